from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.policy.builtin import count, quantile, std
from smetric.policy.vocabulary import mean_of

values = st.lists(st.floats(-1e15, 1e15), min_size=1, max_size=9)


@pytest.mark.parametrize(("share", "expected"), [(0, 1), (0.25, 2), (0.5, 3), (0.9, 7), (1, 9)])
def test_a_quantile_is_linear_between_two_values(share: float, expected: float) -> None:
    assert quantile([4, 1, 9, 2, 3], share) == pytest.approx(expected)
    assert quantile([7], share) == 7


@given(values, st.floats(0, 1), st.floats(0, 1))
def test_a_quantile_lies_within_the_values_and_grows_with_its_share(cells: list[float], one: float, two: float) -> None:
    low, high = sorted([one, two])
    assert min(cells) <= quantile(cells, low) <= max(cells)
    assert quantile(cells, low) <= quantile(cells, high) + abs(quantile(cells, high)) * 1e-12
    assert quantile(cells, 0) == min(cells)
    assert quantile(cells, 1) == max(cells)


@given(values)
def test_the_deviation_is_that_of_the_population(cells: list[float]) -> None:
    assert std(cells) == pytest.approx(statistics.pstdev(cells), rel=1e-6, abs=1)
    assert std(cells) <= (max(cells) - min(cells)) / 2


def test_a_deviation_does_not_overflow_and_is_0_of_nobody() -> None:
    assert std([-1e300, 1e300]) == pytest.approx(1e300)
    assert std([]) == 0


@given(st.floats(-1e15, 1e15), st.integers(1, 9), st.sampled_from([0, 1, -1]))
def test_a_mean_lies_within_the_values(cell: float, count_: int, step: int) -> None:
    cells = [cell] * count_ + [math.nextafter(cell, math.inf * step)] * bool(step)
    assert min(cells) <= mean_of(cells) <= max(cells)


def test_mean_and_count() -> None:
    assert mean_of([0.175] * 3) == 0.175
    assert mean_of([1, 2, 6]) == 3
    assert count([True, False, True]) == 2
