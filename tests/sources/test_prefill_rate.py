"""How fast instances prefill: what counts as a sample, how many say something, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.fleet.instance import Instance
from smetric.fleet.prefill import ATTENTION_TOKENS
from smetric.sources.measured import FEWEST, FRESH_S, KEPT, PrefillRates
from tests.clock import Clock


def sample(rates: PrefillRates, instance: Instance, seconds: float, *, new: int = 1000, hit: int | None = 0) -> None:
    lease = instance.charge(1, new + (hit or 0), hit)
    rates.first_token(lease, seconds)
    lease.release()


def plain(name: str = "a") -> Instance:
    """One for which attention costs nothing."""
    return Instance(name, f"http://{name}", attention_tokens=1e15)


def test_a_rate_is_the_fast_end_of_the_last_samples() -> None:
    clock = Clock()
    rates, instance = PrefillRates(clock), plain()
    for tenth in range(1, 11):
        sample(rates, instance, 1 / tenth)
    cells, stamps = rates.measure("prefill_rate", [instance, plain("b")])
    assert cells == [pytest.approx(9000), None]
    assert stamps == [1000.0, None]


def test_attention_is_part_of_what_was_computed() -> None:
    rates, instance = PrefillRates(Clock()), Instance("a", "http://a")
    for _ in range(FEWEST):
        sample(rates, instance, 1.0, new=6923)
    assert ATTENTION_TOKENS == 6923
    assert rates.rate(instance) == pytest.approx(6923 * 1.5)


def test_a_cached_beginning_was_not_computed_but_is_attended_to() -> None:
    rates, instance = PrefillRates(Clock()), Instance("a", "http://a")
    for _ in range(FEWEST):
        sample(rates, instance, 1.0, new=1000, hit=6923)
    assert rates.rate(instance) == pytest.approx(1000 + 1000 * (7923 - 500) / 6923)


def test_few_samples_say_nothing_and_old_ones_nothing_any_more() -> None:
    clock = Clock()
    rates, instance = PrefillRates(clock), plain()
    for _ in range(FEWEST - 1):
        sample(rates, instance, 0.1)
    assert rates.rate(instance) is None
    clock.now += FRESH_S - 1
    sample(rates, instance, 0.1)
    assert rates.rate(instance) == pytest.approx(10_000)
    clock.now += 2
    assert rates.rate(instance) is None


def test_what_fetches_computes_nothing_was_never_looked_up_or_is_a_batch_is_no_sample() -> None:
    rates, instance = PrefillRates(Clock()), plain()
    for _ in range(2 * FEWEST):
        sample(rates, instance, 0.1, hit=None)
        sample(rates, instance, 0.1, new=0, hit=1000)
        sample(rates, instance, 0.0)
        rates.first_token(instance.charge(1, 1000, 0, stored=500), 0.1)
        rates.first_token(instance.charge(3, 3000, 0), 0.1)
    assert rates.rate(instance) is None


def test_the_last_samples_alone_are_kept() -> None:
    rates, instance = PrefillRates(Clock()), plain()
    for _ in range(200):
        sample(rates, instance, 0.01)
    for _ in range(KEPT):
        sample(rates, instance, 0.1)
    assert rates.rate(instance) == pytest.approx(10_000)


def test_a_new_process_is_measured_anew() -> None:
    rates, instance = PrefillRates(Clock()), plain()
    for _ in range(FEWEST):
        sample(rates, instance, 0.1)
    rates.forget(instance)
    assert rates.rate(instance) is None


@given(st.lists(st.floats(0.001, 100), min_size=FEWEST, max_size=100))
def test_a_rate_is_one_that_was_seen(seconds: list[float]) -> None:
    rates, instance = PrefillRates(Clock()), plain()
    for each in seconds:
        sample(rates, instance, each)
    rate = rates.rate(instance)
    assert rate is not None
    assert any(rate == pytest.approx(1000 / each) for each in seconds[-KEPT:])
