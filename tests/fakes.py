"""Fakes on raw sockets that tests share: an engine that misbehaves by script, and a client that parses strictly.

Nothing here uses the HTTP libraries under test.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from smetric.errors import HttpError
from smetric.features import VOCABULARY
from smetric.fleet.exchange import Exchange, Exchanges
from smetric.fleet.record import DecisionRecord
from smetric.http.connection import Handler
from smetric.http.headers import App, Receive, Scope, Send
from smetric.http.limits import HttpLimits
from smetric.http.listener import address_of, listen, serve_port
from smetric.http.tls import Tls
from smetric.http.transaction import Transaction
from smetric.proxy.error_response import error_body
from smetric.routing.policy_files import PolicyFile
from smetric.routing.routes import Route, Routes

Headers = list[tuple[bytes, bytes]]
Script = Callable[["Call"], Awaitable[None]]

CAPTURES = Path(__file__).parent / "data" / "vllm"
#: An idle engine's page, as far as decisions need it.
METRICS = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc 0.0\n"
MODELS = b'{"object":"list","data":[{"id":"tiny","object":"model","root":"/models/tiny","parent":null}]}'


def capture(name: str) -> tuple[bytes, bytes]:
    """The request and the response of a wire capture, as bytes on the wire."""
    request, _, response = (CAPTURES / f"{name}.http").read_bytes().partition(b"\n===== RESPONSE =====\n")
    return request, response


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait for *condition*; fails after *within_s* seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.005)


async def live(receive: Receive, send: Send) -> None:
    """Answer an ASGI server's lifespan, as an app with nothing to start or to stop does."""
    for said in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{said}.complete"})


