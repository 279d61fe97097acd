from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smetric.sources.vllm import next_turn


def test_turns_follow_each_other_at_the_interval() -> None:
    assert next_turn(10.25, 1.0, 10.5) == 11.25
    assert next_turn(10.25, 1.0, 11.25) == 11.25


def test_a_turn_that_takes_longer_than_the_interval_is_followed_by_the_next_at_once() -> None:
    assert next_turn(10.25, 1.0, 11.26) == 11.25
    assert next_turn(10.25, 1.0, 12.2) == 11.25


def test_turns_that_were_missed_are_left_out() -> None:
    assert next_turn(10.25, 1.0, 12.5) == 13.25
    assert next_turn(10.25, 1.0, 70.5) == 71.25


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 3600))
def test_after_a_pause_of_any_length_loops_are_as_far_apart_as_before(a: float, b: float, pause_s: float) -> None:
    later = [next_turn(due, 1.0, 1.0 + pause_s) % 1.0 for due in (a, b)]
    apart = abs(later[0] - later[1]) % 1.0
    was = abs(a - b) % 1.0
    assert abs(min(apart, 1 - apart) - min(was, 1 - was)) < 1e-6
