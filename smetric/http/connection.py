"""HTTP/1.1 server connection: requests, responses, pipelining, deadlines, orderly close.

A request whose end is in doubt is answered once, and the connection closes after it. httptools (llhttp, strict) parses;
`inspect_head` judges what it lets pass. The listener accepts connections and limits their number.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any, Protocol, cast
from urllib.parse import unquote

import httptools
import structlog

from smetric.errors import HttpError, RequestError
from smetric.http.headers import Receive, Scope, Send
from smetric.http.limits import (
    BODY_FIELDS,
    NO_WEBSOCKET,
    HttpLimits,
    drop_authority,
    explain,
    has_body,
    inspect_head,
    refusal,
    wants_websocket,
)
from smetric.http.transaction import ENDED, STARTED, WAITING, Timer, Transaction, Watchdog

log = structlog.get_logger("smetric.server")

#: Bytes of bodies that may wait for the application before reading pauses.
HIGH_WATER = 256 * 1024
#: After the response to a request that is half read, this much more of it is read and dropped, for at most this long: a
#: reset could overtake the response.
LINGER_S = 1.0
LINGER_BYTES = 4 * 1024 * 1024
#: Seconds in which a client must take the buffered part of a broken response, or answer a TLS close_notify.
CLOSE_TIMEOUT_S = 2.0
#: Seconds in which a connection that ends may still bring a request, which may be on its way already.
LAST_REQUEST_S = 0.5
#: Requests waiting behind the current one from which reading pauses, and from which no more are taken.
PIPELINE_PAUSE = 8
PIPELINE_MOST = 512
#: Header fields of all waiting requests from which no more are taken: a field of four bytes takes eighty in memory.
PIPELINE_FIELDS = 4096
#: Bytes outside of bodies after which other connections have their turn; the transport would read on.
FRAMING_AT_ONCE = 64 * 1024
#: Seconds between two checks for a disconnect while reading is paused.
DISCONNECT_CHECK_S = 0.05
#: Poll event for the end of the client's side; where the system lacks it, only the end of the connection is seen.
_HALF_CLOSED = getattr(select, "POLLRDHUP", 0)
#: SO_LINGER value that ends a connection by a reset.
_RESET = struct.pack("ii", 1, 0)
#: The error for a failure of the application; the log has the reason.
FAULT = HttpError(500, "a fault in the router; its log says where", "internal_error")


class Handler(Protocol):
    """Application of a listener. `__call__` is ASGI, and used for the lifespan only."""

    limits: HttpLimits
    #: Set by the listener: returns the number of open connections and their limit.
    connections: Callable[[], tuple[int, int]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the lifespan."""

    def serve(self, scope: Scope, client: Transaction) -> Coroutine[Any, Any, None]:
        """Answer a request whose head has passed `inspect_head`."""

    def refused(self, problem: HttpError, scope: Scope, is_seen: bool) -> None:
        """Count a request that was refused before it was whole; *is_seen*: `serve` has it, and counts it itself."""

    def error_body(self, path: str, problem: HttpError) -> bytes:
        """Return the JSON body of an error on *path*."""


