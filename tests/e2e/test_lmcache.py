"""Agent sessions routed by what LMCache's real services say: `pytest -m e2e tests/e2e/test_lmcache.py`.

Engines are emulated and LMCache at each of them is played: neither is what is tested here. What is measured is written
to `figures.json` in the folder of `setup_lmcache.sh`; see docs/internals/real-engines.md.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic

import aiohttp
import pytest
import zmq.asyncio

from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import EmulatedSettings
from tests.e2e.figures import moves, note, stuck
from tests.e2e.lmcache_players import (
    CoordinatorKeys,
    Key,
    Keys,
    Player,
    ServerPlayer,
    WorkerPlayer,
    controller_keys,
    prefix,
)
from tests.e2e.real_lmcache import RealService, service, set_up
from tests.e2e.real_vllm import MODEL
from tests.e2e.router_process import Answered, RouterProcess, router
from tests.e2e.sessions import AgentSession

pytestmark = pytest.mark.e2e

SESSIONS = 12
#: Characters, more than a chunk: by less of its own a session is not told from those that share its system prompt.
TASK = 2400
#: Seconds in which sessions must be home again.
HOME_S = 60.0
#: So that what is known decides alone, not how loaded an instance is just then.
NO_GUARD = {"OVERLOAD": 100.0}


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    set_up()


@dataclass(frozen=True)
class Told:
    """An answer, and what the chosen instance's LMCache held of its prompt before and after it, tokens.

    `best` is what the one that held most did before.
    """

    answer: Answered
    least: int
    most: int
    best: int

    @property
    def is_true(self) -> bool:
        """What was predicted lies between the two; other sessions store meanwhile."""
        return self.answer.predicted is not None and self.least <= self.answer.predicted <= self.most


@dataclass
class Site(Generic[Key]):
    """Three emulated engines, LMCache played at each, one real lookup service, and a client."""

    service: RealService
    engines: dict[str, EmulatedFleet]
    players: dict[str, Player[Key]]
    keys: Keys[Key]
    client: aiohttp.ClientSession

    def settings(self, *, prefix_index: bool = False, **more: Any) -> dict[str, Any]:
        """A router's configuration."""
        return {
            "instances": [{"id": id, "url": engine.urls[0]} for id, engine in self.engines.items()],
            "block_size": 16,
            "params": NO_GUARD,
            "prefix_index": {"enabled": prefix_index},
            "tokenizer": {"source": "engine"},
            "lmcache": {
                "url": self.service.url,
                "mode": self.service.mode,
                "instances": {id: player.id for id, player in self.players.items()},
                "breaker_open": "1s",
                # A turn that ends in the chunk of the turn before is the same question, and these agents never pause.
                "answers_ttl": "10ms",
            },
        } | more

    async def tokens_of(self, session: AgentSession) -> list[int]:
        """The ids of the session's next prompt, as any living engine counts them."""
        engine = next(engine for engine in self.engines.values() if engine.urls)
        body = session.body()
        asked = {"model": MODEL, "messages": body["messages"], "tools": body["tools"], "add_generation_prompt": True}
        async with self.client.post(f"{engine.urls[0]}/tokenize", json=asked) as answer:
            assert answer.status == 200, await answer.text()
            tokens: list[int] = (await answer.json())["tokens"]
            return tokens

    async def play(
        self, process: RouterProcess, sessions: Sequence[AgentSession], turns: range, *, by_service: bool = True
    ) -> list[Told]:
        """All *sessions* at once, turn by turn; what was answered is then stored, and the service told of it."""

        async def one(session: AgentSession) -> list[Told]:
            told = []
            for turn in turns:
                keys = await self.keys.of(await self.tokens_of(session)) if by_service else []
                before = {id: prefix(player, keys) for id, player in self.players.items()}
                answer = await process.ask(self.client, session, turn)
                chosen = self.players[answer.instance]
                told.append(Told(answer, before[answer.instance], prefix(chosen, keys), max(before.values())))
                await chosen.store(keys)
            return told

        return [told for each in await asyncio.gather(*map(one, sessions)) for told in each]


