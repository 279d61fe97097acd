"""What observed policies read is gathered beside the decision: at hand with it, looked up once the request was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance, Scrape
from smetric.fleet.record import DecisionRecord
from smetric.policy import Policy
from smetric.request.request import InferenceRequest
from smetric.routing.router import Router, Routing
from smetric.sources.source import Cells, Source
from tests.fakes import routes_by, until
from tests.records.drive import policy

BAILIAN = policy(shipped_policies()["bailian"].read_text())
BY_USAGE = policy("policy by_usage\nroute argmin(kv_usage + running / 100 requests)\n")


class Index(Source):
    """A source that knows what it was told: hits by instance, after *delay_s* seconds."""

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


def fleet_of(names: str = "abc") -> Fleet:
    fleet = Fleet((Instance(name, f"http://{name}") for name in names), VOCABULARY)
    for instance in fleet.instances:
        instance.scrape = Scrape(fleet.clock(), 2.0, 1.0, 0.25, 0)
    return fleet


def router_of(fleet: Fleet, source: Index, *observed: Policy, acting: str = "smetric") -> Router:
    return Router(fleet, routes_by(shipped_policies()[acting]), [source], observed=observed)


def first_turn() -> InferenceRequest:
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
    record = await observed(router_of(fleet_of(), source, BAILIAN), first_turn())
    ((snapshot, lag),) = record.beside
    assert snapshot.columns == {"hit_len": [0, 1000, 0]}  # never more than the prompt
    assert snapshot.known["hit_len"] == [True, True, False]
    assert snapshot.origins_of("hit_len") == ["index", "index", ""]
    assert lag is not None
    assert 0 <= lag < 5


async def test_observer_reads_features_at_hand_before_the_charge() -> None:
    record = await observed(router_of(fleet_of(), Index({}), BY_USAGE, acting="load_only"), first_turn())
    assert record.instance is not None
    assert record.instance.own == 1
    ((snapshot, lag),) = record.beside
    assert snapshot.columns == {"kv_usage": [0.25] * 3, "running": [2.0] * 3}
    assert lag is None


async def test_observer_gathers_nothing_twice() -> None:
    source = Index({"a": 900})
    router = router_of(fleet_of(), source, BAILIAN)
    record = await observed(router, InferenceRequest(turn=2, prompt_len=1000, est_hit=800, body=b"{}"))
    assert record.beside == ()
    assert source.asked == 1


async def test_observer_drops_look_ups_that_end_after_the_answer_began() -> None:
    source = Index({"a": 100})
    source.may_answer.clear()
    router, request = router_of(fleet_of(), source, BAILIAN), first_turn()
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
    router = Router(fleet_of(), routes_by(path), [source], observed=[BAILIAN])
    request = first_turn()
    routing = await router.route(request)
    assert routing.outcome == "held"
    router.observe(routing, record_of(routing, request))
    await asyncio.sleep(0)
    assert source.asked == 0
