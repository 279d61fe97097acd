from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from smetric.http import connection
from smetric.http.connection import HIGH_WATER
from smetric.http.headers import Receive, Scope, Send
from smetric.http.limits import HttpLimits
from smetric.http.transaction import Transaction
from tests.fakes import PlainHandler, RawClient, listening, request, until

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]


@asynccontextmanager
async def serving(endpoint: Endpoint, limits: HttpLimits | None = None) -> AsyncIterator[str]:
    async with listening(PlainHandler(endpoint, limits)) as listener:
        yield listener.url


async def read_body(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    while True:
        message = await receive()
        assert message["type"] == "http.request"
        pieces.append(message["body"])
        if not message["more_body"]:
            return b"".join(pieces)


async def answer(send: Send, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [*headers]})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with what the request was taken for."""
    body = await read_body(receive)
    shown = {"method": scope["method"], "path": scope["path"], "body": body.decode(), "version": scope["http_version"]}
    await answer(send, orjson.dumps(shown), (b"content-type", b"application/json"))


async def echoed(client: RawClient) -> dict[str, Any]:
    response = await client.response()
    assert (response.status, response.complete) == (200, True)
    shown: dict[str, Any] = orjson.loads(response.body)
    return shown


async def test_scope_follows_asgi() -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await echo(scope, receive, send)

    async with serving(app) as url, await RawClient.connect(url) as client:
        await client.send(
            b"POST /a%20b?q=%20 HTTP/1.1\r\nHost: x\r\nX-Up: 1 \r\nx-up: 2\r\nContent-Length: 2\r\n\r\nhi"
        )
        assert (await echoed(client))["body"] == "hi"
    (scope,) = seen
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == ("/a b", b"/a%20b", b"q=%20")
    assert scope["headers"] == [(b"host", b"x"), (b"x-up", b"1"), (b"x-up", b"2"), (b"content-length", b"2")]
    assert (scope["scheme"], scope["method"], scope["http_version"]) == ("http", "POST", "1.1")
    assert scope["client"][0] == "127.0.0.1"
    assert scope["server"][1] == int(url.rpartition(":")[2])


@pytest.mark.parametrize("whole", [True, False], ids=["in one piece", "byte by byte"])
@pytest.mark.parametrize("framing", ["length", "chunked", "none", "empty", "zeros"])
async def test_upgrade_is_ignored_and_its_body_read(framing: str, whole: bool) -> None:
    """Java's HTTP client asks for h2c with every request; the parser by itself would take the body for another one."""
    head = b"POST /first HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    framed = {
        "length": b"Content-Length: 5\r\n\r\nhello",
        "chunked": b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "none": b"\r\n",
        "empty": b"Content-Length: 0\r\n\r\n",
        "zeros": b"Content-Length: 00\r\n\r\n",
    }[framing]
    body = "hello" if framing in ("length", "chunked") else ""
    raw = head + framed + request("POST", "/second", b"more")
    async with serving(echo) as url, await RawClient.connect(url) as client:
        if whole:
            await client.send(raw)
        else:
            for i in range(len(raw)):
                await client.send(raw[i : i + 1])
                await asyncio.sleep(0)
        first, second = await echoed(client), await echoed(client)
    assert (first["path"], first["body"]) == ("/first", body)
    assert (second["path"], second["body"]) == ("/second", "more")


async def test_upgrades_in_one_piece_are_ignored_or_close_the_connection() -> None:
    upgrade = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with serving(echo) as url, await RawClient.connect(url) as client:
        await client.send(upgrade * 1000)
        answered = 0
        while not (response := await client.response("GET")).values("connection"):
            assert response.status == 200
            answered += 1
        assert answered >= 512
        assert await client.at_end()


async def test_connection_answers_500_for_an_app_that_fails_and_closes() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("secret")

    async with serving(failing) as url, await RawClient.connect(url) as client:
        await client.send(GET)
        response = await client.response("GET")
        assert (response.status, response.value("connection")) == (500, "close")
        assert orjson.loads(response.body)["error"]["type"] == "internal_error"
        assert b"secret" not in response.body
        assert await client.at_end()


