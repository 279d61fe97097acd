"""Fleet: candidates, snapshots and slow start."""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from smetric.config import settings as sections
from smetric.config.settings import HealthSettings, InstanceSettings, PrefillSettings, Settings
from smetric.errors import ConfigError, NoCandidate
from smetric.features import VOCABULARY
from smetric.files import policy_path
from smetric.fleet.fleet import CERTAIN, DECODE_BLOCKS, MOST_MODELS, SCRAPED, Candidates, Fleet, fleet_of
from smetric.fleet.health import Health
from smetric.fleet.instance import Instance, Scrape
from smetric.policy import Decision, Policy, load
from smetric.request.request import Api, InferenceRequest
from smetric.telemetry.decision_text import rows
from tests.clock import Clock

# Cache of candidates

READS = ("requests", "running", "waiting", "kv_usage", "id")
SCRAPES = st.none() | st.builds(
    Scrape, st.sampled_from([900.0, 990.0, 1000.0]), st.integers(0, 3), st.integers(0, 3), st.none(), st.integers(0, 2)
)
CHANGES = st.one_of(
    st.tuples(st.just("healthy"), st.booleans()),
    st.tuples(st.just("draining"), st.booleans()),
    st.tuples(st.just("deprioritized"), st.booleans()),
    st.tuples(st.just("models"), st.none() | st.frozensets(st.sampled_from("mn"), max_size=2)),
    st.tuples(st.just("scrape"), SCRAPES),
    st.tuples(st.just("own"), st.integers(0, 3)),
)
STEPS = st.lists(st.tuples(st.integers(0, 2), CHANGES, st.sampled_from("mn")), max_size=12)


def instances() -> list[Instance]:
    return [Instance(name, f"http://{name}") for name in "abc"]


def clock() -> float:
    return 1000.0


def seen(fleet: Fleet, model: str) -> object:
    """The candidates for *model*, and what a policy sees of them."""
    try:
        candidates = fleet.candidates(model)
    except NoCandidate as error:
        return error.status
    snapshot = fleet.snapshot(candidates, READS)
    return list(candidates), snapshot.ids, snapshot.columns, snapshot.known, snapshot.stamps


@given(STEPS)
def test_candidates_are_the_same_cached_or_computed(steps: list[tuple[int, tuple[str, object], str]]) -> None:
    fleet = Fleet(instances(), VOCABULARY, clock=clock)
    for which, (name, value), model in steps:
        seen(fleet, model)
        setattr(fleet.instances[which], name, value)
        anew = Fleet(fleet.instances, VOCABULARY, clock=clock)
        assert seen(fleet, model) == seen(fleet, model) == seen(anew, model)


def test_candidates_are_cached_until_an_instance_changes() -> None:
    fleet = Fleet(instances(), VOCABULARY, clock=clock)
    first = fleet.candidates("m")
    fleet["a"].charge(1, 100)
    assert fleet.candidates("m") is first
    assert fleet.candidates("m", exclude=[fleet["c"]]) == first[:2]
    assert fleet.candidates("m") is first
    fleet["a"].restarted()
    assert fleet.candidates("m") is not first
    assert fleet.candidates("m") == first


def test_candidates_cache_is_bounded_for_unknown_models() -> None:
    fleet = Fleet(instances(), VOCABULARY, clock=clock)
    kept = [fleet.candidates(str(number)) for number in range(2 * MOST_MODELS)]
    again = [fleet.candidates(str(number)) for number in range(2 * MOST_MODELS)]
    assert sum(one is other for one, other in zip(kept, again, strict=True)) == MOST_MODELS
    assert kept == again


def test_candidates_count_panics() -> None:
    fleet = Fleet(instances(), VOCABULARY, clock=clock)
    for instance in fleet.instances:
        instance.healthy = False
    for _ in range(3):
        assert len(fleet.candidates("m")) == 3
    assert fleet.panics == 3


@pytest.mark.parametrize(("running", "own", "others"), [(3, 1, 3.0), (1, 5, 0.0), (0, 0, 1.0)])
def test_scrape_others_are_those_beyond_own(running: int, own: int, others: float) -> None:
    scrape = Scrape(990.0, running, 1, None, own)
    assert scrape.others == others
    assert dataclasses.replace(scrape, own=0).others == running + 1


