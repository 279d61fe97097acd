"""How values are printed."""

from __future__ import annotations

from typing import Any

import pytest

from smetric.policy.types import exact, figure


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
def test_a_value_is_short_and_exact_enough(value: Any, shown: str) -> None:
    assert figure(value) == shown


def test_more_figures_are_shown_where_they_are_asked_for() -> None:
    assert [figure(9424.56, digits) for digits in (4, 6)] == ["9425", "9424.56"]
    assert [figure(0.12344, digits) for digits in (4, 6)] == ["0.123", "0.12344"]


def test_a_bound_turned_about_is_no_minus_zero() -> None:
    assert [exact(each) for each in (-0.0, -1.5, 1048577.0)] == ["0", "-1.5", "1048577"]