@pytest.mark.parametrize("said", [1, 9], ids=["longer than announced", "shorter than announced"])
async def test_connection_closes_if_the_body_differs_from_its_content_length(said: int) -> None:
    async def lying(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"hello", (b"content-length", b"%d" % said))

    async with serving(lying) as url, await RawClient.connect(url) as client:
        await client.send(GET + GET)
        head = await client.head()
        assert head.status == 200
        assert len(await client.reader.read()) <= said - (said == 9)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "broken off"])
async def test_connection_resets_a_broken_response_that_only_its_close_delimits(
    is_whole: bool,
) -> None:
    """As HTTP/1.0 has it: a close in good order would make what there is of it look whole."""

    async def breaking_off(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"some", "more_body": True})
        if is_whole:
            await send({"type": "http.response.body"})

    async with serving(breaking_off) as url, await RawClient.connect(url) as client:
        await client.send(b"GET / HTTP/1.0\r\n\r\n")
        assert (await client.head()).values("content-length") == []
        assert await client.reader.read(4) == b"some"
        if is_whole:
            assert await client.reader.read() == b""
        else:
            with pytest.raises(ConnectionResetError):
                await client.reader.read()


@pytest.mark.parametrize("value", [b"a\r\nx: y", b"a\nx: y", b"a\rb", b"a\0b"])
async def test_response_field_that_would_break_the_framing_is_never_sent(value: bytes) -> None:
    async def splitting(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"hello", (b"x-a", value))

    async with serving(splitting) as url, await RawClient.connect(url) as client:
        await client.send(GET)
        response = await client.response("GET")
        assert response.status == 500
        assert response.values("x") == response.values("x-a") == []


async def test_connection_stops_reading_a_body_that_the_app_does_not_take() -> None:
    go = asyncio.Event()
    body = bytes(32 * 1024 * 1024)
    asked: list[Transaction] = []

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(receive, Transaction)
        asked.append(receive)
        await go.wait()
        await answer(send, b"%d" % len(await read_body(receive)), (b"content-length", b"8"))

    async with serving(slow) as url, await RawClient.connect(url) as client:
        sending = asyncio.create_task(client.send(request("POST", "/", body)))
        await until(lambda: bool(asked) and asked[0].buffered > HIGH_WATER)
        held = asked[0].buffered
        assert held < 2 * HIGH_WATER
        await asyncio.sleep(0.1)
        assert asked[0].buffered == held
        assert not sending.done()
        go.set()
        await sending
        assert (await client.response()).body == b"%d" % len(body)


async def test_send_waits_for_a_slow_client() -> None:
    sent = 0

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            if (await asyncio.wait_for(at_once(receive), 1))["type"] == "http.disconnect":
                return
            sent += 1

    async def at_once(receive: Receive) -> Any:
        """`receive`, if it has something to say."""
        task = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        if not task.done():
            task.cancel()
            return {"type": "nothing"}
        return task.result()

    async with serving(endless) as url:
        client = await RawClient.connect(url)
        await client.send(GET)
        assert (await client.head()).status == 200
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        stuck = -1
        for _ in range(100):
            await asyncio.sleep(0.05)
            if sent == stuck:
                break
            stuck = sent
        assert sent == stuck
        assert sent * 65536 < 16 * 1024 * 1024
        client.reset()


async def test_pipeline_is_answered_up_to_its_limit_and_closes_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "PIPELINE_MOST", 30)
    begun = 0

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal begun
        begun += 1
        await answer(send, b"%d" % begun, (b"content-length", b"%d" % len(str(begun))))

    async with serving(counting) as url, await RawClient.connect(url) as client:
        await client.send(GET * 20)
        assert [(await client.response("GET")).body for _ in range(20)] == [b"%d" % n for n in range(1, 21)]
        await client.send(GET * 100)
        bodies = []
        while (response := await client.response("GET")).values("connection") != ["close"]:
            bodies.append(response.body)
        assert 29 <= len(bodies) <= 32
        assert await client.at_end()


