"""Agent sessions through several routers that share placements, and after a restart.

Emulated engines, the shapes of recorded Claude Code sessions, real processes and ports.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import orjson
import pytest

from smetric.http.listener import address_of, listen
from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.sources.prefix_index.persistence import NAME, UnreadableImage, decode_image
from tests.agent_sessions import SESSIONS, Gateway, Sidecar, agents, engines, instances, sidecar
from tests.fakes import until
from tests.faults.process import process

pytestmark = pytest.mark.slow

SIDECARS = 4


@asynccontextmanager
async def several(*, peered: bool) -> AsyncIterator[tuple[EmulatedFleet, list[Sidecar], Gateway, list[str]]]:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(engines())
        admins = [listen("127.0.0.1", 0) for _ in range(SIDECARS)]
        urls = [address_of(admin) for admin in admins]
        sidecars = list(await asyncio.gather(*(sidecar(fleet, admin, urls if peered else ()) for admin in admins)))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        try:
            yield fleet, sidecars, Gateway([one.url for one in sidecars], client), urls
        finally:
            await asyncio.gather(*(one.end() for one in sidecars))


def have_shared(sidecars: Sequence[Sidecar], turns: int) -> bool:
    """Whether prompt and reply of each of the first *turns* turns have reached all other routers.

    What each holds still differs: the router that served a turn drops the marker of the reply before it.
    """
    figures = [one.application.sources.peers.figures() for one in sidecars if one.application.sources.peers is not None]
    return sum(one.placements["received"] for one in figures) == 2 * (SIDECARS - 1) * SESSIONS * turns


async def test_routers_that_share_placements_bring_sessions_home_behind_a_random_gateway() -> None:
    async with several(peered=True) as (_, sidecars, gateway, _urls):
        players = agents()
        await gateway.begin(players, 2)
        for turns in 2, 3:
            await until(partial(have_shared, sidecars, turns))
            assert await gateway.turn(players) >= 0.9
        await until(partial(have_shared, sidecars, 4))
        figures = [
            one.application.sources.peers.figures() for one in sidecars if one.application.sources.peers is not None
        ]
        # Each has found itself in the list and removed itself.
        assert [list(each.up.values()) for each in figures] == [[True] * (SIDECARS - 1)] * SIDECARS
        assert sum(each.placements["dropped"] + each.placements["refused"] for each in figures) == 0


async def test_routers_that_share_nothing_scatter_sessions() -> None:
    async with several(peered=False) as (_, _sidecars, gateway, _urls):
        players = agents()
        await gateway.begin(players)
        assert await gateway.turn(players) < 0.7


async def test_router_that_restarts_learns_placements_from_its_peers() -> None:
    async with several(peered=True) as (fleet, sidecars, gateway, urls):
        players = agents()
        await gateway.begin(players)
        await until(lambda: have_shared(sidecars, 3))
        await sidecars[0].end()
        port = int(urls[0].rpartition(":")[2])
        sidecars[0] = await sidecar(fleet, listen("127.0.0.1", port), urls)
        gateway.routers = [sidecars[0].url]
        assert await gateway.turn(players) >= 0.9


# One router, killed


def kept(folder: Path) -> int:
    """Blocks in the file, counted for each instance."""
    try:
        image = decode_image((folder / NAME).read_bytes())
    except (FileNotFoundError, UnreadableImage):
        return 0
    return sum(len(one.packed) // 8 for one in image.instances)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_router_that_was_killed_restores_its_index_from_the_file(tmp_path: Path, number: signal.Signals) -> None:
    async with engines() as fleet, aiohttp.ClientSession() as client:
        config = tmp_path / "smetric.yaml"
        settings = {
            "instances": [{"id": one.id, "url": one.url} for one in instances(fleet)],
            "params": {"FLOOR": 1000},
            "scrape": {"interval": "100ms"},
            "prefix_index": {"folder": "state", "save_every": "100ms" if number == signal.SIGKILL else "1h"},
        }
        config.write_bytes(orjson.dumps(settings))
        players, gateway = agents(), Gateway([], client)
        async with process(tmp_path / "first.log", "--config", str(config), policy="smetric") as first:
            gateway.routers = [first.data]
            await gateway.begin(players)
            if number == signal.SIGKILL:
                held = 0
                while held == 0 or held != kept(tmp_path / "state"):
                    held = kept(tmp_path / "state")
                    await asyncio.sleep(0.25)
            first.process.send_signal(number)
            await first.ended()
        assert os.stat(tmp_path / "state" / NAME).st_mode & 0o077 == 0
        async with process(tmp_path / "second.log", "--config", str(config), policy="smetric") as second:
            gateway.routers = [second.data]
            assert await gateway.turn(players) >= 0.9
