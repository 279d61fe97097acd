from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from smetric.policy import types
from smetric.policy.types import SMALLEST_DIVISOR, Interval

_NUMBERS = st.floats(min_value=-1e15, max_value=1e15)


@st.composite
def _inside(draw: st.DrawFn) -> tuple[Interval, float]:
    """An interval and a number in it."""
    low, value, high = sorted((draw(_NUMBERS), draw(_NUMBERS), draw(_NUMBERS)))
    return Interval(low, high), value


@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mul])
@given(_inside(), _inside())
def test_an_operation_stays_in_the_interval_of_its_operands(
    operation: Callable[[object, object], object], a: tuple[Interval, float], b: tuple[Interval, float]
) -> None:
    found = operation(a[0], b[0])
    assert isinstance(found, Interval)
    value = operation(a[1], b[1])
    assert isinstance(value, float)
    assert value in found


@given(_inside(), _inside())
def test_a_quotient_stays_in_its_interval(a: tuple[Interval, float], b: tuple[Interval, float]) -> None:
    assume(abs(b[1]) >= SMALLEST_DIVISOR)
    assert a[1] / b[1] in types.ratio(a[0], b[0])
    if 0.0 not in b[0]:
        assert a[1] / b[1] in a[0] / b[0]


@given(_inside(), _inside(), _inside())
def test_element_wise_functions_stay_in_their_interval(
    a: tuple[Interval, float], b: tuple[Interval, float], c: tuple[Interval, float]
) -> None:
    intervals, values = [a[0], b[0], c[0]], [a[1], b[1], c[1]]
    assert min(values) in types.least(intervals)
    assert max(values) in types.greatest(intervals)
    assert min(max(values[0], values[1]), values[2]) in types.clamped(intervals)
    assert abs(a[1]) in types.absolute([a[0]])
    assert all(value in types.hull(intervals) for value in values)


def test_what_is_no_number_is_not_bounded() -> None:
    assert Interval(0.0, 1e300).bounded
    assert not Interval(0.0, 1e301).bounded
    assert not Interval(float("nan"), float("nan")).bounded
