"""A lookup source on a fake service, and the requests it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from smetric import names
from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import Api, InferenceRequest, TokenRatio
from smetric.sources.client import Breaker
from smetric.sources.lmcache.client import Coordinator, LmcacheClient, LookupService
from smetric.sources.lmcache.source import LmcacheLookup
from tests.clock import Clock
from tests.fakes import Call, FakeEngine

JSON = (b"content-type", b"application/json")


class Ids:
    """Gives the same ids for every prompt, after *delay_s* if there is one."""

    def __init__(self, ids: Any = None, delay_s: float = 0.0) -> None:
        self.ids = ids
        self.delay_s = delay_s
        self.asked = 0

    async def of(self, request: InferenceRequest) -> Sequence[int] | None:
        self.asked += 1
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        ids: Sequence[int] | None = self.ids
        return ids

    def begin(self, request: InferenceRequest) -> None:
        return None


def request(model: str = "m/test-model", *, reading: ReaderSettings | None = None, **fields: Any) -> InferenceRequest:
    """A chat request as the router reads it."""
    body = {"model": model, "messages": [{"role": "user", "content": "say it"}], **fields}
    return parse(Api.CHAT, orjson.dumps(body), (), TokenRatio(), reading or ReaderSettings())


@dataclass
class Asked:
    """A lookup, the service behind it, and what it said of itself."""

    lookup: LmcacheLookup
    service: FakeEngine
    ids: Ids
    clock: Clock
    results: list[str] = field(default_factory=list)
    suspended: list[bool] = field(default_factory=list)

    @property
    def questions(self) -> list[dict[str, Any]]:
        """The bodies the service was sent."""
        return [orjson.loads(call.body) for call in self.service.calls]


@asynccontextmanager
async def asking(
    script: Any,
    *,
    service: LookupService | None = None,
    ids: Any = range(1000, 2024),
    failures: int = 3,
    deadline_s: float = 0.3,
    host: str = "127.0.0.1",
    **settings: Any,
) -> AsyncIterator[Asked]:
    """A lookup that is started, on a service that answers by *script*."""
    engine, clock, given = FakeEngine(script), Clock(), Ids(ids)
    await engine.start()
    results: list[str] = []
    suspended: list[bool] = []
    client = LmcacheClient(
        service or Coordinator(256, 1),
        engine.url.replace("127.0.0.1", host),
        Breaker(failures, 5.0, clock=clock),
        on_late=lambda: results.append(names.LOOKUP_LATE),
        on_breaker=suspended.append,
        clock=settings.get("clock", clock),
    )
    lookup = LmcacheLookup(
        client,
        given,
        deadline=lambda tokens: deadline_s,
        chunk_size=256,
        models=settings.get("models", {}),
        answers_ttl_s=1.0,
        on_result=results.append,
        clock=settings.get("clock", clock),
    )
    await lookup.start()
    try:
        yield Asked(lookup, engine, given, clock, results, suspended)
    finally:
        await lookup.stop()
        await engine.stop()


def answering(status: int, body: bytes) -> Any:
    """A script that always answers this."""

    async def script(call: Call) -> None:
        await call.answer(status, body, JSON)

    return script
