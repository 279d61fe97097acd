"""How fast cached tokens come from elsewhere: what the prefill does not account for."""

from __future__ import annotations

import pytest

from smetric.features import VOCABULARY
from smetric.fleet.fleet import Candidates, Fleet
from smetric.fleet.instance import Instance
from smetric.sources.measured import FEWEST, FRESH_S, KEPT_FETCHES, LEAST_TOKENS, FetchRates, PrefillRates, PrefillTimes
from tests.clock import Clock


def measured(
    clock: Clock, rate: float = 10_000, start_s: float = 0.0, *beside: PrefillRates
) -> tuple[PrefillTimes, Instance]:
    """An instance that computes *rate* tokens a second after *start_s* seconds, and is known to, *beside* too."""
    times, instance = PrefillTimes(clock), Instance("a", "http://a", attention_tokens=1e15)
    for number in range(FEWEST):
        lease = instance.charge(1, tokens := 1000 * (1 + number % 2 * 3), 0)
        for one in (times, *beside):
            one.first_token(lease, start_s + tokens / rate)
        lease.release()
    return times, instance


def fetch(rates: FetchRates, instance: Instance, seconds: float, *, stored: int = 4000, length: int = 5000) -> None:
    lease = instance.charge(1, length, 0, stored=stored)
    rates.first_token(lease, seconds)
    lease.release()


def test_what_the_prefill_does_not_account_for_was_spent_on_the_fetch() -> None:
    clock = Clock()
    prefill, instance = measured(clock)
    rates = FetchRates(prefill, clock=clock)
    for _ in range(FEWEST):
        fetch(rates, instance, 0.1 + 0.2)  # 1,000 tokens are computed, 4,000 fetched
    other = Instance("b", "http://b")
    cells, stamps = rates.measure("fetch_rate", [instance, other])
    assert cells == [pytest.approx(20_000)] * 2
    assert stamps == [1000.0, 1000.0]


def test_the_prefill_that_stood_before_it_is_accounted_for_too() -> None:
    clock = Clock()
    prefill, instance = measured(clock)
    rates = FetchRates(prefill, clock=clock)
    instance.charge(1, 3000, 0)
    for _ in range(FEWEST):
        fetch(rates, instance, 0.3 + 0.1 + 0.2)
    assert rates.rate() == pytest.approx(20_000)


def test_what_passes_whatever_is_computed_was_not_spent_on_the_fetch() -> None:
    clock = Clock()
    prefill, instance = measured(clock, 10_000, 0.5)
    rates = FetchRates(prefill, clock=clock)
    for _ in range(FEWEST):
        fetch(rates, instance, 0.5 + 0.1 + 0.2)
    assert rates.rate() == pytest.approx(20_000)


def test_few_fetches_small_ones_and_old_ones_say_nothing() -> None:
    clock = Clock()
    prefill, instance = measured(clock)
    rates = FetchRates(prefill, clock=clock)
    for _ in range(FEWEST - 1):
        fetch(rates, instance, 0.3)
    for _ in range(20):
        fetch(rates, instance, 0.3, stored=LEAST_TOKENS - 1)
    assert rates.rate() is None
    fetch(rates, instance, 0.3)
    assert rates.rate() is not None
    clock.now += FRESH_S + 1
    assert rates.rate() is None


def test_while_prefills_are_unknown_a_fetch_cannot_be_told_from_computing() -> None:
    clock = Clock()
    rates, instance = FetchRates(PrefillTimes(clock), clock=clock), Instance("a", "http://a")
    for _ in range(2 * FEWEST):
        fetch(rates, instance, 0.3)
    assert rates.rate() is None


def test_the_last_fetches_count_and_one_that_took_no_time_is_no_division_by_nothing() -> None:
    clock = Clock()
    prefill, instance = measured(clock)
    rates = FetchRates(prefill, clock=clock)
    for _ in range(50):
        fetch(rates, instance, 3.0)
    for _ in range(KEPT_FETCHES):
        fetch(rates, instance, 0.05)
    assert rates.rate() == pytest.approx(4_000_000)


def test_a_configured_rate_is_the_rate() -> None:
    rates = FetchRates(PrefillTimes(), configured=50_000)
    assert rates.measure("fetch_rate", [Instance("a", "http://a")]) == ([50_000.0], None)


def test_while_it_is_unknown_the_prefill_rate_stands_in() -> None:
    clock = Clock()
    known = PrefillRates(clock)
    prefill, instance = measured(clock, 10_000, 0.0, known)
    fleet = Fleet([instance, Instance("b", "http://b")], VOCABULARY, clock=clock)
    fleet.measured_by(known)
    fleet.measured_by(FetchRates(prefill, clock=clock))
    snapshot = fleet.snapshot(Candidates(fleet.instances), ["fetch_rate", "prefill_rate"])
    assert snapshot.columns["fetch_rate"] == snapshot.columns["prefill_rate"] == [pytest.approx(10_000)] * 2
    assert snapshot.is_known("fetch_rate") == [False, False]
    assert snapshot.is_known("prefill_rate") == [True, False]
