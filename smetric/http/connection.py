"""HTTP/1.1 server connection: pipelining, limits, orderly close."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from math import inf
from typing import Any, Protocol, cast
from urllib.parse import unquote

import httptools
import structlog

from smetric.errors import HttpError, RequestError
from smetric.http.headers import Receive, Scope, Send, retry_fields
from smetric.http.limits import BODY_FIELDS, Limits, has_body, inspect_head
from smetric.http.transaction import HIGH_WATER, Stage, Transaction
from smetric.http.watchdog import Timer, Watchdog

#: After an answer to a half-read request, this much more of its body is read and dropped, for at most this long, so
#: that the client reads the answer instead of a reset.
LINGER_S = 1.0
LINGER_BYTES = 4 * 1024 * 1024
#: The error for a failure of the application; the log has the reason.
FAULT = HttpError(500, "a fault in the router; its log says where", "internal_error")


class Handler(Protocol):
    """Application of a listener: an ASGI app with the listener's settings.

    `__call__` is used for the lifespan only.
    """

    limits: Limits
    #: Set by the listener: the number of open connections and their limit.
    connections: Callable[[], tuple[int, int]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the lifespan."""

    async def serve(self, scope: Scope, client: Transaction) -> None:
        """Answer a request whose head has passed `inspect_head`."""

    def refused(self, problem: HttpError, scope: Scope, is_seen: bool) -> None:
        """Count a request that was refused before it was whole; *is_seen*: `serve` has it, and counts it itself."""

    def error_body(self, path: str, problem: HttpError) -> bytes:
        """Return the JSON body of an error on *path*."""


def explain(error: httptools.HttpParserError) -> RequestError:
    """Return the error for what httptools refused; its own text could quote the request."""
    reason = str(error)
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return RequestError("this method is not served here", status=405, kind="method_not_allowed")
    if "HTTP version" in reason or "PRI" in reason:
        return RequestError("HTTP/1.1 is spoken here", status=505, kind="http_version_not_supported")
    if "Transfer-Encoding" in reason or "Content-Length" in reason:
        return RequestError("Content-Length and Transfer-Encoding must say once, and plainly, where the body ends")
    return RequestError("the request is not well-formed HTTP/1.1")


def oddity(scope: Scope) -> HttpError | None:
    """Return the reason to refuse a request of another protocol, or None."""
    if scope["http_version"] == "0.9":
        return RequestError("the request line lacks its HTTP version")
    if any(name == b"upgrade" and b"websocket" in value.lower() for name, value in scope["headers"]):
        return RequestError("WebSockets are not spoken here")
    return None


def refusal(
    problem: HttpError, scope: Scope | None, url: bytes, error_body: Callable[[str, HttpError], bytes]
) -> bytes:
    """Return a whole response, after which the connection closes."""
    path = scope["path"] if scope is not None else url.decode("latin-1")
    body = error_body(path, problem)
    lines = [
        f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"date: {formatdate(usegmt=True)}",
        "connection: close",
    ]
    if problem.status == 405:
        lines.append("allow: GET, HEAD, POST, DELETE")
    lines += [f"{name.decode()}: {value.decode()}" for name, value in retry_fields(problem)]
    head = "\r\n".join([*lines, "", ""]).encode("ascii")
    return head if scope is not None and scope["method"] == "HEAD" else head + body


# What the ASGI scopes of all requests of a connection have in common.


