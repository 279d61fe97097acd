"""A fault-free set-up to be broken: emulated engines and LMCache, each behind a front, and its settings."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
import orjson
from aiohttp import web
from msgspec.structs import replace

from smetric.app import Application
from smetric.config.settings import (
    Admin,
    InstanceSettings,
    KvEventsSettings,
    Listen,
    LmcacheSettings,
    LookupSettings,
    Settings,
    TokenizerSettings,
)
from smetric.doctor.examination import Examination, as_text, examine
from smetric.doctor.site import Finding, FindingSeverity
from smetric.http.listener import address_of, listen, serve_port
from smetric.http.tls import Tls
from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import EmulatedSettings
from smetric.lab.engine import EngineConfig
from tests.fakes import until
from tests.ports import free_port
from tests.sources.kv_events.kv_engine import KvEngine, stored

Edit = Callable[[bytes], bytes]


class Front:
    """Reverse proxy of *target* that can break it: changed, refused, late or compressed answers. Use it as a context.

    Args:
        target: base URL.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.url = ""
        #: Changes of bodies, and statuses answered instead, by path.
        self.edits: dict[str, Edit] = {}
        self.statuses: dict[str, int] = {}
        #: Paths without an answer, paths with compressed answers, and headers of all answers.
        self.hanging: set[str] = set()
        self.compressed: set[str] = set()
        self.headers: dict[str, str] = {}
        #: API key that it requires; empty for none.
        self.key = ""
        #: Called with the body of each chat request after its answer.
        self.on_chat: Callable[[bytes], Awaitable[None]] | None = None
        self._client: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    def edit(self, path: str, old: bytes, new: bytes) -> None:
        """Put *new* for *old* in the answers of *path*; *old* must be there."""

        def put(body: bytes) -> bytes:
            assert old in body
            return body.replace(old, new)

        self.edits[path] = put

    def edit_json(self, path: str, change: Callable[[Any], None]) -> None:
        """Change the JSON answers of *path* by *change*."""

        def put(body: bytes) -> bytes:
            value = orjson.loads(body)
            change(value)
            return orjson.dumps(value)

        self.edits[path] = put

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        assert self._client is not None
        await self._runner.cleanup()
        await self._client.close()

    async def _pass(self, request: web.Request) -> web.Response:
        path = request.path
        if path in self.hanging:
            await asyncio.Event().wait()
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        if path in self.statuses:
            return web.Response(status=self.statuses[path], headers=self.headers)
        assert self._client is not None
        content = await request.read()
        headers = {"content-type": request.content_type} if content else {}
        async with self._client.request(request.method, self.target + path, data=content, headers=headers) as answer:
            body = await answer.read()
            if answer.status == 200 and path in self.edits:
                body = self.edits[path](body)
            if answer.status == 200 and path == "/v1/chat/completions" and self.on_chat is not None:
                await self.on_chat(content)
            if path in self.compressed:
                return web.Response(body=gzip.compress(body), headers={"content-encoding": "gzip"})
            return web.Response(
                status=answer.status,
                body=body,
                headers={
                    "content-type": answer.headers.get("content-type", "text/plain"),
                    "server": answer.headers.get("server", "x"),
                    **self.headers,
                },
            )


@asynccontextmanager
async def publishing(front: Front, *, replay: bool = True) -> AsyncIterator[KvEngine]:
    """An engine behind *front* that publishes the prompts it receives."""
    engine = KvEngine(replay=replay)

    async def publish(content: bytes) -> None:
        question = {"messages": orjson.loads(content)["messages"]}
        async with aiohttp.ClientSession() as client, client.post(front.target + "/tokenize", json=question) as answer:
            ids: Sequence[int] = (await answer.json())["tokens"]
        await engine.publish(stored(ids))

    front.on_chat = publish
    try:
        yield engine
    finally:
        await engine.close()


