from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smetric.proxy.context import LEAST, SHARE, WINDOW_S, RetryBudget
from tests.clock import Clock


def taken(budget: RetryBudget, wanted: int) -> int:
    return sum(budget.take() for _ in range(wanted))


def serve(budget: RetryBudget, requests: int) -> None:
    """Count so many requests that arrive and end."""
    for _ in range(requests):
        budget.arrived()
        budget.ended()


def test_retry_budget_of_few_requests_exceeds_the_failures_of_an_ejection() -> None:
    assert taken(RetryBudget(Clock()), 1000) == LEAST > 5


def test_retry_budget_of_many_requests_is_a_fifth_of_them() -> None:
    budget = RetryBudget(Clock())
    serve(budget, 1004)
    assert taken(budget, 1000) == 200  # and no part of one more


def test_retry_budget_covers_all_requests_of_a_dead_instance() -> None:
    """One of two instances has half of the requests under way."""
    budget = RetryBudget(Clock())
    for _ in range(400):
        budget.arrived()
    assert sum(budget.take(has_died=True) for _ in range(200)) == 200
    assert not budget.take()


def test_retry_budget_of_repeated_deaths_is_the_usual_one() -> None:
    budget = RetryBudget(Clock())
    serve(budget, 1000)
    budget.arrived()
    assert sum(budget.take(has_died=True) for _ in range(1000)) == 200


def test_retry_budget_forgets_requests_past_the_window() -> None:
    clock = Clock()
    budget = RetryBudget(clock)
    serve(budget, 1000)
    assert taken(budget, 150) == 150
    clock.now += WINDOW_S - 1
    assert taken(budget, 1000) == 50
    clock.now += 1
    assert taken(budget, 1000) == 0  # the requests are forgotten before the retries they allowed
    clock.now += WINDOW_S
    assert taken(budget, 1000) == LEAST


def test_retry_budget_counts_old_requests_that_are_under_way() -> None:
    """One of five instances takes a fifth of them with it; long requests arrive slowly."""
    clock = Clock()
    budget = RetryBudget(clock)
    for _ in range(300):
        budget.arrived()
    clock.now += 60
    serve(budget, 50)
    for _ in range(100):
        budget.ended()
    assert taken(budget, 1000) == 70
    clock.now += WINDOW_S
    assert taken(budget, 1000) == 40


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(0, 60), st.integers(0, 60)), max_size=40))
def test_retry_budget_holds_in_every_window(steps: list[tuple[float, int, int]]) -> None:
    clock = Clock()
    budget = RetryBudget(clock)
    seen: list[tuple[int, int, int]] = []
    for wait, requests, retries in steps:
        clock.now += wait
        serve(budget, requests)
        seen.append((int(clock.now), requests, taken(budget, retries)))
        recent = [one for one in seen if one[0] > int(clock.now) - WINDOW_S]
        earlier = [one for one in seen if one[0] > int(clock.now) - 2 * WINDOW_S]
        allowed = max(LEAST, SHARE * sum(requests for _, requests, _ in earlier) + 1)
        assert sum(count for _, _, count in recent) <= allowed
