"""Built-ins that make one value of the candidates' values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from smetric.policy import interval
from smetric.policy.builtin.row import Builtin, Family
from smetric.policy.mean import mean


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
    middle = mean(values)
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


ROWS = (
    Builtin(
        name="mean",
        signature="mean(v [where m, default: x])",
        doc="The mean over the candidates.",
        family=Family.REDUCTION,
        function=mean,
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
        bounds=interval.total,
    ),
    Builtin(
        name="std",
        signature="std(v [where m])",
        doc="The standard deviation over the candidates, divided by their number; 0 of nobody.",
        family=Family.REDUCTION,
        function=std,
        where=True,
        bounds=interval.spread,
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