async def test_pipeline_limits_the_header_fields_of_all_requests() -> None:
    request = b"GET / HTTP/1.1\r\nhost: a\r\n" + b"a:\r\n" * 95 + b"\r\n"
    async with serving(echo) as url, await RawClient.connect(url) as client:
        for at_once in (20, 20, 20, 120):  # what has been answered counts no more
            await client.send(request * at_once)
            answers = 0
            while answers < at_once and (await client.response("GET")).values("connection") != ["close"]:
                answers += 1
            assert answers == min(at_once, 43)
        assert await client.at_end()


async def test_pipeline_ends_at_a_malformed_request() -> None:
    paths: list[str] = []

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        paths.append(scope["path"])
        await echo(scope, receive, send)

    async with serving(noting) as url, await RawClient.connect(url) as client:
        bad = b"POST /bad HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n"
        await client.send(request("GET", "/good") + bad + request("GET", "/worse"))
        assert (await echoed(client))["path"] == "/good"
        assert (await client.response()).status == 400
        assert await client.at_end()
    assert paths == ["/good"]


@pytest.mark.parametrize("cut", [0, 1, 400, 800])
async def test_head_that_began_after_another_request_has_the_same_limit(cut: int) -> None:
    head = b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n" % (b"A: %b\r\n" % (b"a" * 200) * 6)
    async with serving(echo, HttpLimits(header_bytes=1024)) as url, await RawClient.connect(url) as client:
        await client.send(GET + head[:cut])
        await echoed(client)
        for piece in (head[cut:900], head[900:]):
            await client.send(piece)
            await asyncio.sleep(0.01)
        assert (await client.response()).status == 431
        assert await client.at_end()


@pytest.mark.parametrize("before", [b"", request("GET", "/"), request("POST", "/", b"a" * 2000)])
async def test_head_limit_counts_fields_whatever_arrives_with_them(before: bytes) -> None:
    """Fields, not the bytes between them, are what the limit is on; a head of just as much is served."""
    limits = HttpLimits(header_bytes=1024)
    fits = b"GET / HTTP/1.1\r\nHost: x\r\nA: %b\r\n\r\n" % (b"a" * (1024 - 6))
    async with serving(echo, limits) as url, await RawClient.connect(url) as client:
        await client.send(before + fits + fits.replace(b"aaa", b"aaaa", 1))
        for _ in range(2 if before else 1):
            await echoed(client)
        assert (await client.response()).status == 431
        assert await client.at_end()


@pytest.mark.parametrize("cut", [1, 600, -2], ids=["line", "fields", "end"])
async def test_head_may_reach_all_its_limits_however_it_is_cut(cut: int) -> None:
    limits = HttpLimits(header_bytes=1024, target_bytes=512, header_count=50)
    fields = [(b"Host", b"x"), (b"Content-Length", b"2"), *[(b"A%02d" % n, b"a") for n in range(47)]]
    fields.append((b"Rest", b"r" * (1020 - sum(len(name) + len(value) for name, value in fields))))
    assert (len(fields), sum(len(name) + len(value) for name, value in fields)) == (50, 1024)
    head = b"POST /%b?%b HTTP/1.1\r\n" % (b"p" * 255, b"q" * 256)
    head += b"".join(b"%b: %b\r\n" % field for field in fields) + b"\r\n"
    async with serving(echo, limits) as url, await RawClient.connect(url) as client:
        for piece in (head[:cut], head[cut:], b"hi"):
            await client.send(piece)
            await asyncio.sleep(0.01)
        assert (await echoed(client))["body"] == "hi"


async def test_head_that_began_after_another_request_has_the_same_timeout() -> None:
    async with (
        serving(echo, HttpLimits(head_timeout_s=0.1, idle_timeout_s=30.0)) as url,
        await RawClient.connect(url) as client,
    ):
        await client.send(GET + GET[:10])
        await echoed(client)
        assert (await client.response()).status == 408
        assert await client.at_end()


