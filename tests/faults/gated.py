"""Engine that answers on command, and the router's figures of waiting requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from prometheus_client import generate_latest

from tests.fakes import CHAT_ANSWER, Call, FakeEngine, Response, until
from tests.faults.harness import Running, running

JSON = (b"content-type", b"application/json")


class Gated:
    """Engine that answers on command."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self._gate = asyncio.Semaphore(0)

    def close(self) -> None:
        """Answer nothing any more but what is let through."""
        self.engine.script = self._script

    async def _script(self, call: Call) -> None:
        await self._gate.acquire()
        await call.answer(200, CHAT_ANSWER, JSON)

    def let_through(self) -> None:
        """Answer the longest waiting request, or the next one."""
        self._gate.release()

    async def serve(self, count: int) -> None:
        """Answer *count* requests, each once it has come."""
        for served in range(count):
            await until(lambda served=served: len(self.users) > served)  # type: ignore[misc]
            self.let_through()

    @property
    def users(self) -> list[str]:
        """Users of the received requests, in order."""
        return [orjson.loads(call.body).get("user", "") for call in self.engine.calls]


@asynccontextmanager
async def occupied(**settings: Any) -> AsyncIterator[tuple[Running, Gated, list[asyncio.Task[Response]]]]:
    """Run a router whose only instance is busy with a first request, whose task is given."""
    gated = Gated()
    async with running(gated.engine, **settings) as router:
        gated.close()
        tasks = [asked(router, "first")]
        await until(lambda: len(gated.users) == 1)
        yield router, gated, tasks
        gated.engine.recover()


def figures(router: Running, start: str) -> dict[str, float]:
    """The router's series that begin with *start*, as they are now: the page it serves may be a second old."""
    lines = generate_latest(router.application.metrics.registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(start)}


def busy(router: Running) -> int:
    """How many requests are in its queue."""
    return router.application.admission.room.size


def asked(router: Running, user: str, **fields: Any) -> asyncio.Task[Response]:
    """A request of *user*, under way."""
    return asyncio.create_task(router.chat(user=user, **fields))
