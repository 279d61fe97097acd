"""Units, intervals and the printing of values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from smetric.features import VOCABULARY
from smetric.policy import types
from smetric.policy.types import PLAIN, SMALLEST_DIVISOR, Interval, canonical, exact, figure, parse_unit


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (("token", ""), "tokens"),
        (("tokens", "seconds"), "tokens per second"),
        (("seconds", "token"), "seconds per token"),
        (("reqs", "second"), "reqs per second"),
    ],
)
def test_unit_canonical_form(words: tuple[str, str], written: str) -> None:
    assert canonical(*words) == written


def test_unit_products_and_quotients_cancel() -> None:
    tokens, rate = parse_unit("tokens"), parse_unit("tokens per second")
    assert str(tokens / rate) == "seconds"
    assert tokens / tokens == PLAIN
    assert str(tokens * tokens * parse_unit("requests")) == "requests·tokens²"
    assert str(PLAIN / rate / rate) == "seconds² per token²"


def test_unit_parses_its_own_text() -> None:
    for feature in VOCABULARY.features.values():
        assert str(parse_unit(feature.unit)) == feature.unit
    with pytest.raises(ValueError, match="unknown unit `reqs`"):
        parse_unit("reqs")


_NUMBERS = st.floats(min_value=-1e15, max_value=1e15)


@st.composite
def _inside(draw: st.DrawFn) -> tuple[Interval, float]:
    """An interval and a number in it."""
    low, value, high = sorted((draw(_NUMBERS), draw(_NUMBERS), draw(_NUMBERS)))
    return Interval(low, high), value


@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mul])
@given(_inside(), _inside())
def test_interval_holds_the_result_of_an_operation(
    operation: Callable[[object, object], object], a: tuple[Interval, float], b: tuple[Interval, float]
) -> None:
    found = operation(a[0], b[0])
    assert isinstance(found, Interval)
    value = operation(a[1], b[1])
    assert isinstance(value, float)
    assert value in found


@given(_inside(), _inside())
def test_interval_holds_a_quotient(a: tuple[Interval, float], b: tuple[Interval, float]) -> None:
    assume(abs(b[1]) >= SMALLEST_DIVISOR)
    assert a[1] / b[1] in types.ratio(a[0], b[0])
    if 0.0 not in b[0]:
        assert a[1] / b[1] in a[0] / b[0]


@given(_inside(), _inside(), _inside())
def test_interval_holds_the_results_of_element_wise_functions(
    a: tuple[Interval, float], b: tuple[Interval, float], c: tuple[Interval, float]
) -> None:
    intervals, values = [a[0], b[0], c[0]], [a[1], b[1], c[1]]
    assert min(values) in types.least(intervals)
    assert max(values) in types.greatest(intervals)
    assert min(max(values[0], values[1]), values[2]) in types.clamped(intervals)
    assert abs(a[1]) in types.absolute([a[0]])
    assert all(value in types.hull(intervals) for value in values)


def test_interval_of_nan_is_unbounded() -> None:
    assert Interval(0.0, 1e300).bounded
    assert not Interval(0.0, 1e301).bounded
    assert not Interval(float("nan"), float("nan")).bounded


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3, "3"),
        (9.0, "9"),
        (0.475, "0.475"),
        (2 / 3, "0.667"),
        (8 / 3, "2.667"),
        (1234.5678, "1235"),
        (123.456, "123.5"),
        (-0.5, "-0.5"),
        (0.00001234, "1.23e-05"),
        (1e9, "1000000000"),
        (True, "true"),
        (False, "false"),
        ("both", "both"),
        (frozenset({"b", "a"}), "{a, b}"),
        ("x" * 50, "x" * 39 + "…"),
    ],
)
def test_figure_is_short(value: Any, shown: str) -> None:
    assert figure(value) == shown


def test_figure_shows_as_many_digits_as_asked_for() -> None:
    assert [figure(9424.56, digits) for digits in (4, 6)] == ["9425", "9424.56"]
    assert [figure(0.12344, digits) for digits in (4, 6)] == ["0.123", "0.12344"]


def test_exact_shows_no_minus_zero() -> None:
    assert [exact(each) for each in (-0.0, -1.5, 1048577.0)] == ["0", "-1.5", "1048577"]
