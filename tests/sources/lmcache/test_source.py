"""Sources of LMCache: cached answers, tiers, and their place behind other sources."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from smetric import names
from smetric.config import load_settings
from smetric.config.settings import LmcacheSettings, Settings
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.request.reader import ReaderSettings
from smetric.request.request import InferenceRequest
from smetric.routing.router import Router, Routing
from smetric.sources.lmcache import source
from smetric.sources.lmcache.client import MAX_TOKENS, NOTHING, Controller, LmcacheHits
from smetric.sources.lmcache.source import lmcache_sources
from smetric.sources.lookups import LookupDeadline
from smetric.sources.source import Cells, Source
from smetric.telemetry.metrics import Metrics
from tests.fakes import FakeEngine, hang, routes_by
from tests.sources.lmcache import fakes
from tests.sources.lmcache.captures import exchange
from tests.sources.lmcache.fakes import Ids, answering, asking, request

INSTANCE = Instance("mpA", "http://mpA")
#: Both A's and B's prefixes of 1,024 tokens.
BOTH = exchange("coordinator_20_lookup_both")[2]
HELD = LmcacheHits(host={"mpA": 1024, "mpB": 512}, own={"mpA": 1024, "mpB": 512}, shared=1024)


async def test_lookup_keeps_answer_for_the_decision_even_if_late() -> None:
    async with asking(hang, deadline_s=0.05) as asked:
        one = request()
        assert asked.lookup.recent(one) is None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asked.lookup.of(one)
        assert asked.lookup.recent(one) is NOTHING
        assert asked.lookup.recent(request()) is None
        asked.clock.now += 1.0
        assert asked.lookup.recent(one) is None


async def test_lookup_caches_answer_by_leading_chunks() -> None:
    async with asking(answering(200, BOTH)) as asked:
        assert await asked.lookup.of(request()) == HELD
        asked.ids.ids = [*range(1000, 2024), 7, 8, 9]  # the same chunks, another tail
        assert await asked.lookup.of(request()) == HELD
        assert asked.results == [names.LOOKUP_OK, names.LOOKUP_CACHED]
        asked.clock.now += 1.0
        await asked.lookup.of(request())
        asked.lookup.forget(INSTANCE)
        await asked.lookup.of(request())
        assert len(asked.service.calls) == 3
        asked.ids.ids = range(1001, 2025)
        await asked.lookup.of(request())
        await asked.lookup.of(request(model="m/other"))
        await asked.lookup.of(request(cache_salt="tenant1"))
        assert len(asked.service.calls) == 6


async def test_lookup_drops_cached_answer_after_prefill() -> None:
    async with asking(answering(200, BOTH)) as asked:
        first, other = request(), request()
        await asked.lookup.of(first)
        first.token_ids = array("I", range(1000, 2024))
        asked.lookup.prefilled(first, INSTANCE)
        assert asked.lookup.recent(first) is None
        asked.ids.ids = [*range(1000, 2024), 7, 8, 9]  # a follow-up that adds less than a chunk
        await asked.lookup.of(other)
        assert asked.results == [names.LOOKUP_OK, names.LOOKUP_OK]
        other.token_ids = array("I", range(5000, 6024))  # of another prompt: what is known stays
        asked.lookup.prefilled(other, INSTANCE)
        await asked.lookup.of(request())
        assert asked.results[-1] == names.LOOKUP_CACHED


@pytest.mark.parametrize("ids", [range(255), (), [-1] * 256, [1 << 32] * 256, [1.5] * 256, ["1"] * 256, [None] * 256])
async def test_lookup_sends_only_whole_chunks_of_valid_ids(ids: Any) -> None:
    async with asking(answering(200, BOTH), ids=ids) as asked:
        assert await asked.lookup.of(request()) is NOTHING
        assert asked.results == [names.LOOKUP_NOT_ASKED]
        assert asked.service.calls == []


async def test_lookup_without_token_ids_is_unknown() -> None:
    async with asking(answering(200, BOTH), ids=None) as asked:
        assert await asked.lookup.of(request()) is NOTHING
        assert asked.results == [names.LOOKUP_NO_TOKENS]


async def test_lookup_cuts_prompt_at_max_tokens() -> None:
    async with asking(answering(400, b"{}"), ids=array("I", [1]) * (MAX_TOKENS + 100_000)) as asked:
        await asked.lookup.of(request())
        assert len(asked.questions[0]["token_ids"]) == MAX_TOKENS // 256 * 256


async def test_lookup_maps_salts_models_and_aliases() -> None:
    models = {"m/test-model": "/models/seven"}
    request = partial(fakes.request, reading=ReaderSettings(aliases={"gpt": "m/test-model"}))
    async with asking(answering(200, BOTH), models=models) as asked:
        await asked.lookup.of(request(model="gpt", cache_salt="tenant1"))
        (question,) = asked.questions
        assert (question["model_name"], question["cache_salt"]) == ("/models/seven", "tenant1")
        assert await asked.lookup.of(request(model="m/adapter")) is NOTHING
        await asked.lookup.of(request(model="gpt", cache_salt=None))
        assert [question["cache_salt"] for question in asked.questions] == ["tenant1", ""]
        assert await asked.lookup.of(request(model="gpt", cache_salt=7)) is NOTHING
        assert len(asked.service.calls) == 2


async def test_lookup_skips_salted_prompts_with_controller() -> None:
    body = exchange("controller_10_lookup_hit_one")[2]
    async with asking(answering(200, body), service=Controller()) as asked:
        assert await asked.lookup.of(request(cache_salt="tenant1")) is NOTHING
        assert asked.service.calls == []
        assert (await asked.lookup.of(request(cache_salt=""))).host == {"instA": 1024}


async def test_lookup_cache_is_bounded_in_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_LENGTHS", 5)
    async with asking(answering(200, BOTH)) as asked:  # five lengths each: two hosts, two of its own, and the answer
        first, second = request(model="a"), request(model="b")
        for one in (first, second, second, first):
            assert await asked.lookup.of(one) == HELD
        assert asked.results == [names.LOOKUP_OK, names.LOOKUP_OK, names.LOOKUP_CACHED, names.LOOKUP_OK]
    monkeypatch.setattr(source, "MAX_LENGTHS", 4)
    async with asking(answering(200, BOTH)) as asked:
        for _ in range(2):
            assert await asked.lookup.of(first) == HELD
        assert asked.results == [names.LOOKUP_OK, names.LOOKUP_OK]


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
async def test_tiers_fill_their_own_features(body: bytes, mode: str, filled: dict[str, Any]) -> None:
    instances = {"a": "mpA", "b": "mpB"} if mode == "coordinator" else {"a": "instA", "b": "instB"}
    async with tiers(body, mode=mode, instances=instances) as (made, service, _):
        assert {tier.name: await cells(tier, "a", "b", "c") for tier in made if tier.fills} == filled
        assert {name for tier in made for name in tier.fills} <= set(VOCABULARY.features)
        assert len(service.calls) == 1


async def test_tier_uses_own_id_of_unmapped_instance() -> None:
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


async def test_tiers_share_one_question_per_decision_and_name_their_cells(all_tiers: Path) -> None:
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


async def test_tiers_fill_hit_len_only_behind_better_sources(all_tiers: Path) -> None:
    async with tiers(BOTH) as (made, _, _):
        router = router_of(made, fleet_of("mpA", "mpB"), all_tiers, Better({"mpB": 0}))
        routing = await router.route(long_request())
        assert origins(routing, "hit_len") == {"mpA": "lmcache:host", "mpB": "better"}
        assert origins(routing, "host_hit_len") == {"mpA": "lmcache:host", "mpB": "lmcache:host"}


async def test_tiers_are_not_asked_for_first_turn_under_smetric() -> None:
    async with tiers(BOTH) as (made, service, _):
        routing = await router_of(made, fleet_of("mpA", "mpB"), shipped_policies()["smetric"]).route(long_request())
        assert routing.outcome == "routed"
        assert service.calls == []


async def test_tiers_name_only_candidates(all_tiers: Path) -> None:
    fleet = fleet_of("mpA", "mpB", "mpC")
    fleet["mpA"].draining = True
    async with tiers(BOTH) as (made, _, _):
        router = router_of(made, fleet, all_tiers)
        for _ in range(3):
            assert (await router.route(long_request())).instance.id == "mpB"
        fleet["mpB"].draining = True
        assert (await router.route(long_request())).instance.id == "mpC"


async def test_tiers_forget_answers_on_restart(all_tiers: Path) -> None:
    async with tiers(BOTH, answers_ttl=60.0) as (made, service, _):
        fleet = fleet_of("mpA", "mpB")
        router = router_of(made, fleet, all_tiers)
        for _ in range(2):
            await router.route(long_request())
        assert len(service.calls) == 1
        router.forget(fleet["mpA"])
        await router.route(long_request())
        assert len(service.calls) == 2


async def test_tiers_wait_for_hanging_service_once_per_decision(all_tiers: Path) -> None:
    async with tiers(BOTH) as (made, service, _):
        service.script = hang
        loop = asyncio.get_running_loop()
        started = loop.time()
        routing = await router_of(made, fleet_of("mpA", "mpB"), all_tiers, deadline_s=0.1).route(long_request())
        assert routing.outcome == "routed"
        assert loop.time() - started < 0.5
        assert len(service.calls) == 1
        assert set(origins(routing, "hit_len").values()) == {""}


async def test_lookups_are_counted_by_result() -> None:
    async with tiers(BOTH) as (made, _, metrics):
        await cells(made[0], "mpA")
        await cells(made[0], "mpA")
        page = (await metrics.page())[0]
    assert b'smetric_lookups_total{result="ok",source="lmcache"} 1.0' in page
    assert b'smetric_lookups_total{result="cached",source="lmcache"} 1.0' in page


def test_settings_refuse_mapping_of_unknown_instance(tmp_path: Path) -> None:
    path = tmp_path / "smetric.yaml"
    path.write_bytes(
        orjson.dumps({"instances": [{"id": "gpu-1", "url": "http://h:1"}], "lmcache": {"instances": {"gpu1": "mp"}}})
    )
    with pytest.raises(ConfigError, match=r"lmcache.instances.gpu1: no instance has this id; did you mean gpu-1"):
        load_settings(path, {})
