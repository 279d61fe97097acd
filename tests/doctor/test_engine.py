from __future__ import annotations

import asyncio

import pytest

from smetric.config.settings import InstanceSettings
from smetric.doctor.site import MAX_BYTES, Answer, NoAnswer, Wire, look
from tests.fakes import Call, FakeEngine, capture


async def answered(engine: FakeEngine) -> str:
    """Why there is no answer; empty if there is one."""
    await engine.start()
    try:
        async with Wire() as wire:
            await wire.get(engine.url + "/x", within_s=0.3)
    except NoAnswer as reason:
        return str(reason)
    finally:
        await engine.stop()
    return ""


async def test_why_there_is_no_answer_is_said_in_words() -> None:
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
    assert "an answer that is no HTTP" in await answered(FakeEngine(nonsense))
    assert await answered(FakeEngine(close)) == "the connection was closed without an answer"
    assert "an answer of more than" in await answered(FakeEngine(endless))
    async with Wire() as wire:
        for url, why in (("http://127.0.0.1:9", "connection refused"), ("http://no.such.invalid", "is unknown")):
            with pytest.raises(NoAnswer, match=why):
                await wire.get(url, within_s=5.0)


async def test_a_page_of_two_ranks_is_read_and_what_is_no_answer_leaves_gaps() -> None:
    page = capture("dp2_metrics_load")[1].partition(b"\r\n\r\n")[2] or capture("dp2_metrics_load")[1]

    async def serve(call: Call) -> None:
        await call.answer(200, b"{}")

    async def metrics(call: Call) -> None:
        await call.answer(200, page)

    engine = FakeEngine(serve)
    engine.metrics = metrics
    await engine.start()
    try:
        async with Wire() as wire:
            seen = await look(wire, InstanceSettings(id="a", url=engine.url, models=("tiny",)), 2.0)
    finally:
        await engine.stop()
    assert (seen.problem, seen.version, seen.server, seen.ahead_s) == ("", "", "", None)
    assert (seen.ranks, seen.speaks_vllm, seen.has_old_names) == (2, True, False)
    assert seen.page.cache["block_size"] == "128"
    assert seen.models == ["tiny"]
    card = seen.card("tiny")
    assert card is not None
    assert card.root == "/models/tiny"


def test_a_clock_is_compared_with_ours_at_the_time_that_its_answer_came() -> None:
    """An engine's metrics may take a minute more than its health, whose date it is."""
    assert Answer(200, {"date": "Thu, 01 Jan 1970 00:01:40 GMT"}, b"", 90.0).clock_ahead_s == 10.0
