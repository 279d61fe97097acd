"""Built-in functions: one row each, its function beside it."""

from __future__ import annotations

import enum
import functools
import math
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smetric.policy import types
from smetric.policy.snapshot import Snapshot
from smetric.policy.types import Interval
from smetric.policy.vocabulary import key_of, mean_of

# One row of the table of built-in functions: everything that checking, compiling and printing one needs to know.


class Family(enum.Enum):
    """Built-ins with the same rule for what they take and give; in brackets the arguments of a row's `function`."""

    #: One number per instance, and what is told besides, to a single number of its unit [values, *more].
    REDUCTION = "reduction"
    #: Truth per instance to a single truth value [values].
    TEST = "test"
    #: Truth per instance, or nothing, to a plain number [values].
    COUNT = "count"
    #: One number per instance to a plain one per instance [values, those of the candidates].
    SCALE = "scale"
    #: Numbers of one unit, single or per instance, to the same, element by element [one value of each, or written out].
    ELEMENT = "element"
    #: Two numbers to their quotient, element by element [written out].
    RATIO = "ratio"
    #: One number per instance to the best instance, ties drawn …
    PICK = "pick"
    #: … or in rotation [both written out].
    ROTATION = "rotation"
    #: One number per instance to an instance drawn by it [values, candidates, ids, seed, stream, *named].
    LOTTERY = "lottery"
    #: Instances to an instance [written out].
    FIRST = "first"
    #: A number to that many of the candidates [candidates, number, ids, seed, stream].
    DRAW = "draw"
    #: One number per instance, and a number, to that many of the best [written out].
    TOP = "top"
    #: A share to a truth value [share, seed, stream].
    CHANCE = "chance"
    #: A string to a plain number: per instance [string, ids, seed] …
    WEIGHT = "weight"
    #: … or single [string, seed].
    PLACE = "place"
    #: A value per instance, and what is known of it [snapshot, features].
    KNOWN = "known"
    AGE = "age"
    #: … and whether it is known and young enough [written out].
    FRESH = "fresh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """One function.

    Args:
        name: as policies write it.
        signature: as the manual prints it; *v* number per instance, *m* truth per instance, *x* number of any shape,
            *n* a single plain number.
        doc: what it gives, one sentence.
        family: the rule of its types.
        function: what compiled policies call; None for those that are written out.
        least: fewest positional arguments.
        most: most positional arguments, or None for any number.
        named: its named arguments; `then` may be given several times.
        required: the named arguments that must be given always.
        where: whether the first argument may be followed by `where`.
        of_nobody: whether its value over nobody is one; if not, `where` requires `default:`.
        never_negative: whether what it takes must not be below 0.
        ordered: whether its last two arguments are bounds, the lower one first.
        weighs: whether it takes shares by value, so that one above 0 is needed.
        direction: of a pick, `min` or `max`: whether a low or a high value wins.
        bounds: from the intervals of the positional arguments to that of the result.
    """

    name: str
    signature: str
    doc: str
    family: Family
    function: Callable[..., Any] | None = None
    least: int = 1
    most: int | None = 1
    named: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    where: bool = False
    of_nobody: bool = True
    never_negative: bool = False
    ordered: bool = False
    weighs: bool = False
    direction: str = ""
    bounds: Callable[[Sequence[Interval]], Interval] = types.hull


def unit_interval(_: Sequence[Interval]) -> Interval:
    """0..1, whatever is put in."""
    return types.TRUTH


# Built-ins that work element by element: numbers of one unit to a number, single or per instance.

ELEMENT_ROWS = (
    Builtin(
        name="least",
        signature="least(x, x…)",
        doc="The smallest of its arguments, element by element.",
        family=Family.ELEMENT,
        least=2,
        most=None,
        bounds=types.least,
    ),
    Builtin(
        name="greatest",
        signature="greatest(x, x…)",
        doc="The largest of its arguments, element by element.",
        family=Family.ELEMENT,
        least=2,
        most=None,
        bounds=types.greatest,
    ),
    Builtin(
        name="clamp",
        signature="clamp(x, lo, hi)",
        doc="x, but at least lo and at most hi.",
        family=Family.ELEMENT,
        least=3,
        most=3,
        ordered=True,
        bounds=types.clamped,
    ),
    Builtin(
        name="abs",
        signature="abs(x)",
        doc="The distance from 0.",
        family=Family.ELEMENT,
        function=abs,
        bounds=types.absolute,
    ),
    Builtin(
        name="ratio",
        signature="ratio(x, y, default: z)",
        doc="x / y, and the default where y is 0 (nearer to 0 than 1e-9).",
        family=Family.RATIO,
        least=2,
        most=2,
        named=("default",),
        required=("default",),
    ),
)


# Built-ins that ask how well a value is known.


def known(snapshot: Snapshot, features: Iterable[str]) -> list[bool]:
    """Per candidate, whether all *features* are known."""
    cells = [True] * len(snapshot.ids)
    for feature in features:
        cells = [a and b for a, b in zip(cells, snapshot.is_known(feature), strict=True)]
    return cells


def age(snapshot: Snapshot, features: Iterable[str]) -> list[float]:
    """Per candidate, the age in seconds of the oldest of *features*."""
    cells = [0.0] * len(snapshot.ids)
    for feature in features:
        cells = [max(a, b) for a, b in zip(cells, snapshot.age(feature), strict=True)]
    return cells


KNOWLEDGE_ROWS = (
    Builtin(
        name="known",
        signature="known(x)",
        doc="Whether every feature it is computed from is known there.",
        family=Family.KNOWN,
        function=known,
    ),
    Builtin(
        name="age",
        signature="age(x)",
        doc="The age of the oldest feature it is computed from; 1e9 seconds where unknown.",
        family=Family.AGE,
        function=age,
    ),
    Builtin(
        name="fresh",
        signature="fresh(x, limit)",
        doc="Short for known(x) and age(x) <= limit.",
        family=Family.FRESH,
        least=2,
        most=2,
    ),
)


# Built-ins that make one value of the candidates' values.


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which *share* of at least one value lie, linear between two (NumPy's default, type 7)."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    if below + 1 >= len(ordered):
        return ordered[-1]
    low, high = ordered[below], ordered[below + 1]
    # Rounding must not carry it out of the interval that the checker promised.
    return min(low + (high - low) * (place - below), high)


def std(values: Sequence[float]) -> float:
    """The standard deviation, divided by the number of values; 0 of none. No square overflows on the way."""
    if not values:
        return 0.0
    middle = mean_of(values)
    far = [abs(value - middle) for value in values]
    farthest = max(far)
    if farthest == 0:
        return 0.0
    deviation = farthest * math.sqrt(math.fsum([(each / farthest) ** 2 for each in far]) / len(values))
    # Rounding must not carry it out of the interval that the checker promised.
    return min(deviation, (max(values) - min(values)) / 2)


def count(values: Sequence[bool]) -> int:
    """How many are true."""
    return values.count(True)


REDUCTION_ROWS = (
    Builtin(
        name="mean",
        signature="mean(v [where m, default: x])",
        doc="The mean over the candidates.",
        family=Family.REDUCTION,
        function=mean_of,
        named=("default",),
        where=True,
        of_nobody=False,
    ),
    Builtin(
        name="min",
        signature="min(v [where m, default: x])",
        doc="The smallest over the candidates.",
        family=Family.REDUCTION,
        function=min,
        named=("default",),
        where=True,
        of_nobody=False,
    ),
    Builtin(
        name="max",
        signature="max(v [where m, default: x])",
        doc="The largest over the candidates.",
        family=Family.REDUCTION,
        function=max,
        named=("default",),
        where=True,
        of_nobody=False,
    ),
    Builtin(
        name="quantile",
        signature="quantile(v [where m], n [, default: x])",
        doc="The value below which the share n (0..1) of the candidates lie, linear between two of them.",
        family=Family.REDUCTION,
        function=quantile,
        least=2,
        most=2,
        named=("default",),
        where=True,
        of_nobody=False,
    ),
    Builtin(
        name="sum",
        signature="sum(v [where m])",
        doc="The sum over the candidates; 0 of nobody.",
        family=Family.REDUCTION,
        function=math.fsum,
        where=True,
        bounds=types.total,
    ),
    Builtin(
        name="std",
        signature="std(v [where m])",
        doc="The standard deviation over the candidates, divided by their number; 0 of nobody.",
        family=Family.REDUCTION,
        function=std,
        where=True,
        bounds=types.spread,
    ),
    Builtin(
        name="any",
        signature="any(m [where m])",
        doc="Whether it holds for some candidate; false of nobody.",
        family=Family.TEST,
        function=any,
        where=True,
    ),
    Builtin(
        name="all",
        signature="all(m [where m])",
        doc="Whether it holds for every candidate; true of nobody.",
        family=Family.TEST,
        function=all,
        where=True,
    ),
    Builtin(
        name="count",
        signature="count([m [where m]])",
        doc="For how many candidates it holds; without an argument, how many there are.",
        family=Family.COUNT,
        function=count,
        least=0,
        where=True,
    ),
)


# Built-ins that put the candidates' values on a scale of their own, without a unit.


def norm(values: Sequence[float], over: Sequence[float]) -> list[float]:
    """Min-max of *values* on the range of *over*; 0 for all when that range is empty."""
    low, high = min(over), max(over)
    if low == high:
        return [0.0] * len(values)
    width = high - low
    return _on_scale([(value - low) / width for value in values], over)


def share(values: Sequence[float], over: Sequence[float]) -> list[float]:
    """*values*, none below 0, by the sum of *over*; equal shares when that is 0."""
    total = math.fsum(over)
    if total == 0:
        return [1.0 / len(over)] * len(values)
    return _on_scale([value / total for value in values], over)


def _on_scale(shares: list[float], over: Sequence[float]) -> list[float]:
    """*shares*, those of instances that a filter removed within 0..1, too: the checker promised it of each."""
    return shares if len(shares) == len(over) else [min(max(0.0, each), 1.0) for each in shares]


def rank(values: Sequence[float], over: Sequence[float]) -> list[int]:
    """1 and how many of *over* are smaller, for each of *values*."""
    ordered = sorted(over)
    return [1 + bisect_left(ordered, value) for value in values]


SCALE_ROWS = (
    Builtin(
        name="norm",
        signature="norm(v)",
        doc="Min-max over the candidates, 0..1; 0 where all are equal.",
        family=Family.SCALE,
        function=norm,
        bounds=unit_interval,
    ),
    Builtin(
        name="share",
        signature="share(v)",
        doc="Its part of the sum over the candidates, 0..1; equal shares where all are 0.",
        family=Family.SCALE,
        function=share,
        never_negative=True,
        bounds=unit_interval,
    ),
    Builtin(
        name="rank",
        signature="rank(v)",
        doc="1 for the smallest over the candidates, and so on; ties share the lower rank.",
        family=Family.SCALE,
        function=rank,
        bounds=lambda _: types.COUNT_ALL,
    ),
)


# Stateless draws: the decision's seed mixed with the place of the draw in the file.
#
# Not `random.Random(seed)`: setting one up costs more than a policy.

_MASK = (1 << 64) - 1


def stream_of(key: str) -> int:
    """The number that stands for a pick's own stream of draws; unrelated edits of the file do not change it."""
    return zlib.crc32(key.encode()) * 0x9E3779B97F4A7C15 & _MASK


