"""Built-ins that choose an instance, and how they settle ties and draw lots.

Finding the best and narrowing by `then:` is written out by the compiler (`picker`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from smetric.policy.builtin.row import Builtin, Family
from smetric.policy.seed import fraction, mix


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


ROWS = (
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
