"""How long prefills take: what is a sample, which are kept, for how long, and what a few large ones among many say."""

from __future__ import annotations

import pytest

from smetric.fleet.instance import Instance
from smetric.sources.measured import EVERY_S, FEWEST, FRESH_S, KEPT_TIMES, PrefillTimes
from tests.clock import Clock


def plain() -> Instance:
    """One for which attention costs nothing."""
    return Instance("a", "http://a", attention_tokens=1e15)


def sample(times: PrefillTimes, instance: Instance, seconds: float, *, new: int = 1000, hit: int | None = 0) -> None:
    lease = instance.charge(1, new + (hit or 0), hit)
    times.first_token(lease, seconds)
    lease.release()


def test_small_and_large_prefills_tell_the_start_from_the_rate() -> None:
    times, instance = PrefillTimes(Clock()), plain()
    for new in (100, 300, 900, 9000) * 2:
        sample(times, instance, 0.05 + new / 20_000, new=new, hit=5000)
    found = times.of(instance)
    assert found is not None
    assert found.start_s == pytest.approx(0.05)
    assert found.per_token_s == pytest.approx(1 / 20_000)
    assert times.of(plain()) is None


def test_what_stood_before_a_request_is_part_of_its_sample() -> None:
    times, instance = PrefillTimes(Clock()), plain()
    for new in (100, 300, 900, 9000) * 2:
        before = instance.charge(1, 4000, 0)
        sample(times, instance, 0.05 + (4000 + new) / 20_000, new=new)
        before.release()
    found = times.of(instance)
    assert found is not None
    assert found.of(4000) == pytest.approx(0.25)


def test_many_small_requests_push_no_large_one_out() -> None:
    clock = Clock()
    times, instance = PrefillTimes(clock), plain()
    sample(times, instance, 0.05 + 30_000 / 20_000, new=30_000)
    for _ in range(10 * KEPT_TIMES):
        sample(times, instance, 0.05 + 150 / 20_000, new=150)
    clock.now += FRESH_S - 1
    for _ in range(KEPT_TIMES):
        sample(times, instance, 0.05 + 150 / 20_000, new=150)
    found = times.of(instance)
    assert found is not None
    assert found.of(20_000) == pytest.approx(1.05)
    clock.now += 2
    found = times.of(instance)
    assert found is not None
    assert found.of(20_000) == pytest.approx((0.05 + 150 / 20_000) * 20_000 / 150)  # nothing tells them apart any more


def test_few_samples_say_nothing_and_old_ones_nothing_any_more() -> None:
    clock = Clock()
    times, instance = PrefillTimes(clock), plain()
    for _ in range(FEWEST - 1):
        sample(times, instance, 0.1)
    assert times.of(instance) is None
    sample(times, instance, 0.1)
    found = times.of(instance)
    assert found is not None
    assert found.of(1000) == pytest.approx(0.1)
    clock.now += FRESH_S + 1
    assert times.of(instance) is None


def test_what_was_found_holds_for_a_second() -> None:
    clock = Clock()
    times, instance = PrefillTimes(clock), plain()
    for _ in range(FEWEST):
        sample(times, instance, 0.1)
    first = times.of(instance)
    for _ in range(KEPT_TIMES):
        sample(times, instance, 0.2)
    assert times.of(instance) is first
    clock.now += EVERY_S
    found = times.of(instance)
    assert found is not None
    assert found.of(1000) == pytest.approx(0.2)


def test_what_fetches_computes_nothing_was_never_looked_up_or_is_a_batch_is_no_sample() -> None:
    times, instance = PrefillTimes(Clock()), plain()
    for _ in range(2 * FEWEST):
        sample(times, instance, 0.1, hit=None)
        sample(times, instance, 0.1, new=0, hit=1000)
        sample(times, instance, 0.0)
        times.first_token(instance.charge(1, 1000, 0, stored=500), 0.1)
        times.first_token(instance.charge(3, 3000, 0), 0.1)
    assert times.of(instance) is None


def test_a_new_process_is_measured_anew() -> None:
    times, instance = PrefillTimes(Clock()), plain()
    for _ in range(FEWEST):
        sample(times, instance, 0.1)
    times.forget(instance)
    assert times.of(instance) is None
