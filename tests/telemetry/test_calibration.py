"""Forecasts of the time to first token, against emulated engines whose prefill takes the time of a linear model."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson

from smetric.app import Application
from smetric.config.settings import InstanceSettings, Scrape, Settings
from smetric.emulator.fleet import EmulatedFleet
from smetric.emulator.instance import InstanceSettings as EngineSettings
from smetric.proxy.server import address_of, listen, serve
from smetric.sim.engine import EngineConfig
from tests.fakes import until

MODEL = "emulated"
SESSIONS, TURNS = 2, 14
#: Mean actual time over mean forecast. The rate is that of the fast requests, so forecasts err on the short side; a
#: busy machine adds to what came.
BAND = (0.7, 1.8)


async def play(url: str, session: int) -> None:
    """A session whose turns add 12 kB each, answered as streams."""
    messages: list[dict[str, Any]] = []
    async with aiohttp.ClientSession() as client:
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"{session} {turn} " + "some words of a file " * 570})
            body = {"model": MODEL, "messages": messages, "max_tokens": 2, "ignore_eos": True, "stream": True}
            async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            messages.append({"role": "assistant", "content": "done"})


async def test_forecasts_are_within_the_stated_band_of_what_came() -> None:
    config = EngineConfig(block_size=16, blocks=60_000, max_model_len=200_000)
    async with EmulatedFleet(2, EngineSettings(model=MODEL, engine=config, time_scale=4.0)) as fleet:
        application = Application(
            Settings(
                instances=tuple(InstanceSettings(id=f"e{n}", url=url) for n, url in enumerate(fleet.urls)),
                params={"FLOOR": 1000.0},
                scrape=Scrape(interval=0.2),
            )
        )
        data, admin, stop = listen("127.0.0.1", 0), listen("127.0.0.1", 0), asyncio.Event()
        serving = [
            asyncio.create_task(serve(application.data_app(), data, stop=stop.wait, drain_s=2.0)),
            asyncio.create_task(serve(application.admin_app(), admin, stop=stop.wait, drain_s=2.0)),
        ]
        try:
            await until(lambda: all(one.scrape and one.models for one in application.fleet.instances), 30.0)
            await asyncio.gather(*(play(address_of(data), number) for number in range(SESSIONS)))
            async with aiohttp.ClientSession() as client, client.get(f"{address_of(admin)}/admin/savings") as answer:
                rows = orjson.loads(await answer.read())["savings"]
        finally:
            stop.set()
            await asyncio.gather(*serving)
    stuck = next(row for row in rows if row["rule"] == "stick")
    assert stuck["decisions"] == SESSIONS * (TURNS - 1)
    # The first eight samples of each instance make its rate.
    assert stuck["forecast"]["count"] >= SESSIONS * (TURNS - 10)
    assert BAND[0] <= stuck["forecast"]["actual_of_predicted"] <= BAND[1]
    # The other instance held at most the common beginning.
    assert stuck["tokens"]["saved"] > 0
    assert stuck["seconds"]["saved"] > 0