# Candidates and snapshots


def small_fleet(*instances: Instance | str, clock: Clock | None = None) -> Fleet:
    made = [Instance(each, f"http://{each}") if isinstance(each, str) else each for each in instances]
    return Fleet(made, VOCABULARY, clock=clock or Clock())


def ids(instances: list[Instance]) -> list[str]:
    return [instance.id for instance in instances]


def test_fleet_orders_instances_by_id() -> None:
    fleet = small_fleet("b", "a")
    assert ids(fleet.instances) == ["a", "b"]
    assert fleet["b"].url == "http://b"
    assert fleet.get("c") is None


def test_candidates_serve_the_model_or_list_no_models() -> None:
    fleet = small_fleet(
        Instance("a", "http://a", models=["m", "m-alias"]),
        Instance("b", "http://b", models=["n"]),
        Instance("c", "http://c"),
    )
    assert ids(fleet.candidates("m-alias")) == ["a", "c"]
    assert ids(fleet.candidates("")) == ["a", "b", "c"]


def test_candidates_of_an_unknown_model_are_404() -> None:
    fleet = small_fleet(Instance("a", "http://a", models=["m"]))
    with pytest.raises(NoCandidate) as caught:
        fleet.candidates("other" * 100)
    assert (caught.value.status, caught.value.kind) == (404, "model_not_found")
    assert f"model `{'other' * 40}` does not exist here" in str(caught.value)


def test_candidates_of_an_unavailable_model_are_503() -> None:
    fleet = small_fleet(Instance("a", "http://a", models=["m"]), Instance("b", "http://b", models=["n"]))
    fleet["a"].draining = True
    with pytest.raises(NoCandidate) as caught:
        fleet.candidates("m")
    assert caught.value.status == 503
    assert caught.value.retry_after_s == 1.0


def test_candidates_for_prefill_alone_take_no_ordinary_requests_even_in_a_panic() -> None:
    roles = {"a": "prefill", "b": "decode", "c": "both"}
    fleet = small_fleet(*(Instance(id, f"http://{id}", role=role) for id, role in roles.items()))
    assert ids(fleet.candidates("m")) == ["b", "c"]
    fleet["b"].healthy = fleet["c"].healthy = False
    assert ids(fleet.candidates("m")) == ["b", "c"]
    with pytest.raises(NoCandidate, match="for prefill alone"):
        small_fleet(Instance("a", "http://a", role="prefill")).candidates("m")


def test_candidates_leave_out_unhealthy_unless_all_are() -> None:
    fleet = small_fleet("a", "b")
    fleet["a"].healthy = False
    assert ids(fleet.candidates("m")) == ["b"]
    fleet["b"].healthy = False
    assert ids(fleet.candidates("m")) == ["a", "b"]


def test_candidates_panic_below_the_tolerated_share() -> None:
    instances = [Instance(f"gpu-{number}", f"http://gpu-{number}") for number in range(25)]
    fleet = Fleet(instances, VOCABULARY, health=Health(instances, HealthSettings(panic_below_percent=56)))
    for instance in instances[14:]:
        instance.healthy = False
    assert len(fleet.candidates("m")) == 14
    instances[13].healthy = False
    assert len(fleet.candidates("m")) == 25


def test_candidates_leave_out_deprioritized_unless_all_are() -> None:
    one, two = Instance("a", "http://a"), Instance("b", "http://b")
    fleet = small_fleet(one, two)
    one.deprioritized = True
    assert ids(fleet.candidates("m")) == ["b"]
    assert ids(fleet.candidates("m", exclude=[two])) == ["a"]  # excluded instances are left out first
    two.deprioritized = True
    assert ids(fleet.candidates("m")) == ["a", "b"]
    assert fleet.panics == 0


