"""Built-in functions: one row each, in the table at the end of this module.

The checker types a built-in by its family (`check_expression`), and the compiler writes it by its family (`emitter`).
"""

from __future__ import annotations

import enum
import functools
import math
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smetric.policy import types
from smetric.policy.snapshot import Snapshot
from smetric.policy.types import Interval
from smetric.policy.vocabulary import key_of, mean_of


class Family(enum.Enum):
    """Built-ins with one rule for arguments and result.

    The comments name the arguments of a row's `function` in brackets. The compiler writes out a family without them.
    """

    #: A number per instance to one number of its unit [values, *further arguments].
    REDUCTION = "reduction"
    #: Truth per instance to one truth value [values].
    TEST = "test"
    #: Truth per instance, or nothing, to a plain number [values].
    COUNT = "count"
    #: A number per instance to a plain one per instance [values, values of the candidates].
    SCALE = "scale"
    #: Numbers of one unit, single or per instance, to the same, element by element [one value of each].
    ELEMENT = "element"
    #: Two numbers to their quotient, element by element.
    RATIO = "ratio"
    #: A number per instance to the best instance; ties are drawn.
    PICK = "pick"
    #: The same; ties are taken in rotation.
    ROTATION = "rotation"
    #: A number per instance to an instance drawn by it [values, candidates, ids, seed, stream, *named arguments].
    LOTTERY = "lottery"
    #: Picks to the first that has a candidate.
    FIRST = "first"
    #: A number to a mask of that many candidates [candidates, number, ids, seed, stream].
    DRAW = "draw"
    #: A number per instance, and a number, to a mask of that many of the best.
    TOP = "top"
    #: A share to a truth value [share, seed, stream].
    CHANCE = "chance"
    #: A string to a plain number per instance [string, ids, seed].
    WEIGHT = "weight"
    #: A string to one plain number [string, seed].
    PLACE = "place"
    #: A value per instance to its provenance: truth [snapshot, features].
    KNOWN = "known"
    #: A value per instance to its provenance: seconds [snapshot, features].
    AGE = "age"
    #: A value per instance, and seconds, to truth.
    FRESH = "fresh"


@dataclass(frozen=True, slots=True)
class Builtin:
    """Built-in function.

    Args:
        signature: as the manual prints it; *v* number per instance, *m* truth per instance, *x* number of any shape,
            *n* one plain number. Names before a colon are its named arguments.
        doc: its result, one sentence.
        family: the rule of its types.
        function: what compiled policies call; None if the compiler writes it out.
        required: the named arguments that must always be given.
        never_negative: whether its argument must be at least 0.
        ordered: whether its last two arguments are bounds, the lower one first.
        weighs: whether its argument is a weight, so that one above 0 is needed.
        direction: of a pick, `min` or `max`: whether a low or a high value wins.
        bounds: from the intervals of the positional arguments to that of the result.
    """

    signature: str
    doc: str
    family: Family
    function: Callable[..., Any] | None = None
    required: tuple[str, ...] = ()
    never_negative: bool = False
    ordered: bool = False
    weighs: bool = False
    direction: str = ""
    bounds: Callable[[Sequence[Interval]], Interval] = types.hull

    @property
    def name(self) -> str:
        """Its name in policies."""
        return self.signature.partition("(")[0]

    @property
    def named(self) -> tuple[str, ...]:
        """Its named arguments; `then` may be given several times."""
        return tuple(re.findall(r"(\w+):", self.signature))

    @property
    def positional(self) -> tuple[int, int | None]:
        """The fewest and the most positional arguments; None for any number."""
        inside, optional = self.signature[len(self.name) + 1 : -1], 1
        while optional:
            inside, optional = re.subn(r"\[[^\[\]]*\]", "", inside)
        required = [part for part in inside.split(",") if part.strip() and ":" not in part]
        is_open = any("…" in part for part in required)
        return len(required), None if is_open else max(1, len(required))

    @property
    def where(self) -> bool:
        """Whether its first argument may be followed by `where`."""
        return "where m" in self.signature

    @property
    def total(self) -> bool:
        """Whether it has a value without candidates; if not, `where` requires `default:`."""
        return not (self.where and "default" in self.named)


# ── provenance ───────────────────────────────────────────────────────────────


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


