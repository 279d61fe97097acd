"""Addresses, HTTP exchanges and engines of a site."""

from __future__ import annotations

import asyncio

import pytest

from smetric.config.settings import InstanceSettings
from smetric.doctor.site import MAX_BYTES, NoReply, SiteClient, SiteReply, is_own, look, resolve
from tests.fakes import Call, FakeEngine, capture


@pytest.mark.parametrize("host", ["engine..example", "two words"])
async def test_resolve_invalid_name_is_none(host: str) -> None:
    assert await resolve(f"http://{host}:8000") is None


@pytest.mark.parametrize(
    ("ip", "host", "is_it"),
    [
        ("127.0.0.1", "0.0.0.0", True),
        ("::1", "0.0.0.0", False),
        ("127.0.0.1", "::", True),
        ("::1", "::", True),
        ("192.0.2.1", "::", False),
        ("127.0.0.1", "127.0.0.2", False),
    ],
)
async def test_is_own_compares_addresses_and_ports(ip: str, host: str, is_it: bool) -> None:
    assert await is_own((ip, 8000), host, 8000) is is_it
    assert not await is_own((ip, 8001), host, 8000)


async def answered(engine: FakeEngine) -> str:
    """Return why there is no reply; empty if there is one."""
    await engine.start()
    try:
        async with SiteClient() as client:
            await client.ask(engine.url + "/x", within_s=0.3)
    except NoReply as reason:
        return str(reason)
    finally:
        await engine.stop()
    return ""


async def test_client_explains_why_there_is_no_answer() -> None:
    async def hang(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab")
        await asyncio.Event().wait()

    async def nonsense(call: Call) -> None:
        await call.send(b"SSH-2.0-x\r\n\r\n")
        call.close()

    async def close(call: Call) -> None:
        call.close()

    async def endless(call: Call) -> None:
        await call.answer(200, b"x" * (MAX_BYTES + 1))

    assert await answered(FakeEngine(hang)) == "no answer in 0.3 s"
    assert "the answer is not HTTP" in await answered(FakeEngine(nonsense))
    assert await answered(FakeEngine(close)) == "the connection was closed without an answer"
    assert "the answer has more than" in await answered(FakeEngine(endless))
    async with SiteClient() as client:
        for url, why in (("http://127.0.0.1:9", "connection refused"), ("http://no.such.invalid", "is unknown")):
            with pytest.raises(NoReply, match=why):
                await client.ask(url, within_s=5.0)


async def test_look_reads_two_ranks_and_tolerates_missing_answers() -> None:
    page = capture("dp2_metrics_load")[1].partition(b"\r\n\r\n")[2] or capture("dp2_metrics_load")[1]

    async def serve(call: Call) -> None:
        await call.answer(200, b"{}")

    async def metrics(call: Call) -> None:
        await call.answer(200, page)

    engine = FakeEngine(serve)
    engine.metrics = metrics
    await engine.start()
    try:
        async with SiteClient() as client:
            seen = await look(client, InstanceSettings(id="a", url=engine.url, models=("tiny",)), 2.0)
    finally:
        await engine.stop()
    assert (seen.problem, seen.version, seen.server, seen.ahead_s) == ("", "", "", None)
    assert (seen.ranks, seen.speaks_vllm, seen.has_old_names) == (2, True, False)
    assert seen.page.cache["block_size"] == "128"
    assert seen.models == ["tiny"]
    card = seen.card("tiny")
    assert card is not None
    assert card.root == "/models/tiny"


def test_reply_clock_is_compared_at_arrival() -> None:
    """Metrics may arrive a minute after the health reply that has the date."""
    assert SiteReply(200, {"date": "Thu, 01 Jan 1970 00:01:40 GMT"}, b"", 90.0).clock_ahead_s == 10.0
