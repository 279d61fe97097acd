"""Draws of several, the highest, chances and keys."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.policy.builtin import bucket, chance, draw, drawn_of, highest, hrw, lowest, marked
from smetric.policy.vocabulary import pseudonym

NAMES = ["a", "b", "c", "d"]


@given(st.integers(1, 12), st.floats(-2, 15), st.integers(0, 1 << 62))
def test_a_draw_takes_that_many_at_least_one_whatever_the_order(size: int, number: float, seed: int) -> None:
    names = [f"gpu-{i}" for i in range(size)]
    taken = drawn_of(range(size), number, names, seed, 9)
    assert len(set(taken)) == len(taken) == min(max(1, int(number)), size)
    turned = names[::-1]
    assert {turned[i] for i in drawn_of(range(size), number, turned, seed, 9)} == {names[i] for i in taken}
    assert draw(range(size), number, names, seed, 9) == marked(taken, size)


def test_every_pair_is_drawn_alike() -> None:
    pairs = Counter(frozenset(drawn_of(range(4), 2, NAMES, seed, 9)) for seed in range(6000))
    assert len(pairs) == 6
    # The 99.99th percentile of chi-square with 5 degrees of freedom is 25.7.
    assert sum((count - 1000) ** 2 / 1000 for count in pairs.values()) < 25.7


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=9), st.floats(-1, 12))
def test_the_highest_are_certain_or_tied_for_the_last_places(values: list[int], number: float) -> None:
    those = range(len(values))
    certain, tied, places = highest(values, those, number)
    wanted = min(max(1, int(number)), len(values))
    best = sorted(values, reverse=True)[:wanted]
    assert len(certain) + places == wanted
    assert 1 <= places <= len(tied)
    assert sorted([values[i] for i in [*certain, *tied[:places]]], reverse=True) == best
    assert {values[i] for i in tied} == {best[-1]}
    negated = [-value for value in values]
    assert [sorted(part) for part in lowest(negated, those, number)[:2]] == [sorted(certain), sorted(tied)]


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_a_chance_comes_true_as_often_as_it_says(share: float) -> None:
    hits = sum(chance(share, seed, 4) for seed in range(10_000))
    assert abs(hits - 10_000 * share) <= 4 * (10_000 * share * (1 - share)) ** 0.5


def test_keys_spread_evenly_over_instances_and_move_only_when_theirs_leaves() -> None:
    keys = [f"session-{i}" for i in range(4000)]

    def home(key: str, names: list[str]) -> str:
        weights = hrw(key, names, 0)
        return names[weights.index(max(weights))]

    homes = {key: home(key, NAMES) for key in keys}
    counts = Counter(homes.values())
    # The 99.99th percentile of chi-square with 3 degrees of freedom is 21.1.
    assert sum((counts[name] - 1000) ** 2 / 1000 for name in NAMES) < 21.1
    left = ["a", "b", "d"]
    assert all(home(key, left) == homes[key] for key in keys if homes[key] != "c")
    assert home("session-1", NAMES[::-1]) == homes["session-1"]


def test_a_key_has_a_fixed_place_and_places_spread_evenly() -> None:
    places = [bucket(f"session-{i}", 0) for i in range(4000)]
    assert all(0 <= place < 1 for place in places)
    assert abs(sum(place < 0.25 for place in places) - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5
    assert bucket("session-1", 1) == places[1]
    assert places[1] == 0.5604531134723802  # the same in every version


def test_no_key_stands_for_the_seed() -> None:
    assert len({bucket("", seed) for seed in range(50)}) == 50
    assert hrw("", NAMES, 1) != hrw("", NAMES, 2)


@given(st.text(min_size=1), st.integers(0, 1 << 62))
def test_a_stand_in_is_placed_as_what_it_stands_for(key: str, seed: int) -> None:
    assert bucket(pseudonym(key), seed) == bucket(key, seed)
    assert hrw(pseudonym(key), NAMES, seed) == hrw(key, NAMES, seed)
