"""Rows G: told to end, the router lets its streams end first."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import orjson
import pytest

from tests.fakes import DONE, Call, FakeEngine, RawClient, delta, fetch, until
from tests.faults.harness import chat, running

STREAMS = 200


@pytest.mark.slow
async def test_g1_sigterm_lets_two_hundred_streams_end_and_refuses_new_connections(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await call.stream(delta("a"), end=False)
        await go_on.wait()
        for event in (delta("b"), DONE):
            await call.send(b"%x\r\n%b\r\n" % (len(event), event))
        await call.send(b"0\r\n\r\n")

    engine = FakeEngine(script)
    await engine.start()
    log = (tmp_path / "log").open("wb")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "smetric", "serve", "--policy", "load_only", "--instance", engine.url),
        *("--port", "0", "--admin-port", "0"),
        stderr=log,
        env={**os.environ, "SMETRIC_LOG__FORMAT": "json", "SMETRIC_DRAIN__DEADLINE": "30s"},
    )
    try:
        lines = tmp_path / "log"
        await until(lambda: b"smetric.serving" in lines.read_bytes(), within_s=20)
        serving = next(line for line in map(orjson.loads, lines.read_bytes().splitlines()) if "data" in line)
        clients = await asyncio.gather(*(RawClient.connect(serving["data"]) for _ in range(STREAMS)))
        idle = await RawClient.connect(serving["data"])
        body = chat(stream=True)
        request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        for client in clients:
            await client.send(request)
        await until(lambda: len(engine.calls) == STREAMS, within_s=20)

        process.send_signal(signal.SIGTERM)
        await until(lambda: b"smetric.draining" in lines.read_bytes())
        assert (await fetch(serving["admin"], "GET", "/readyz")).status == 503
        assert (await fetch(serving["admin"], "GET", "/healthz")).status == 200
        assert await idle.at_end()
        with pytest.raises(ConnectionRefusedError):
            await RawClient.connect(serving["data"])

        go_on.set()
        answers = await asyncio.gather(*(client.response() for client in clients))
        assert all(answer.complete for answer in answers)
        assert {answer.body for answer in answers} == {delta("a") + delta("b") + DONE}
        async with asyncio.timeout(10):
            assert await process.wait() == 0
        assert b"smetric.stopped" in lines.read_bytes()
        for client in [*clients, idle]:
            client.leave()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        log.close()
        await engine.stop()


async def test_g2_a_stream_longer_than_the_drain_deadline_is_cut_off_and_aborted() -> None:
    async def endless(call: Call) -> None:
        await call.stream(delta("a"), end=False)
        await asyncio.Event().wait()

    engine = FakeEngine()
    async with running(engine, drain_s=0.3, check_after=False) as router:
        engine.script = endless
        client = await router.client(chat(stream=True))
        assert (await client.head()).status == 200
        await client.reader.readuntil(b"\n\n")
    # the router has ended although the stream had not
    assert len(engine.aborted) == 1
    assert router.counted() == (0, 0, 0)
    assert b"[DONE]" not in await client.reader.read()
    client.leave()