def test_snapshot_has_a_column_for_each_feature_without_lookup() -> None:
    fleet = small_fleet(Instance("a", "http://a", role="prefill", pool="p", zone="z"), Instance("b", "http://b"))
    snapshot = fleet.snapshot(Candidates(fleet.instances), VOCABULARY.features)
    assert set(snapshot.columns) == {name for name, feature in VOCABULARY.features.items() if not feature.lookup}
    assert snapshot.columns["role"] == ["prefill", "both"]
    assert all(len(column) == 2 for column in snapshot.columns.values())


def test_features_are_all_filled_by_sources_or_fleet() -> None:
    by_sources = {name for name, feature in VOCABULARY.features.items() if feature.lookup or feature.measured}
    filled = set(SCRAPED) | set(CERTAIN) | {DECODE_BLOCKS} | by_sources
    assert filled == set(VOCABULARY.features)


def test_snapshot_corrects_scraped_values_by_the_ledger() -> None:
    clock = Clock()
    fleet = small_fleet("a", clock=clock)
    instance = fleet["a"]
    instance.scrape = Scrape(measured_at=998.0, running=4, waiting=2, kv_usage=0.5, own=0)
    instance.charge(1, 10)
    snapshot = fleet.snapshot(Candidates([instance]), ["requests", "running", "waiting", "kv_usage"])
    assert snapshot.columns == {"requests": [7], "running": [5], "waiting": [2], "kv_usage": [0.5]}
    assert snapshot.age("requests") == [2.0]


def test_snapshot_gives_silent_instance_its_last_load_then_the_mean() -> None:
    clock = Clock()
    fleet = small_fleet(*"abc", clock=clock)
    a, b, c = fleet.instances
    a.scrape = Scrape(measured_at=1000.0, running=1, waiting=0, kv_usage=0.1, own=0)
    clock.now = 1029.0
    b.scrape = Scrape(measured_at=1029.0, running=6, waiting=0, kv_usage=0.4, own=0)
    c.scrape = Scrape(measured_at=1029.0, running=8, waiting=2, kv_usage=0.6, own=0)
    assert fleet.snapshot(Candidates([a, b, c]), ["requests"]).columns["requests"] == [1, 6, 10]
    clock.now = 1031.0
    snapshot = fleet.snapshot(Candidates([a, b, c]), ["requests", "kv_usage"])
    assert snapshot.columns == {"requests": [8, 6, 10], "kv_usage": [0.5, 0.4, 0.6]}
    assert snapshot.is_known("requests") == [False, True, True]


def test_snapshot_counts_own_requests_without_scrapes() -> None:
    fleet = small_fleet("a", "b")
    a, b = fleet.instances
    for _ in range(9):
        a.charge(1, 10)
    # Without any scrape the own counts hold.
    assert fleet.snapshot(Candidates([a, b]), ["requests"]).columns["requests"] == [9, 0]
    # The mean of the known never hides what we sent.
    b.scrape = Scrape(measured_at=1000.0, running=2, waiting=0, kv_usage=None, own=0)
    assert fleet.snapshot(Candidates([a, b]), ["requests"]).columns["requests"] == [9, 2]


def test_snapshot_clamps_hits_and_keeps_their_origin() -> None:
    fleet = small_fleet("a", "b")
    snapshot = fleet.snapshot(Candidates(fleet.instances), ["hit_len"])
    assert "hit_len" not in snapshot.columns  # until the look-up
    fleet.fill(snapshot, "hit_len", [5000.0, None], "kv_events", 4096)
    assert snapshot.columns["hit_len"] == [4096, 0]
    assert snapshot.is_known("hit_len") == [True, False]
    assert snapshot.origins_of("hit_len") == ["kv_events", ""]
    assert [snapshot.origin("hit_len", at) for at in range(2)] == ["kv_events", ""]


# Slow start: phantom load lets the share of a returning instance grow evenly.

COUNT = 4
FAIR = 1 / COUNT


def cold_fleet(clock: Clock, count: int = COUNT, slow_start: float = 30.0) -> Fleet:
    instances = [Instance(f"gpu-{i}", f"http://gpu-{i}", models=["m"]) for i in range(count)]
    health = Health(instances, HealthSettings(slow_start=slow_start), clock=clock)
    return Fleet(instances, VOCABULARY, health=health, clock=clock)


