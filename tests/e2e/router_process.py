"""`smetric serve` as a process in front of real engines, and agents that talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.e2e.real_vllm import BLOCK, RealEngine, folder
from tests.e2e.sessions import AgentSession
from tests.ports import free_ports

#: Times an agent asks where the router, which has the rest of two busy cores, is overloaded.
TRIES = 10


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer, as the client and the decision log saw it."""

    session: int
    turn: int
    status: int
    instance: str
    decision: dict[str, Any]

    @property
    def predicted(self) -> int | None:
        hit = self.decision.get("hit")
        return hit["tokens"] if hit else None

    @property
    def source(self) -> str:
        hit = self.decision.get("hit")
        return (hit["source"] or "") if hit else ""

    @property
    def cached(self) -> int | None:
        usage = self.decision.get("usage")
        return usage["cached_tokens"] if usage else None


class RouterProcess:
    """One router.

    Args:
        engines: in front of which it stands; their ids are e1, e2, ….
        work: a folder for its configuration and log.
        settings: more of its configuration.
    """

    def __init__(self, engines: Sequence[RealEngine], work: Path, **settings: Any) -> None:
        self.port, self.admin = free_ports(2)
        self._work = work
        self._process: subprocess.Popen[bytes] | None = None
        work.mkdir(parents=True, exist_ok=True)
        configuration = {
            "instances": [
                {
                    "id": f"e{engine.number}",
                    "url": engine.url,
                    "kv_events": f"tcp://127.0.0.1:{engine.events}",
                    "kv_replay": f"tcp://127.0.0.1:{engine.replays}",
                }
                for engine in engines
            ],
            "listen": {"port": self.port},
            "admin": {"port": self.admin},
            "block_size": BLOCK,
            # Engines and router share two cores here, and the engines want them both.
            "scrape": {"interval": "250ms", "timeout": "5s"},
            "lookup": {"deadline_base": "5s", "deadline_cap": "10s"},
        } | settings
        (work / "smetric.yaml").write_text(yaml.safe_dump(configuration))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, **environ: str) -> None:
        with (self._work / "router.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "smetric", "serve", "--config", str(self._work / "smetric.yaml")],
                env=os.environ | environ,
                stdout=log,
                stderr=log,
            )

    def end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(30)
            self._process = None

    async def page(self, client: aiohttp.ClientSession, path: str) -> Any:
        """A page of the admin port: JSON, or text."""
        async with client.get(f"http://127.0.0.1:{self.admin}{path}") as answer:
            assert answer.status == 200, (path, answer.status)
            return await (answer.text() if path == "/metrics" else answer.json())

    async def ready(self, client: aiohttp.ClientSession, engines: int, *, kv_events: bool) -> None:
        """Wait until it serves and has scraped all engines, and knows their caches if it listens to them."""
        deadline = time.monotonic() + 60
        while True:
            assert time.monotonic() < deadline, f"the router is not ready; see {self._work}"
            with contextlib.suppress(aiohttp.ClientError):
                rows = (await self.page(client, "/admin/instances"))["instances"]
                known = sum((await self.known(client)).values()) if kv_events else engines
                if known == engines and all(row["capacity_tokens"] and row["models"] for row in rows):
                    break
            await asyncio.sleep(0.2)

    async def known(self, client: aiohttp.ClientSession) -> dict[str, bool]:
        """Of which instances the cache contents are known."""
        lines = (await self.page(client, "/metrics")).splitlines()
        return {
            line.partition('instance="')[2].partition('"')[0]: line.endswith(" 1.0")
            for line in lines
            if line.startswith("smetric_kv_events_known{")
        }

    async def ask(self, client: aiohttp.ClientSession, session: AgentSession, turn: int) -> Answered:
        """The session's next request; its reply is told to the session. Where the router has no time, it waits."""
        for _ in range(TRIES):
            async with client.post(self.url + session.path, json=session.body()) as answer:
                body = await answer.json(content_type=None)
                decision = answer.headers.get("x-smetric-decision-id", "")
                instance = answer.headers.get("x-smetric-instance", "")
                status, retry_after = answer.status, answer.headers.get("retry-after")
            if status != 503 or retry_after is None:
                break
            await asyncio.sleep(float(retry_after))
        assert status == 200, body
        if session.api == "messages":
            session.answered("".join(part.get("text", "") for part in body["content"]))
        else:
            session.answered(body["choices"][0]["message"]["content"] or "")
        return Answered(session.number, turn, status, instance, await self.page(client, f"/admin/decisions/{decision}"))

    async def play(
        self, client: aiohttp.ClientSession, sessions: Sequence[AgentSession], turns: range
    ) -> list[Answered]:
        """All *sessions* at once, each turn by turn."""

        async def one(session: AgentSession) -> list[Answered]:
            return [await self.ask(client, session, turn) for turn in turns]

        return [answer for each in await asyncio.gather(*map(one, sessions)) for answer in each]


@asynccontextmanager
async def router(
    engines: Sequence[RealEngine], name: str, *, environ: dict[str, str] | None = None, **settings: Any
) -> AsyncIterator[tuple[RouterProcess, aiohttp.ClientSession]]:
    """A router that knows its engines, and a client; *name* names its folder."""
    process = RouterProcess(engines, folder() / "routers" / name, **settings)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as client:
        try:
            process.start(**(environ or {}))
            kv_events = bool(settings.get("kv_events", {}).get("enabled"))
            await process.ready(client, len(engines), kv_events=kv_events)
            yield process, client
        finally:
            process.end(signal.SIGTERM)
