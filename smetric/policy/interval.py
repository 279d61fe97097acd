"""Where a number of a policy can lie: interval arithmetic that keeps every value finite by construction.

Which expressions are refused because of their interval is the checker's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smetric.policy.figure import exact

#: No expression of a policy may pass this.
MAX_VALUE = 1e300
#: Candidates a decision may have, for the bounds of sums and counts.
MAX_CANDIDATES = 1e6
#: `ratio` takes a divisor nearer to 0 than this for 0, so that its result stays bounded.
SMALLEST_DIVISOR = 1e-9


@dataclass(frozen=True, slots=True)
class Interval:
    """The closed interval from `low` to `high`, both finite."""

    low: float
    high: float

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Interval) -> Interval:
        return Interval(self.low - other.high, self.high - other.low)

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __mul__(self, other: Interval) -> Interval:
        corners = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        return Interval(min(corners), max(corners))

    def __truediv__(self, other: Interval) -> Interval:
        """Division by an interval that does not hold 0."""
        corners = [a / b for a in (self.low, self.high) for b in (other.low, other.high)]
        return Interval(min(corners), max(corners))

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{exact(self.low)}..{exact(self.high)}"

    @property
    def place(self) -> str:
        """Where it is, in words."""
        return f"is {exact(self.low)}" if self.low == self.high else f"lies in {self}"

    @property
    def bounded(self) -> bool:
        """Whether it stays within what a policy may compute; False for NaN too."""
        return self.low >= -MAX_VALUE and self.high <= MAX_VALUE


TRUTH = Interval(0.0, 1.0)
TRUE = Interval(1.0, 1.0)
FALSE = Interval(0.0, 0.0)
ZERO = Interval(0.0, 0.0)
COUNT = Interval(0.0, MAX_CANDIDATES)
COUNT_ALL = Interval(1.0, MAX_CANDIDATES)


def hull(intervals: Sequence[Interval]) -> Interval:
    """The smallest interval around all of them."""
    return Interval(min(each.low for each in intervals), max(each.high for each in intervals))


def total(intervals: Sequence[Interval]) -> Interval:
    """The sum over any number of candidates, nobody included."""
    return intervals[0] * COUNT


def spread(intervals: Sequence[Interval]) -> Interval:
    """The standard deviation over any number of candidates: at most half the width."""
    return Interval(0.0, (intervals[0].high - intervals[0].low) / 2)


def least(intervals: Sequence[Interval]) -> Interval:
    """The smallest of one value out of each."""
    return Interval(min(each.low for each in intervals), min(each.high for each in intervals))


def greatest(intervals: Sequence[Interval]) -> Interval:
    """The largest of one value out of each."""
    return Interval(max(each.low for each in intervals), max(each.high for each in intervals))


def clamped(intervals: Sequence[Interval]) -> Interval:
    """`clamp(x, lo, hi)`, computed as the least of hi and the greatest of x and lo."""
    value, low, high = intervals
    return least([greatest([value, low]), high])


def absolute(intervals: Sequence[Interval]) -> Interval:
    """`abs(x)`."""
    value = intervals[0]
    if value.low >= 0:
        return value
    return -value if value.high <= 0 else Interval(0.0, max(-value.low, value.high))


def ratio(above: Interval, below: Interval) -> Interval:
    """`above / below` where below is not taken for 0."""
    parts = []
    if below.high >= SMALLEST_DIVISOR:
        parts.append(above / Interval(max(below.low, SMALLEST_DIVISOR), below.high))
    if below.low <= -SMALLEST_DIVISOR:
        parts.append(above / Interval(below.low, min(below.high, -SMALLEST_DIVISOR)))
    return hull(parts) if parts else ZERO
