from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smetric.policy.builtin import norm, rank, share


def test_norm_is_on_the_range_of_the_candidates_and_0_where_all_are_equal() -> None:
    assert norm([1, 3, 5], [1, 3, 5]) == [0, 0.5, 1]
    assert norm([1, 3, 2, 5, 0], [1, 3, 2]) == [0, 1, 0.5, 1, 0]  # those whom a filter removed lie on it, too
    assert norm([4, 4], [4, 4]) == [0, 0]


def test_shares_are_of_the_candidates_and_equal_where_all_are_0() -> None:
    assert share([1, 3, 4], [1, 3, 4]) == [0.125, 0.375, 0.5]
    assert share([1, 3, 4, 9], [1, 3]) == [0.25, 0.75, 1.0, 1.0]
    assert share([0, 0], [0, 0]) == [0.5, 0.5]


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=9))
def test_shares_sum_to_1(values: list[float]) -> None:
    shares = share(values, values)
    assert all(0 <= each <= 1 for each in shares)
    assert abs(sum(shares) - 1) < 1e-9


def test_ranks_count_from_1_and_ties_share_the_lower() -> None:
    assert rank([5, 1, 3, 3], [5, 1, 3, 3]) == [4, 1, 2, 2]
    assert rank([5, 1, 3, 9], [1, 3]) == [3, 1, 2, 3]
