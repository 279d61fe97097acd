"""HTTP/1.1 from the wire: requests told apart without doubt, answered in order, no connection that outlives its use.

Parsing is httptools' (llhttp, strict): what it refuses is answered here, and what it lets pass is judged by
`inspect_head`. Whatever leaves in doubt where a request ends is answered once, and the connection ends behind it.
One request and its answer are in `transaction.py`, the task that answers in `turns.py`, connections in their number and
their start and end in `connection.py`. In what it differs from Hypercorn's own is held by
`tests/proxy/test_deviations.py`.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import unquote

import httptools
import structlog

from smetric.errors import HttpError, RequestError
from smetric.proxy.asgi import App, Scope
from smetric.proxy.client import LINGER_BYTES, LINGER_S
from smetric.proxy.error_response import FAULT
from smetric.proxy.inflow import Inflow, polled
from smetric.proxy.intake import BODY_FIELDS, Refused, has_body, inspect_head, unheard
from smetric.proxy.limits import Limits
from smetric.proxy.refusal import explain, oddity, refusal
from smetric.proxy.scope import scope_over
from smetric.proxy.transaction import HIGH_WATER, Stage, Transaction
from smetric.proxy.turns import Turns
from smetric.proxy.watchdog import Timer

log = structlog.get_logger("smetric.server")

#: How long a connection may wait for its client to take a goodbye, or what is buffered of an answer that was broken
#: off, seconds.
CLOSE_TIMEOUT_S = 2.0
#: Seconds in which a connection that ends may still bring a request: it may be on its way already, from a client that
#: was not told, for its last answer had begun before.
LAST_REQUEST_S = 0.5
#: Requests that may wait behind the one being answered before reading pauses, and before no more are taken.
PIPELINE_PAUSE = 8
PIPELINE_MOST = 512
#: Ends a connection by a reset instead of a FIN, as a socket option.
RESET = struct.pack("ii", 1, 0)
#: After so much of it at once others have their turn: the transport would go on reading what there is.
FRAMING_AT_ONCE = 64 * 1024


class Http1(asyncio.Protocol):
    """One connection of a client.

    Args:
        app: what answers requests.
        limits: bounds on one request, and on waiting for one.
        state: the lifespan's state, copied into each scope.
        lost: called when the connection is no more.
        timer: of deadlines; shared with other connections of the loop, None for one of its own.
        refused: told of each request that the app does not see, or not the end of, for what is wrong with it.
    """

    __slots__ = (
        "_body_bytes",
        "_current",
        "_deadline",
        "_drain",
        "_dropped",
        "_has_left",
        "_headers",
        "_inflow",
        "_is_closing",
        "_is_deaf",
        "_limits",
        "_loop",
        "_lost",
        "_overhead",
        "_parser",
        "_received",
        "_receiving",
        "_refused",
        "_scope",
        "_state",
        "_timer",
        "_transport",
        "_url",
        "_waiting",
        "is_ending",
        "is_full",
        "turns",
    )

    def __init__(
        self,
        app: App,
        limits: Limits,
        state: Mapping[str, Any],
        lost: Callable[[Http1], object],
        timer: Timer | None = None,
        refused: Refused = unheard,
    ) -> None:
        self._limits = limits
        self._state = state
        self._lost = lost
        self._refused = refused
        self._loop = asyncio.get_running_loop()
        self.turns = Turns(app, timer or Timer(), self._loop)
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        #: What each scope begins as.
        self._scope: dict[str, Any] = {}
        #: The head being read; None between its end and the next request.
        self._headers: list[tuple[bytes, bytes]] | None = None
        self._url = b""
        #: Bytes of the request being read: those that are not of its body, and those that are.
        self._overhead = self._body_bytes = 0
        #: The same as the last data came, the whole of it included: no head in it is longer.
        self._received = 0
        #: Whose body is arriving.
        self._receiving: Transaction | None = None
        #: Who is being answered.
        self._current: Transaction | None = None
        self._waiting: deque[Transaction | bytes] = deque()
        #: Nothing more is read as a request; what still comes is dropped, and counted.
        self._is_deaf = False
        self._dropped = 0
        self._is_closing = self._has_left = False
        #: None before reading is paused for the first time.
        self._inflow: Inflow | None = None
        #: What who answers waits on while the client takes less.
        self._drain: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: By which a request or the rest of its head is to come; 0 for a head that has just begun.
        self._deadline = 0.0
        self.is_full = self.is_ending = False

    # From the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self._transport = cast(asyncio.Transport, transport)
        self._scope = scope_over(transport)
        self._await_request(self._limits.idle_timeout_s)

    def data_received(self, data: bytes) -> None:
        """*data* has arrived."""
        if self._is_deaf:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self._close(0.0)
            return
        before = self._overhead
        self._received = self._overhead = before + len(data)
        while data:
            data = self._parse(data)
        if self._overhead - before > FRAMING_AT_ONCE and not self._is_deaf:
            self._pause(True)
            self._loop.call_soon(self._set_reading)
        if self._headers is not None and not self._deadline and self._current is None and not self._is_deaf:
            self._await_request(self._limits.head_timeout_s)
        limits = self._limits
        if self._overhead > limits.header_bytes and self._overhead > limits.overhead_bytes(self._body_bytes):
            in_head = self._headers is not None
            status = (414 if len(self._url) > limits.target_bytes else 431) if in_head else 400
            self.refuse(RequestError("the request takes more bytes around its body than allowed", status=status))

    def _parse(self, data: bytes) -> bytes:
        """Parse *data*; what is returned of it has not been parsed, and is to be."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade()
            return b"" if self._is_deaf else data[upgrade.args[0] :]
        except httptools.HttpParserCallbackError:
            log.exception("smetric.connection.failed")
            self.abort()
        except httptools.HttpParserError as error:
            self.refuse(explain(error))
        return b""

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

    def on_message_begin(self) -> None:
        """A request begins."""
        self._headers = []
        self._url = b""
        self._deadline = 0.0

    def on_url(self, piece: bytes) -> None:
        """*piece* of the request target."""
        self._url += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field; those behind a body are dropped."""
        headers = self._headers
        if headers is not None:
            headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        headers, self._headers = self._headers, None
        if self._is_deaf or headers is None:
            return
        parser = self._parser
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
        scope["state"] = dict(self._state)
        problem = oddity(scope) if version == "0.9" or parser.should_upgrade() else None
        if problem is None:
            problem = inspect_head(scope, self._limits, self._received)
        if problem is not None:
            self.refuse(problem, scope)
            return
        transaction = self._receiving = Transaction(
            self, scope, self._limits, version == "1.1" and parser.should_keep_alive()
        )
        if self._current is None and not self._waiting:
            self._current = transaction
            self.turns.take(transaction)
        else:
            self._waiting.append(transaction)
            self._set_reading()

    def on_body(self, piece: bytes) -> None:
        """*piece* of a body."""
        size = len(piece)
        self._overhead -= size
        self._body_bytes += size
        receiving = self._receiving
        if receiving is None or self._is_deaf:
            return
        receiving.feed(piece)
        if receiving.buffered > HIGH_WATER or self._waiting:
            self._set_reading()

    def on_message_complete(self) -> None:
        """A request is whole."""
        receiving = self._receiving
        if receiving is None:
            return
        if self._parser.should_upgrade() and has_body(receiving.scope):
            return  # the parser takes its body for another protocol
        self._receiving = None
        self._overhead = self._body_bytes = 0
        receiving.end_body()
        if len(self._waiting) >= PIPELINE_MOST:
            receiving.is_last = self._is_deaf = True
        if self._inflow is not None:  # the app may never take this body, and then nobody else would resume
            self._set_reading()

    def _ignore_upgrade(self) -> None:
        """Go on with HTTP/1.1 behind a request to change to another protocol, with its body first if it has one."""
        self._parser = httptools.HttpRequestParser(self)
        receiving, self._receiving = self._receiving, None
        if receiving is not None and not receiving.complete:
            # A fresh parser that is told of the same body; `_receiving` is unset so that it starts nothing.
            framing = b"".join(b"%b: %b\r\n" % field for field in receiving.scope["headers"] if field[0] in BODY_FIELDS)
            is_deaf, self._is_deaf = self._is_deaf, True
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)
            self._is_deaf = is_deaf
            self._receiving = receiving

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
            self._set_reading()

    def answered(self, transaction: Transaction) -> None:
        """The answer is whole: go on with the next request, or end."""
        self._current = None
        if transaction.is_last and (self._is_deaf or self._waiting or not transaction.complete):
            self._linger()
        elif transaction.is_last:
            self._close(self._limits.send_timeout_s)
        elif self._waiting:
            self._start(self._waiting.popleft())
            self._set_reading()
        else:
            wait_s = self._limits.idle_timeout_s if self._headers is None else self._limits.head_timeout_s
            self._await_request(LAST_REQUEST_S if self.is_ending else wait_s)

    def failed(self, transaction: Transaction) -> None:
        """The app has ended before its answer was whole: say so, by a 500 or by the connection's end."""
        self._current = None
        stage, transaction.stage = transaction.stage, Stage.ENDED
        if stage is Stage.WAITING:
            self._is_deaf = True
            self._waiting.clear()
            self._start(refusal(FAULT, transaction.scope, b""))
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
        self.turns.take(turn)

    def refuse(self, problem: HttpError, scope: Scope | None = None) -> None:
        """Answer *problem* when its turn has come; nothing behind it counts."""
        if self._is_deaf:
            return
        self._is_deaf = True
        self._set_reading()
        broken, self._receiving = self._receiving, None
        is_seen = broken is not None and broken is self._current
        if broken is not None:
            broken.leave(problem)
            if is_seen:
                self._current = None
                if broken.stage is Stage.STARTED:
                    self._close(CLOSE_TIMEOUT_S)
                    return
            else:
                self._waiting.remove(broken)
        self._refused(problem, self._scope, is_seen)
        said = refusal(problem, scope, self._url)
        if self._current is None and not self._waiting:
            self._start(said)
        else:
            self._waiting.append(said)

    def _await_request(self, seconds: float) -> None:
        self._deadline = deadline = self._loop.time() + seconds
        if self._timer is not None and self._timer.when() > deadline:
            self._cancel_timer()
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._check)

    def _check(self) -> None:
        """The deadline for a request may have passed. It moves without its timer, which would cost more than this."""
        self._timer = None
        if self._current is not None or self._is_deaf:
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._check)
        elif self._headers is None and polled(self._transport, select.POLLIN):  # a reset would be all it got
            self._await_request(LAST_REQUEST_S)
        elif self._headers is None:
            # Who speaks TLS need not answer our goodbye, nor hear it as long as it has no use for the connection.
            is_taken = not self._transport.get_write_buffer_size() and polled(self._transport, select.POLLOUT)
            self._close(CLOSE_TIMEOUT_S if is_taken else self._limits.send_timeout_s)
        else:
            text = f"the request's head did not arrive within {self._limits.head_timeout_s:g} s"
            self.refuse(RequestError(text, status=408, kind="request_timeout"))

    def _set_reading(self) -> None:
        """Pause or resume reading: by what waits for the app, and always on when it is dropped anyway."""
        held = sum(turn.buffered for turn in {self._receiving, *self._waiting} if isinstance(turn, Transaction))
        self._pause(not self._is_deaf and (held > HIGH_WATER or len(self._waiting) >= PIPELINE_PAUSE))

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
        self._has_left = self._is_deaf = True
        self.resume_writing()
        self._receiving = None
        self._waiting.clear()
        self.turns.end()
        current, self._current = self._current, None
        if current is not None:
            current.leave()

    def _linger(self) -> None:
        """Let a client that may still be sending read its answer: a reset could overtake it."""
        self._is_deaf = True
        self._set_reading()
        if self._is_closing or self._transport.is_closing():
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._is_closing = True
        self._cancel_timer()
        self._timer = self._loop.call_later(LINGER_S, self._close, CLOSE_TIMEOUT_S)

    def _close(self, grace_s: float) -> None:
        """Close, and abort if the client has not taken what is buffered within *grace_s*."""
        self._is_closing = self._is_deaf = True
        self._leave()
        self._cancel_timer()
        self._transport.close()
        self._timer = self._loop.call_later(grace_s, self._transport.abort)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """End with what is under way, or is on its way already."""
        self.is_ending = True
        if self._current is None and self._headers is None and not self._is_deaf:
            self._await_request(LAST_REQUEST_S)

    def abort(self) -> None:
        """End at once, whatever is under way."""
        self._is_closing = True
        self._leave()
        self._transport.abort()
