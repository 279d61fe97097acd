"""What LMCache's tiers fill, and how they stand behind other sources in the router."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from smetric.config import load_settings
from smetric.config.settings import LmcacheSettings, Settings
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.request.request import InferenceRequest
from smetric.routing.router import Router, Routing
from smetric.sources.lmcache.source import lmcache_sources
from smetric.sources.lookups import LookupDeadline
from smetric.sources.source import Cells, Source
from smetric.telemetry.metrics import Metrics
from tests.fakes import FakeEngine, hang, routes_by
from tests.sources.lmcache_captures import exchange
from tests.sources.lmcache_fakes import Ids, answering, request

BOTH = exchange("coordinator_20_lookup_both")[2]
SPLIT = exchange("controller_22_lookup_A2_B4")[2]
ALONE = exchange("controller_10_lookup_hit_one")[2]
DISK = exchange("controller_25_lookup_disk")[2]

#: Prefers the longest hit in any tier, and so looks all of them up.
ALL_TIERS = """policy all_tiers

route argmax(hit_len + host_hit_len + disk_hit_len + store_hit_len)
"""


@asynccontextmanager
async def tiers(body: bytes, **lmcache: Any) -> AsyncIterator[tuple[list[Source], FakeEngine, Metrics]]:
    service = FakeEngine(answering(200, body))
    await service.start()
    metrics = Metrics()
    settings = Settings(lmcache=LmcacheSettings(url=service.url, **lmcache))
    made = lmcache_sources(settings, Ids(range(1000, 2024)), LookupDeadline().of, metrics)
    for tier in made:
        await tier.start()
    try:
        yield made, service, metrics
    finally:
        for tier in made:
            await tier.stop()
        await service.stop()


async def cells(tier: Source, *ids: str) -> dict[str, Cells]:
    found = tier.lookup(request(), [Instance(id, f"http://{id}") for id in ids])
    return found if isinstance(found, Mapping) else await found


@pytest.mark.parametrize(
    ("body", "mode", "filled"),
    [
        (
            BOTH,
            "coordinator",
            {
                "lmcache:host": {"hit_len": [1024, 512, None], "host_hit_len": [1024, 512, None]},
                "lmcache:disk": {"disk_hit_len": [1024, 512, None]},
                "lmcache:store": {"store_hit_len": [1024, 1024, 1024]},
                "lmcache:likely": {"hit_len": [None, None, None]},
            },
        ),
        (
            ALONE,
            "controller",
            {
                "lmcache:host": {"hit_len": [1024, None, None], "host_hit_len": [1024, None, None]},
                "lmcache:disk": {"disk_hit_len": [1024, None, None]},
                "lmcache:store": {"store_hit_len": [None, None, None]},
                "lmcache:likely": {"hit_len": [None, None, None]},
            },
        ),
        (
            SPLIT,
            "controller",
            {
                "lmcache:host": {"hit_len": [None, None, None], "host_hit_len": [None, None, None]},
                "lmcache:disk": {"disk_hit_len": [None, None, None]},
                "lmcache:store": {"store_hit_len": [None, None, None]},
                "lmcache:likely": {"hit_len": [None, 1024, None]},
            },
        ),
        (
            DISK,
            "controller",
            {
                "lmcache:host": {"hit_len": [None, None, None], "host_hit_len": [None, None, None]},
                "lmcache:disk": {"disk_hit_len": [1024, None, None]},
                "lmcache:store": {"store_hit_len": [None, None, None]},
                "lmcache:likely": {"hit_len": [None, None, None]},
            },
        ),
    ],
    ids=["coordinator", "one named", "several named", "on disk"],
)
async def test_each_tier_fills_its_own_features(body: bytes, mode: str, filled: dict[str, Any]) -> None:
    instances = {"a": "mpA", "b": "mpB"} if mode == "coordinator" else {"a": "instA", "b": "instB"}
    async with tiers(body, mode=mode, instances=instances) as (made, service, _):
        assert {tier.name: await cells(tier, "a", "b", "c") for tier in made if tier.fills} == filled
        assert {name for tier in made for name in tier.fills} <= set(VOCABULARY.features)
        assert len(service.calls) == 1


async def test_an_instance_without_an_entry_has_the_same_id_in_lmcache() -> None:
    async with tiers(BOTH) as (made, _, _):
        assert (await cells(made[0], "mpB", "x"))["hit_len"] == [512, None]


def router_of(made: list[Source], fleet: Fleet, path: Path, *first: Any, deadline_s: float = 5.0) -> Router:
    deadline = LookupDeadline(deadline_s, 0.0, deadline_s)
    return Router(fleet, routes_by(path), [*first, *made], deadline=deadline, rng=random.Random(7))


def fleet_of(*ids: str) -> Fleet:
    return Fleet((Instance(id, f"http://{id}") for id in ids), VOCABULARY)


def origins(routing: Routing, feature: str) -> dict[str, str]:
    assert routing.decision is not None
    snapshot = routing.decision.snapshot
    return dict(zip(snapshot.ids, snapshot.origins_of(feature) or [], strict=True))


@pytest.fixture
def all_tiers(tmp_path: Path) -> Path:
    path = tmp_path / "all_tiers.policy"
    path.write_text(ALL_TIERS)
    return path


async def test_one_question_fills_every_feature_of_a_decision_and_each_cell_names_its_tier(all_tiers: Path) -> None:
    async with tiers(BOTH) as (made, service, _):
        routing = await router_of(made, fleet_of("mpA", "mpB", "mpC"), all_tiers).route(long_request())
        assert routing.instance.id == "mpA"
        assert origins(routing, "hit_len") == {"mpA": "lmcache:host", "mpB": "lmcache:host", "mpC": ""}
        assert origins(routing, "disk_hit_len") == {"mpA": "lmcache:disk", "mpB": "lmcache:disk", "mpC": ""}
        assert set(origins(routing, "store_hit_len").values()) == {"lmcache:store"}
        assert len(service.calls) == 1


def long_request() -> Any:
    """A request whose prompt is as long as the ids that are given for it."""
    return request(messages=[{"role": "user", "content": "x" * 5000}])


class Better(Source):
    """A source that stands before LMCache and knows of *hits* only."""

    name = "better"
    fills = frozenset({"hit_len"})

    def __init__(self, hits: Mapping[str, int]) -> None:
        self.hits = hits

    def lookup(self, request: InferenceRequest, instances: Sequence[Instance]) -> dict[str, Cells]:
        return {"hit_len": [self.hits.get(instance.id) for instance in instances]}


async def test_lmcache_says_of_hit_len_only_what_no_better_source_knows(all_tiers: Path) -> None:
    async with tiers(BOTH) as (made, _, _):
        router = router_of(made, fleet_of("mpA", "mpB"), all_tiers, Better({"mpB": 0}))
        routing = await router.route(long_request())
        assert origins(routing, "hit_len") == {"mpA": "lmcache:host", "mpB": "better"}
        assert origins(routing, "host_hit_len") == {"mpA": "lmcache:host", "mpB": "lmcache:host"}


async def test_a_first_turn_under_smetric_asks_for_no_token_and_no_look_up() -> None:
    async with tiers(BOTH) as (made, service, _):
        routing = await router_of(made, fleet_of("mpA", "mpB"), shipped_policies()["smetric"]).route(long_request())
        assert routing.outcome == "routed"
        assert service.calls == []


async def test_nobody_but_a_candidate_is_ever_named(all_tiers: Path) -> None:
    fleet = fleet_of("mpA", "mpB", "mpC")
    fleet["mpA"].draining = True
    async with tiers(BOTH) as (made, _, _):
        router = router_of(made, fleet, all_tiers)
        for _ in range(3):
            assert (await router.route(long_request())).instance.id == "mpB"
        fleet["mpB"].draining = True
        assert (await router.route(long_request())).instance.id == "mpC"


async def test_a_restart_of_an_instance_makes_earlier_answers_void(all_tiers: Path) -> None:
    async with tiers(BOTH, answers_ttl=60.0) as (made, service, _):
        fleet = fleet_of("mpA", "mpB")
        router = router_of(made, fleet, all_tiers)
        for _ in range(2):
            await router.route(long_request())
        assert len(service.calls) == 1
        router.forget(fleet["mpA"])
        await router.route(long_request())
        assert len(service.calls) == 2


async def test_a_hanging_service_costs_a_decision_its_deadline_once_whatever_it_looks_up(all_tiers: Path) -> None:
    async with tiers(BOTH) as (made, service, _):
        service.script = hang
        loop = asyncio.get_running_loop()
        started = loop.time()
        routing = await router_of(made, fleet_of("mpA", "mpB"), all_tiers, deadline_s=0.1).route(long_request())
        assert routing.outcome == "routed"
        assert loop.time() - started < 0.5
        assert len(service.calls) == 1
        assert set(origins(routing, "hit_len").values()) == {""}


async def test_look_ups_are_counted_by_how_they_ended() -> None:
    async with tiers(BOTH) as (made, _, metrics):
        await cells(made[0], "mpA")
        await cells(made[0], "mpA")
        page = (await metrics.page())[0]
    assert b'smetric_lookups_total{result="ok",source="lmcache"} 1.0' in page
    assert b'smetric_lookups_total{result="cached",source="lmcache"} 1.0' in page


def test_an_instance_that_is_not_configured_cannot_be_mapped(tmp_path: Path) -> None:
    path = tmp_path / "smetric.yaml"
    path.write_bytes(
        orjson.dumps({"instances": [{"id": "gpu-1", "url": "http://h:1"}], "lmcache": {"instances": {"gpu1": "mp"}}})
    )
    with pytest.raises(ConfigError, match=r"lmcache.instances.gpu1: no instance has this id; did you mean gpu-1"):
        load_settings(path, {})
