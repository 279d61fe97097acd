"""Features measured on requests: what counts as a sample, how many give a value, and for how long."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.features import VOCABULARY
from smetric.fleet.fleet import Candidates, Fleet
from smetric.fleet.instance import ATTENTION_TOKENS, Instance
from smetric.request.prompt import BLOCK_BYTES, Prompt
from smetric.request.request import InferenceRequest
from smetric.sources.measured import (
    CLASS_FRESH_S,
    EVERY_S,
    FEWEST,
    FRESH_S,
    KEPT,
    KEPT_FETCHES,
    KEPT_TIMES,
    LEAST_COMPUTING,
    LEAST_TOKENS,
    RENEWED_S,
    WINDOW,
    WINDOW_S,
    Adapters,
    FetchRates,
    Prefills,
    PrefillTime,
    PromptClasses,
    RequestRates,
    fitted,
)
from smetric.sources.source import Follower
from tests.clock import Clock

MEASURED = [name for name, feature in VOCABULARY.features.items() if feature.measured]


def plain(name: str = "a") -> Instance:
    """An instance for which attention costs nothing."""
    return Instance(name, f"http://{name}", attention_tokens=1e15)


def sample(follower: Follower, instance: Instance, seconds: float, *, new: int = 1000, hit: int | None = 0) -> None:
    lease = instance.charge(1, new + (hit or 0), hit)
    follower.first_token(lease, seconds)
    lease.release()


def rate_of(follower: Prefills, instance: Instance) -> float | None:
    """Tokens per second, by the rate and by the line, of a prompt of 1,000 tokens."""
    found = follower.time_of(instance)
    rate = follower.rate(instance)
    assert (rate is None) == (found is None)
    assert found is None or rate == pytest.approx(1000 / found.of(1000))
    return rate


# ── prefill_rate and prefill times ───────────────────────────────────────────


def test_prefills_are_unknown_with_few_or_old_samples() -> None:
    clock = Clock()
    follower, instance = Prefills(clock), plain()
    for _ in range(FEWEST - 1):
        sample(follower, instance, 0.1)
    assert rate_of(follower, instance) is None
    clock.now += FRESH_S - 1
    sample(follower, instance, 0.1)
    assert rate_of(follower, instance) == pytest.approx(10_000)
    clock.now += 2
    assert rate_of(follower, instance) is None


def test_prefills_ignore_fetches_unknown_hits_batches_and_prompts_held_whole() -> None:
    follower, instance = Prefills(Clock()), plain()
    for _ in range(2 * FEWEST):
        sample(follower, instance, 0.1, hit=None)
        sample(follower, instance, 0.1, new=0, hit=1000)
        sample(follower, instance, 0.0)
        follower.first_token(instance.charge(1, 1000, 0, stored=500), 0.1)
        follower.first_token(instance.charge(3, 3000, 0), 0.1)
    assert rate_of(follower, instance) is None


def test_prefills_are_unknown_after_a_restart() -> None:
    follower, instance = Prefills(Clock()), plain()
    for _ in range(FEWEST):
        sample(follower, instance, 0.1)
    follower.forget(instance)
    assert rate_of(follower, instance) is None


def test_prefill_rate_is_the_90th_percentile_of_the_samples() -> None:
    rates, instance = Prefills(Clock()), plain()
    for tenth in range(1, 11):
        sample(rates, instance, 1 / tenth)
    cells, stamps = rates.measure("prefill_rate", [instance, plain("b")])
    assert cells == [pytest.approx(9000), None]
    assert stamps == [1000.0, None]


@pytest.mark.parametrize(
    ("new", "hit", "rate"), [(6923, 0, 6923 * 1.5), (1000, 6923, 1000 + 1000 * (7923 - 500) / 6923)]
)
def test_prefill_rate_includes_attention_to_the_cached_beginning(new: int, hit: int, rate: float) -> None:
    rates, instance = Prefills(Clock()), Instance("a", "http://a")
    for _ in range(FEWEST):
        sample(rates, instance, 1.0, new=new, hit=hit)
    assert ATTENTION_TOKENS == 6923
    assert rates.rate(instance) == pytest.approx(rate)


@given(st.lists(st.floats(0.001, 100), min_size=FEWEST, max_size=100))
def test_prefill_rate_is_one_of_the_last_samples(seconds: list[float]) -> None:
    rates, instance = Prefills(Clock()), plain()
    for each in seconds:
        sample(rates, instance, each)
    rate = rates.rate(instance)
    assert rate is not None
    assert any(rate == pytest.approx(1000 / each) for each in seconds[-KEPT:])


@pytest.mark.parametrize("ahead", [0, 4000])
def test_prefill_times_separate_start_and_slope_and_include_requests_ahead(ahead: int) -> None:
    times, instance = Prefills(Clock()), plain()
    for new in (100, 300, 900, 9000) * 2:
        before = instance.charge(1, ahead, 0)
        sample(times, instance, 0.05 + (ahead + new) / 20_000, new=new, hit=5000 if not ahead else 0)
        before.release()
    found = times.time_of(instance)
    assert found is not None
    assert found.start_s == pytest.approx(0.05)
    assert found.per_token_s == pytest.approx(1 / 20_000)
    assert times.time_of(plain()) is None


def test_prefill_times_keep_large_samples_among_many_small_ones() -> None:
    clock = Clock()
    times, instance = Prefills(clock), plain()
    sample(times, instance, 0.05 + 30_000 / 20_000, new=30_000)
    for _ in range(10 * KEPT_TIMES):
        sample(times, instance, 0.05 + 150 / 20_000, new=150)
    clock.now += FRESH_S - 1
    for _ in range(KEPT_TIMES):
        sample(times, instance, 0.05 + 150 / 20_000, new=150)
    found = times.time_of(instance)
    assert found is not None
    assert found.of(20_000) == pytest.approx(1.05)
    clock.now += 2
    found = times.time_of(instance)
    assert found is not None
    assert found.of(20_000) == pytest.approx((0.05 + 150 / 20_000) * 20_000 / 150)  # the large one has grown old


def test_prefill_times_hold_for_a_second() -> None:
    clock = Clock()
    times, instance = Prefills(clock), plain()
    for _ in range(FEWEST):
        sample(times, instance, 0.1)
    first = times.time_of(instance)
    for _ in range(KEPT_TIMES):
        sample(times, instance, 0.2)
    assert times.time_of(instance) is first
    clock.now += EVERY_S
    found = times.time_of(instance)
    assert found is not None
    assert found.of(1000) == pytest.approx(0.2)


# ── fetch_rate ───────────────────────────────────────────────────────────────


def measured(clock: Clock, rate: float = 10_000, start_s: float = 0.0) -> tuple[Prefills, Instance]:
    """An instance that is known to compute *rate* tokens a second after *start_s* seconds."""
    times, instance = Prefills(clock), plain()
    for number in range(FEWEST):
        lease = instance.charge(1, tokens := 1000 * (1 + number % 2 * 3), 0)
        times.first_token(lease, start_s + tokens / rate)
        lease.release()
    return times, instance


def fetch(rates: FetchRates, instance: Instance, seconds: float, *, stored: int = 4000) -> None:
    """A request that fetches *stored* of 5,000 tokens and computes the rest."""
    lease = instance.charge(1, 5000, 0, stored=stored)
    rates.first_token(lease, seconds)
    lease.release()


@pytest.mark.parametrize(("start_s", "ahead"), [(0.0, 0), (0.0, 3000), (0.5, 0)], ids=["alone", "queued", "start"])
def test_fetch_rate_excludes_time_that_the_prefill_explains(start_s: float, ahead: int) -> None:
    clock = Clock()
    prefill, instance = measured(clock, 10_000, start_s)
    rates = FetchRates(prefill, clock=clock)
    if ahead:
        instance.charge(1, ahead, 0)
    for _ in range(FEWEST):
        fetch(rates, instance, start_s + ahead / 10_000 + 0.1 + 0.2)
    cells, stamps = rates.measure("fetch_rate", [instance, Instance("b", "http://b")])
    assert cells == [pytest.approx(20_000)] * 2
    assert stamps == [1000.0, 1000.0]


def test_fetch_rate_is_unknown_with_few_small_or_old_fetches() -> None:
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


def test_fetch_rate_is_unknown_while_prefills_are() -> None:
    clock = Clock()
    rates, instance = FetchRates(Prefills(clock), clock=clock), Instance("a", "http://a")
    for _ in range(2 * FEWEST):
        fetch(rates, instance, 0.3)
    assert rates.rate() is None


def test_fetch_rate_counts_the_last_fetches_and_survives_one_without_duration() -> None:
    clock = Clock()
    prefill, instance = measured(clock)
    rates = FetchRates(prefill, clock=clock)
    for _ in range(50):
        fetch(rates, instance, 3.0)
    for _ in range(KEPT_FETCHES):
        fetch(rates, instance, 0.05)
    assert rates.rate() == pytest.approx(4_000_000)


def test_fetch_rate_may_be_configured() -> None:
    rates = FetchRates(Prefills(), configured=50_000)
    assert rates.measure("fetch_rate", [Instance("a", "http://a")]) == ([50_000.0], None)


# ── qps ──────────────────────────────────────────────────────────────────────


@given(st.lists(st.floats(0, 30), max_size=60))
def test_qps_counts_requests_of_the_last_minute(pauses: list[float]) -> None:
    clock = Clock()
    rates, instance, other = RequestRates(clock), Instance("a", "http://a"), Instance("b", "http://b")
    seconds = []
    for pause in pauses:
        clock.now += pause
        rates.sent(InferenceRequest(), instance.charge(1, 10))
        seconds.append(int(clock.now))
        recent = sum(second > int(clock.now) - WINDOW_S for second in seconds)
        if pause < 15:
            assert rates.measure("qps", [instance, other]) == ([recent / WINDOW_S, 0.0], None)
    clock.now += WINDOW_S
    assert rates.measure("qps", [instance])[0] == [0.0]


def test_qps_is_bounded_in_memory_while_no_policy_reads_it() -> None:
    clock = Clock()
    rates, instance = RequestRates(clock), Instance("a", "http://a")
    for _ in range(1000):
        clock.now += 1
        rates.sent(InferenceRequest(), instance.charge(1, 10))
    assert rates.measure("qps", [instance])[0] == [1.0]


# ── features and fleet ───────────────────────────────────────────────────────


def test_fetch_rate_is_replaced_by_prefill_rate_while_unknown() -> None:
    clock = Clock()
    prefill, instance = measured(clock, 10_000, 0.0)
    fleet = Fleet([instance, Instance("b", "http://b")], VOCABULARY, clock=clock)
    fleet.measured_by(prefill)
    fleet.measured_by(FetchRates(prefill, clock=clock))
    snapshot = fleet.snapshot(Candidates(fleet.instances), ["fetch_rate", "prefill_rate"])
    assert snapshot.columns["fetch_rate"] == snapshot.columns["prefill_rate"] == [pytest.approx(10_000)] * 2
    assert snapshot.is_known("fetch_rate") == [False, False]
    assert snapshot.is_known("prefill_rate") == [True, False]


def test_measured_features_without_follower_are_unknown() -> None:
    fleet = Fleet([Instance("a", "http://a"), Instance("b", "http://b")], VOCABULARY)
    snapshot = fleet.snapshot(Candidates(fleet.instances), MEASURED)
    assert snapshot.columns["prefill_rate"] == snapshot.columns["fetch_rate"] == [1.0, 1.0]
    assert all(snapshot.is_known(name) == [False, False] for name in MEASURED)


# ── req.class_share and req.class_streak ─────────────────────────────────────

INSTANCE = Instance("a", "http://a")


def request(beginning: str, rest: str = "") -> InferenceRequest:
    text = beginning.ljust(BLOCK_BYTES, ".") + rest
    return InferenceRequest(prompt_len=1000, prompt=Prompt([text.encode()], 4.0))


def pass_through(classes: PromptClasses, one: InferenceRequest, hit: int) -> InferenceRequest:
    classes.describe(one)
    lease = INSTANCE.charge(1, one.prompt_len, hit)
    classes.sent(one, lease)
    lease.release()
    return one


def test_prompt_class_is_shared_by_prompts_that_begin_alike() -> None:
    classes = PromptClasses(Clock())
    for turn in range(3):
        pass_through(classes, request("system A", f"turn {turn}"), 0)
    pass_through(classes, request("system B"), 0)
    assert pass_through(classes, request("system A", "another"), 0).class_share == 3 / 4
    assert pass_through(classes, request("system C"), 0).class_share == 0


def test_class_streak_counts_hits_in_a_row_within_the_class() -> None:
    classes = PromptClasses(Clock())
    streaks = []
    for hit in (0, 900, 1, 0, 5):
        streaks.append(pass_through(classes, request("A"), hit).class_streak)
        pass_through(classes, request("B"), 0)  # another class does not end the streak
    assert streaks == [0, 0, 1, 2, 0]
    assert pass_through(classes, request("A"), 0).class_streak == 1


def test_prompt_classes_are_bounded_by_requests_and_by_age() -> None:
    clock = Clock()
    classes = PromptClasses(clock)
    pass_through(classes, request("A"), 900)
    for number in range(WINDOW):
        pass_through(classes, request(f"B {number}"), 0)
    forgotten = pass_through(classes, request("A"), 0)
    assert (forgotten.class_share, forgotten.class_streak) == (0, 0)
    assert pass_through(classes, request("A"), 0).class_share == 1 / WINDOW
    clock.now += CLASS_FRESH_S + 1
    assert pass_through(classes, request("A"), 0).class_share == 0


def test_prompt_classes_count_from_when_a_policy_first_reads_them() -> None:
    classes = PromptClasses(Clock())
    classes.sent(request("A"), INSTANCE.charge(1, 1000))
    asked = request("A")
    classes.describe(asked)
    assert asked.class_share == 0


def test_request_without_prompt_has_no_class() -> None:
    classes = PromptClasses(Clock())
    for _ in range(3):
        assert pass_through(classes, InferenceRequest(prompt_len=5), 0).class_share == 0


def test_prefix_is_kept_when_the_text_is_released() -> None:
    one = request("A")
    PromptClasses(Clock()).describe(one)
    prefix = one.prefix
    one.answering()
    one.let_go()
    assert one.prefix == prefix != ""


# ── req.lora ─────────────────────────────────────────────────────────────────


def test_lora_is_the_adapter_that_a_model_or_its_alias_names() -> None:
    clock, instance = Clock(), Instance("a", "http://a")
    adapters = Adapters([instance, Instance("b", "http://b")], clock)
    adapters.describe(InferenceRequest(model="sql"))
    instance.adapters = frozenset({"sql"})  # loaded later
    clock.now += RENEWED_S
    asked = [InferenceRequest(model="sql"), InferenceRequest(model="base"), InferenceRequest(model="x", served="sql")]
    for one in asked:
        adapters.describe(one)
    assert [one.lora for one in asked] == ["sql", "", "sql"]


COSTS = st.lists(st.floats(1, 1e6), min_size=2, max_size=12, unique=True)


@given(COSTS, st.floats(0.0, 1.0), st.floats(1e-6, 1e-2))
def test_fitted_finds_the_line_where_computing_shows(costs: list[float], start_s: float, per_token_s: float) -> None:
    line = PrefillTime(start_s, per_token_s)
    found = fitted([(cost, line.of(cost))] for cost in costs)
    for cost in costs:
        if per_token_s * max(costs) >= LEAST_COMPUTING * line.of(max(costs)):
            assert found.of(cost) == pytest.approx(line.of(cost), rel=1e-2)


@given(st.lists(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1e-3, 1e3)), min_size=1, max_size=8), min_size=1))
def test_fitted_line_rises_from_zero_or_above(groups: list[list[tuple[float, float]]]) -> None:
    found = fitted(groups)
    assert found.start_s >= 0
    assert found.per_token_s > 0


def test_fitted_bounds_the_slope_of_small_prefills_alone() -> None:
    found = fitted([[(100.0, 0.100)], [(200.0, 0.099)]])
    assert found.per_token_s == pytest.approx(LEAST_COMPUTING * 0.099 / 200)
    assert found.of(150) == pytest.approx(0.1, rel=0.05)


def test_fitted_starts_at_zero_for_equal_costs() -> None:
    found = fitted([[(1000.0, 0.2), (1000.0, 0.3), (1000.0, 0.9)]])
    assert found.start_s == 0.0
    assert found.of(2000) == pytest.approx(0.6)


def test_fitted_takes_medians_of_groups() -> None:
    rng = random.Random(3)
    line, groups = PrefillTime(0.04, 1 / 30_000), []
    for size in (150, 300, 600, 20_000):
        costs = [size * rng.uniform(1, 1.9) for _ in range(16)]
        groups.append(
            [(cost, line.of(cost) * (8 if n % 4 == 0 else rng.uniform(0.9, 1.2))) for n, cost in enumerate(costs)]
        )
    found = fitted(groups)
    for cost in (200, 1000, 30_000):
        assert 1 / 1.25 <= found.of(cost) / line.of(cost) <= 1.25
