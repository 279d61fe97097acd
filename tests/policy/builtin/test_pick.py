"""Draws, rotations and lotteries: fair, repeatable, and blind to the order of the candidates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.policy.builtin import drawn, rotated, sample, softmax, softmin

ids = st.lists(st.text("abcxyz-019", min_size=1, max_size=4), min_size=1, max_size=8, unique=True)
NAMES = ["a", "b", "c"]


@given(ids, st.integers(0, 1 << 62))
def test_a_draw_is_one_of_the_tied_whatever_their_order(names: list[str], seed: int) -> None:
    chosen = drawn(names, seed, 5)
    assert chosen in names
    assert drawn(names[::-1], seed, 5) == chosen


@given(ids, st.text("abcxyz-019", max_size=4))
def test_a_rotation_visits_everybody_once_before_anybody_twice(names: list[str], last: str) -> None:
    visited = []
    for _ in names:
        last = rotated(names, last)
        visited.append(last)
    assert sorted(visited) == sorted(names)


@pytest.mark.parametrize(
    ("tied", "last", "chosen"),
    [("ac", "", "a"), ("ca", "a", "c"), ("ac", "b", "c"), ("b", "b", "b"), ("ca", "c", "a")],
)
def test_a_rotation_takes_the_next_id_among_the_tied_in_whatever_order(tied: str, last: str, chosen: str) -> None:
    assert rotated(list(tied), last) == chosen


# ── lotteries ────────────────────────────────────────────────────────────────

DRAWS = 6000


def spread(weights: list[float], counts: list[int]) -> float:
    """Chi-square of *counts* against *weights*; those of weight 0 must not be drawn."""
    total = sum(weights)
    assert all(count == 0 for weight, count in zip(weights, counts, strict=True) if weight == 0)
    expected = [DRAWS * weight / total for weight in weights]
    return sum((count - e) ** 2 / e for count, e in zip(counts, expected, strict=True) if e)


def counts_of(draw: object, size: int, *arguments: object) -> list[int]:
    counts = [0] * size
    for seed in range(DRAWS):
        counts[draw(*arguments[:1], range(size), NAMES, seed, 77, *arguments[1:])] += 1  # type: ignore[operator]
    return counts


@pytest.mark.parametrize(
    ("values", "weights"),
    [([1, 2, 5], [1, 2, 5]), ([0, -3, 4], [0, 0, 1]), ([-1, 0, 0], [1, 1, 1]), ([True, False, True], [1, 0, 1])],
)
def test_a_sample_is_in_proportion_to_its_values(values: list[float], weights: list[float]) -> None:
    # The 99.99th percentile of chi-square with 2 degrees of freedom is 18.4.
    assert spread(weights, counts_of(sample, 3, values)) < 18.4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_a_soft_pick_follows_the_exponential_of_its_distance_from_the_best(temperature: float) -> None:
    values = [3.0, 1.0, 2.0]
    low = [math.exp(-(value - 1) / temperature) for value in values]
    high = [math.exp((value - 3) / temperature) for value in values]
    assert spread(low, counts_of(softmin, 3, values, temperature)) < 18.4
    assert spread(high, counts_of(softmax, 3, values, temperature)) < 18.4


def test_a_soft_pick_at_temperature_0_draws_among_the_best() -> None:
    assert spread([1, 0, 1], counts_of(softmin, 3, [1.0, 2.0, 1.0], 0)) < 18.4
    assert spread([0, 1, 0], counts_of(softmax, 3, [1.0, 2.0, 1.0], 0)) == 0


@given(
    ids,
    st.data(),
    st.integers(0, 1 << 62),
    st.one_of(st.just(0.0), st.floats(0, 1e15, allow_subnormal=True)),
)
def test_a_lottery_chooses_somebody_whatever_the_values_and_the_order(
    names: list[str], data: st.DataObject, seed: int, temperature: float
) -> None:
    size = len(names)
    values = data.draw(st.lists(st.floats(-1e300, 1e300), min_size=size, max_size=size))
    turned = names[::-1], values[::-1]
    for lottery, more in ((softmin, (temperature,)), (softmax, (temperature,)), (sample, ())):
        chosen = lottery(values, range(size), names, seed, 3, *more)
        assert 0 <= chosen < size
        again = lottery(turned[1], range(size), turned[0], seed, 3, *more)
        assert turned[0][again] == names[chosen]
