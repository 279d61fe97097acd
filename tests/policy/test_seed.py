"""Draws are spread evenly, repeatable, and apart for each pick."""

from __future__ import annotations

import random

import pytest

from smetric.policy.builtin import mix, stream_of


@pytest.mark.parametrize("size", [2, 3, 7, 32])
def test_draws_are_even_over_seeds_that_count_up_and_over_random_ones(size: int) -> None:
    rng = random.Random(size)
    stream = stream_of("balance")
    for seeds in (range(20_000), [rng.getrandbits(63) for _ in range(20_000)]):
        counts = [0] * size
        for seed in seeds:
            counts[mix(seed, stream) % size] += 1
        expected = 20_000 / size
        chi_square = sum((count - expected) ** 2 / expected for count in counts)
        # The 99.99th percentile of chi-square with n degrees of freedom is below n + 6 √n + 14.
        assert chi_square < size + 6 * size**0.5 + 14


def test_a_draw_depends_on_seed_and_stream_only_and_fits_64_bits() -> None:
    assert mix(7, 9) == mix(7, 9)
    assert 0 <= mix((1 << 80) + 5, stream_of("x")) < 1 << 64


def test_two_picks_of_one_decision_draw_apart() -> None:
    one, two = stream_of("home"), stream_of("home.2")
    alike = sum(mix(seed, one) % 4 == mix(seed, two) % 4 for seed in range(4000))
    assert 850 < alike < 1150
