"""Routing: what is fetched when, what is charged, and that nobody becomes a magnet."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path

import pytest

from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance, Lease, Scrape
from smetric.request.request import InferenceRequest, Usage
from smetric.routing.router import PIN_TTL_S, Router
from smetric.sources.lookups import LookupDeadline
from smetric.sources.source import Cells, Source
from tests.clock import Clock
from tests.fakes import routes_by


class FakeSource(Source):
    """Answers look-ups from a table of instance id to hit length; asynchronously when *delay_s* is given."""

    fills = frozenset({"hit_len"})

    def __init__(self, hits: Mapping[str, float | None], *, name: str = "fake", delay_s: float | None = None) -> None:
        self.name = name
        self.hits = hits
        self.delay_s = delay_s
        self.asked = 0
        self.seen: list[tuple[str, Instance]] = []
        self.forgotten: list[Instance] = []

    def lookup(
        self, request: InferenceRequest, instances: Sequence[Instance]
    ) -> dict[str, Cells] | Awaitable[dict[str, Cells]]:
        self.asked += 1
        answer: dict[str, Cells] = {"hit_len": [self.hits.get(instance.id) for instance in instances]}
        return answer if self.delay_s is None else self._later(answer, self.delay_s)

    async def _later(self, answer: dict[str, Cells], delay_s: float) -> dict[str, Cells]:
        await asyncio.sleep(delay_s)
        return answer

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        self.seen.append((request.id, instance))

    def forget(self, instance: Instance) -> None:
        self.forgotten.append(instance)


class FakeLearner(FakeSource):
    """A source that learns from whole answers."""

    def __init__(self) -> None:
        super().__init__({})
        self.answers: list[tuple[str, Instance, Usage | None]] = []

    def settled(self, request: InferenceRequest, instance: Instance, usage: Usage | None) -> None:
        self.answers.append((request.id, instance, usage))


def fleet_of(names: str = "abc", clock: Clock | None = None) -> Fleet:
    return Fleet((Instance(name, f"http://{name}") for name in names), VOCABULARY, clock=clock or Clock())


def router_of(
    fleet: Fleet, *sources: FakeSource, policy: str | Path = "smetric", deadline: LookupDeadline | None = None
) -> Router:
    path = shipped_policies()[policy] if isinstance(policy, str) else policy
    return Router(fleet, routes_by(path), sources, deadline=deadline, rng=random.Random(7))


def first_turn() -> InferenceRequest:
    return InferenceRequest(turn=0, prompt_len=1000, est_hit=0)


def later_turn() -> InferenceRequest:
    return InferenceRequest(turn=3, prompt_len=1000, est_hit=900)


async def test_a_first_turn_is_charged_and_causes_no_lookup() -> None:
    fleet, source = fleet_of(), FakeSource({"a": 900})
    router = router_of(fleet, source)
    routing = await router.route(first_turn())
    assert routing.outcome == "routed"
    assert routing.decision is not None
    assert routing.decision.rule == "balance"
    assert source.asked == 0
    assert [i.own for i in fleet.instances].count(1) == 1
    assert routing.lease is not None
    assert routing.lease.instance.unprefilled == 1000
    routing.lease.release()
    assert [i.own for i in fleet.instances] == [0, 0, 0]


async def test_a_later_turn_returns_to_its_cache_and_is_charged_without_the_hit() -> None:
    fleet, source = fleet_of(), FakeSource({"a": 0, "b": 880, "c": 0})
    fleet["b"].scrape = Scrape(measured_at=1000.0, running=1, waiting=0, kv_usage=None, own=0)
    fleet["a"].scrape = fleet["c"].scrape = Scrape(measured_at=1000.0, running=2, waiting=0, kv_usage=None, own=0)
    routing = await router_of(fleet, source).route(later_turn())
    assert routing.decision is not None
    assert (routing.decision.rule, routing.decision.instance) == ("stick", "b")
    assert routing.decision.snapshot.origins_of("hit_len") == ["fake", "fake", "fake"]
    assert source.asked == 1
    assert fleet["b"].unprefilled == 120


async def test_bursts_spread_because_each_decision_is_charged_at_once() -> None:
    fleet = fleet_of("abcd")
    router = router_of(fleet, policy="load_only")
    await asyncio.gather(*(router.route(first_turn()) for _ in range(100)))
    assert [i.own for i in fleet.instances] == [25, 25, 25, 25]


async def test_cells_one_source_does_not_know_fall_to_the_next() -> None:
    best = FakeSource({"a": None, "b": 100, "c": None}, name="best")
    rest = FakeSource({"a": 700, "b": 999, "c": None}, name="rest")
    routing = await router_of(fleet_of(), best, rest, policy="smetric_basic").route(later_turn())
    assert routing.decision is not None
    snapshot = routing.decision.snapshot
    assert snapshot.columns["hit_len"] == [700, 100, 0]
    assert snapshot.is_known("hit_len") == [True, True, False]
    assert snapshot.origins_of("hit_len") == ["rest", "best", ""]


async def test_the_next_source_is_not_asked_when_nothing_is_unknown() -> None:
    best, rest = FakeSource({"a": 1, "b": 2, "c": 3}), FakeSource({"a": 9})
    await router_of(fleet_of(), best, rest, policy="smetric_basic").route(later_turn())
    assert (best.asked, rest.asked) == (1, 0)


async def test_a_late_lookup_is_unknown_and_an_unknown_hit_does_not_stick() -> None:
    fleet, source = fleet_of(), FakeSource({"a": 900}, delay_s=30)
    # Equal loads, so that only the unknown hit keeps it from sticking.
    for instance in fleet.instances:
        instance.charge(1, 10)
    router = router_of(fleet, source, deadline=LookupDeadline(0.01, 0.0, 0.01))
    routing = await asyncio.wait_for(router.route(later_turn()), 5)
    assert routing.decision is not None
    assert routing.decision.rule == "balance"
    assert routing.decision.snapshot.is_known("hit_len") == [False, False, False]


async def test_all_lookups_of_a_decision_have_one_deadline_however_many_steps_it_takes(tmp_path: Path) -> None:
    class Stores(FakeSource):
        fills = frozenset({"store_hit_len"})

        async def _later(self, answer: dict[str, Cells], delay_s: float) -> dict[str, Cells]:
            await asyncio.sleep(delay_s)
            return {"store_hit_len": answer["hit_len"]}

    path = tmp_path / "p.policy"
    path.write_text("policy p\nroute argmax(hit_len) when all(hit_len > 9)\nroute argmax(store_hit_len)\n")
    sources = FakeSource({}, delay_s=30.0), Stores({"a": 900, "b": 0, "c": 0}, delay_s=0.03)
    router = router_of(fleet_of(), *sources, policy=path, deadline=LookupDeadline(0.1, 0.0, 0.1))
    routing = await router.route(later_turn())
    assert routing.decision is not None
    assert routing.decision.snapshot.is_known("store_hit_len") == [False, False, False]


async def test_an_asynchronous_lookup_in_time_counts_and_is_decided_on_a_new_snapshot() -> None:
    fleet, source = fleet_of(), FakeSource({"a": 900, "b": 0, "c": 0}, delay_s=0.01)
    router = router_of(fleet, source, policy="smetric_basic", deadline=LookupDeadline(5.0, 0.0, 5.0))
    pending = asyncio.create_task(router.route(later_turn()))
    await asyncio.sleep(0)
    fleet["a"].charge(5, 10)  # while the look-up is under way
    routing = await pending
    assert routing.decision is not None
    assert routing.decision.instance == "a"
    assert routing.decision.snapshot.columns["requests"][0] == 5


async def test_candidates_that_appear_during_a_lookup_are_unknown_and_those_that_leave_are_gone() -> None:
    fleet, source = fleet_of(), FakeSource({"a": 100, "b": 900, "c": 50}, delay_s=0.01)
    fleet["a"].healthy = False
    router = router_of(fleet, source, policy="smetric_basic", deadline=LookupDeadline(5.0, 0.0, 5.0))
    pending = asyncio.create_task(router.route(later_turn()))
    await asyncio.sleep(0)
    fleet["a"].healthy, fleet["b"].healthy = True, False
    routing = await pending
    assert routing.decision is not None
    snapshot = routing.decision.snapshot
    assert list(snapshot.ids) == ["a", "c"]
    assert snapshot.is_known("hit_len") == [False, True]
    assert routing.decision.instance == "c"


async def test_nobody_for_an_unknown_model_is_an_error_in_the_result() -> None:
    fleet = Fleet([Instance("a", "http://a", models=["m"])], VOCABULARY)
    routing = await router_of(fleet).route(InferenceRequest(model="other"))
    assert (routing.outcome, routing.lease) == ("no_candidate", None)
    assert routing.error is not None
    assert routing.error.status == 404
    assert routing.error.__traceback__ is None  # it would keep the frames of those that wait for the result


async def test_a_retry_leaves_the_failed_instance_out() -> None:
    fleet = fleet_of("ab")
    router = router_of(fleet)
    routing = await router.route(first_turn(), exclude=[fleet["a"]])
    assert routing.lease is not None
    assert routing.lease.instance is fleet["b"]
    assert (await router.route(first_turn(), exclude=fleet.instances)).outcome == "no_candidate"


async def test_a_reject_rule_sheds_with_its_own_status_and_retry_after(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text('policy p\nreject 429 "full" retry 2s when all(requests >= 1) as shed\nroute argmin(requests)\n')
    fleet = fleet_of("a")
    router = router_of(fleet, policy=path)
    lease = (await router.route(first_turn())).lease
    assert lease is not None
    routing = await router.route(first_turn())
    assert (routing.outcome, routing.lease) == ("rejected", None)
    assert routing.error is not None
    assert (routing.error.status, routing.error.message, routing.error.retry_after_s) == (429, "full", 2.0)
    lease.release()
    assert (await router.route(first_turn())).outcome == "routed"


async def test_a_filter_that_leaves_nobody_is_503_and_named(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text('policy p\nkeep pool == "gold" as gold_pool\nroute argmin(requests)\n')
    routing = await router_of(fleet_of("a"), policy=path).route(first_turn())
    assert routing.outcome == "no_candidate"
    assert routing.error is not None
    assert routing.error.status == 503
    assert "gold_pool" in routing.error.message


async def test_an_error_inside_an_evaluation_is_500_and_charges_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_of("a")
    router = router_of(fleet)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(type(router.routes.last.control.file.current.policy), "decide", broken)
    routing = await router.route(first_turn())
    assert (routing.outcome, fleet["a"].own) == ("error", 0)
    assert routing.error is not None
    assert routing.error.status == 500


async def test_a_stored_response_goes_back_to_its_engine_or_nowhere() -> None:
    fleet = fleet_of()
    source = FakeSource({})
    router = router_of(fleet, source)
    request = InferenceRequest(turn=None, est_hit=None, pinned_to="resp_1")
    missing = await router.route(request)
    assert missing.error is not None
    assert missing.error.status == 404
    router.pin("resp_1", fleet["b"])
    routing = await router.route(request)
    assert (routing.outcome, routing.decision) == ("pinned", None)
    assert fleet["b"].own == 1
    assert (await router.route(request, exclude=[fleet["b"]])).error is not None
    router.forget(fleet["b"])
    assert source.forgotten == [fleet["b"]]
    assert (await router.route(request)).outcome == "no_candidate"


async def test_a_restart_takes_all_responses_of_an_engine_though_some_expire_meanwhile() -> None:
    clock = Clock()

    def passing() -> float:
        clock.now += step
        return clock.now

    step = 0.0
    fleet = Fleet([Instance("a", "http://a")], VOCABULARY, clock=passing)
    router = router_of(fleet)
    for number in range(4):
        router.pin(f"resp_{number}", fleet["a"])
        clock.now += 10.0
    clock.now += PIN_TTL_S - 45.0
    step = 2.0
    router.forget(fleet["a"])
    step = 0.0
    for number in range(4):
        assert (await router.route(InferenceRequest(pinned_to=f"resp_{number}"))).outcome == "no_candidate"


async def test_what_costs_no_inference_is_not_charged_and_takes_turns() -> None:
    fleet = fleet_of("ab")
    router = router_of(fleet)
    served = [(await router.route(first_turn(), leased=False)).lease for _ in range(4)]
    assert Counter(lease.instance.id for lease in served if lease) == {"a": 2, "b": 2}
    assert [i.own for i in fleet.instances] == [0, 0]


async def test_prefilled_requests_reach_the_sources() -> None:
    fleet, source = fleet_of(), FakeSource({})
    router = router_of(fleet, source)
    request = InferenceRequest(id="r1")
    router.prefilled(request, fleet["c"])
    assert source.seen == [("r1", fleet["c"])]


@pytest.mark.parametrize("policy", ["smetric", "load_only", "bailian", "lmetric"])
@pytest.mark.parametrize("silent_from", ["the start", "a quiet moment", "long ago"])
async def test_an_engine_whose_metrics_hang_draws_no_crowd(policy: str, silent_from: str) -> None:
    """One of four pages hangs: that engine's share of first turns stays below 1.2/n, whenever it went silent."""
    clock = Clock()
    fleet = fleet_of("abcd", clock)
    router = router_of(fleet, FakeSource({}), policy=policy)
    rng = random.Random(11)
    silent = fleet["b"]
    open_leases: list[tuple[float, Lease]] = []
    strangers = dict.fromkeys("abcd", 4.0)  # requests that other routers sent there
    if silent_from != "the start":
        silent.scrape = Scrape(measured_at=clock.now, running=0, waiting=0, kv_usage=0.0, own=0)
        for instance in fleet.instances:
            strangers[instance.id] = 0.0
    if silent_from == "long ago":
        clock.now += 100
    picks: Counter[str] = Counter()
    for step in range(2000):
        clock.now += 0.05
        for due, lease in [pair for pair in open_leases if pair[0] <= clock.now]:
            lease.release()
            open_leases.remove((due, lease))
        if step % 20 == 0:
            for instance in fleet.instances:
                if instance is not silent:
                    instance.scrape = Scrape(
                        measured_at=clock.now,
                        running=instance.own + strangers[instance.id],
                        waiting=0,
                        kv_usage=0.3,
                        own=instance.own,
                    )
        routing = await router.route(first_turn())
        assert routing.lease is not None
        picks[routing.lease.instance.id] += 1
        open_leases.append((clock.now + rng.expovariate(1 / 0.6), routing.lease))
    assert picks["b"] / 2000 <= 1.2 / 4, picks
    assert picks["b"] > 0, "what nobody knows stays reachable"


async def test_whole_answers_are_told_to_those_that_learn_from_them() -> None:
    fleet, learner = fleet_of(), FakeLearner()
    router = router_of(fleet, FakeSource({}), learner)
    usage = Usage(100, 10, 64)
    router.settled(InferenceRequest(id="r"), fleet["a"], usage)
    assert learner.answers == [("r", fleet["a"], usage)]


async def test_a_decision_keeps_the_cursors_it_was_given_whatever_is_decided_later() -> None:
    router = router_of(fleet_of(), policy="round_robin")
    routings = [await router.route(first_turn()) for _ in range(3)]
    decisions = [routing.decision for routing in routings]
    assert [list(made.used.values()) for made in decisions if made] == [[], ["a"], ["b"]]
    assert [made.instance for made in decisions if made] == ["a", "b", "c"]