def scope_over(transport: asyncio.BaseTransport) -> dict[str, Any]:
    """A scope for a request that comes over *transport*; what is None is the request's own, and to be filled in."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": None,
        "method": None,
        "scheme": "http" if transport.get_extra_info("ssl_object") is None else "https",
        "path": None,
        "raw_path": None,
        "query_string": None,
        "root_path": "",
        "headers": None,
        "client": _address(transport, "peername"),
        "server": _address(transport, "sockname"),
        "state": None,
        "extensions": {},
    }


def _address(transport: asyncio.BaseTransport, name: str) -> tuple[str, int] | None:
    address = transport.get_extra_info(name)
    return (address[0], address[1]) if isinstance(address, tuple) else None


# What a client sends, read or left with the system for now; the system says meanwhile whether the client has left.
#
# When to read is `http1.py`'s, and the end of a connection that is read.

#: Seconds between two looks.
EVERY_S = 0.05
#: The other side has closed its own; where the system has no word for that, only that the connection is gone.
_CLOSED = getattr(select, "POLLRDHUP", 0)


def polled(transport: asyncio.BaseTransport, event: int) -> bool:
    """Whether the system says *event* of a connection, such as `select.POLLIN`, or that it is gone."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), event)
    return bool(poll.poll(0))


class Inflow:
    """Pauses and resumes the reading of one connection, and looks for its client's departure while it is not read.

    Args:
        transport: the connection, which is read.
        left: called once, when the client has left.
    """

    __slots__ = ("_left", "_loop", "_timer", "_transport", "is_paused")

    def __init__(self, transport: asyncio.Transport, left: Callable[[], object]) -> None:
        self._transport = transport
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.is_paused = False

    def pause(self, is_paused: bool) -> None:
        """Whether to leave with the system what comes; nothing is left once the connection closes."""
        if is_paused is self.is_paused or self._transport.is_closing():
            return
        self.is_paused = is_paused
        if is_paused:
            self._transport.pause_reading()
            self._watch()
        else:
            self._transport.resume_reading()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(EVERY_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self.is_paused or self._transport.is_closing():
            return
        if polled(self._transport, _CLOSED):
            self._left()
        else:
            self._watch()


# The task in which an app answers the requests of one connection, one after the other: a task for each costs more.
#
# Which request comes next, and when, is `http1.py`'s.


class Turns:
    """Whose turn it is to be answered.

    Args:
        handler: what answers.
        timer: of deadlines.
        loop: where the task runs.
    """

    __slots__ = ("_handler", "_is_over", "_loop", "_next", "_timer", "_turn", "task")

    def __init__(self, handler: Handler, timer: Timer, loop: asyncio.AbstractEventLoop) -> None:
        self._handler = handler
        self._timer = timer
        self._loop = loop
        self._is_over = False
        #: What the task is to take up, and what it waits on for that.
        self._turn: Transaction | None = None
        self._next: asyncio.Future[None] | None = None
        #: None before the first request.
        self.task: asyncio.Task[None] | None = None

    def take(self, turn: Transaction) -> None:
        """*turn* is next, and the one before has been answered."""
        self._turn = turn
        if self.task is None or self.task.done():
            self.task = self._loop.create_task(self._serve())
        elif self._next is not None and not self._next.done():
            self._next.set_result(None)

    def end(self) -> None:
        """The client has left: end once the app has."""
        self._is_over = True
        if self._next is not None and not self._next.done():
            self._next.set_result(None)

    async def _serve(self) -> None:
        task = cast("asyncio.Task[None]", self.task)
        watchdog = Watchdog(task, self._timer)
        try:
            while True:
                turn, self._turn = self._turn, None
                if turn is not None:
                    await turn.run(self._handler.serve, task, watchdog)
                elif self._is_over:
                    break
                else:
                    self._next = self._loop.create_future()
                    await self._next
        finally:
            if self._turn is not None:  # cancelled behind an answer, with another request at hand
                self.task = self._loop.create_task(self._serve())


# The requests in what a client sends, told apart without doubt: each is handed on as soon as its head is whole.
#
# Parsing is httptools' (llhttp, strict): what it refuses is refused, and what it lets pass is judged by `inspect_head`.
# Whose turn it is, and what becomes of the connection, is `http1.py`'s.

log = structlog.get_logger("smetric.server")


class Parser:
    """Reads the requests of one connection.

    Args:
        connection: told of them.
        scope: what each scope begins as.
        limits: bounds on one request.
        state: the lifespan's state, copied into each scope.
    """

    __slots__ = (
        "_body_bytes",
        "_connection",
        "_limits",
        "_overhead",
        "_parser",
        "_received",
        "_scope",
        "_state",
        "headers",
        "receiving",
        "url",
    )

    def __init__(self, connection: Http1, scope: dict[str, Any], limits: Limits, state: Mapping[str, Any]) -> None:
        self._connection = connection
        self._scope = scope
        self._limits = limits
        self._state = state
        self._parser = httptools.HttpRequestParser(self)
        #: Bytes of the request being read: those that are not of its body, and those that are.
        self._overhead = self._body_bytes = 0
        #: No head that ends in the last data is longer.
        self._received = 0.0
        #: The head being read; None between its end and the next request.
        self.headers: list[tuple[bytes, bytes]] | None = None
        self.url = b""
        #: Whose body is arriving.
        self.receiving: Transaction | None = None

    def read(self, data: bytes) -> int:
        """Take in *data*; how many bytes of it are of no body."""
        before = self._overhead
        self._overhead = before + len(data)
        if before:
            self._received += len(data)
        else:  # what had come of a head that began behind another request was not counted
            self._received = len(data) if self.headers is None else inf
        while data:
            data = self._parse(data)
        limits, overhead = self._limits, self._overhead
        if overhead > limits.header_bytes and overhead > limits.overhead_bytes(self._body_bytes):
            in_head = self.headers is not None
            status = (414 if len(self.url) > limits.target_bytes else 431) if in_head else 400
            problem = RequestError("the request takes more bytes around its body than allowed", status=status)
            self._connection.refuse(problem)
        return overhead - before

    def _parse(self, data: bytes) -> bytes:
        """Parse *data*; what is returned of it has not been parsed, and is to be."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade()
            return b"" if self._connection.is_deaf else data[upgrade.args[0] :]
        except httptools.HttpParserCallbackError:
            log.exception("smetric.connection.failed")
            self._connection.abort()
        except httptools.HttpParserError as error:
            self._connection.refuse(explain(error))
        return b""

    def _ignore_upgrade(self) -> None:
        """Go on with HTTP/1.1 behind a request to change to another protocol, with its body first if it has one."""
        self._parser = httptools.HttpRequestParser(self)
        if self.receiving is not None:  # a fresh parser is told of the same body
            framing = b"".join(
                b"%b: %b\r\n" % field for field in self.receiving.scope["headers"] if field[0] in BODY_FIELDS
            )
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)

    # From httptools

    def on_message_begin(self) -> None:
        """A request begins."""
        self.headers = []
        self.url = b""
        self._connection.deadline = 0.0

    def on_url(self, piece: bytes) -> None:
        """*piece* of the request target."""
        self.url += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field; those behind a body are dropped."""
        headers = self.headers
        if headers is not None:
            headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        headers, self.headers = self.headers, None
        connection = self._connection
        if headers is None or connection.is_deaf or self.receiving is not None:  # the last: behind an upgrade
            return
        parser = self._parser
        raw_path, _, query = self.url.partition(b"?")
        path = raw_path.decode("ascii")
        version = parser.get_http_version()
        scope = self._scope.copy()
        scope["http_version"] = version
        scope["method"] = parser.get_method().decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = raw_path
        scope["query_string"] = query
        scope["headers"] = headers
        scope["state"] = {**self._state}
        problem = oddity(scope) if version == "0.9" or parser.should_upgrade() else None
        if problem is None:
            problem = inspect_head(scope, self._limits, self._received)
        if problem is not None:
            connection.refuse(problem, scope)
            return
        keep_alive = version == "1.1" and parser.should_keep_alive()
        transaction = self.receiving = Transaction(connection, scope, self._limits, keep_alive)
        connection.begin(transaction)

    def on_body(self, piece: bytes) -> None:
        """*piece* of a body."""
        size = len(piece)
        self._overhead -= size
        self._body_bytes += size
        receiving = self.receiving
        if receiving is None:
            return
        receiving.feed(piece)
        if receiving.buffered > HIGH_WATER or self._connection.waiting:
            self._connection.set_reading()

    def on_message_complete(self) -> None:
        """A request is whole."""
        receiving = self.receiving
        if receiving is None:
            return
        if self._parser.should_upgrade() and has_body(receiving.scope):
            return  # the parser takes its body for another protocol
        self.receiving = None
        self._overhead = self._body_bytes = 0
        receiving.end_body()
        self._connection.complete(receiving)


# HTTP/1.1 on one connection: requests answered in order, bounded in number and time, and an end behind its use.
#
# Whatever leaves in doubt where a request ends is answered once, and the connection ends behind it. Requests are told
# apart in `parser.py`; one and its answer are in `transaction.py`, the task that answers in `turns.py`, connections in
# their number and their start and end in `connection.py`. In what it differs from Hypercorn's own is held by
# `tests/proxy/test_deviations.py`.

#: How long a connection may wait for its client to take a goodbye, or what is buffered of an answer that was broken
#: off, seconds.
CLOSE_TIMEOUT_S = 2.0
#: Seconds in which a connection that ends may still bring a request: it may be on its way already, from a client that
#: was not told, for its last answer had begun before.
LAST_REQUEST_S = 0.5
#: Requests that may wait behind the one being answered before reading pauses, and before no more are taken.
PIPELINE_PAUSE = 8
PIPELINE_MOST = 512
#: The same for the header fields of them all: each takes some twenty times the four bytes that it may be on the wire.
PIPELINE_FIELDS = 4096
#: Ends a connection by a reset instead of a FIN, as a socket option.
RESET = struct.pack("ii", 1, 0)
#: After so much of it at once others have their turn: the transport would go on reading what there is.
FRAMING_AT_ONCE = 64 * 1024


class Http1(asyncio.Protocol):
    """One connection of a client.

    Args:
        handler: what answers requests.
        state: the lifespan's state, copied into each scope.
        lost: called when the connection is no more.
        timer: of deadlines; shared with other connections of the loop, None for one of its own.
    """

    __slots__ = (
        "_current",
        "_drain",
        "_dropped",
        "_handler",
        "_has_left",
        "_inflow",
        "_is_closing",
        "_limits",
        "_loop",
        "_lost",
        "_parser",
        "_scope",
        "_state",
        "_timer",
        "_transport",
        "_waiting_fields",
        "deadline",
        "is_deaf",
        "is_ending",
        "is_full",
        "turns",
        "waiting",
    )

    def __init__(
        self,
        handler: Handler,
        state: Mapping[str, Any],
        lost: Callable[[Http1], object],
        timer: Timer | None = None,
    ) -> None:
        self._handler = handler
        self._limits = handler.limits
        self._state = state
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self.turns = Turns(handler, timer or Timer(), self._loop)
        #: From `connection_made` on; and what each scope begins as.
        self._transport: asyncio.Transport
        self._parser: Parser
        self._scope: dict[str, Any]
        #: Who is being answered.
        self._current: Transaction | None = None
        #: Behind it.
        self.waiting: deque[Transaction | bytes] = deque()
        self._waiting_fields = 0
        #: Nothing more is read as a request; what still comes is dropped, and counted.
        self.is_deaf = False
        self._dropped = 0
        self._is_closing = self._has_left = False
        #: None before reading is paused for the first time.
        self._inflow: Inflow | None = None
        #: What who answers waits on while the client takes less.
        self._drain: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: By which a request or the rest of its head is to come; 0 for a head that has just begun.
        self.deadline = 0.0
        self.is_full = self.is_ending = False

    # From the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self._transport = cast(asyncio.Transport, transport)
        self._scope = scope_over(transport)
        self._parser = Parser(self, self._scope, self._limits, self._state)
        self._await_request(self._limits.idle_timeout_s)

    def data_received(self, data: bytes) -> None:
        """*data* has arrived."""
        if self.is_deaf:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self._close(0.0)
            return
        parser = self._parser
        framing = parser.read(data)
        if framing > FRAMING_AT_ONCE and not self.is_deaf:
            self._pause(True)
            self._loop.call_soon(self.set_reading)
        if parser.headers is not None and not self.deadline and self._current is None and not self.is_deaf:
            self._await_request(self._limits.head_timeout_s)

    def eof_received(self) -> None:
        """The client has closed its side: it waits for nothing any more. The transport closes itself."""
        self._leave()
        self._close(CLOSE_TIMEOUT_S)

    def connection_lost(self, _: Exception | None) -> None:
        """The connection is no more."""
        self._is_closing = True
        self._leave()
        self._cancel_timer()
        self._lost(self)

    def pause_writing(self) -> None:
        """The client takes less than it is sent."""
        self.is_full = True

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.is_full = False
        if self._drain is not None and not self._drain.done():
            self._drain.set_result(None)

    # From the parser

    def begin(self, transaction: Transaction) -> None:
        """The head of a request is whole: its turn has come, or comes behind others."""
        if self._current is None and not self.waiting:
            self._current = transaction
            self.turns.take(transaction)
        else:
            self.waiting.append(transaction)
            self._waiting_fields += len(transaction.scope["headers"])
            self.set_reading()

    def complete(self, transaction: Transaction) -> None:
        """A request is whole."""
        if len(self.waiting) >= PIPELINE_MOST or self._waiting_fields >= PIPELINE_FIELDS:
            transaction.is_last = self.is_deaf = True
        if self._inflow is not None:  # the app may never take this body, and then nobody else would resume
            self.set_reading()

    # For transactions

    def write(self, *pieces: bytes) -> None:
        """Send *pieces*, unless the client has left."""
        if self._is_closing:
            return
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        else:
            self._transport.writelines(pieces)

    async def drained(self) -> None:
        """Wait until the client has taken most of what was sent, or has left."""
        if self.is_full and not self._has_left:
            self._drain = self._loop.create_future()
            await self._drain

    def taken(self) -> None:
        """The app has taken what there was of the body."""
        if self._inflow is not None:
            self.set_reading()

    def answered(self, transaction: Transaction) -> None:
        """The answer is whole: go on with the next request, or end."""
        self._current = None
        if transaction.is_last and (self.is_deaf or self.waiting or not transaction.complete):
            self._linger()
        elif transaction.is_last:
            self._close(self._limits.send_timeout_s)
        elif self.waiting:
            self._start(self.waiting.popleft())
            self.set_reading()
        else:
            idle_s = LAST_REQUEST_S if self.is_ending else self._limits.idle_timeout_s
            self._await_request(idle_s if self._parser.headers is None else self._limits.head_timeout_s)

    def failed(self, transaction: Transaction) -> None:
        """The app has ended before its answer was whole: say so, by a 500 or by the connection's end."""
        self._current = None
        stage, transaction.stage = transaction.stage, Stage.ENDED
        if stage is Stage.WAITING:
            self.is_deaf = True
            self.waiting.clear()
            self._start(refusal(FAULT, transaction.scope, b"", self._handler.error_body))
            return
        if transaction.ends_by_close:  # what there is of it would look whole
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            if not self._transport.can_write_eof():  # TLS would say goodbye first
                self._transport.abort()
        self._close(CLOSE_TIMEOUT_S)

    # Waiting and ending

    def _start(self, turn: Transaction | bytes) -> None:
        if isinstance(turn, bytes):
            self.write(turn)
            self._linger()
            return
        self._current = turn
        self._waiting_fields -= len(turn.scope["headers"])
        self.turns.take(turn)

    def refuse(self, problem: HttpError, scope: Scope | None = None) -> None:
        """Answer *problem* when its turn has come; nothing behind it counts."""
        if self.is_deaf:
            return
        self.is_deaf = True
        self.set_reading()
        broken, self._parser.receiving = self._parser.receiving, None
        is_seen = broken is not None and broken is self._current
        if broken is not None:
            broken.leave(problem)
            if is_seen:
                self._current = None
                if broken.stage is Stage.STARTED:
                    self._close(CLOSE_TIMEOUT_S)
                    return
            else:
                self.waiting.remove(broken)
        self._handler.refused(problem, self._scope, is_seen)
        said = refusal(problem, scope, self._parser.url, self._handler.error_body)
        if self._current is None and not self.waiting:
            self._start(said)
        else:
            self.waiting.append(said)

    def _await_request(self, seconds: float) -> None:
        self.deadline = deadline = self._loop.time() + seconds
        if self._timer is not None and self._timer.when() > deadline:
            self._cancel_timer()
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._check)

    def _check(self) -> None:
        """The deadline for a request may have passed. It moves without its timer, which would cost more than this."""
        self._timer = None
        if self._current is not None or self.is_deaf:
            return
        if self._loop.time() < self.deadline:
            self._timer = self._loop.call_at(self.deadline, self._check)
        elif polled(self._transport, select.POLLIN):  # what has come is read first; a close would reset it
            self._await_request(LAST_REQUEST_S)
        elif self._parser.headers is None:
            self._close(self._limits.send_timeout_s)
        else:
            text = f"the request's head did not arrive within {self._limits.head_timeout_s:g} s"
            self.refuse(RequestError(text, status=408, kind="request_timeout"))

    def set_reading(self) -> None:
        """Pause or resume reading: by what waits for the app, and always on when it is dropped anyway."""
        is_paused = len(self.waiting) >= PIPELINE_PAUSE
        if not is_paused:  # then they are few
            turns = {self._parser.receiving, *self.waiting}
            is_paused = sum(turn.buffered for turn in turns if isinstance(turn, Transaction)) > HIGH_WATER
        self._pause(is_paused and not self.is_deaf)

    def _pause(self, is_paused: bool) -> None:
        if self._inflow is None:
            if not is_paused or self._transport.is_closing():
                return
            self._inflow = Inflow(self._transport, self.eof_received)
        self._inflow.pause(is_paused)

    def _leave(self) -> None:
        """The client has left: nobody waits for an answer any more."""
        if self._has_left:
            return
        self._has_left = self.is_deaf = True
        self.resume_writing()
        self._parser.receiving = None
        self.waiting.clear()
        self.turns.end()
        current, self._current = self._current, None
        if current is not None:
            current.leave()

    def _linger(self) -> None:
        """Let a client that may still be sending read its answer: a reset could overtake it."""
        self.is_deaf = True
        self.set_reading()
        if self._is_closing or self._transport.is_closing():
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._is_closing = True
        self._cancel_timer()
        self._timer = self._loop.call_later(LINGER_S, self._close, CLOSE_TIMEOUT_S)

    def _close(self, grace_s: float) -> None:
        """Close, and abort if the client has not taken what is buffered within *grace_s*."""
        self._is_closing = self.is_deaf = True
        self._leave()
        self._cancel_timer()
        transport = self._transport
        if not transport.get_write_buffer_size() and polled(transport, select.POLLOUT):
            # The system has it all. Who speaks TLS need not answer our goodbye, nor read it while it asks for nothing.
            grace_s = min(grace_s, CLOSE_TIMEOUT_S)
        transport.close()
        self._timer = self._loop.call_later(grace_s, transport.abort)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """End with what is under way, or is on its way already."""
        self.is_ending = True
        if self._current is None and self._parser.headers is None and not self.is_deaf:
            self._await_request(LAST_REQUEST_S)

    def abort(self) -> None:
        """End at once, whatever is under way."""
        self._is_closing = True
        self._leave()
        self._transport.abort()