def fraction(seed: int, stream: int) -> float:
    """A number on 0..1, never 1, drawn from *seed* in *stream*."""
    return (mix(seed, stream) >> 11) * 2.0**-53


def mix(seed: int, stream: int) -> int:
    """64 well mixed bits of *seed* in *stream* (the finaliser of splitmix64)."""
    x = (seed ^ stream) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


# Built-ins that choose some of the candidates, that draw, and that place by a key.


def drawn_of(those: Sequence[int], number: float, ids: Sequence[str], seed: int, stream: int) -> list[int]:
    """*number* of *those*, at least one and at most all, at random; their order plays no part."""
    order = sorted(those, key=ids.__getitem__)
    wanted = min(max(1, int(number)), len(order))
    if wanted == len(order):
        return order
    start = mix(seed, stream)
    for place in range(wanted):
        other = place + mix(start, place) % (len(order) - place)
        order[place], order[other] = order[other], order[place]
    return order[:wanted]


def draw(those: Sequence[int], number: float, ids: Sequence[str], seed: int, stream: int) -> list[bool]:
    """Which of all candidates `drawn_of` takes."""
    return marked(drawn_of(those, number, ids, seed, stream), len(ids))


def marked(those: Sequence[int], size: int) -> list[bool]:
    """True at the indices *those*, of *size*."""
    mask = [False] * size
    for i in those:
        mask[i] = True
    return mask


