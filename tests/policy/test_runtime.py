"""The parts of picks and norms that compiled policies call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.policy import Snapshot
from smetric.policy.runtime import age, drawn, known, norm, rotated

ids = st.lists(st.text("abcxyz-019", min_size=1, max_size=4), min_size=1, max_size=8, unique=True)


@given(ids, st.integers(0, 1 << 62))
def test_a_draw_is_one_of_the_tied_whatever_their_order(names: list[str], seed: int) -> None:
    tied = list(range(len(names)))
    chosen = names[drawn(tied, names, seed, 5)]
    turned = names[::-1]
    assert turned[drawn(tied, turned, seed, 5)] == chosen


@given(ids, st.text("abcxyz-019", max_size=4))
def test_a_rotation_visits_everybody_once_before_anybody_twice(names: list[str], last: str) -> None:
    tied = list(range(len(names)))
    visited = []
    for _ in names:
        last = names[rotated(tied, names, last)]
        visited.append(last)
    assert sorted(visited) == sorted(names)


@pytest.mark.parametrize(
    ("tied", "last", "chosen"),
    [([0, 2], "", "a"), ([0, 2], "a", "c"), ([0, 2], "b", "c"), ([1], "b", "b"), ([0, 2], "c", "a")],
)
def test_a_rotation_takes_the_next_id_among_the_tied(tied: list[int], last: str, chosen: str) -> None:
    names = ["a", "b", "c"]
    assert names[rotated(tied, names, last)] == chosen


def test_norm_is_on_the_range_of_the_candidates_and_0_where_all_are_equal() -> None:
    assert norm([1, 3, 5], [1, 3, 5]) == [0, 0.5, 1]
    assert norm([1, 3, 5], [1, 3]) == [0, 1, 2]
    assert norm([4, 4], [4, 4]) == [0, 0]


def test_a_value_is_known_where_all_its_features_are_and_as_old_as_the_oldest() -> None:
    snapshot = Snapshot(
        ["a", "b", "c"],
        {"x": [1, 2, 3], "y": [1, 2, 3]},
        known={"x": [True, False, True]},
        stamps={"x": [8.0, 9.0, None], "y": [9.0, 1.0, 9.0]},
        now=10.0,
    )
    assert known(snapshot, ["x", "y"]) == [True, False, True]
    assert age(snapshot, ["x", "y"]) == [2.0, 1e9, 1e9]
    assert age(snapshot, []) == [0.0, 0.0, 0.0]
