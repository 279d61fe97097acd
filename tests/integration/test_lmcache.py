"""Router that knows the caches of emulated engines from LMCache alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

import aiohttp
import orjson
import pytest

from smetric.app import Application
from smetric.config.settings import (
    InstanceSettings,
    LmcacheSettings,
    LookupSettings,
    PrefixIndexSettings,
    Settings,
)
from smetric.lab.emulator import instance as emulated
from smetric.lab.emulator import prompt
from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.request.request import InferenceRequest
from tests.fakes import listening, until

pytestmark = pytest.mark.slow

SYSTEM = "You are an agent. " * 120  # 540 tokens: two chunks that all sessions share
TURN = "Look at this file: " + "x = 1; " * 200


class TemplateIds:
    """The ids of the emulated engines' own template, by request id."""

    def __init__(self) -> None:
        self.by_id: dict[str, list[int]] = {}

    async def of(self, request: InferenceRequest) -> Sequence[int] | None:
        return self.by_id.get(request.id)

    def begin(self, request: InferenceRequest) -> None:
        return None


class Agent:
    """One session: every turn carries the whole history."""

    numbers = itertools.count()

    def __init__(self, name: str, url: str, ids: TemplateIds) -> None:
        self.url = url
        self.ids = ids
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        self.name = name
        #: The instance of each turn, and the prompt tokens it had cached.
        self.served: list[tuple[str, int]] = []

    async def turn(self, client: aiohttp.ClientSession) -> None:
        self.messages.append({"role": "user", "content": f"{self.name}: {TURN}"})
        id = f"{self.name}-{next(self.numbers)}"
        self.ids.by_id[id] = prompt.to_ids(prompt.render(self.messages))
        body = {"model": "emulated", "messages": self.messages, "max_tokens": 8}
        async with client.post(self.url + "/v1/chat/completions", json=body, headers={"x-request-id": id}) as response:
            assert response.status == 200
            answer = orjson.loads(await response.read())
            self.messages.append(answer["choices"][0]["message"])
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.served.append((response.headers["x-smetric-instance"], cached))


@asynccontextmanager
async def router(
    fleet: EmulatedFleet,
    ids: TemplateIds,
    mode: Literal["coordinator", "controller"] = "coordinator",
    *,
    index: bool = True,
    replicas: int = 1,
) -> AsyncIterator[tuple[Application, str]]:
    application = Application(
        Settings(
            instances=tuple(InstanceSettings(url=url, id=url.removeprefix("http://")) for url in fleet.urls),
            prefix_index=PrefixIndexSettings(enabled=index),
            lmcache=LmcacheSettings(url=fleet.lmcache_url, mode=mode),
            # what this machine does meanwhile is not under test
            lookup=LookupSettings(deadline_base=5.0, deadline_cap=5.0),
            replicas=replicas,
        ),
        {},
        ids,
    )
    async with listening(application.data_app()) as port:
        await until(lambda: application.is_ready and all(one.scrape for one in application.fleet.instances))
        yield application, port.url


def emulated_fleet() -> EmulatedFleet:
    return EmulatedFleet(3, emulated.EmulatedSettings(time_scale=50), lmcache=True)


@asynccontextmanager
async def routed(mode: Literal["coordinator", "controller"]) -> AsyncIterator[tuple[Application, str, TemplateIds]]:
    ids = TemplateIds()
    async with emulated_fleet() as fleet, router(fleet, ids, mode, index=False) as (application, url):
        yield application, url, ids


@pytest.mark.parametrize(
    ("mode", "tiers"), [("coordinator", {"lmcache:host"}), ("controller", {"lmcache:host", "lmcache:likely"})]
)
async def test_router_keeps_sessions_on_instances_by_lmcache(
    mode: Literal["coordinator", "controller"], tiers: set[str]
) -> None:
    async with routed(mode) as (application, url, ids), aiohttp.ClientSession() as client:
        agents = [Agent(f"agent {number}", url, ids) for number in range(6)]
        for _ in range(4):
            for agent in agents:
                await agent.turn(client)
        homes = [agent.served[0][0] for agent in agents]
        assert set(homes) == {instance.id for instance in application.fleet.instances}
        for agent, home in zip(agents, homes, strict=True):
            assert [instance for instance, _ in agent.served] == [home] * 4
        hits = [(record.hit, record.usage) for record in application.telemetry.decisions.recent(1000)]
        known = [(hit, usage) for hit, usage in hits if hit is not None]
        # The system prompt is credited to the first instance, so the controller is certain only of the agents there.
        assert {origin for (_, origin), _ in known} == tiers
        # Whole chunks are at most one chunk less than the cached tokens, and never more.
        for (hit, _), usage in known:
            assert usage is not None
            assert usage.cached_tokens is not None
            assert 0 <= usage.cached_tokens - hit < 256
        assert len(known) == len(agents) * 3


async def test_restarted_router_distinguishes_shared_prompt_and_sessions() -> None:
    ids = TemplateIds()
    async with emulated_fleet() as fleet, aiohttp.ClientSession() as client:
        async with router(fleet, ids) as (_, url):
            agents = [Agent(f"agent {number}", url, ids) for number in range(9)]
            for _ in range(2):
                for agent in agents:
                    await agent.turn(client)
        async with router(fleet, ids) as (application, url):
            for agent in agents:
                agent.url = url
                await agent.turn(client)
            # The first of each instance leaves the shared part in the index; of the others it knows nothing else.
            assert [agent.served[-1][0] for agent in agents] == [agent.served[0][0] for agent in agents]
            hits = [record.hit for record in application.telemetry.decisions.recent(1000)]
            assert {origin for hit in hits if hit is not None for origin in hit[1:]} == {"lmcache:host"}
            for agent in agents:
                await agent.turn(client)
            hits = [record.hit for record in application.telemetry.decisions.recent(len(agents))]
            assert {origin for hit in hits if hit is not None for origin in hit[1:]} == {"prefix_index"}


async def test_prefix_index_does_not_hide_lmcache_of_other_routers() -> None:
    ids, rng = TemplateIds(), random.Random(3)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(emulated_fleet())
        client = await stack.enter_async_context(aiohttp.ClientSession())
        urls = [(await stack.enter_async_context(router(fleet, ids, replicas=4)))[1] for _ in range(4)]
        agents = [Agent(f"agent {number}", "", ids) for number in range(9)]
        for _ in range(4):
            for agent in agents:
                agent.url = rng.choice(urls)
                await agent.turn(client)
        for agent in agents:
            assert {instance for instance, _ in agent.served} == {agent.served[0][0]}