@asynccontextmanager
async def engines_and_client() -> AsyncIterator[tuple[dict[str, EmulatedFleet], aiohttp.ClientSession]]:
    settings = EmulatedSettings(model=MODEL, time_scale=20.0)
    engines = {f"e{number}": EmulatedFleet(1, settings) for number in (1, 2, 3)}
    async with AsyncExitStack() as stack:
        for engine in engines.values():
            await engine.__aenter__()
            # One of them may be gone already.
            stack.push_async_callback(_gone, engine)
        # Engines close idle connections after five seconds.
        connector = aiohttp.TCPConnector(keepalive_timeout=3)
        timeout = aiohttp.ClientTimeout(total=60)
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, timeout=timeout))
        yield engines, client


async def _gone(engine: EmulatedFleet) -> None:
    if engine.urls:
        await engine.__aexit__(None, None, None)


@asynccontextmanager
async def coordinated(*options: str) -> AsyncIterator[Site[str]]:
    """A site with LMCache in processes of its own."""
    async with engines_and_client() as (engines, client), service("coordinator", *options) as coordinator:
        players: dict[str, Player[str]] = {id: ServerPlayer(f"mp-{id}", coordinator, client) for id in engines}
        try:
            for player in players.values():
                await player.start()
            yield Site(coordinator, engines, players, CoordinatorKeys(coordinator, client), client)
        finally:
            for player in players.values():
                await player.die()


@asynccontextmanager
async def controlled(*, heartbeats: bool) -> AsyncIterator[Site[int]]:
    """A site with LMCache within the engines."""
    async with (
        engines_and_client() as (engines, client),
        service("controller") as controller,
        controller_keys() as keys,
    ):
        with zmq.asyncio.Context() as context:
            players: dict[str, Player[int]] = {
                id: WorkerPlayer(f"worker-{id}", controller, context, heartbeats=heartbeats) for id in engines
            }
            try:
                for player in players.values():
                    await player.start()
                yield Site(controller, engines, players, keys, client)
            finally:
                for player in players.values():
                    await player.die()


