"""Router: look-ups, charges, errors and observed policies."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path

import pytest

from smetric.errors import HttpError
from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance, Lease, Scrape
from smetric.fleet.record import DecisionRecord
from smetric.policy import Decision, Policy
from smetric.request.prompt import Prompt
from smetric.request.request import InferenceRequest, Usage
from smetric.routing.router import PIN_TTL_S, Router, Routing
from smetric.sources.lookups import LookupDeadline
from smetric.sources.source import Cells, Source
from tests.clock import Clock
from tests.fakes import routes_by, until
from tests.records.drive import policy

# Look-ups, charges and answers


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


def policy_at(folder: Path, text: str) -> Path:
    path = folder / "p.policy"
    path.write_text(f"policy p\n{text}\n")
    return path


async def decide(router: Router, request: InferenceRequest) -> Decision:
    routing = await router.route(request)
    assert routing.decision is not None
    return routing.decision


def error_of(routing: Routing) -> HttpError:
    assert routing.error is not None
    return routing.error


def first_turn() -> InferenceRequest:
    return InferenceRequest(turn=0, prompt_len=1000, est_hit=0)


def later_turn() -> InferenceRequest:
    return InferenceRequest(turn=3, prompt_len=1000, est_hit=900)


async def test_router_charges_first_turn_without_lookup() -> None:
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


async def test_router_returns_later_turn_to_its_cache_and_charges_without_hit() -> None:
    fleet, source = fleet_of(), FakeSource({"a": 0, "b": 880, "c": 0})
    fleet["b"].scrape = Scrape(measured_at=1000.0, running=1, waiting=0, kv_usage=None, own=0)
    fleet["a"].scrape = fleet["c"].scrape = Scrape(measured_at=1000.0, running=2, waiting=0, kv_usage=None, own=0)
    decision = await decide(router_of(fleet, source), later_turn())
    assert (decision.rule, decision.instance) == ("stick", "b")
    assert decision.snapshot.origins_of("hit_len") == ["fake", "fake", "fake"]
    assert source.asked == 1
    assert fleet["b"].unprefilled == 120


async def test_router_spreads_bursts_by_charging_at_once() -> None:
    fleet = fleet_of("abcd")
    router = router_of(fleet, policy="load_only")
    await asyncio.gather(*(router.route(first_turn()) for _ in range(100)))
    assert [i.own for i in fleet.instances] == [25, 25, 25, 25]


async def test_router_asks_next_source_for_unknown_cells() -> None:
    best = FakeSource({"a": None, "b": 100, "c": None}, name="best")
    rest = FakeSource({"a": 700, "b": 999, "c": None}, name="rest")
    snapshot = (await decide(router_of(fleet_of(), best, rest, policy="smetric_basic"), later_turn())).snapshot
    assert snapshot.columns["hit_len"] == [700, 100, 0]
    assert snapshot.is_known("hit_len") == [True, True, False]
    assert snapshot.origins_of("hit_len") == ["rest", "best", ""]


async def test_router_skips_next_source_when_all_is_known() -> None:
    best, rest = FakeSource({"a": 1, "b": 2, "c": 3}), FakeSource({"a": 9})
    await router_of(fleet_of(), best, rest, policy="smetric_basic").route(later_turn())
    assert (best.asked, rest.asked) == (1, 0)


async def test_router_takes_late_lookup_as_unknown() -> None:
    fleet, source = fleet_of(), FakeSource({"a": 900}, delay_s=30)
    # Equal loads, so that only the unknown hit keeps it from sticking.
    for instance in fleet.instances:
        instance.charge(1, 10)
    router = router_of(fleet, source, deadline=LookupDeadline(0.01, 0.0, 0.01))
    decision = await asyncio.wait_for(decide(router, later_turn()), 5)
    assert decision.rule == "balance"
    assert decision.snapshot.is_known("hit_len") == [False, False, False]


async def test_router_gives_all_lookups_of_a_decision_one_deadline(tmp_path: Path) -> None:
    class Stores(FakeSource):
        fills = frozenset({"store_hit_len"})

        async def _later(self, answer: dict[str, Cells], delay_s: float) -> dict[str, Cells]:
            await asyncio.sleep(delay_s)
            return {"store_hit_len": answer["hit_len"]}

    path = policy_at(tmp_path, "route argmax(hit_len) when all(hit_len > 9)\nroute argmax(store_hit_len)")
    sources = FakeSource({}, delay_s=30.0), Stores({"a": 900, "b": 0, "c": 0}, delay_s=0.03)
    router = router_of(fleet_of(), *sources, policy=path, deadline=LookupDeadline(0.1, 0.0, 0.1))
    decision = await decide(router, later_turn())
    assert decision.snapshot.is_known("store_hit_len") == [False, False, False]


async def test_router_decides_on_new_snapshot_after_waiting() -> None:
    fleet, source = fleet_of(), FakeSource({"a": 900, "b": 0, "c": 0}, delay_s=0.01)
    router = router_of(fleet, source, policy="smetric_basic", deadline=LookupDeadline(5.0, 0.0, 5.0))
    pending = asyncio.create_task(decide(router, later_turn()))
    await asyncio.sleep(0)
    fleet["a"].charge(5, 10)  # while the look-up is under way
    decision = await pending
    assert (decision.instance, decision.snapshot.columns["requests"][0]) == ("a", 5)


async def test_router_follows_candidates_that_change_during_a_lookup() -> None:
    fleet, source = fleet_of(), FakeSource({"a": 100, "b": 900, "c": 50}, delay_s=0.01)
    fleet["a"].healthy = False
    router = router_of(fleet, source, policy="smetric_basic", deadline=LookupDeadline(5.0, 0.0, 5.0))
    pending = asyncio.create_task(decide(router, later_turn()))
    await asyncio.sleep(0)
    fleet["a"].healthy, fleet["b"].healthy = True, False
    decision = await pending
    assert list(decision.snapshot.ids) == ["a", "c"]
    assert decision.snapshot.is_known("hit_len") == [False, True]
    assert decision.instance == "c"


async def test_router_returns_error_for_unknown_model() -> None:
    fleet = Fleet([Instance("a", "http://a", models=["m"])], VOCABULARY)
    routing = await router_of(fleet).route(InferenceRequest(model="other"))
    assert (routing.outcome, routing.lease) == ("no_candidate", None)
    assert error_of(routing).status == 404
    assert error_of(routing).__traceback__ is None  # it would keep the frames of waiting callers


async def test_router_excludes_failed_instance_on_retry() -> None:
    fleet = fleet_of("ab")
    router = router_of(fleet)
    routing = await router.route(first_turn(), exclude=[fleet["a"]])
    assert routing.lease is not None
    assert routing.lease.instance is fleet["b"]
    assert (await router.route(first_turn(), exclude=fleet.instances)).outcome == "no_candidate"


async def test_router_counts_the_new_blocks_of_a_request_and_shared_ones_once(tmp_path: Path) -> None:
    router = router_of(fleet_of("ab"), policy=policy_at(tmp_path, "route argmin(decode_blocks, then: requests)"))

    async def blocks(text: bytes) -> list[float]:
        prompt = Prompt([text], 4.0)
        decision = await decide(router, InferenceRequest(turn=0, prompt_len=prompt.length, prompt=prompt))
        return decision.snapshot.columns["decode_blocks"]

    assert await blocks(b"a" * 4096) == [64, 64]
    assert await blocks(b"a" * 4096) == [64, 64]  # where it runs already it adds nothing
    assert await blocks(b"a" * 2048 + b"b" * 2048) == [96, 96]  # half of it is shared with both


async def test_router_sheds_with_status_and_retry_after_of_the_rule(tmp_path: Path) -> None:
    text = 'reject 429 "full" retry 2s when all(requests >= 1) as shed\nroute argmin(requests)'
    router = router_of(fleet_of("a"), policy=policy_at(tmp_path, text))
    lease = (await router.route(first_turn())).lease
    assert lease is not None
    routing = await router.route(first_turn())
    assert (routing.outcome, routing.lease) == ("rejected", None)
    error = error_of(routing)
    assert (error.status, error.message, error.retry_after_s) == (429, "full", 2.0)
    lease.release()
    assert (await router.route(first_turn())).outcome == "routed"


async def test_router_names_the_filter_that_left_no_candidate(tmp_path: Path) -> None:
    path = policy_at(tmp_path, 'keep pool == "gold" as gold_pool\nroute argmin(requests)')
    routing = await router_of(fleet_of("a"), policy=path).route(first_turn())
    assert (routing.outcome, error_of(routing).status) == ("no_candidate", 503)
    assert "gold_pool" in error_of(routing).message


async def test_router_answers_500_to_failed_evaluation_without_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_of("a")
    router = router_of(fleet)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(type(router.routes.last.control.file.current.policy), "decide", broken)
    routing = await router.route(first_turn())
    assert (routing.outcome, fleet["a"].own) == ("error", 0)
    assert error_of(routing).status == 500


async def test_router_pins_stored_response_to_its_engine() -> None:
    fleet = fleet_of()
    source = FakeSource({})
    router = router_of(fleet, source)
    request = InferenceRequest(turn=None, est_hit=None, pinned_to="resp_1")
    assert error_of(await router.route(request)).status == 404
    router.pin("resp_1", fleet["b"])
    routing = await router.route(request)
    assert (routing.outcome, routing.decision) == ("pinned", None)
    assert fleet["b"].own == 1
    assert (await router.route(request, exclude=[fleet["b"]])).error is not None
    router.forget(fleet["b"])
    assert source.forgotten == [fleet["b"]]
    assert (await router.route(request)).outcome == "no_candidate"


async def test_router_forgets_all_pins_of_a_restarted_engine() -> None:
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


async def test_router_rotates_requests_without_inference() -> None:
    fleet = fleet_of("ab")
    router = router_of(fleet)
    served = [(await router.route(first_turn(), leased=False)).lease for _ in range(4)]
    assert Counter(lease.instance.id for lease in served if lease) == {"a": 2, "b": 2}
    assert [i.own for i in fleet.instances] == [0, 0]


async def test_router_reports_prefilled_requests_to_sources() -> None:
    fleet, source = fleet_of(), FakeSource({})
    router = router_of(fleet, source)
    request = InferenceRequest(id="r1")
    router.lookups.prefilled(request, fleet["c"])
    assert source.seen == [("r1", fleet["c"])]


@pytest.mark.parametrize("policy", ["smetric", "load_only", "bailian", "lmetric"])
@pytest.mark.parametrize("silent_from", ["the start", "a quiet moment", "long ago"])
async def test_router_sends_no_crowd_to_engine_with_hanging_metrics(policy: str, silent_from: str) -> None:
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
    assert picks["b"] > 0, "an instance of unknown load stays reachable"


async def test_router_reports_complete_answers_to_sources() -> None:
    fleet, learner = fleet_of(), FakeLearner()
    router = router_of(fleet, FakeSource({}), learner)
    usage = Usage(100, 10, 64)
    router.lookups.settled(InferenceRequest(id="r"), fleet["a"], usage)
    assert learner.answers == [("r", fleet["a"], usage)]


async def test_decision_keeps_its_cursors() -> None:
    router = router_of(fleet_of(), policy="round_robin")
    routings = [await router.route(first_turn()) for _ in range(3)]
    decisions = [routing.decision for routing in routings]
    assert [list(made.used.values()) for made in decisions if made] == [[], ["a"], ["b"]]
    assert [made.instance for made in decisions if made] == ["a", "b", "c"]


# Observed policies

BAILIAN = policy(shipped_policies()["bailian"].read_text())
BY_USAGE = policy("policy by_usage\nroute argmin(kv_usage + running / 100 requests)\n")


class Index(Source):
    """Source with given hits by instance, after *delay_s* seconds."""

    name = "index"
    fills = frozenset({"hit_len"})

    def __init__(self, hits: Mapping[str, float]) -> None:
        self.hits = dict(hits)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked = 0

    async def lookup(self, request: InferenceRequest, instances: Sequence[Instance]) -> dict[str, Cells]:
        self.asked += 1
        await self.may_answer.wait()
        return {"hit_len": [self.hits.get(instance.id) for instance in instances]}

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        self.hits[instance.id] = 1e9


def scraped_fleet(names: str = "abc") -> Fleet:
    fleet = Fleet((Instance(name, f"http://{name}") for name in names), VOCABULARY)
    for instance in fleet.instances:
        instance.scrape = Scrape(fleet.clock(), 2.0, 1.0, 0.25, 0)
    return fleet


def observing_router(fleet: Fleet, source: Index, *observed: Policy, acting: str = "smetric") -> Router:
    return Router(fleet, routes_by(shipped_policies()[acting]), [source], observed=observed)


def first_request() -> InferenceRequest:
    return InferenceRequest(turn=0, prompt_len=1000, est_hit=0, body=b"{}")


def record_of(routing: Routing, request: InferenceRequest) -> DecisionRecord:
    return DecisionRecord(
        time_ns=1,
        outcome=routing.outcome,
        request=request,
        policy=routing.generation.policy,
        generation=1,
        decision=routing.decision,
        instance=routing.lease.instance if routing.lease else None,
        beside=((routing.beside, None),) if routing.beside is not None else (),
    )


async def observed(router: Router, request: InferenceRequest) -> DecisionRecord:
    routing = await router.route(request)
    record = record_of(routing, request)
    router.observe(routing, record)
    for _ in range(5):  # a look-up begins in the next tick, and a task of it ends within a few
        await asyncio.sleep(0)
    return record


async def test_observer_looks_up_after_the_decision_with_its_lag() -> None:
    source = Index({"a": 0, "b": 5000})
    record = await observed(observing_router(scraped_fleet(), source, BAILIAN), first_request())
    ((snapshot, lag),) = record.beside
    assert snapshot.columns == {"hit_len": [0, 1000, 0]}  # never more than the prompt
    assert snapshot.known["hit_len"] == [True, True, False]
    assert snapshot.origins_of("hit_len") == ["index", "index", ""]
    assert lag is not None
    assert 0 <= lag < 5


async def test_observer_reads_features_at_hand_before_the_charge() -> None:
    record = await observed(observing_router(scraped_fleet(), Index({}), BY_USAGE, acting="load_only"), first_request())
    assert record.instance is not None
    assert record.instance.own == 1
    ((snapshot, lag),) = record.beside
    assert snapshot.columns == {"kv_usage": [0.25] * 3, "running": [2.0] * 3}
    assert lag is None


async def test_observer_gathers_nothing_twice() -> None:
    source = Index({"a": 900})
    router = observing_router(scraped_fleet(), source, BAILIAN)
    record = await observed(router, InferenceRequest(turn=2, prompt_len=1000, est_hit=800, body=b"{}"))
    assert record.beside == ()
    assert source.asked == 1


async def test_observer_drops_look_ups_that_end_after_the_answer_began() -> None:
    source = Index({"a": 100})
    source.may_answer.clear()
    router, request = observing_router(scraped_fleet(), source, BAILIAN), first_request()
    routing = await router.route(request)
    record = record_of(routing, request)
    router.observe(routing, record)
    await until(lambda: source.asked == 1)
    request.answering()
    source.may_answer.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert record.beside == ()


async def test_observer_ignores_held_requests(tmp_path: Path) -> None:
    path = tmp_path / "held.policy"
    path.write_text("policy held\nhold for 5 seconds when mean(requests) > 1\nroute rr_argmin(requests)\n")
    source = Index({})
    router = Router(scraped_fleet(), routes_by(path), [source], observed=[BAILIAN])
    request = first_request()
    routing = await router.route(request)
    assert routing.outcome == "held"
    router.observe(routing, record_of(routing, request))
    await asyncio.sleep(0)
    assert source.asked == 0