ENGINES = EmulatedSettings(model="m", engine=EngineConfig(blocks=2048, max_model_len=16384), time_scale=100.0)


@dataclass
class Lab:
    """Two emulated engines behind fronts, LMCache behind another, and settings without a fault."""

    engines: EmulatedFleet
    fronts: list[Front]
    store: Front
    settings: Settings

    def set(self, **fields: Any) -> None:
        """Replace settings."""
        self.settings = replace(self.settings, **fields)

    def lmcache(self, **fields: Any) -> None:
        """Let the router ask LMCache."""
        ids = {f"e{n}": url.removeprefix("http://") for n, url in enumerate(self.engines.urls)}
        lmcache = LmcacheSettings(**{"url": self.store.url, "instances": ids, **fields})
        self.set(lmcache=lmcache, tokenizer=TokenizerSettings(source="engine"))

    def store_policy(self, folder: Path) -> str:
        """Write a policy that looks up what only LMCache fills, and return its path."""
        path = folder / "store.policy"
        path.write_text("policy store\n\nroute argmax(store_hit_len, then: requests)\n")
        return str(path)

    async def findings(self, *, may_probe: bool = False) -> list[tuple[str, Finding]]:
        """Examine the set-up, and return each finding with the name of its check."""
        return all_findings(await examine(self.settings, may_probe=may_probe))

    async def only_finding(self, check: str, severity: FindingSeverity, *, may_probe: bool = False) -> Finding:
        """Examine the set-up, and return its only finding, which is of this check and severity."""
        examination = await examine(self.settings, may_probe=may_probe)
        found = all_findings(examination)
        assert [(by, finding.severity) for by, finding in found] == [(check, severity)], as_text(examination)
        return found[0][1]

    async def is_fine(self, *, may_probe: bool = False) -> bool:
        """Examine the set-up, and return whether nothing was found."""
        examination = await examine(self.settings, may_probe=may_probe)
        assert all_findings(examination) == [], as_text(examination)
        return True


def all_findings(examination: Examination) -> list[tuple[str, Finding]]:
    return [(outcome.check.name, finding) for outcome in examination.outcomes for finding in outcome.findings]


@asynccontextmanager
async def set_up() -> AsyncIterator[Lab]:
    async with EmulatedFleet(2, ENGINES, lmcache=True) as engines:
        fronts = [Front(url) for url in engines.urls]
        async with fronts[0], fronts[1], Front(engines.lmcache_url) as store:
            settings = Settings(
                listen=Listen(port=free_port()),
                admin=Admin(port=free_port()),
                instances=tuple(InstanceSettings(id=f"e{n}", url=front.url) for n, front in enumerate(fronts)),
                lookup=LookupSettings(deadline_base=5.0, deadline_cap=5.0),
            )
            yield Lab(engines, fronts, store, settings)


def listening(lab: Lab, *ends: KvEngine, **fields: Any) -> Settings:
    """Return settings that listen to *ends*."""
    return replace(
        lab.settings,
        instances=tuple(
            replace(instance, kv_events=end.endpoint, kv_replay=end.replay)
            for instance, end in zip(lab.settings.instances, ends, strict=True)
        ),
        kv_events=KvEventsSettings(enabled=True, **fields),
        tokenizer=TokenizerSettings(source="engine"),
    )


@asynccontextmanager
async def running(lab: Lab, tls: Tls | None = None) -> AsyncIterator[str]:
    """A router that runs with the settings of *lab*, and its URL."""
    settings = lab.settings
    admin, data = listen("127.0.0.1", settings.admin.port), listen("127.0.0.1", settings.listen.port)
    router, stop = Application(settings, environ={}), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve_port(router.data_app(), data, stop=stop.wait, drain_s=1.0, tls=tls))
        group.create_task(serve_port(router.admin_app(), admin, stop=stop.wait, drain_s=1.0))
        await until(lambda: router.is_ready)
        try:
            yield address_of(data)
        finally:
            stop.set()
