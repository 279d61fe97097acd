from __future__ import annotations

import asyncio

from msgspec.structs import replace

from smetric.config.settings import InstanceSettings
from smetric.doctor.examination import examine
from tests.doctor.lab import Lab, told
from tests.fakes import Call, FakeEngine


async def test_connections_that_engines_close_early_are_measured(lab: Lab) -> None:
    async def close_soon(call: Call) -> None:
        await call.answer(200, b"")
        await asyncio.sleep(0.2)
        call.close()

    engine = FakeEngine()
    engine.health = close_soon
    await engine.start()
    try:
        instances = (InstanceSettings(id="short", url=engine.url),)
        examination = await examine(replace(lab.settings, instances=instances), may_probe=False, may_wait=True)
    finally:
        await engine.stop()
    found = dict(told(examination))
    assert "closes idle connections after 0." in found["keep-alive"].what
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE" in found["keep-alive"].remedy
