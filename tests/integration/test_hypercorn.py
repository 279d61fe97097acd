"""Differences between our HTTP/1.1 server and Hypercorn, each tried on both with the same app.

They are the reasons for a server of our own: docs/internals/architecture.md. A test fails if ours loses the behaviour,
and if Hypercorn gains it; then there is one reason less.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import pytest
import pytest_asyncio
from hypercorn.asyncio import serve
from hypercorn.config import Config

from smetric.http import connection
from smetric.http.headers import Receive, Scope, Send
from smetric.http.limits import HttpLimits
from smetric.http.listener import address_of, listen, serve_port
from tests.fakes import PlainHandler, RawClient, live, until

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from hypercorn.typing import ASGIFramework

#: Seconds a connection may wait for a request, and for its head.
PATIENCE_S = 0.4
#: Seconds after which no more of an answer comes, and after which what does not happen is taken not to.
SILENCE_S, NEVER_S = 0.03, 0.2
MOST_HEADER_BYTES = 32 * 1024
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKS = b"5\r\nhello\r\n0\r\n\r\n"


class Recorder:
    """An app that answers how long a body was, and remembers what it was asked and which clients left."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.left: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(receive, send)
            return
        self.asked.append(scope["type"])
        path: str = scope["path"]
        if scope["type"] == "websocket":
            return
        size = 0
        while path != "/unread":
            message = await receive()
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                break
        if path == "/unread":
            await asyncio.sleep(0.05)  # as an app that looks something up before it refuses
        elif path == "/waits":
            assert (await receive())["type"] == "http.disconnect"
            self.left.append(path)
            return
        if path == "/floods":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                async with asyncio.timeout(0.05):
                    await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        body = b"%d" % size
        length = [] if path == "/streams" else [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": body, "more_body": False})


@dataclass
class Side:
    """One of the two servers, with its app."""

    url: str
    app: Recorder
    stop: asyncio.Event
    #: Returns the number of open connections.
    connections: Callable[[], int]

    async def said(self, data: bytes) -> bytes:
        """Return the answer to *data* up to the end of the connection or of its output."""
        async with await RawClient.connect(self.url) as client:
            await client.send(data)
            heard = b""
            try:
                while piece := await asyncio.wait_for(client.reader.read(65536), SILENCE_S if heard else 3 * NEVER_S):
                    heard += piece
            except (TimeoutError, ConnectionError):
                pass
            return heard


def stock_connections() -> int:
    """Return the number of connections that Hypercorn has in hand."""
    return sum("_server_callback" in getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())


@dataclass
class Both:
    """Hypercorn as it is, and ours."""

    stock: Side
    ours: Side


@pytest_asyncio.fixture
async def both() -> AsyncIterator[Both]:
    config = Config()
    config.accesslog = config.errorlog = None
    config.h11_max_incomplete_size = MOST_HEADER_BYTES
    config.keep_alive_timeout = PATIENCE_S
    config.graceful_timeout = 0.1
    limits = HttpLimits(
        header_bytes=MOST_HEADER_BYTES, idle_timeout_s=PATIENCE_S, head_timeout_s=PATIENCE_S, connections=2
    )
    async with AsyncExitStack() as stack:
        sockets = [stack.enter_context(listen("127.0.0.1", 0)) for _ in range(2)]
        app = Recorder()
        handler = PlainHandler(app, limits)
        stock = Side(address_of(sockets[0]), Recorder(), asyncio.Event(), stock_connections)
        ours = Side(address_of(sockets[1]), app, asyncio.Event(), lambda: handler.connections()[0])
        config.bind = [f"fd://{sockets[0].detach()}"]
        served = [
            asyncio.create_task(serve(cast("ASGIFramework", stock.app), config, shutdown_trigger=stock.stop.wait)),
            asyncio.create_task(serve_port(handler, sockets[1], stop=ours.stop.wait, drain_s=0.1)),
        ]
        for side in (stock, ours):
            async with await RawClient.connect(side.url) as client:
                await client.send(GET)
                assert (await client.response("GET")).status == 200
            side.app.asked.clear()
        yield Both(stock, ours)
        for side in (stock, ours):
            side.stop.set()
        async with asyncio.timeout(5):
            await asyncio.gather(*served)


def head(*lines: bytes, host: bytes = b"x") -> bytes:
    """A head of these lines and a Host."""
    return b"\r\n".join([lines[0], b"Host: " + host, *lines[1:], b"", b""])


TAKEN = {
    "both lengths, Content-Length first": (
        400,
        head(b"POST / HTTP/1.1", b"Content-Length: 5", b"Transfer-Encoding: chunked") + CHUNKS,
    ),
    "both lengths, Transfer-Encoding first": (
        400,
        head(b"POST / HTTP/1.1", b"Transfer-Encoding: chunked", b"Content-Length: 5") + CHUNKS,
    ),
    "Transfer-Encoding in 1.0": (400, head(b"POST / HTTP/1.0", b"Transfer-Encoding: chunked") + CHUNKS),
    "a length twice": (400, head(b"POST / HTTP/1.1", b"Content-Length: 5", b"Content-Length: 5") + b"hello"),
    "a list of lengths": (400, head(b"POST / HTTP/1.1", b"Content-Length: 5, 5") + b"hello"),
    "bare line feeds": (400, b"GET / HTTP/1.1\nHost: x\n\n"),
    "a folded line": (400, head(b"GET / HTTP/1.1", b"X: a\r\n b")),
    "a version to come": (505, head(b"GET / HTTP/1.2")),
    "HTTP/2.0 in words": (505, head(b"GET / HTTP/2.0")),
    "a method that is not served": (405, head(b"TRACE / HTTP/1.1")),
    "a method in small letters": (405, head(b"get / HTTP/1.1")),
    "CONNECT": (405, head(b"CONNECT x:1 HTTP/1.1")),
    "a fragment": (400, head(b"GET /#a HTTP/1.1")),
    "a host that is none": (400, head(b"GET / HTTP/1.1", host=b"a b/..@c")),
    "many fields": (431, head(b"GET / HTTP/1.1", *(b"x%d: 1" % number for number in range(1500)))),
    "a field of 40 KB in one piece": (431, head(b"GET / HTTP/1.1", b"x: " + b"a" * 40_000)),
    "a long target": (414, head(b"GET /" + b"a" * 16_000 + b" HTTP/1.1")),
}


@pytest.mark.parametrize("case", TAKEN)
async def test_server_refuses_what_hypercorn_takes(both: Both, case: str) -> None:
    status, data = TAKEN[case]
    assert (await both.stock.said(data)).startswith(b"HTTP/1.1 200 ")
    assert both.stock.app.asked == ["http"]
    refused = await both.ours.said(data)
    assert refused.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nconnection: close\r\n" in refused
    assert both.ours.app.asked == []


#: Requests that both answer, with the beginnings of Hypercorn's answer and of ours.
ANSWERED = {
    "an upgrade to HTTP/2": (
        head(
            *(b"GET / HTTP/1.1", b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c"),
            b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA",
        ),
        b"HTTP/1.1 101 ",
        b"HTTP/1.1 200 ",
    ),
    "a body that the app does not read": (
        head(b"POST /unread HTTP/1.1", b"Content-Length: 5", b"Expect: 100-continue"),
        b"HTTP/1.1 100 ",
        b"HTTP/1.1 200 ",
    ),
    "chunks with bare line feeds": (
        head(b"POST / HTTP/1.1", b"Transfer-Encoding: chunked") + b"5\nhello\n0\n\n",
        b"",
        b"HTTP/1.1 400 ",
    ),
}


@pytest.mark.parametrize("case", ANSWERED)
async def test_server_answers_otherwise_than_hypercorn(both: Both, case: str) -> None:
    data, stock, ours = ANSWERED[case]
    said = await both.stock.said(data)
    assert said.startswith(stock)
    assert bool(said) == bool(stock)
    assert (await both.ours.said(data)).startswith(ours)


async def test_server_refuses_the_http2_preface(both: Both) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    settings = await both.stock.said(preface)
    assert (settings[3], settings[5:9]) == (4, bytes(4)), "a SETTINGS frame of the whole connection"
    assert (await both.ours.said(preface)).startswith(b"HTTP/1.1 505 ")


async def test_server_refuses_websockets(both: Both) -> None:
    data = head(
        *(b"GET / HTTP/1.1", b"Connection: Upgrade", b"Upgrade: websocket"),
        *(b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="),
    )
    await both.stock.said(data)
    assert both.stock.app.asked == ["websocket"]
    assert (await both.ours.said(data)).startswith(b"HTTP/1.1 426 ")
    assert both.ours.app.asked == []


async def test_server_sends_the_reason_phrase_and_no_framing_for_head(both: Both) -> None:
    stock, ours = [await side.said(head(b"HEAD /streams HTTP/1.1")) for side in (both.stock, both.ours)]
    assert stock.startswith(b"HTTP/1.1 200 \r\n")
    assert b"transfer-encoding: chunked" in stock.lower()
    assert ours.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding" not in ours


async def test_server_answers_408_to_a_slow_head(both: Both) -> None:
    for side in (both.stock, both.ours):
        async with await RawClient.connect(side.url) as client:
            await client.send(GET[:10])
            if side is both.ours:
                assert (await client.response()).status == 408
            assert await client.at_end()


async def test_server_notices_a_disconnect_after_trailing_bytes(both: Both) -> None:
    for side in (both.stock, both.ours):
        client = await RawClient.connect(side.url)
        await client.send(head(b"GET /waits HTTP/1.1") + b"\r\n")
        await until(lambda side=side: bool(side.app.asked))  # type: ignore[misc]
        client.reset()
    await until(lambda: both.ours.app.left == ["/waits"])
    await asyncio.sleep(NEVER_S)
    assert both.stock.app.left == []


async def test_server_keeps_nothing_of_an_unread_body(both: Both) -> None:
    body = bytes(3_000_000)
    await until(lambda: both.stock.connections() == 0)
    for side in (both.ours, both.stock):
        client = await RawClient.connect(side.url)
        client.writer.write(head(b"POST /unread HTTP/1.1", b"Content-Length: %d" % len(body)) + body)
        assert (await client.head()).status == 200
        client.leave()
        if side is both.ours:
            await until(lambda: both.ours.connections() == 0)
        else:
            await asyncio.sleep(PATIENCE_S + NEVER_S)
            assert both.stock.connections() == 1


async def test_server_closes_the_connection_of_a_client_that_never_reads(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CLOSE_TIMEOUT_S", 0.1)
    await until(lambda: both.stock.connections() == 0)
    for side in (both.ours, both.stock):
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", int(side.url.rpartition(":")[2])))
            deaf.sendall(head(b"GET /floods HTTP/1.1"))
            await until(lambda side=side: bool(side.app.asked))  # type: ignore[misc]
            if side is both.ours:
                await until(lambda: both.ours.connections() == 0)
            else:
                await asyncio.sleep(PATIENCE_S + NEVER_S)
                assert both.stock.connections() == 1
    await until(lambda: both.stock.connections() == 0)


async def test_server_limits_connections(both: Both) -> None:
    for side in (both.stock, both.ours):
        held = [await RawClient.connect(side.url) for _ in range(2)]
        await asyncio.sleep(0.02)
        said = await side.said(GET)
        assert said.startswith(b"HTTP/1.1 503 " if side is both.ours else b"HTTP/1.1 200 ")
        for client in held:
            client.leave()


async def test_server_answers_a_request_that_was_on_its_way_at_the_drain(both: Both) -> None:
    for side in (both.stock, both.ours):
        async with await RawClient.connect(side.url) as client:
            await client.send(GET)
            assert (await client.response("GET")).status == 200
            side.stop.set()
            await asyncio.sleep(0.05)
            if side is both.ours:
                await client.send(GET)
                assert (await client.response("GET")).status == 200
            else:
                assert await client.at_end()
