"""Rows B: a client that leaves takes its request in the engine with it."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes import Call, FakeEngine, delta, hang, until
from tests.faults.harness import Running, chat, running

DEPARTURES = 100


async def endless(call: Call) -> None:
    """A stream that goes on until the router leaves."""
    await call.stream(delta("a"), end=False)
    while True:
        await asyncio.sleep(0.05)
        await call.send(b"%x\r\n%b\r\n" % (len(delta("b")), delta("b")))


async def leave(router: Running, how: str, *, stream: bool, after_first_byte: bool) -> None:
    async with await router.client(chat(stream=stream)) as client:
        if after_first_byte:
            assert (await client.head()).status == 200
            assert await client.reader.read(1)
        else:
            before = len(router.engines[0].calls)
            await until(lambda: len(router.engines[0].calls) > before)
        client.reset() if how == "RST" else client.leave()


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_b1_a_client_that_leaves_a_stream_aborts_it_in_the_engine(how: str) -> None:
    async with running(FakeEngine()) as router:
        engine = router.engines[0]
        engine.script = endless
        for _ in range(DEPARTURES // 20):
            leaving = (leave(router, how, stream=True, after_first_byte=True) for _ in range(20))
            await asyncio.gather(*leaving)
        await until(lambda: len(engine.aborted) == DEPARTURES)
        await until(lambda: router.counted() == (0, 0, 0))
        await until(lambda: sum(line["status"] == 499 for line in router.lines("request")) == DEPARTURES)
        assert router.instance_of(engine).healthy


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_b2_a_client_that_leaves_during_prefill_aborts_it_in_the_engine(how: str, stream: bool) -> None:
    async with running(FakeEngine()) as router:
        engine = router.engines[0]
        engine.script = hang
        for _ in range(DEPARTURES // 2):
            await leave(router, how, stream=stream, after_first_byte=False)
        await until(lambda: len(engine.aborted) == DEPARTURES // 2)
        await until(lambda: router.counted() == (0, 0, 0))
        await until(lambda: sum(line["status"] == 499 for line in router.lines("request")) == DEPARTURES // 2)


async def test_b2_a_client_that_leaves_between_head_and_body_of_an_answer_aborts_it() -> None:
    async def only_head(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n")
        await asyncio.Event().wait()

    async with running(FakeEngine()) as router:
        engine = router.engines[0]
        engine.script = only_head
        async with await router.client(chat()) as client:
            assert (await client.head()).status == 200
        await until(lambda: len(engine.aborted) == 1)


async def test_a_client_that_closes_its_connection_by_header_is_logged_with_the_status_it_got() -> None:
    async with running(FakeEngine()) as router:
        answer = await router.ask("POST", "/v1/chat/completions", chat(), ("Connection", "close"))
        assert answer.complete
        await until(lambda: len(router.lines("request")) == 2)
        assert router.lines("request")[-1]["status"] == 200
        assert "error_type" not in router.lines("request")[-1]