def highest(values: Sequence[float], those: Sequence[int], number: float) -> tuple[list[int], list[int], int]:
    """The *number* (at least one) of *those* with the highest values.

    Returns:
        Those that are among them for certain, those tied for the last places, and how many of these there are.
    """
    wanted = min(max(1, int(number)), len(those))
    order = sorted(those, key=values.__getitem__, reverse=True)
    edge = values[order[wanted - 1]]
    certain = [i for i in order[:wanted] if values[i] > edge]
    return certain, [i for i in order if values[i] == edge], wanted - len(certain)


def lowest(values: Sequence[float], those: Sequence[int], number: float) -> tuple[list[int], list[int], int]:
    """`highest`, but of the lowest values."""
    return highest([-value for value in values], those, number)


def chance(share: float, seed: int, stream: int) -> bool:
    """True for *share* of all seeds."""
    return fraction(seed, stream) < share


def hrw(key: str, ids: Sequence[str], seed: int) -> list[float]:
    """The rendezvous weight of *key* on each of *ids*, 0..1: highest random weight (Thaler and Ravishankar, 1998)."""
    own = key_of(key) if key else seed
    return [fraction(own, _key_of_id(ident)) for ident in ids]


def bucket(key: str, seed: int) -> float:
    """The place of *key* on 0..1, the same for ever; of no key, that of the seed."""
    return fraction(key_of(key) if key else seed, _BUCKET)


