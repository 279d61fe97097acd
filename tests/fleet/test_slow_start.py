"""The share of first turns of an instance that has come back grows evenly, by the phantom load that policies see."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from smetric.features import VOCABULARY
from smetric.files import policy_path
from smetric.fleet.fleet import Candidates, Fleet
from smetric.fleet.health import Health, Tolerance
from smetric.fleet.instance import Instance, Scrape
from smetric.policy import Decision, Policy, load
from smetric.request.request import Api, InferenceRequest
from smetric.telemetry.decision_text import rows
from tests.clock import Clock

COUNT = 4
FAIR = 1 / COUNT


def fleet_of(clock: Clock, count: int = COUNT, slow_start_s: float = 30.0) -> Fleet:
    instances = [Instance(f"gpu-{i}", f"http://gpu-{i}", models=["m"]) for i in range(count)]
    health = Health(instances, Tolerance(slow_start_s=slow_start_s), clock=clock)
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
    fleet = fleet_of(clock)
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
        heapq.heappush(due, (prefilled_at, 2 * len(seen), lease.first_byte))
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
def test_the_share_of_first_turns_grows_evenly_over_the_slow_start(policy_name: str) -> None:
    seen = first_turns(policy_name)
    assert share(seen, -10.0, 0.0) == 0
    for middle in (5.0, 10.0, 15.0, 20.0, 25.0):
        assert share(seen, middle - 2.5, middle + 2.5) == pytest.approx(middle / 30.0, abs=0.12)
    assert max(share(seen, start / 2, start / 2 + 5.0) for start in range(110)) <= 1.2
    assert share(seen, 35.0, 60.0) == pytest.approx(1.0, abs=0.1)


def test_without_it_one_that_comes_back_is_flooded() -> None:
    """What the phantom load is against: the empty one is the least loaded until it is as loaded as the others."""
    clock = Clock(0.0)
    fleet = fleet_of(clock, slow_start_s=0)
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


def test_the_phantom_is_what_the_others_bear_and_the_trace_says_so() -> None:
    clock = Clock(0.0)
    fleet = fleet_of(clock, 3)
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


def test_where_all_have_come_back_at_once_nothing_is_added() -> None:
    clock = Clock(0.0)
    fleet = fleet_of(clock, 2)
    for instance, own in zip(fleet.instances, (3, 5), strict=True):
        come_back(fleet, instance)
        instance.own = own
    assert fleet.snapshot(Candidates(fleet.instances), ["requests"]).columns == {"requests": [3, 5]}