async def test_empty_lines_between_requests_are_limited() -> None:
    async with (
        serving(echo, HttpLimits(header_bytes=1024, target_bytes=1024)) as url,
        await RawClient.connect(url) as client,
    ):
        await client.send(b"\r\n" + request("GET", "/") + b"\r\n\r\n" + request("GET", "/"))
        assert (await echoed(client))["path"] == (await echoed(client))["path"] == "/"
        for _ in range(8):
            await client.send(b"\r\n" * 512)
            await asyncio.sleep(0.01)
        assert (await client.response()).status == 400
        assert await client.at_end()


async def test_half_closed_connection_is_a_disconnect() -> None:
    left = asyncio.Event()

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)
        assert (await receive())["type"] == "http.disconnect"
        left.set()

    async with serving(waiting) as url, await RawClient.connect(url) as client:
        await client.send(GET)
        await asyncio.sleep(0.02)
        client.writer.write_eof()
        async with asyncio.timeout(1):
            await left.wait()


@pytest.mark.parametrize("leave", [RawClient.leave, RawClient.reset], ids=["FIN", "RST"])
async def test_connection_notices_disconnect_while_reading_is_paused(leave: Callable[[RawClient], None]) -> None:
    left = asyncio.Event()

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(receive, Transaction)
        receive.watch()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    async with serving(waiting) as url:
        client = await RawClient.connect(url)
        await client.send(request("POST", "/", bytes(2 * HIGH_WATER))[: HIGH_WATER + 20_000])
        await asyncio.sleep(2 * connection.DISCONNECT_CHECK_S)
        assert not left.is_set()
        leave(client)
        async with asyncio.timeout(5):
            await left.wait()


async def test_connection_leaves_no_task_behind() -> None:
    async def ask(times: int) -> None:
        for _ in range(times):
            async with await RawClient.connect(url) as client:
                await client.send(GET)
                await echoed(client)

    async with serving(echo) as url:
        await ask(1)
        await asyncio.sleep(0.05)
        before = len(asyncio.all_tasks())
        await ask(20)
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_connection_answers_all_requests_in_one_task() -> None:
    tasks: list[asyncio.Task[Any] | None] = []

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        tasks.append(asyncio.current_task())
        await echo(scope, receive, send)

    async with serving(noting) as url:
        async with await RawClient.connect(url) as client:
            await client.send(GET)
            await echoed(client)
            await client.send(GET + GET)
            await echoed(client)
            await echoed(client)
        assert len(tasks) == 3
        assert len(set(tasks)) == 1
        await until(lambda: tasks[0] not in asyncio.all_tasks())


async def test_connection_answers_the_next_request_in_a_new_task_after_a_cancel() -> None:
    busy: list[asyncio.Task[Any]] = []

    async def lingering(scope: Scope, receive: Receive, send: Send) -> None:
        await echo(scope, receive, send)
        task = asyncio.current_task()
        assert task is not None
        if scope["path"] == "/first":
            busy.append(task)
            await asyncio.Event().wait()

    async with serving(lingering) as url, await RawClient.connect(url) as client:
        await client.send(request("GET", "/first") + request("GET", "/second"))
        assert (await echoed(client))["path"] == "/first"
        await until(lambda: len(busy) == 1)
        busy[0].cancel()
        assert (await echoed(client))["path"] == "/second"


async def test_request_leaves_nothing_for_the_garbage_collector() -> None:
    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(receive, Transaction)
        receive.watch()
        await echo(scope, receive, send)

    async with serving(watched) as url, await RawClient.connect(url) as client:
        await client.send(GET)
        await echoed(client)
        gc.collect()
        gc.disable()
        try:
            for _ in range(50):
                await client.send(GET)
                await echoed(client)
            await asyncio.sleep(0)
            left = [each for each in gc.get_objects() if isinstance(each, Transaction)]
            assert len(left) <= 1
        finally:
            gc.enable()
