"""Row B4: deadlines of heads and bodies, on both ports."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from smetric.config.settings import LimitSettings, PeersSettings
from tests.fakes import FakeEngine, RawClient, request, until
from tests.faults.harness import CANARY, chat, running


async def trickle(client: RawClient, data: bytes, every_s: float) -> None:
    """Send *data* byte by byte for as long as the server takes it."""
    with contextlib.suppress(ConnectionError, RuntimeError):
        for i in range(len(data)):
            await client.send(data[i : i + 1])
            await asyncio.sleep(every_s)


async def test_b4_slow_head_is_408_and_silent_connection_is_closed() -> None:
    limits = LimitSettings(idle_timeout=0.5, head_timeout=0.5)
    loop = asyncio.get_running_loop()
    async with running(FakeEngine(), limits=limits) as router:
        began = loop.time()
        async with await RawClient.connect(router.url) as slow, await RawClient.connect(router.url) as silent:
            sending = asyncio.create_task(trickle(slow, b"GET / HTTP/1.1\r\nHost: " + b"x" * 1000, 0.02))
            assert (await slow.response()).status == 408
            assert await silent.at_end()
            assert 0.499 < loop.time() - began < 1.5  # uvloop counts milliseconds
            slow.leave()
            await sending


async def test_b4_missing_or_slow_body_is_408_at_the_deadline() -> None:
    async with running(FakeEngine(), limits=LimitSettings(body_timeout=0.5)) as router:
        head, end, body = request("POST", "/v1/chat/completions", chat()).partition(b"\r\n\r\n")
        loop = asyncio.get_running_loop()
        for at_once in (head + end + body[:-10], head + end):
            async with await RawClient.connect(router.url) as client:
                await client.send(at_once)
                began = loop.time()
                sending = asyncio.create_task(trickle(client, b"" if body[:-10] in at_once else body, 0.02))
                answer = await client.response()
                assert answer.status == 408
                assert 0.499 < loop.time() - began < 1.5  # uvloop counts milliseconds
                assert CANARY.encode() not in answer.body
                client.leave()
                await sending
        assert router.engines[0].calls == []
        counted = (await router.admin("/metrics")).body
        assert b'smetric_requests_total{code="408",route="/v1/chat/completions"} 2.0' in counted
        assert b'code="500"' not in counted
        await until(lambda: any(line.get("error_type") == "request_timeout" for line in router.lines("request")))


@pytest.mark.parametrize("part", ["head", "idle"])
async def test_b4_deadlines_of_heads_and_idle_connections_are_settings(part: str) -> None:
    limits = LimitSettings(head_timeout=0.2, idle_timeout=0.2)
    async with running(FakeEngine(), limits=limits) as router:
        for url in (router.url, router.admin_url):
            async with await RawClient.connect(url) as client:
                if part == "head":
                    await client.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
                    assert (await client.response()).status == 408
                assert await client.at_end()


async def test_b4_admin_port_cuts_off_slow_and_large_bodies() -> None:
    head = b"POST /admin/placements HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    peers = PeersSettings(urls=("http://127.0.0.1:9",))
    async with running(FakeEngine(), limits=LimitSettings(body_timeout=0.2), peers=peers) as router:
        for length, status in ((100, 408), (5_000_000, 413)):
            async with await RawClient.connect(router.admin_url) as client:
                await client.send(head % length)
                assert (await client.response()).status == status
                assert await client.at_end()