class PlainHandler:
    """ASGI app on the listener, without the guard that `Intake` is.

    Args:
        app: the app.
        limits: of the listener.
    """

    def __init__(self, app: App, limits: HttpLimits | None = None) -> None:
        self._app = app
        self.limits = limits or HttpLimits()
        self.connections: Callable[[], tuple[int, int]] = lambda: (0, 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the lifespan."""
        await live(receive, send)

    async def serve(self, scope: Scope, client: Transaction) -> None:
        """Answer a request."""
        await self._app(scope, client, client.send)

    def refused(self, problem: HttpError, scope: Scope, is_seen: bool) -> None:
        """Count nothing."""

    def error_body(self, path: str, problem: HttpError) -> bytes:
        """An error as OpenAI shapes it."""
        return error_body(path, problem)


@dataclass(frozen=True)
class Listening:
    """A listener that serves until `stop` is set; then its task ends."""

    url: str
    stop: asyncio.Event
    task: asyncio.Task[None]

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 0


@contextlib.asynccontextmanager
async def listening(
    handler: Handler, *, port: int = 0, drain_s: float = 1.0, tls: Tls | None = None
) -> AsyncIterator[Listening]:
    """Serve *handler* on a listener of its own, which must end in time."""
    stop = asyncio.Event()
    with listen("127.0.0.1", port) as sock:
        task = asyncio.create_task(serve_port(handler, sock, stop=stop.wait, drain_s=drain_s, tls=tls))
        try:
            yield Listening(address_of(sock), stop, task)
        finally:
            stop.set()
            async with asyncio.timeout(10):
                await task


@dataclass
class Call:
    """One request an engine received, and the means to answer it."""

    method: bytes
    target: bytes
    #: As on the wire: order, case and duplicates.
    headers: Headers
    body: bytes
    writer: asyncio.StreamWriter = field(repr=False)
    #: How many requests this connection has carried, this one included.
    nth: int = 1
    #: Loop time at which the router closed the connection before the answer was complete; None: it did not.
    aborted_at: float | None = None

    def values(self, name: bytes) -> list[bytes]:
        """The values of the header *name*, in order."""
        return [value for key, value in self.headers if key.lower() == name]

    async def send(self, data: bytes) -> None:
        """Send raw bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        """Send a whole answer with a Content-Length."""
        await self.send(head(status, (b"content-length", b"%d" % len(body)), *headers) + body)

    async def stream(self, *events: bytes, kind: bytes = b"text/event-stream; charset=utf-8", end: bool = True) -> None:
        """Send a chunked answer, one chunk for each event."""
        await self.send(head(200, (b"content-type", kind), (b"transfer-encoding", b"chunked")))
        for event in events:
            await self.send(chunk(event))
        if end:
            await self.send(b"0\r\n\r\n")

    def reset(self) -> None:
        """End the connection with an RST."""
        linger = struct.pack("ii", 1, 0)  # closing without it sends a FIN
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()

    def close(self) -> None:
        """End the connection with a FIN."""
        self.writer.close()


def routes_by(policy: Path) -> Routes:
    """One policy for all requests."""
    file = PolicyFile(policy, VOCABULARY)
    return Routes([Route(file.name, file)])


def head(status: int, *headers: tuple[bytes, bytes]) -> bytes:
    """The head of an answer."""
    lines = b"".join(b"%b: %b\r\n" % field for field in headers)
    return b"HTTP/1.1 %d X\r\n%b\r\n" % (status, lines)


def chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def delta(text: str) -> bytes:
    """One event of a chat stream."""
    return b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text.encode()


USAGE = b'"usage":{"prompt_tokens":20,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":16}}'
DONE = b"data: [DONE]\n\n"
CHAT_ANSWER = b'{"id":"chatcmpl-1","choices":[{"index":0,"message":{"role":"assistant","content":"ok"}}],%b}' % USAGE


async def healthy(call: Call) -> None:
    """Answer like an engine that is well: a stream if one was asked for."""
    if b'"stream":true' in call.body.replace(b" ", b""):
        await call.stream(delta("o"), delta("k"), DONE)
    else:
        await call.answer(200, CHAT_ANSWER, (b"content-type", b"application/json"))


async def idle_page(call: Call) -> None:
    """The metrics of an engine that does nothing."""
    await call.answer(200, METRICS, (b"content-type", b"text/plain; version=0.0.4"))


async def alive(call: Call) -> None:
    """Answer a health probe like an engine that is well."""
    await call.answer(200, b"")


async def one_model(call: Call) -> None:
    """A list of the one model `tiny`."""
    await call.answer(200, MODELS, (b"content-type", b"application/json"))


async def hang(call: Call) -> None:
    """Never answer."""
    await asyncio.Event().wait()


class FakeEngine:
    """Engine whose answers follow a script, except for `/metrics`, `/health` and the model list.

    A call whose connection the router closes is cancelled, and the time noted in `aborted_at`.
    """

    def __init__(self, script: Script = healthy) -> None:
        self.script = script
        self.metrics: Script = idle_page
        self.models: Script = one_model
        self.health: Script = alive
        #: The calls that went to the script, in the order of arrival.
        self.calls: list[Call] = []
        #: How many connections were accepted.
        self.connections = 0
        self.url = ""
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        #: Connections that wait for another call, those of the router's scraper left out.
        self._idle: set[asyncio.Task[None]] = set()

    def recover(self) -> None:
        """Be well from now on."""
        self.script, self.metrics, self.models, self.health = healthy, idle_page, one_model, alive

    @property
    def aborted(self) -> list[Call]:
        """The calls that the router gave up before they were answered."""
        return [call for call in self.calls if call.aborted_at is not None]

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        """Listen on *port*, or on a free one."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=1 << 20)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Refuse new connections and drop open ones."""
        assert self._server is not None
        self._server.close()
        for _ in range(3):
            await asyncio.sleep(0)  # a connection that is just being accepted becomes a task
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def drop_idle(self) -> None:
        """Close idle connections, as engines do after a while."""
        for task in self._idle:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self.connections += 1
        try:
            pending, nth, is_scraper = b"", 0, False
            while not writer.is_closing():
                call = await self._receive(reader, writer, pending)
                self._idle.discard(task)
                nth += 1
                call.nth = nth
                pending = await self._answer(call, reader)
                is_scraper = is_scraper or call.target == b"/metrics"
                if not is_scraper:
                    self._idle.add(task)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the router or the test is done with this connection
        finally:
            self._open.discard(task)
            self._idle.discard(task)
            writer.close()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pending: bytes) -> Call:
        lines = (pending + await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        method, target, _ = lines[0].split(b" ")
        headers: Headers = []
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            headers.append((name, value.strip(b" \t")))
        length = next((int(value) for name, value in headers if name.lower() == b"content-length"), 0)
        return Call(method, target, headers, await reader.readexactly(length), writer)

    async def _answer(self, call: Call, reader: asyncio.StreamReader) -> bytes:
        """Run the script while watching for the router to leave; returns what the router sent meanwhile."""
        if call.target == b"/metrics":
            script = self.metrics
        elif call.target == b"/v1/models":
            script = self.models
        elif call.target == b"/health":
            script = self.health
        else:
            script = self.script
            self.calls.append(call)
        answering = asyncio.ensure_future(script(call))
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                try:
                    answering.result()
                except ConnectionError:
                    call.aborted_at = asyncio.get_running_loop().time()
                    raise
                return leaving.result() if leaving.done() and leaving.exception() is None else b""
            call.aborted_at = asyncio.get_running_loop().time()
            raise ConnectionResetError
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)


