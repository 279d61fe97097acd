"""A set-up that is well, to be broken: emulated engines and LMCache, each behind a front, and its settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from smetric.app import Application
from smetric.config.settings import (
    Admin,
    InstanceSettings,
    KvEventsSettings,
    Listen,
    LmcacheSettings,
    Lookup,
    Settings,
    TokenizerSettings,
)
from smetric.doctor.examination import Examination, as_text
from smetric.doctor.site import Finding
from smetric.http.listener import address_of, listen, serve_port
from smetric.http.tls import Tls
from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import InstanceSettings as EngineSettings
from smetric.lab.engine import EngineConfig
from tests.doctor.front import Front
from tests.fakes import until
from tests.ports import free_port
from tests.sources.kv_events.kv_engine import KvEngine

ENGINES = EngineSettings(model="m", engine=EngineConfig(blocks=2048, max_model_len=16384), time_scale=100.0)


@dataclass
class Lab:
    """Two emulated engines behind fronts, LMCache behind another, and settings with which all is well."""

    engines: EmulatedFleet
    fronts: list[Front]
    store: Front
    settings: Settings

    def lmcache(self, **fields: Any) -> None:
        """Let the router ask LMCache."""
        ids = {f"e{n}": url.removeprefix("http://") for n, url in enumerate(self.engines.urls)}
        self.settings = replace(
            self.settings,
            lmcache=LmcacheSettings(**{"url": self.store.url, "instances": ids, **fields}),
            tokenizer=TokenizerSettings(source="engine"),
        )


def told(examination: Examination) -> list[tuple[str, Finding]]:
    return [(outcome.check.name, finding) for outcome in examination.outcomes for finding in outcome.findings]


def the_only(examination: Examination) -> tuple[str, Finding]:
    found = told(examination)
    assert len(found) == 1, as_text(examination)
    return found[0]


@asynccontextmanager
async def set_up() -> AsyncIterator[Lab]:
    async with EmulatedFleet(2, ENGINES, lmcache=True) as engines:
        fronts = [Front(url) for url in engines.urls]
        async with fronts[0], fronts[1], Front(engines.lmcache_url) as store:
            settings = Settings(
                listen=Listen(port=free_port()),
                admin=Admin(port=free_port()),
                instances=tuple(InstanceSettings(id=f"e{n}", url=front.url) for n, front in enumerate(fronts)),
                lookup=Lookup(deadline_base=5.0, deadline_cap=5.0),
            )
            yield Lab(engines, fronts, store, settings)


def listening(lab: Lab, *ends: KvEngine, **fields: Any) -> Settings:
    """Settings that listen to *ends*."""
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
    """A router with the settings of *lab*; where it is sent requests."""
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