#: Ids of instances come again with every request.
_key_of_id = functools.lru_cache(maxsize=4096)(key_of)
_BUCKET = key_of("bucket")

MASK_ROWS = (
    Builtin(
        name="draw",
        signature="draw(n)",
        doc="n of the candidates at random, at least one; for `keep` and `where`.",
        family=Family.DRAW,
        function=draw,
    ),
    Builtin(
        name="top",
        signature="top(v, n, then: v…)",
        doc="The n candidates with the highest values, at least one; ties by the lowest `then:`, then at random.",
        family=Family.TOP,
        least=2,
        most=2,
        named=("then",),
    ),
    Builtin(
        name="chance",
        signature="chance(n)",
        doc="True with probability n (0..1).",
        family=Family.CHANCE,
        function=chance,
    ),
    Builtin(
        name="hrw",
        signature="hrw(string)",
        doc="The key's rendezvous weight on each instance, 0..1; an empty key stands for the request itself.",
        family=Family.WEIGHT,
        function=hrw,
        bounds=unit_interval,
    ),
    Builtin(
        name="bucket",
        signature="bucket(string)",
        doc="The key's fixed place on 0..1, for percentages; an empty key stands for the request itself.",
        family=Family.PLACE,
        function=bucket,
        bounds=unit_interval,
    ),
)


# Built-ins that choose an instance, and how they settle ties and draw lots.
#
# Finding the best and narrowing by `then:` is written out by the compiler (`picker`).


def drawn(names: Sequence[str], seed: int, stream: int) -> str:
    """One of *names* at random; their order plays no part."""
    in_order = sorted(names)
    return in_order[mix(seed, stream) % len(in_order)]


def rotated(names: Sequence[str], last: str) -> str:
    """The first of *names* after *last* in their order, around the end."""
    in_order = sorted(names)  # costs next to nothing where they are: a fleet's candidates come in order of their ids
    return in_order[bisect_right(in_order, last) % len(in_order)]


def sample(values: Sequence[float], those: Sequence[int], ids: Sequence[str], seed: int, stream: int) -> int:
    """One of *those* with a probability in proportion to its value; those below 0 count as 0, all of them as equal."""
    order = sorted(those, key=ids.__getitem__)
    total = sum([values[i] for i in order if values[i] > 0])
    if total == 0:
        return order[mix(seed, stream) % len(order)]
    left = fraction(seed, stream) * total
    chosen = -1
    for i in order:
        if values[i] > 0:
            chosen = i  # the last one, should rounding leave something over
            left -= values[i]
            if left < 0:
                break
    return chosen