def come_back(fleet: Fleet, instance: Instance) -> None:
    fleet.health.refused(instance)
    for _ in range(2):
        fleet.health.probed(instance, ok=True)


def decided(policy: Policy, fleet: Fleet, candidates: Candidates, cursors: dict[str, str], seed: int) -> Decision:
    """A decision on a first turn, of which no cache holds anything."""
    request = InferenceRequest(turn=0, prompt_len=1000, est_hit=0, model="m", api=Api.CHAT)
    snapshot = fleet.snapshot(candidates, policy.reads)
    while not isinstance(decision := policy.decide(snapshot, request, cursors, seed), Decision):
        for name in decision.features:
            fleet.fill(snapshot, name, [0.0] * len(candidates), ["nobody"] * len(candidates), request.prompt_len)
    return decision


def first_turns(
    policy_name: str, *, rate: float = 200.0, prefill_s: float = 0.1, decode_s: float = 1.4
) -> list[tuple[float, int]]:
    """First turns at random times for 60 s: when each came, and where it went; gpu-0 comes back, empty, at 0 s."""
    clock, rng = Clock(0.0), random.Random(7)
    fleet = cold_fleet(clock)
    policy = load(policy_path(policy_name).read_text(), VOCABULARY)
    cursors: dict[str, str] = {}
    due: list[tuple[float, int, Callable[[], None]]] = []
    seen: list[tuple[float, int]] = []
    fleet.health.refused(fleet.instances[0])
    clock.now, back_at = -10.0, 0.0
    while clock.now < 60.0:
        clock.now += rng.expovariate(rate)
        while due and due[0][0] <= clock.now:
            heapq.heappop(due)[2]()
        if clock.now >= back_at and not fleet.instances[0].healthy:
            come_back(fleet, fleet.instances[0])
        candidates = fleet.candidates("m")
        decision = decided(policy, fleet, candidates, cursors, len(seen))
        cursors.update(decision.cursors)
        chosen = candidates[decision.index]
        lease, prefilled_at = chosen.charge(1, 1000), clock.now + prefill_s
        heapq.heappush(due, (prefilled_at, 2 * len(seen), lease.first_output))
        heapq.heappush(due, (prefilled_at + rng.expovariate(1 / decode_s), 2 * len(seen) + 1, lease.release))
        seen.append((clock.now, fleet.instances.index(chosen)))
    return seen


def share(seen: list[tuple[float, int]], since: float, until: float) -> float:
    """The share of gpu-0 in a window, where the fair one is 1."""
    window = [where for at, where in seen if since <= at < until]
    return window.count(0) / len(window) / FAIR


#: By `requests`, by `running`, and by `unprefilled` and `decode_blocks`.
BALANCING = ["smetric", "load_only", "aibrix_prefix_sigma", "dynamo"]


@pytest.mark.parametrize("policy_name", BALANCING)
def test_slow_start_grows_the_share_of_first_turns_evenly(policy_name: str) -> None:
    seen = first_turns(policy_name)
    assert share(seen, -10.0, 0.0) == 0
    for middle in (5.0, 10.0, 15.0, 20.0, 25.0):
        assert share(seen, middle - 2.5, middle + 2.5) == pytest.approx(middle / 30.0, abs=0.12)
    assert max(share(seen, start / 2, start / 2 + 5.0) for start in range(110)) <= 1.2
    assert share(seen, 35.0, 60.0) == pytest.approx(1.0, abs=0.1)


def test_slow_start_off_floods_a_returning_instance() -> None:
    """Without phantom load the returning instance gets all requests until it is as loaded as the others."""
    clock = Clock(0.0)
    fleet = cold_fleet(clock, slow_start=0)
    policy = load(policy_path("load_only").read_text(), VOCABULARY)
    for instance in fleet.instances[1:]:
        instance.own = 20
    come_back(fleet, fleet.instances[0])
    request = InferenceRequest(turn=0, prompt_len=1000, est_hit=0, model="m", api=Api.CHAT)
    for _ in range(20):
        decision = policy.decide(fleet.snapshot(Candidates(fleet.instances), policy.reads), request, {}, 0)
        assert isinstance(decision, Decision)
        assert decision.index == 0
        fleet.instances[0].own += 1