@dataclass
class Response:
    """Response as a client read it."""

    status: int
    #: Names as on the wire.
    headers: Headers
    body: bytes
    #: The body is complete by its framing.
    complete: bool

    def values(self, name: str) -> list[str]:
        """The values of the header *name*, in order."""
        return [value.decode("latin-1") for key, value in self.headers if key.lower() == name.encode()]

    def value(self, name: str) -> str:
        """The only value of the header *name*."""
        (value,) = self.values(name)
        return value


def request(method: str, target: str, body: bytes = b"", headers: Iterable[tuple[str, str]] = ()) -> bytes:
    """A request with a Host and, where it has a body, a Content-Length and a Content-Type, JSON by default."""
    lines, headers = [f"{method} {target} HTTP/1.1", "Host: router"], list(headers)
    if body:
        lines.append(f"Content-Length: {len(body)}")
        if all(name.lower() != "content-type" for name, _ in headers):
            lines.append("Content-Type: application/json")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class RawClient:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, url: str) -> RawClient:
        """Connect to the host and port of *url*."""
        parts = urlsplit(url)
        return cls(*await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 22))

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def send(self, data: bytes) -> None:
        """Send raw bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Response:
        """The head of the next answer; its body stays unread."""
        async with asyncio.timeout(10):
            lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        fields = [line.partition(b":") for line in lines[1:]]
        return Response(int(lines[0].split(b" ")[1]), [(n, v.strip()) for n, _, v in fields], b"", False)

    async def response(self, method: str = "POST") -> Response:
        """The next answer, as far as it comes."""
        response = await self.head()
        length = response.values("content-length")
        body = bytearray()
        try:
            async with asyncio.timeout(10):
                if method == "HEAD" or response.status == 204:
                    response.complete = True
                elif response.values("transfer-encoding"):
                    while size := int(await self.reader.readuntil(b"\r\n"), 16):
                        body += (await self.reader.readexactly(size + 2))[:-2]
                    await self.reader.readexactly(2)
                    response.complete = True
                elif length:
                    body += await self.reader.readexactly(int(length[0]))
                    response.complete = True
                else:
                    body += await self.reader.read()
        except asyncio.IncompleteReadError as error:
            body += error.partial if length else b""
        except ConnectionError:
            pass  # an abnormal end: `complete` stays False
        response.body = bytes(body)
        return response

    async def at_end(self) -> bool:
        """Whether the server has closed the connection and sent nothing more; waits for it."""
        try:
            async with asyncio.timeout(5):
                return await self.reader.read() == b""
        except ConnectionError:
            return True

    def leave(self) -> None:
        """Close with a FIN."""
        self.writer.close()

    def reset(self) -> None:
        """Close with an RST."""
        self.writer.transport.abort()


async def fetch(
    url: str, method: str, target: str, body: bytes = b"", headers: Iterable[tuple[str, str]] = ()
) -> Response:
    """Send one request on a new connection."""
    async with await RawClient.connect(url) as client:
        await client.send(request(method, target, body, headers))
        return await client.response(method)


def exchange_of(*records: DecisionRecord, arrival_ns: int = 0) -> Exchange:
    """An exchange without listeners, with these decisions, the last one last."""
    exchange = Exchanges(()).begin({"headers": []}, "/v1/chat/completions", trusted=True)
    exchange.arrival_ns = arrival_ns
    exchange.previous, exchange.record = (None, None, *records)[-2:]
    return exchange
