"""Agent sessions played through routers in this process, on emulated engines.

The shapes are those of recorded Claude Code sessions, the texts are filler.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from socket import socket

import aiohttp

from smetric.app import Application
from smetric.config.settings import Admin, InstanceSettings, PeersSettings, ScrapeSettings, Settings
from smetric.http.listener import address_of, listen, serve_port
from smetric.lab.demo.play import MODEL, Dialect, Messages, Reply, Session, load_sessions
from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import EmulatedSettings
from smetric.lab.engine import EngineConfig
from tests.fakes import until

SESSIONS = 16
#: These tests ask where the cache of a session is; load would blur it.
PARAMS = {"FLOOR": 1000.0}


@asynccontextmanager
async def engines() -> AsyncIterator[EmulatedFleet]:
    """Four engines that are fast and evict nothing."""
    config = EngineConfig(block_size=16, blocks=200_000, max_model_len=100_000)
    async with EmulatedFleet(4, EmulatedSettings(model=MODEL, engine=config, time_scale=1000.0)) as fleet:
        yield fleet


def instances(fleet: EmulatedFleet) -> tuple[InstanceSettings, ...]:
    return tuple(InstanceSettings(id=f"e{n}", url=url) for n, url in enumerate(fleet.urls))


@dataclass
class Agent:
    """A session as far as it was played."""

    session: Session
    home: str = ""
    replies: list[str] = field(default_factory=list)


def agents() -> list[Agent]:
    return [Agent(session) for session in load_sessions()[:SESSIONS]]


class Gateway:
    """Sends each request to any of several routers."""

    def __init__(self, routers: Sequence[str], client: aiohttp.ClientSession, seed: int = 3) -> None:
        self.routers = routers
        self._client = client
        self._random = random.Random(seed)
        self._dialect: Dialect = Messages()

    async def begin(self, agents: Sequence[Agent], turns: int = 3) -> None:
        """The first turns of every session, after which no two have all but a kilobyte in common any more."""
        for _ in range(turns):
            await self.turn(agents)

    async def turn(self, agents: Sequence[Agent]) -> float:
        """One turn of every session; the share that came home."""
        return sum(await asyncio.gather(*map(self._ask, agents))) / len(agents)

    async def _ask(self, agent: Agent) -> bool:
        reply = Reply()
        router = self._random.choice(self.routers)
        body = self._dialect.body(agent.session, agent.replies)
        async with self._client.post(router + self._dialect.path, data=body, headers=self._dialect.headers) as response:
            assert response.status == 200
            async for line in response.content:
                if line.startswith(b"data: "):
                    self._dialect.read(line[6:].strip(), reply)
        instance = response.headers["x-smetric-instance"]
        was_home, agent.home = instance == agent.home, instance
        agent.replies.append("".join(reply.text))
        return was_home


@dataclass
class Sidecar:
    application: Application
    url: str
    stop: asyncio.Event
    ports: list[asyncio.Task[None]]

    async def end(self) -> None:
        self.stop.set()
        await asyncio.gather(*self.ports)


async def sidecar(fleet: EmulatedFleet, admin: socket, peers: Sequence[str]) -> Sidecar:
    """Router with its admin port on the socket *admin*."""
    application = Application(
        Settings(
            instances=instances(fleet),
            admin=Admin(port=0),
            params=PARAMS,
            scrape=ScrapeSettings(interval=0.2),
            peers=PeersSettings(urls=tuple(peers), token="sixteen-characters", interval=0.02),
        ),
        {},
    )
    data, stop = listen("127.0.0.1", 0), asyncio.Event()
    ports = [
        asyncio.create_task(serve_port(app, sock, stop=stop.wait, drain_s=0.5))
        for app, sock in ((application.admin_app(), admin), (application.data_app(), data))
    ]
    await until(lambda: application.is_ready and all(one.scrape for one in application.fleet.instances))
    return Sidecar(application, address_of(data), stop, ports)
