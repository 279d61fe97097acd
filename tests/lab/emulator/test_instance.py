"""Emulated instance."""

from __future__ import annotations

import asyncio

from smetric.lab.emulator import prompt
from smetric.lab.emulator.call import EmulatedCall
from smetric.lab.emulator.instance import EmulatedInstance, EmulatedSettings


async def test_instance_serves_requests_after_abort_all() -> None:
    instance = EmulatedInstance(EmulatedSettings(time_scale=100))
    aborted, served = (EmulatedCall(prompts=[prompt.encode("hello")], model="emulated", limit=2) for _ in range(2))
    first = instance.generate(aborted)
    instance.abort_all()
    assert first.ended
    second = instance.generate(served)
    async with asyncio.timeout(5):
        while not second.ended:
            await second.changed()
    assert second.choices[0].finish_reason == "length"