# ── reductions ───────────────────────────────────────────────────────────────


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile of at least one value, linear between two values (NumPy's default, type 7)."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    if below + 1 >= len(ordered):
        return ordered[-1]
    low, high = ordered[below], ordered[below + 1]
    # Rounding must not carry it out of the interval that the checker computed.
    return min(low + (high - low) * (place - below), high)


def std(values: Sequence[float]) -> float:
    """The standard deviation of the population; 0 of no values. No square overflows."""
    if not values:
        return 0.0
    middle = mean_of(values)
    distances = [abs(value - middle) for value in values]
    farthest = max(distances)
    if farthest == 0:
        return 0.0
    deviation = farthest * math.sqrt(math.fsum([(each / farthest) ** 2 for each in distances]) / len(values))
    # Rounding must not carry it out of the interval that the checker computed.
    return min(deviation, (max(values) - min(values)) / 2)


def count(values: Sequence[bool]) -> int:
    """The number of true values."""
    return values.count(True)


# ── scales ───────────────────────────────────────────────────────────────────


def norm(values: Sequence[float], over: Sequence[float]) -> list[float]:
    """Min-max of *values* on the range of *over*; 0 for all if that range is empty."""
    low, high = min(over), max(over)
    if low == high:
        return [0.0] * len(values)
    width = high - low
    return _on_scale([(value - low) / width for value in values], over)


def share(values: Sequence[float], over: Sequence[float]) -> list[float]:
    """Return *values*, none of which is negative, divided by the sum of *over*; equal shares if the sum is 0."""
    total = math.fsum(over)
    if total == 0:
        return [1.0 / len(over)] * len(values)
    return _on_scale([value / total for value in values], over)


def _on_scale(shares: list[float], over: Sequence[float]) -> list[float]:
    """*shares* within 0..1, also for instances that a filter removed: the checker relies on it."""
    return shares if len(shares) == len(over) else [min(max(0.0, each), 1.0) for each in shares]


def rank(values: Sequence[float], over: Sequence[float]) -> list[int]:
    """For each of *values*, 1 plus the number of smaller values in *over*."""
    ordered = sorted(over)
    return [1 + bisect_left(ordered, value) for value in values]


# ── draws ────────────────────────────────────────────────────────────────────
# Stateless: the decision's seed, mixed with the name of the draw. Setting up `random.Random(seed)` would cost more than
# a whole decision.

_MASK = (1 << 64) - 1


def stream_of(key: str) -> int:
    """The stream of draws of a pick called *key*; unrelated edits of the file do not change it."""
    return zlib.crc32(key.encode()) * 0x9E3779B97F4A7C15 & _MASK


def mix(seed: int, stream: int) -> int:
    """64 well mixed bits of *seed* in *stream* (the finaliser of splitmix64)."""
    x = (seed ^ stream) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def fraction(seed: int, stream: int) -> float:
    """A number in [0, 1), drawn from *seed* in *stream*."""
    return (mix(seed, stream) >> 11) * 2.0**-53


def chance(share: float, seed: int, stream: int) -> bool:
    """True for *share* of all seeds."""
    return fraction(seed, stream) < share


def drawn_of(those: Sequence[int], number: float, ids: Sequence[str], seed: int, stream: int) -> list[int]:
    """*number* of *those*, at least one and at most all, at random, whatever their order."""
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
    """The mask of `drawn_of`."""
    return marked(drawn_of(those, number, ids, seed, stream), len(ids))


def marked(those: Sequence[int], size: int) -> list[bool]:
    """A mask of *size*, true at the indices *those*."""
    mask = [False] * size
    for i in those:
        mask[i] = True
    return mask


def highest(values: Sequence[float], those: Sequence[int], number: float) -> tuple[list[int], list[int], int]:
    """The *number* (at least one) of *those* with the highest values.

    Returns:
        The indices above the last value, the indices tied for the last places, and the number of these places.
    """
    wanted = min(max(1, int(number)), len(those))
    order = sorted(those, key=values.__getitem__, reverse=True)
    edge = values[order[wanted - 1]]
    certain = [i for i in order[:wanted] if values[i] > edge]
    return certain, [i for i in order if values[i] == edge], wanted - len(certain)


def lowest(values: Sequence[float], those: Sequence[int], number: float) -> tuple[list[int], list[int], int]:
    """`highest`, but of the lowest values."""
    return highest([-value for value in values], those, number)


# ── keys ─────────────────────────────────────────────────────────────────────


def hrw(key: str, ids: Sequence[str], seed: int) -> list[float]:
    """The rendezvous weight of *key* on each of *ids*, 0..1: highest random weight (Thaler and Ravishankar, 1998)."""
    own = key_of(key) if key else seed
    return [fraction(own, _key_of_id(ident)) for ident in ids]


def bucket(key: str, seed: int) -> float:
    """The place of *key* in [0, 1), the same in every version; of an empty key, that of the seed."""
    return fraction(key_of(key) if key else seed, _BUCKET)


#: The same ids come with every request.
_key_of_id = functools.lru_cache(maxsize=4096)(key_of)
_BUCKET = key_of("bucket")

# ── picks ────────────────────────────────────────────────────────────────────


def drawn(names: Sequence[str], seed: int, stream: int) -> str:
    """Return one of *names* at random; their order does not matter."""
    in_order = sorted(names)
    return in_order[mix(seed, stream) % len(in_order)]


def rotated(names: Sequence[str], last: str) -> str:
    """Return the name after *last* in sorted order; after the last one, the first."""
    in_order = sorted(names)
    return in_order[bisect_right(in_order, last) % len(in_order)]


def sample(values: Sequence[float], those: Sequence[int], ids: Sequence[str], seed: int, stream: int) -> int:
    """Return one of *those*, drawn in proportion to its value. Values below 0 count as 0; if all do, it is even."""
    order = sorted(those, key=ids.__getitem__)
    total = sum([values[i] for i in order if values[i] > 0])
    if total == 0:
        return order[mix(seed, stream) % len(order)]
    left = fraction(seed, stream) * total
    chosen = -1
    for i in order:
        if values[i] > 0:
            chosen = i  # the last one, if rounding leaves a rest
            left -= values[i]
            if left < 0:
                break
    return chosen


def softmin(
    values: Sequence[float], those: Sequence[int], ids: Sequence[str], seed: int, stream: int, temperature: float
) -> int:
    """Return one of *those*, drawn in proportion to exp(-(value - lowest) / temperature); at 0 one of the lowest."""
    best = min([values[i] for i in those])
    if temperature == 0:
        return ids.index(drawn([ids[i] for i in those if values[i] == best], seed, stream))
    # No exponent is above 0, so none overflows; the best has weight 1, so the sum is never 0.
    return sample([math.exp(min(0.0, (best - value) / temperature)) for value in values], those, ids, seed, stream)


def softmax(
    values: Sequence[float], those: Sequence[int], ids: Sequence[str], seed: int, stream: int, temperature: float
) -> int:
    """Return one of *those*, drawn in proportion to exp((value - highest) / temperature); at 0 one of the highest."""
    return softmin([-value for value in values], those, ids, seed, stream, temperature)


# ── the table ────────────────────────────────────────────────────────────────


def _unit_interval(_: Sequence[Interval]) -> Interval:
    return types.TRUTH


_ROWS = (
    Builtin("mean(v [where m, default: x])", "The mean over the candidates.", Family.REDUCTION, mean_of),
    Builtin("min(v [where m, default: x])", "The smallest over the candidates.", Family.REDUCTION, min),
    Builtin("max(v [where m, default: x])", "The largest over the candidates.", Family.REDUCTION, max),
    Builtin(
        "quantile(v [where m], n [, default: x])",
        "The value below which the share n (0..1) of the candidates lie, linear between two of them.",
        Family.REDUCTION,
        quantile,
    ),
    Builtin(
        "sum(v [where m])",
        "The sum over the candidates; 0 without candidates.",
        Family.REDUCTION,
        math.fsum,
        bounds=types.total,
    ),
    Builtin(
        "std(v [where m])",
        "The population standard deviation over the candidates; 0 without candidates.",
        Family.REDUCTION,
        std,
        bounds=types.spread,
    ),
    Builtin("any(m [where m])", "Whether it holds for some candidate; false without candidates.", Family.TEST, any),
    Builtin("all(m [where m])", "Whether it holds for every candidate; true without candidates.", Family.TEST, all),
    Builtin(
        "count([m [where m]])",
        "The number of candidates for which it holds; without an argument, of all candidates.",
        Family.COUNT,
        count,
    ),
    Builtin(
        "norm(v)", "Min-max over the candidates, 0..1; 0 if all are equal.", Family.SCALE, norm, bounds=_unit_interval
    ),
    Builtin(
        "share(v)",
        "The value's share of the sum over the candidates, 0..1; equal shares if all are 0.",
        Family.SCALE,
        share,
        never_negative=True,
        bounds=_unit_interval,
    ),
    Builtin(
        "rank(v)",
        "1 for the smallest over the candidates, and so on; ties share the lower rank.",
        Family.SCALE,
        rank,
        bounds=lambda _: types.COUNT_ALL,
    ),
    Builtin("least(x, x…)", "The smallest of its arguments, element by element.", Family.ELEMENT, bounds=types.least),
    Builtin(
        "greatest(x, x…)", "The largest of its arguments, element by element.", Family.ELEMENT, bounds=types.greatest
    ),
    Builtin(
        "clamp(x, lo, hi)", "x, but at least lo and at most hi.", Family.ELEMENT, ordered=True, bounds=types.clamped
    ),
    Builtin("abs(x)", "The distance from 0.", Family.ELEMENT, abs, bounds=types.absolute),
    Builtin(
        "ratio(x, y, default: z)",
        "x / y, or the default if y is 0 (nearer to 0 than 1e-9).",
        Family.RATIO,
        required=("default",),
    ),
    Builtin(
        "argmin(v [where m], then: v…)",
        "The instance with the lowest value; ties by `then:`, then one at random.",
        Family.PICK,
        direction="min",
    ),
    Builtin(
        "argmax(v [where m], then: v…)",
        "The instance with the highest value; ties by `then:`, then one at random.",
        Family.PICK,
        direction="max",
    ),
    Builtin(
        "rr_argmin(v [where m], then: v…, within: x)",
        "The instance with the lowest value; ties, and those at most x above it, by `then:`, then in rotation.",
        Family.ROTATION,
        direction="min",
    ),
    Builtin(
        "rr_argmax(v [where m], then: v…, within: x)",
        "The instance with the highest value; ties, and those at most x below it, by `then:`, then in rotation.",
        Family.ROTATION,
        direction="max",
    ),
    Builtin(
        "softmin(v [where m], temperature: x)",
        "An instance drawn in proportion to exp(-(v - lowest) / x); at 0 one of the lowest.",
        Family.LOTTERY,
        softmin,
        required=("temperature",),
        direction="min",
    ),
    Builtin(
        "softmax(v [where m], temperature: x)",
        "An instance drawn in proportion to exp((v - highest) / x); at 0 one of the highest.",
        Family.LOTTERY,
        softmax,
        required=("temperature",),
        direction="max",
    ),
    Builtin(
        "sample(v or m [where m])",
        "An instance drawn in proportion to v, or evenly where m holds; if none is above 0, evenly among all.",
        Family.LOTTERY,
        sample,
        weighs=True,
        direction="max",
    ),
    Builtin("first(pick, pick…)", "The first pick that has a candidate.", Family.FIRST),
    Builtin("draw(n)", "n of the candidates at random, at least one; for `keep` and `where`.", Family.DRAW, draw),
    Builtin(
        "top(v, n, then: v…)",
        "The n candidates with the highest values, at least one; ties by the lowest `then:`, then at random.",
        Family.TOP,
    ),
    Builtin("chance(n)", "True with probability n (0..1).", Family.CHANCE, chance),
    Builtin(
        "hrw(string)",
        "The key's rendezvous weight on each instance, 0..1; an empty key stands for the request itself.",
        Family.WEIGHT,
        hrw,
        bounds=_unit_interval,
    ),
    Builtin(
        "bucket(string)",
        "A fixed number in 0..1 for the key, for percentages; an empty key stands for the request itself.",
        Family.PLACE,
        bucket,
        bounds=_unit_interval,
    ),
    Builtin("known(x)", "Whether every feature that x is computed from is known.", Family.KNOWN, known),
    Builtin("age(x)", "The age of the oldest feature that x is computed from; 1e9 s if unknown.", Family.AGE, age),
    Builtin("fresh(x, limit)", "Short for known(x) and age(x) <= limit.", Family.FRESH),
)

#: Every built-in, by name.
BUILTINS: Mapping[str, Builtin] = {row.name: row for row in _ROWS}
