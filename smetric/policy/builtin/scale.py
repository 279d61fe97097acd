"""Built-ins that put the candidates' values on a scale of their own, without a unit."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from smetric.policy import interval
from smetric.policy.builtin.row import Builtin, Family, unit_interval


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


ROWS = (
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
        bounds=lambda _: interval.COUNT_ALL,
    ),
)