def softmin(
    values: Sequence[float], those: Sequence[int], ids: Sequence[str], seed: int, stream: int, temperature: float
) -> int:
    """One of *those*, with probability ∝ exp(-(value - lowest) / temperature); at 0 one of the lowest."""
    return _softened(values, those, ids, seed, stream, temperature, 1.0)


def softmax(
    values: Sequence[float], those: Sequence[int], ids: Sequence[str], seed: int, stream: int, temperature: float
) -> int:
    """One of *those*, with probability ∝ exp((value - highest) / temperature); at 0 one of the highest."""
    return _softened(values, those, ids, seed, stream, temperature, -1.0)


def _softened(
    values: Sequence[float],
    those: Sequence[int],
    ids: Sequence[str],
    seed: int,
    stream: int,
    temperature: float,
    sign: float,
) -> int:
    costs = [sign * value for value in values]
    best = min([costs[i] for i in those])
    if temperature == 0:
        return ids.index(drawn([ids[i] for i in those if costs[i] == best], seed, stream))
    # No exponent is above 0, so none overflows; the best has weight 1, so the sum is never 0.
    return sample([math.exp(min(0.0, (best - cost) / temperature)) for cost in costs], those, ids, seed, stream)


PICK_ROWS = (
    Builtin(
        name="argmin",
        signature="argmin(v [where m], then: v…)",
        doc="The instance with the lowest value; ties by `then:`, then one at random.",
        family=Family.PICK,
        named=("then",),
        where=True,
        direction="min",
    ),
    Builtin(
        name="argmax",
        signature="argmax(v [where m], then: v…)",
        doc="The instance with the highest value; ties by `then:`, then one at random.",
        family=Family.PICK,
        named=("then",),
        where=True,
        direction="max",
    ),
    Builtin(
        name="rr_argmin",
        signature="rr_argmin(v [where m], then: v…, within: x)",
        doc="The instance with the lowest value; ties, and those at most x above it, by `then:`, then in rotation.",
        family=Family.ROTATION,
        named=("then", "within"),
        where=True,
        direction="min",
    ),
    Builtin(
        name="rr_argmax",
        signature="rr_argmax(v [where m], then: v…, within: x)",
        doc="The instance with the highest value; ties, and those at most x below it, by `then:`, then in rotation.",
        family=Family.ROTATION,
        named=("then", "within"),
        where=True,
        direction="max",
    ),
    Builtin(
        name="softmin",
        signature="softmin(v [where m], temperature: x)",
        doc="One drawn with a probability in proportion to exp(-(v - lowest) / x); at 0 one of the lowest.",
        family=Family.LOTTERY,
        function=softmin,
        named=("temperature",),
        required=("temperature",),
        where=True,
        direction="min",
    ),
    Builtin(
        name="softmax",
        signature="softmax(v [where m], temperature: x)",
        doc="One drawn with a probability in proportion to exp((v - highest) / x); at 0 one of the highest.",
        family=Family.LOTTERY,
        function=softmax,
        named=("temperature",),
        required=("temperature",),
        where=True,
        direction="max",
    ),
    Builtin(
        name="sample",
        signature="sample(v or m [where m])",
        doc="One drawn with a probability in proportion to v, or among those of m; nothing above 0: all are alike.",
        family=Family.LOTTERY,
        function=sample,
        where=True,
        weighs=True,
        direction="max",
    ),
    Builtin(
        name="first",
        signature="first(pick, pick…)",
        doc="The first that is somebody.",
        family=Family.FIRST,
        least=2,
        most=None,
    ),
)


# The built-in functions: one row each, its function beside it. A built-in of a family that exists is one more row.
#
# How each family is typed is in `check_family`, how it is compiled in `emitter` and `picker`.

#: Every built-in, by name.
BUILTINS: Mapping[str, Builtin] = {
    row.name: row
    for rows in (REDUCTION_ROWS, SCALE_ROWS, ELEMENT_ROWS, PICK_ROWS, MASK_ROWS, KNOWLEDGE_ROWS)
    for row in rows
}
