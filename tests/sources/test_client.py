"""HTTP client: sessions, bounded bodies, circuit breaker."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.http import addresses
from smetric.http.addresses import resolve
from smetric.sources.client import Breaker, PlainSession, is_plain, read_within
from tests.clock import Clock
from tests.fakes import Call, FakeEngine
from tests.resolver import Resolver


async def test_session_shares_one_name_look_up_and_cancels_it_on_close() -> None:
    resolver = Resolver()
    resolver.gate.clear()
    session = PlainSession(resolver, timeout_s=0.05)
    asks = (session.http.get("http://engine.test:81/") for _ in range(3))
    assert [type(each) for each in await asyncio.gather(*asks, return_exceptions=True)] == [TimeoutError] * 3
    assert resolver.asked == [("engine.test", 81)]
    await session.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_session_keeps_the_last_good_address_while_look_ups_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "TTL_S", 0.0)
    resolver = Resolver()
    session = PlainSession(resolver, timeout_s=5.0)
    async with FakeEngine() as engine:
        url = engine.url.replace("127.0.0.1", "engine.test") + "/health"
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.http.get(url)
        resolver.found = ("127.0.0.1",)
        for _ in range(2):
            engine.drop_idle()
            async with session.http.get(url) as answer:
                assert answer.status == 200
            resolver.found = ()
        await session.close()


@pytest.mark.parametrize(("encoding", "plain"), [(None, True), (b"Identity", True), (b"gzip", False)])
async def test_is_plain_detects_compressed_bodies(encoding: bytes | None, plain: bool) -> None:
    async def answer(call: Call) -> None:
        assert call.values(b"accept-encoding") == []
        await call.answer(200, b"page", *([(b"content-encoding", encoding)] if encoding else []))

    session = PlainSession(resolve, timeout_s=5.0)
    async with FakeEngine(answer) as engine, session.http.get(engine.url + "/page") as response:
        assert is_plain(response) is plain
        assert await response.read() == b"page"
    await session.close()


@pytest.mark.parametrize(("most", "body"), [(10, b"0123456789"), (9, None)])
async def test_read_within_stops_at_the_bound(most: int, body: bytes | None) -> None:
    async def answer(call: Call) -> None:
        await call.answer(200, b"0123456789")

    async with (
        FakeEngine(answer) as engine,
        aiohttp.ClientSession() as session,
        session.post(engine.url + "/v1/x") as response,
    ):
        assert await read_within(response, most) == body


@pytest.mark.parametrize(
    "steps",
    ["+f+f+s+f+f+f-", "+f+f+fw-W+--s+++", "+f+f+fwW+fw-W+", "+f+f+fwW+a+", "+++++fffwffW+"],
    ids=["in a row", "one try closes it", "a try that fails", "an abandoned try", "late failures in flight"],
)
def test_breaker_allows_requests_by_what_those_before_came_to(steps: str) -> None:
    """`+` and `-` ask for one more; `f`, `s` and `a` report one; `w` waits almost until the next try, `W` the rest."""
    clock = Clock(0.0)
    one = Breaker(3, 5.0, clock=clock)
    for step in steps:
        match step:
            case "+" | "-":
                assert one.allows() is (step == "+")
            case "w" | "W":
                clock.now += 4.99 if step == "w" else 0.01
            case _:
                {"f": one.failed, "s": one.succeeded, "a": one.abandoned}[step]()


@given(st.lists(st.sampled_from(["succeeded", "failed", "abandoned"]), max_size=60), st.integers(1, 5))
def test_breaker_closes_after_any_history_once_the_service_answers(ends: list[str], most: int) -> None:
    clock = Clock(0.0)
    one = Breaker(most, 5.0, clock=clock)
    for end in ends:
        clock.now += 1.0
        if one.allows():
            getattr(one, end)()
    clock.now += 5.0
    assert one.allows()
    one.succeeded()
    assert not one.is_open
    assert one.allows()


@pytest.mark.parametrize("most", [1, 4])
def test_breaker_never_opens_early(most: int) -> None:
    one = Breaker(most, 1.0, clock=Clock(0.0))
    for _ in range(most - 1):
        one.failed()
    assert not one.is_open
    one.failed()
    assert one.is_open