class Connection(asyncio.Protocol):
    """HTTP/1.1 server connection: pipelining, limits, orderly close.

    Args:
        handler: answers the requests.
        made: called when the connection is there.
        lost: called when it is gone.
        timer: of deadlines; shared by the connections of a loop.
    """

    __slots__ = (
        "_body_bytes",
        "_close_timer",
        "_current",
        "_deadline",
        "_disconnect_timer",
        "_drain",
        "_dropped",
        "_handler",
        "_has_left",
        "_headers",
        "_idle",
        "_loop",
        "_lost",
        "_made",
        "_next",
        "_overhead",
        "_parser",
        "_received",
        "_receiving",
        "_scope",
        "_timer",
        "_url",
        "_waiting",
        "_waiting_fields",
        "discards_input",
        "is_closing",
        "is_ending",
        "is_full",
        "is_paused",
        "limits",
        "task",
        "transport",
    )

    def __init__(
        self,
        handler: Handler,
        made: Callable[[Connection], object],
        lost: Callable[[Connection], object],
        timer: Timer,
    ) -> None:
        self._handler = handler
        self._made = made
        self._lost = lost
        self._timer = timer
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self.limits = handler.limits
        #: Fields of each scope that are the same for all requests.
        self._scope: dict[str, Any]
        # Request that is being read.
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        #: The head being read; None between its end and the next request.
        self._headers: list[tuple[bytes, bytes]] | None = None
        self._url = b""
        #: Its bytes outside of its body, and in it.
        self._overhead = self._body_bytes = 0
        #: An upper bound on the bytes of a head that ends in the last data.
        self._received = 0.0
        #: The request whose body is arriving.
        self._receiving: Transaction | None = None
        # Requests that are answered, one after the other, in one task: a task for each costs more.
        self._current: Transaction | None = None
        self._waiting: deque[Transaction | bytes] = deque()
        self._waiting_fields = 0
        #: None before the first request.
        self.task: asyncio.Task[None] | None = None
        #: The request that the task takes up next, and the future on which the task waits for it.
        self._next: Transaction | None = None
        self._idle: asyncio.Future[None] | None = None
        # State of the connection.
        #: Input is dropped, and counted.
        self.discards_input = False
        self._dropped = 0
        #: The connection closes with the response that is being given.
        self.is_ending = False
        self.is_closing = self._has_left = False
        self.is_paused = False
        self._disconnect_timer: asyncio.TimerHandle | None = None
        #: Back-pressure: the client reads more slowly than it is sent data.
        self.is_full = False
        #: The future on which a response waits during back-pressure.
        self._drain: asyncio.Future[None] | None = None
        #: When the next request, or the rest of its head, is due; 0 for a head that has just begun.
        self._deadline = 0.0
        self._close_timer: asyncio.TimerHandle | None = None

    # From the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self.transport = cast(asyncio.Transport, transport)
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "http" if transport.get_extra_info("ssl_object") is None else "https",
            "root_path": "",
            "client": _address(transport, "peername"),
            "server": _address(transport, "sockname"),
            "extensions": {},
        }
        self._await_request(self.limits.idle_timeout_s)
        self._made(self)

    def data_received(self, data: bytes) -> None:
        """Read *data*."""
        if self.discards_input:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self._close(0.0)
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        before = self._overhead
        self._overhead = before + len(data)
        if before:
            self._received += len(data)
        else:  # the bytes of a head that began behind another request were not counted
            self._received = len(data) if self._headers is None else inf
        while data:
            data = self._parse(data)
        overhead, limits = self._overhead, self.limits
        if overhead > limits.header_bytes and overhead > limits.overhead_bytes(self._body_bytes):
            status = 400
            if self._headers is not None:
                status = 414 if len(self._url) > limits.target_bytes else 431
            self.refuse(RequestError("the request takes more bytes around its body than allowed", status=status))
        if self.discards_input:
            return
        if overhead - before > FRAMING_AT_ONCE:
            self._pause(True)
            self._loop.call_soon(self._set_reading)
        if self._headers is not None and not self._deadline and self._current is None:
            self._await_request(limits.head_timeout_s)

    def eof_received(self) -> None:
        """Treat a half-closed connection as a disconnect. The transport closes itself."""
        self._leave()
        self._close(CLOSE_TIMEOUT_S)

    def connection_lost(self, _: Exception | None) -> None:
        """End."""
        self.is_closing = True
        self._leave()
        self._cancel_close_timer()
        self._parser = None  # it refers back to this
        self._lost(self)

    def pause_writing(self) -> None:
        """Note back-pressure: the client reads more slowly than it is sent data."""
        self.is_full = True

    def resume_writing(self) -> None:
        """Note that the client has caught up."""
        self.is_full = False
        if self._drain is not None and not self._drain.done():
            self._drain.set_result(None)

    # Parsing

    def _parse(self, data: bytes) -> bytes:
        """Parse *data* and return the rest that is still to be parsed."""
        parser = self._parser
        assert parser is not None
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade()
            return b"" if self.discards_input else data[upgrade.args[0] :]
        except httptools.HttpParserCallbackError:
            log.exception("smetric.connection.failed")
            self.abort()
        except httptools.HttpParserError as error:
            self.refuse(explain(error))
        return b""

    def _ignore_upgrade(self) -> None:
        """Read on as HTTP/1.1 after a request to change protocols, with its body first if it has one."""
        self._parser = httptools.HttpRequestParser(self)
        if self._receiving is not None:  # the new parser gets a head that announces the same body
            framing = b"".join(
                b"%b: %b\r\n" % field for field in self._receiving.scope["headers"] if field[0] in BODY_FIELDS
            )
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._headers = []
        self._url = b""
        self._deadline = 0.0

    def on_url(self, piece: bytes) -> None:
        """Read a piece of the request target."""
        self._url += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header field; trailer fields are dropped."""
        if self._headers is not None:
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Begin to answer, or refuse, a request whose head is complete."""
        headers, self._headers = self._headers, None
        if headers is None or self.discards_input or self._receiving is not None:  # the last: after an upgrade
            return
        parser = self._parser
        assert parser is not None
        raw_path, _, query = self._url.partition(b"?")
        path = raw_path.decode("ascii")
        version = parser.get_http_version()
        scope = self._scope.copy()
        scope["http_version"] = version
        scope["method"] = parser.get_method().decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = raw_path
        scope["query_string"] = query
        scope["headers"] = headers
        if raw_path[:1] != b"/":
            drop_authority(scope)
        if parser.should_upgrade() and wants_websocket(headers):
            problem: HttpError | None = NO_WEBSOCKET
        else:
            problem = inspect_head(scope, self.limits, self._received)
        if problem is not None:
            self.refuse(problem, scope)
            return
        transaction = Transaction(self, scope, is_last=version != "1.1" or not parser.should_keep_alive())
        self._receiving = transaction
        if self._current is None and not self._waiting:
            self._take_up(transaction)
        else:
            self._waiting.append(transaction)
            self._waiting_fields += len(headers)
            self._set_reading()

    def on_body(self, piece: bytes) -> None:
        """Read a piece of a body."""
        self._overhead -= len(piece)
        self._body_bytes += len(piece)
        receiving = self._receiving
        if receiving is not None:
            receiving.feed(piece)
            if receiving.buffered > HIGH_WATER or self._waiting:
                self._set_reading()

    def on_message_complete(self) -> None:
        """End a request."""
        receiving, parser = self._receiving, self._parser
        assert parser is not None
        if receiving is None or (parser.should_upgrade() and has_body(receiving.scope)):
            return  # the parser takes the body of an upgrade for another protocol
        self._receiving = None
        self._overhead = self._body_bytes = 0
        receiving.end_body()
        if len(self._waiting) >= PIPELINE_MOST or self._waiting_fields >= PIPELINE_FIELDS:
            receiving.is_last = self.discards_input = True
        if self.is_paused:  # the application may never take this body, and nothing else would resume
            self._set_reading()

    # Answering

    def _take_up(self, transaction: Transaction) -> None:
        """Answer *transaction* next."""
        self._current = self._next = transaction
        if self.task is None or self.task.done():
            self.task = self._loop.create_task(self._serve())
        else:
            self._wake_task()

    def _wake_task(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def _serve(self) -> None:
        """Answer requests until the client has left."""
        task = cast("asyncio.Task[None]", self.task)
        watchdog = Watchdog(task, self._timer)
        try:
            while True:
                transaction, self._next = self._next, None
                if transaction is None:
                    if self._has_left:
                        break
                    self._idle = self._loop.create_future()
                    await self._idle
                    continue
                transaction.task, transaction.watchdog = task, watchdog
                watchdog.expired = None
                try:
                    await self._handler.serve(transaction.scope, transaction)
                except Exception:
                    log.exception("smetric.request.failed", method=transaction.scope["method"])
                finally:
                    watchdog.close()
                    transaction.is_watched = False
                    if transaction.stage is not ENDED and not transaction.gone:
                        self._failed(transaction)
        finally:
            if self._next is not None:  # cancelled after a response, with another request at hand
                self.task = self._loop.create_task(self._serve())

    async def drained(self) -> None:
        """Wait until the client has taken most of what was sent, or has left."""
        if self.is_full and not self._has_left:
            self._drain = self._loop.create_future()
            await self._drain

    def body_taken(self) -> None:
        """Read on after a pause, now that the application has taken what there was of a body."""
        self._set_reading()

    def answered(self, transaction: Transaction) -> None:
        """Go on with the next request after a whole response, or close."""
        self._current = None
        if transaction.is_last and (self.discards_input or self._waiting or not transaction.complete):
            self._linger()
        elif transaction.is_last:
            self._close(self.limits.send_timeout_s)
        elif self._waiting:
            self._answer(self._waiting.popleft())
            self._set_reading()
        elif self._headers is not None:
            self._await_request(self.limits.head_timeout_s)
        else:
            self._await_request(LAST_REQUEST_S if self.is_ending else self.limits.idle_timeout_s)

    def _answer(self, turn: Transaction | bytes) -> None:
        if isinstance(turn, bytes):
            if not self.is_closing:
                self.transport.write(turn)
            self._linger()
        else:
            self._waiting_fields -= len(turn.scope["headers"])
            self._take_up(turn)

    def _failed(self, transaction: Transaction) -> None:
        """Answer 500. If the response has begun, close so that the client notices that it is incomplete."""
        self._current = None
        stage, transaction.stage = transaction.stage, ENDED
        if stage is WAITING:
            self.discards_input = True
            self._waiting.clear()
            self._answer(refusal(FAULT, transaction.scope, b"", self._handler.error_body))
            return
        if transaction.ends_by_close:  # an orderly close would make it look whole
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            if not self.transport.can_write_eof():  # TLS would send its close_notify first
                self.transport.abort()
        self._close(CLOSE_TIMEOUT_S)

    def refuse(self, problem: HttpError, scope: Scope | None = None) -> None:
        """Answer *problem* after the responses before it; all input after it is dropped."""
        if self.discards_input:
            return
        self.discards_input = True
        self._set_reading()
        broken, self._receiving = self._receiving, None
        is_seen = broken is not None and broken is self._current
        if broken is not None:
            broken.leave(problem)
            if not is_seen:
                self._waiting.remove(broken)
            else:
                self._current = None
                if broken.stage is STARTED:
                    self._close(CLOSE_TIMEOUT_S)
                    return
        self._handler.refused(problem, self._scope, is_seen)
        response = refusal(problem, scope, self._url, self._handler.error_body)
        if self._current is None and not self._waiting:
            self._answer(response)
        else:
            self._waiting.append(response)

    # Reading

    def _set_reading(self) -> None:
        """Pause reading while too much waits for the application; input that is dropped is always read."""
        is_paused = False
        if not self.discards_input:
            is_paused = len(self._waiting) >= PIPELINE_PAUSE
            if not is_paused:
                turns = {self._receiving, *self._waiting}
                is_paused = sum(turn.buffered for turn in turns if isinstance(turn, Transaction)) > HIGH_WATER
        self._pause(is_paused)

    def _pause(self, is_paused: bool) -> None:
        if is_paused is self.is_paused or self.transport.is_closing():
            return
        self.is_paused = is_paused
        if is_paused:
            self.transport.pause_reading()
            self._await_disconnect()
        else:
            self.transport.resume_reading()

    def _await_disconnect(self) -> None:
        if self._disconnect_timer is None:
            self._disconnect_timer = self._loop.call_later(DISCONNECT_CHECK_S, self._check_disconnect)

    def _check_disconnect(self) -> None:
        """Ask the system whether the client has left, as nothing is read."""
        self._disconnect_timer = None
        if not self.is_paused or self.transport.is_closing():
            return
        if _polled(self.transport, _HALF_CLOSED):
            self.eof_received()
        else:
            self._await_disconnect()

    def _await_request(self, seconds: float) -> None:
        self._deadline = deadline = self._loop.time() + seconds
        if self._close_timer is not None and self._close_timer.when() > deadline:
            self._cancel_close_timer()
        if self._close_timer is None:
            self._close_timer = self._loop.call_at(deadline, self._check_deadline)

    def _check_deadline(self) -> None:
        """Close, or answer 408, if no request came in time; if the deadline has moved, set the timer to it."""
        self._close_timer = None
        if self._current is not None or self.discards_input:
            return
        if self._loop.time() < self._deadline:
            self._close_timer = self._loop.call_at(self._deadline, self._check_deadline)
        elif _polled(self.transport, select.POLLIN):  # it is read first; a close would reset it
            self._await_request(LAST_REQUEST_S)
        elif self._headers is None:
            self._close(self.limits.send_timeout_s)
        else:
            text = f"the request's head did not arrive within {self.limits.head_timeout_s:g} s"
            self.refuse(RequestError(text, status=408, kind="request_timeout"))

    # Closing

    def end(self) -> None:
        """Close after the request that is under way, or on its way already."""
        self.is_ending = True
        if self._current is None and self._headers is None and not self.discards_input:
            self._await_request(LAST_REQUEST_S)

    def abort(self) -> None:
        """Close at once."""
        self.is_closing = True
        self._leave()
        self.transport.abort()

    def _leave(self) -> None:
        """Note that the client waits for no response any more."""
        if self._has_left:
            return
        self._has_left = self.discards_input = True
        self.resume_writing()
        self._receiving = None
        self._waiting.clear()
        self._wake_task()
        current, self._current = self._current, None
        if current is not None:
            current.leave()

    def _linger(self) -> None:
        """Close after a pause in which a client that is still sending reads its response: a reset could overtake it."""
        self.discards_input = True
        self._set_reading()
        if self.is_closing or self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.is_closing = True
        self._cancel_close_timer()
        self._close_timer = self._loop.call_later(LINGER_S, self._close, CLOSE_TIMEOUT_S)

    def _close(self, grace_s: float) -> None:
        """Close, and abort if the client has not taken what is buffered within *grace_s*."""
        self.is_closing = self.discards_input = True
        self._leave()
        self._cancel_close_timer()
        transport = self.transport
        if not transport.get_write_buffer_size() and _polled(transport, select.POLLOUT):
            # The system has it all. A TLS client may not answer our close_notify, or not read it.
            grace_s = min(grace_s, CLOSE_TIMEOUT_S)
        transport.close()
        self._close_timer = self._loop.call_later(grace_s, transport.abort)

    def _cancel_close_timer(self) -> None:
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None


def _address(transport: asyncio.BaseTransport, name: str) -> tuple[str, int] | None:
    address = transport.get_extra_info(name)
    return (address[0], address[1]) if isinstance(address, tuple) else None


def _polled(transport: asyncio.BaseTransport, event: int) -> bool:
    """Return whether the system reports *event* of a connection, such as `select.POLLIN`, or its end."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), event)
    return bool(poll.poll(0))