def sessions(first: int) -> list[AgentSession]:
    # Those that share a system prompt begin one after the other, so on different instances.
    return [AgentSession(first + 3 * (at % 4) + at // 4, "chat", TASK) for at in range(SESSIONS)]


def answers(told: Sequence[Told]) -> list[Answered]:
    return [one.answer for one in told]


def sources(told: Sequence[Told]) -> dict[str, int]:
    """Who said what the follow-ups went by; empty where nobody knew the chosen instance's cache."""
    return dict(Counter(one.answer.source for one in told if one.answer.turn > 0))


async def known_instances(site: Site[Any]) -> set[str]:
    async with site.client.get(site.service.url + site.service.page) as answer:
        return {row["instance_id"] for row in (await answer.json())["instances"]}


async def wait_for_instances(site: Site[Any], wanted: set[str]) -> None:
    deadline = time.monotonic() + HOME_S
    while (known := await known_instances(site)) != wanted:
        assert time.monotonic() < deadline, f"the {site.service.mode} knows {known}"
        await asyncio.sleep(0.2)


# ── the coordinator ──────────────────────────────────────────────────────────


async def test_sessions_stick_to_the_instance_that_the_coordinator_names() -> None:
    async with coordinated() as site, router([], "lmcache-coordinator", **site.settings()) as (process, _):
        told = await site.play(process, sessions(0), range(8))
        named = [one for one in told if one.answer.source == "lmcache:host"]
        figures = {
            "answers": len(told),
            "sources": sources(told),
            "true": sum(one.is_true for one in named),
            "stuck": round(stuck(answers(told)), 3),
            "first_turns": dict(Counter(one.answer.instance for one in told if one.answer.turn == 0)),
            "lookup_ms_p50": round(1000 * sorted(one.answer.decision["lookup_s"] for one in named)[len(named) // 2], 1),
        }
        note("lmcache coordinator", figures)
        assert sources(told) == {"lmcache:host": SESSIONS * 7}
        assert [(one.least, one.answer.predicted, one.most, one.answer.turn) for one in named if not one.is_true] == []
        assert moves(answers(told)) == []
        assert len({one.answer.instance for one in told}) == 3
        # The trace names source and tier of each cell.
        row = next(row for row in named[-1].answer.decision["candidates"] if row.get("chosen"))
        assert row["hit_len_source"] == "lmcache:host"


async def test_a_server_that_dies_is_forgotten_by_the_coordinator_and_only_its_own_sessions_move() -> None:
    async with (
        coordinated("--instance-timeout", "2", "--health-check-interval", "0.5") as site,
        router([], "lmcache-server-dies", **site.settings()) as (process, _),
    ):
        agents = sessions(100)
        before = await site.play(process, agents, range(3))
        dead = before[-1].answer.instance
        homes = {one.answer.session: one.answer.instance for one in before}
        await site.players[dead].die()
        await wait_for_instances(site, {player.id for id, player in site.players.items() if id != dead})
        # What its engine computes from now on is stored nowhere.
        site.players[dead].held.clear()
        after = await site.play(process, agents, range(3, 6))
        others = [one for one in (*before, *after) if homes[one.answer.session] != dead]
        note(
            "lmcache server dies",
            {
                "sessions": len(agents),
                "of_the_dead": sum(home == dead for home in homes.values()),
                "others_stuck": round(stuck(answers(others)), 3),
                "sources": sources(after),
            },
        )
        assert stuck(answers(others)) == 1.0


async def test_a_coordinator_restarted_empty_scatters_nobody_where_the_prefix_index_is_there_too() -> None:
    figures = {}
    for stacked in (True, False):
        async with (
            coordinated() as site,
            router([], f"lmcache-coordinator-restarts-{stacked}", **site.settings(prefix_index=stacked)) as (
                process,
                _,
            ),
        ):
            agents = sessions(200)
            before = await site.play(process, agents, range(3))
            site.service.kill()
            await site.service.start()
            started = time.monotonic()
            for player in site.players.values():
                # Servers tell what they store from now on, not what they hold.
                player.held.clear()
            await wait_for_instances(site, {player.id for player in site.players.values()})
            after = await site.play(process, agents, range(3, 6))
            assert time.monotonic() - started < HOME_S
            each = {turn: round(stuck(answers([*before, *after]), turn), 3) for turn in (3, 4, 5)}
            figures["with the prefix index" if stacked else "alone"] = {"home": each, "sources": sources(after)}
            assert each[3] >= 0.9 or not stacked
            assert each[5] >= 0.9
    note("lmcache coordinator restarted empty", figures)


async def test_a_coordinator_that_hangs_costs_the_deadline_and_then_nothing() -> None:
    deadline = {"deadline_base": "100ms", "deadline_per_1k_tokens": "2ms", "deadline_cap": "300ms"}
    async with (
        coordinated() as site,
        router([], "lmcache-hangs", **site.settings(lookup=deadline)) as (process, client),
    ):
        agents = sessions(300)
        before = await site.play(process, agents, range(3))
        site.service.signal(signal.SIGSTOP)
        try:
            late = await site.play(process, agents, range(3, 6), by_service=False)
            page = await process.page(client, "/metrics")
        finally:
            site.service.signal(signal.SIGCONT)
        waited = [one.answer.decision["lookup_s"] for one in late]
        results = {
            result: int(float(count))
            for result, count in re.findall(r'smetric_lookups_total\{result="(\w+)",source="lmcache"\} (\S+)', page)
        }
        # Each is at home where its last answer was stored, which nobody could be told of in between.
        for one in late:
            agent = next(agent for agent in agents if agent.number == one.answer.session)
            keys = await site.keys.of(await site.tokens_of(agent))
            await site.players[one.answer.instance].store(keys)
        resumed = time.monotonic()
        while 'smetric_lookup_suspended{source="lmcache"} 1.0' in await process.page(client, "/metrics"):
            assert time.monotonic() < resumed + HOME_S
            await site.play(process, sessions(400)[:1], range(2))
            await asyncio.sleep(0.2)
        after = await site.play(process, agents, range(6, 9))
        note(
            "lmcache coordinator hangs",
            {
                "lookup_ms_max": round(1000 * max(waited)),
                "lookup_ms_p50": round(1000 * sorted(waited)[len(waited) // 2], 1),
                "results": results,
                "sources": sources(late),
                "sources_after": sources(after),
                "best_after": sum(one.least == one.best for one in after),
            },
        )
        assert sources(before) == {"lmcache:host": SESSIONS * 2}
        assert sources(late).keys() == {""}
        assert results["late"] > 0
        assert results["suspended"] > 0
        assert max(waited) < 1.0
        # While nothing was known a session went anywhere, so several hold as much of it: one of them answers.
        assert all(one.least == one.best for one in after)


# ── the controller ───────────────────────────────────────────────────────────


async def test_sessions_stick_to_the_instance_that_the_controller_names() -> None:
    async with (
        controlled(heartbeats=False) as site,
        router([], "lmcache-controller", **site.settings()) as (process, _),
    ):
        told = await site.play(process, sessions(500), range(8))
        figures: dict[str, Any] = {"answers": len(told), "stuck": round(stuck(answers(told)), 3)}
        for source in ("lmcache:host", "lmcache:likely"):
            named = [one for one in told if one.answer.source == source]
            figures[source] = {"answers": len(named), "true": sum(one.is_true for one in named)}
        figures["unknown"] = sources(told).get("", 0)
        figures["moves"] = moves(answers(told))
        note("lmcache controller", figures)
        assert figures["lmcache:host"]["answers"] == figures["lmcache:host"]["true"]
        assert stuck(answers(told)) >= 0.9


async def test_the_controller_names_a_dead_worker_for_ever_and_its_engine_is_sent_nothing() -> None:
    async with (
        controlled(heartbeats=False) as site,
        router([], "lmcache-worker-dies", **site.settings()) as (process, _),
    ):
        agents = sessions(600)
        before = await site.play(process, agents, range(3))
        dead = before[-1].answer.instance
        homes = {one.answer.session: one.answer.instance for one in before}
        await site.players[dead].die()
        await _gone(site.engines[dead])
        after = await site.play(process, agents, range(3, 6))
        assert site.players[dead].id in await known_instances(site)
        others = [one for one in (*before, *after) if homes[one.answer.session] != dead]
        note(
            "lmcache worker and engine die",
            {
                "of_the_dead": sum(home == dead for home in homes.values()),
                "answered_by": dict(Counter(one.answer.instance for one in after)),
                "others_stuck": round(stuck(answers(others)), 3),
                "moves": moves(answers(others)),
            },
        )
        assert dead not in {one.answer.instance for one in after}
        assert stuck(answers(others)) >= 0.9


async def test_a_controller_restarted_empty_scatters_nobody_where_workers_send_heartbeats() -> None:
    async with (
        controlled(heartbeats=True) as site,
        router([], "lmcache-controller-restarts", **site.settings()) as (process, _),
    ):
        agents = sessions(700)
        before = await site.play(process, agents, range(3))
        held = sum(len(player.held) for player in site.players.values())
        assert held > 0
        site.service.kill()
        started = time.monotonic()
        await site.service.start()
        await wait_for_instances(site, {player.id for player in site.players.values()})
        while await keys_at(site) < held:
            assert time.monotonic() < started + HOME_S
            await asyncio.sleep(0.2)
        known_s = time.monotonic() - started
        after = await site.play(process, agents, range(3, 6))
        each = {turn: round(stuck(answers([*before, *after]), turn), 3) for turn in (3, 4, 5)}
        note("lmcache controller restarted, heartbeats on", {"known_again_s": round(known_s, 1), "home": each})
        assert each[3] >= 0.9


async def test_a_controller_restarted_empty_scatters_nobody_where_the_prefix_index_is_there_too() -> None:
    async with (
        controlled(heartbeats=False) as site,
        router([], "lmcache-controller-restarts-stacked", **site.settings(prefix_index=True)) as (process, _),
    ):
        agents = sessions(800)
        before = await site.play(process, agents, range(3))
        site.service.kill()
        await site.service.start()
        # Its workers have no way to hear of it: it knows nobody from now on, and drops what they say.
        after = await site.play(process, agents, range(3, 6))
        each = {turn: round(stuck(answers([*before, *after]), turn), 3) for turn in (3, 4, 5)}
        note("lmcache controller restarted, prefix index", {"home": each, "sources": sources(after)})
        assert await known_instances(site) == set()
        assert each[3] >= 0.9


async def keys_at(site: Site[Any]) -> int:
    """Chunks the controller knows of."""
    async with site.client.get(site.service.url + site.service.page) as answer:
        count: int = (await answer.json())["total_key_count"]
        return count
