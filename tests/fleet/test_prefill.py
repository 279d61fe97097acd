"""Cost and time of a prefill."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.fleet.prefill import LEAST_COMPUTING, PrefillTime, fitted

COSTS = st.lists(st.floats(1, 1e6), min_size=2, max_size=12, unique=True)


@given(COSTS, st.floats(0.0, 1.0), st.floats(1e-6, 1e-2))
def test_a_line_is_found_again_where_computing_shows(costs: list[float], start_s: float, per_token_s: float) -> None:
    line = PrefillTime(start_s, per_token_s)
    found = fitted([(cost, line.of(cost))] for cost in costs)
    for cost in costs:
        if per_token_s * max(costs) >= LEAST_COMPUTING * line.of(max(costs)):
            assert found.of(cost) == pytest.approx(line.of(cost), rel=1e-2)


@given(st.lists(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1e-3, 1e3)), min_size=1, max_size=8), min_size=1))
def test_a_line_never_falls_nor_begins_below_nothing(groups: list[list[tuple[float, float]]]) -> None:
    found = fitted(groups)
    assert found.start_s >= 0
    assert found.per_token_s > 0


def test_of_small_prefills_alone_the_share_that_was_computing_is_at_least_a_tenth() -> None:
    found = fitted([[(100.0, 0.100)], [(200.0, 0.099)]])
    assert found.per_token_s == pytest.approx(LEAST_COMPUTING * 0.099 / 200)
    assert found.of(150) == pytest.approx(0.1, rel=0.05)


def test_where_all_are_as_large_the_start_cannot_be_told() -> None:
    found = fitted([[(1000.0, 0.2), (1000.0, 0.3), (1000.0, 0.9)]])
    assert found.start_s == 0.0
    assert found.of(2000) == pytest.approx(0.6)


def test_the_slow_few_of_a_group_are_outvoted() -> None:
    rng = random.Random(3)
    line, groups = PrefillTime(0.04, 1 / 30_000), []
    for size in (150, 300, 600, 20_000):
        costs = [size * rng.uniform(1, 1.9) for _ in range(16)]
        groups.append(
            [(cost, line.of(cost) * (8 if n % 4 == 0 else rng.uniform(0.9, 1.2))) for n, cost in enumerate(costs)]
        )
    found = fitted(groups)
    for cost in (200, 1000, 30_000):
        assert 1 / 1.25 <= found.of(cost) / line.of(cost) <= 1.25
