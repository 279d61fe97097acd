from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.sources.client import Breaker
from tests.clock import Clock


def breaker(clock: Clock) -> Breaker:
    return Breaker(3, 5.0, clock=clock)


def fail(one: Breaker, times: int) -> None:
    for _ in range(times):
        assert one.allows()
        one.failed()


def test_it_opens_after_failures_in_a_row_and_not_for_failures_between_successes() -> None:
    one = breaker(Clock(0.0))
    fail(one, 2)
    one.succeeded()
    fail(one, 2)
    assert one.allows()
    one.failed()
    assert one.is_open
    assert not one.allows()


def test_open_it_lets_one_request_through_after_a_while_and_closes_when_that_succeeds() -> None:
    clock = Clock(0.0)
    one = breaker(clock)
    fail(one, 3)
    clock.now = 4.99
    assert not one.allows()
    clock.now = 5.0
    assert [one.allows() for _ in range(3)] == [True, False, False]
    one.succeeded()
    assert not one.is_open
    assert [one.allows() for _ in range(3)] == [True] * 3


def test_a_try_that_fails_opens_it_for_as_long_again() -> None:
    clock = Clock(0.0)
    one = breaker(clock)
    fail(one, 3)
    clock.now = 5.0
    fail(one, 1)
    clock.now = 9.99
    assert not one.allows()
    clock.now = 10.0
    assert one.allows()


def test_a_try_that_was_abandoned_leaves_the_next_one_free_at_once() -> None:
    clock = Clock(0.0)
    one = breaker(clock)
    fail(one, 3)
    clock.now = 5.0
    assert one.allows()
    one.abandoned()
    assert one.is_open
    assert one.allows()


def test_what_was_under_way_when_it_opened_and_fails_late_does_not_hold_the_next_try_back() -> None:
    clock = Clock(0.0)
    one = breaker(clock)
    assert [one.allows() for _ in range(5)] == [True] * 5
    for _ in range(3):
        one.failed()
    clock.now = 4.0
    one.failed()
    one.failed()
    clock.now = 5.0
    assert one.allows()


@given(st.lists(st.sampled_from(["succeeded", "failed", "abandoned"]), max_size=60), st.integers(1, 5))
def test_whatever_happened_a_service_that_is_well_again_is_asked_again(ends: list[str], most: int) -> None:
    clock = Clock(0.0)
    one = Breaker(most, 5.0, clock=clock)
    for end in ends:
        clock.now += 1.0
        if one.allows():
            getattr(one, end)()
    clock.now += 5.0
    assert one.allows()
    one.succeeded()
    assert not one.is_open
    assert one.allows()


@pytest.mark.parametrize("most", [1, 4])
def test_it_never_opens_early(most: int) -> None:
    one = Breaker(most, 1.0, clock=Clock(0.0))
    fail(one, most - 1)
    assert not one.is_open
    one.failed()
    assert one.is_open
