from __future__ import annotations

import asyncio

import aiohttp
import pytest

from smetric.http import addresses
from smetric.sources.client import PlainSession
from tests.fakes import FakeEngine
from tests.resolver import Resolver


async def test_one_look_up_serves_all_who_wait_for_it_and_closing_gives_it_up() -> None:
    resolver = Resolver()
    resolver.gate.clear()
    session = PlainSession(resolver, timeout_s=0.05)
    asks = (session.http.get("http://engine.test:81/") for _ in range(3))
    assert [type(each) for each in await asyncio.gather(*asks, return_exceptions=True)] == [TimeoutError] * 3
    assert resolver.asked == [("engine.test", 81)]
    await session.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_name_that_leads_nowhere_is_a_connection_error_and_an_answer_holds_while_look_ups_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "TTL_S", 0.0)
    resolver = Resolver()
    engine = FakeEngine()
    await engine.start()
    url = engine.url.replace("127.0.0.1", "engine.test") + "/health"
    session = PlainSession(resolver, timeout_s=5.0)
    with pytest.raises(aiohttp.ClientConnectionError):
        await session.http.get(url)
    resolver.found = ("127.0.0.1",)
    for _ in range(2):
        engine.drop_idle()
        async with session.http.get(url) as answer:
            assert answer.status == 200
        resolver.found = ()
    await session.close()
    await engine.stop()
