"""Built-ins that choose some of the candidates, that draw, and that place by a key."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from smetric.policy.builtin.row import Builtin, Family, unit_interval
from smetric.policy.pseudonym import key_of
from smetric.policy.seed import fraction, mix


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

ROWS = (
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