def test_slow_start_adds_phantom_load_with_its_source() -> None:
    clock = Clock(0.0)
    fleet = cold_fleet(clock, 3)
    one, two, three = fleet.instances
    for instance, running, unprefilled in ((one, 2, 100), (two, 8, 600), (three, 12, 1000)):
        instance.scrape = Scrape(measured_at=15.0, running=running, waiting=0, kv_usage=0.1, own=0)
        instance.unprefilled = instance.sent_tokens = unprefilled
    come_back(fleet, one)
    clock.now = 15.0
    snapshot = fleet.snapshot(Candidates(fleet.instances), ["requests", "running", "unprefilled", "inflight_tokens"])
    requests, tokens = [8, 8, 12], [580, 600, 1000]
    assert snapshot.columns == {
        "requests": requests,
        "running": requests,
        "unprefilled": tokens,
        "inflight_tokens": tokens,
    }
    full = fleet.snapshot(Candidates(fleet.instances), ["waiting", "kv_usage"])
    assert full.columns == {"waiting": [0, 0, 0], "kv_usage": [0.1, 0.1, 0.1]}
    policy = load("policy p\nroute argmin(requests)", VOCABULARY)
    request = InferenceRequest(turn=0, prompt_len=1, est_hit=0, model="m", api=Api.CHAT)
    decision = policy.decide(fleet.snapshot(Candidates(fleet.instances), policy.reads), request, {}, 0)
    assert isinstance(decision, Decision)
    assert {row["id"]: row["requests_source"] for row in rows(decision, 3)} == {
        "gpu-0": "slow_start",
        "gpu-1": "ledger",
        "gpu-2": "ledger",
    }
    clock.now = 31.0
    assert fleet.snapshot(Candidates(fleet.instances), ["unprefilled"]).columns == {"unprefilled": [100, 600, 1000]}
    assert fleet.snapshot(Candidates(fleet.instances), ["requests"]).origins == {}


def test_slow_start_of_all_instances_adds_nothing() -> None:
    clock = Clock(0.0)
    fleet = cold_fleet(clock, 2)
    for instance, own in zip(fleet.instances, (3, 5), strict=True):
        come_back(fleet, instance)
        instance.own = own
    assert fleet.snapshot(Candidates(fleet.instances), ["requests"]).columns == {"requests": [3, 5]}


# Fleet of settings

ONE = InstanceSettings(url="http://127.0.0.1:1", id="b", models=("m",), role="decode", pool="p", zone="z")
OTHER = InstanceSettings(url="http://127.0.0.1:2", id="a")


def test_fleet_of_settings_has_their_values(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-of-a\n")
    settings = Settings(
        instances=(ONE, replace(OTHER, api_key_file=str(key))),
        prefill=PrefillSettings(attention_tokens=1234),
        scrape=sections.ScrapeSettings(unknown_after=7.0),
    )
    fleet = fleet_of(settings, lambda *_: None)
    assert [each.id for each in fleet.instances] == ["a", "b"]
    other, one = fleet.instances
    assert (one.url, one.models, one.role, one.pool, one.zone) == (ONE.url, frozenset({"m"}), "decode", "p", "z")
    assert one.key is None
    assert other.key is not None
    assert other.key.text == "sk-of-a"
    assert one.attention_tokens == other.attention_tokens == 1234
    assert fleet.unknown_after_s == 7.0


def test_fleet_reports_ejections_with_their_reason() -> None:
    ejected: list[tuple[str, str]] = []
    fleet = fleet_of(Settings(instances=(ONE, OTHER)), lambda instance, reason: ejected.append((instance.id, reason)))
    for _ in range(5):
        fleet.health.probed(fleet["a"], ok=False)
    assert ejected == [("a", "probe")]


def test_fleet_names_the_instance_of_an_unreadable_key(tmp_path: Path) -> None:
    settings = Settings(instances=(replace(OTHER, api_key_file=str(tmp_path / "none")),))
    with pytest.raises(ConfigError, match="instances: a: api_key_file"):
        fleet_of(settings, lambda *_: None)
