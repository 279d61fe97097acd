"""Rows B: disconnects and slow readers."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from statistics import median, quantiles

import pytest

from smetric.config.settings import LimitSettings
from smetric.http import listener
from tests.fakes import Call, FakeEngine, RawClient, Script, delta, fetch, hang, request, until
from tests.faults.harness import Running, Tell, chat, running
from tests.faults.process import process

DEPARTURES = 100
#: Seconds from a departure to the abort in the engine.
ABORTED_S = 0.05


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


def delays(engine: FakeEngine, left_at: list[float]) -> list[float]:
    """Seconds from each departure to its abort, of departures one after the other."""
    return [(call.aborted_at or 0.0) - at for call, at in zip(engine.calls, left_at, strict=True)]


def check_delays(delays: list[float]) -> str:
    """The median is short on a busy machine too; the figure is the 99th percentile."""
    assert median(delays) <= ABORTED_S
    return f"p99 {1000 * quantiles(delays, n=100)[98]:.1f} ms"


async def check_departures(how: str, script: Script, *, stream: bool, after_first_byte: bool, count: int) -> str:
    """Have *count* clients leave, one after the other; each must abort its request in the engine and be counted."""
    async with running(FakeEngine(), script=script) as router:
        engine = router.engines[0]
        left_at = []
        for _ in range(count):
            await leave(router, how, stream=stream, after_first_byte=after_first_byte)
            left_at.append(asyncio.get_running_loop().time())
        await until(lambda: len(engine.aborted) == count)
        await until(lambda: router.counted() == (0, 0, 0))
        await until(lambda: sum(line["status"] == 499 for line in router.lines("request")) == count)
        assert router.instance_of(engine).healthy
        return check_delays(delays(engine, left_at))


@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_b1_disconnect_during_a_stream_aborts_it_in_the_engine(how: str, record_property: Tell) -> None:
    delay = await check_departures(how, endless, stream=True, after_first_byte=True, count=DEPARTURES)
    record_property("F4 in a stream", f"{delay}, {how}, in a stream")


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_b2_disconnect_during_prefill_aborts_it_in_the_engine(
    how: str, stream: bool, record_property: Tell
) -> None:
    delay = await check_departures(how, hang, stream=stream, after_first_byte=False, count=DEPARTURES // 2)
    record_property("F4", f"{delay}, {how}, in prefill, {'' if stream else 'not '}streaming")


async def test_b2_disconnect_between_head_and_body_aborts_the_answer() -> None:
    async def only_head(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n")
        await asyncio.Event().wait()

    async with running(FakeEngine(), script=only_head) as router:
        engine = router.engines[0]
        async with await router.client(chat()) as client:
            assert (await client.head()).status == 200
        await until(lambda: len(engine.aborted) == 1)


MORE = {
    "CRLF": b"\r\n",
    "x": b"x",
    "GET": request("GET", "/healthz"),
    "many of them": request("GET", "/healthz") * 20,
    "a large request": request("POST", "/v1/chat/completions", b"x" * 400_000),
    "a large request in chunks": request("POST", "/", headers=[("Transfer-Encoding", "chunked")])
    + b"4000\r\n%b\r\n" % (b"x" * 0x4000) * 24,
}


@pytest.mark.parametrize("extra", MORE.values(), ids=MORE)
async def test_b3_disconnect_after_trailing_bytes_aborts_at_once(extra: bytes) -> None:
    async with running(FakeEngine(), script=hang) as router:
        engine = router.engines[0]
        for _ in range(DEPARTURES // 5):
            client = await router.client(chat(stream=True))
            before = len(engine.calls)
            await client.send(extra)
            await until(lambda before=before: len(engine.calls) > before)  # type: ignore[misc]
            client.leave()
        await until(lambda: len(engine.aborted) == DEPARTURES // 5)
        await until(lambda: router.counted() == (0, 0, 0))


async def test_b5_clients_that_never_read_are_cut_off_and_aborted() -> None:
    event = delta("x" * 60_000)

    async def flood(call: Call) -> None:
        await call.stream(end=False)
        while True:
            await call.send(b"%x\r\n%b\r\n" % (len(event), event))

    deaf_clients = 50
    async with running(FakeEngine(), limits=LimitSettings(send_timeout=1.0), script=flood) as router:
        engine = router.engines[0]
        body = request("POST", "/v1/chat/completions", chat(stream=True))
        port = int(router.url.rpartition(":")[2])
        before = len(asyncio.all_tasks())
        with ExitStack() as stack:
            for _ in range(deaf_clients):
                deaf = stack.enter_context(socket.socket())
                deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                deaf.connect(("127.0.0.1", port))
                deaf.sendall(body)
            await until(lambda: len(engine.calls) == deaf_clients)
            await until(lambda: len(engine.aborted) == deaf_clients, within_s=1.0 + 3.0)
            await until(lambda: router.counted() == (0, 0, 0))
            await until(lambda: len(asyncio.all_tasks()) <= before)
        await until(lambda: len(router.lines("request")) == 1 + deaf_clients)
        assert {(line["status"], line["error_type"]) for line in router.lines("request")[1:]} == {
            (499, "client_stalled")
        }


async def test_b6_connections_above_the_bound_get_503_and_streams_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "most_connections", lambda: 20)
    async with running(FakeEngine(), script=endless) as router:
        engine = router.engines[0]
        streams = [await router.client(chat(stream=True)) for _ in range(20)]
        for client in streams:
            assert (await client.head()).status == 200
        crowd = [await RawClient.connect(router.url) for _ in range(100)]
        refused = 0
        for client in crowd:
            try:
                answer = await client.response()
            except (ConnectionError, asyncio.IncompleteReadError):
                continue  # too many even for that
            assert (answer.status, 1 <= int(answer.value("retry-after")) <= 3) == (503, True)
            refused += 1
        assert refused >= 20
        for client in crowd:
            client.leave()
        for client in streams:
            assert await client.reader.readuntil(b"\n\n")
        assert 1 <= len(router.lines("smetric.connections.full")) <= 2
        for client in streams:
            client.leave()
        engine.recover()
        await until(lambda: router.counted() == (0, 0, 0))
        assert (await router.chat()).status == 200


async def is_served(url: str) -> bool:
    try:
        return (await fetch(url, "GET", "/healthz")).status == 200
    except (ConnectionError, asyncio.IncompleteReadError):
        return False


@pytest.mark.slow
async def test_b6_lack_of_file_descriptors_keeps_streams_and_passes(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        engine = FakeEngine(endless)
        await engine.start()
        stack.push_async_callback(engine.stop)
        few = ("bash", "-c", 'ulimit -n 128; exec "$@"', "-")
        router = await stack.enter_async_context(process(tmp_path / "log", "--instance", engine.url, before=few))
        log = router.log.read_bytes
        streams = [await stack.enter_async_context(await RawClient.connect(router.data)) for _ in range(10)]
        for client in streams:
            await client.send(request("POST", "/v1/chat/completions", chat(stream=True)))
            assert (await client.head()).status == 200
        lines, began = log().count(b"\n"), time.monotonic()
        for _ in range(3):
            crowd = [await RawClient.connect(router.data) for _ in range(200)]
            for client in crowd:
                stack.callback(client.reset)
            await asyncio.sleep(0.3)
            for client in streams:
                assert await client.reader.readuntil(b"\n\n")
            for client in crowd:
                client.reset()
        assert log().count(b"\n") - lines <= 10 * max(1.0, time.monotonic() - began)
        engine.recover()
        deadline = time.monotonic() + 5
        while not await is_served(router.data):
            assert time.monotonic() < deadline


async def test_connection_close_is_logged_with_the_status_sent() -> None:
    async with running(FakeEngine()) as router:
        answer = await router.ask("POST", "/v1/chat/completions", chat(), ("Connection", "close"))
        assert answer.complete
        await until(lambda: len(router.lines("request")) == 2)
        assert router.lines("request")[-1]["status"] == 200
        assert "error_type" not in router.lines("request")[-1]
