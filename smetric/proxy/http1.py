"""HTTP/1.1 on one connection: requests answered in order, bounded in number and time, and an end behind its use.

Whatever leaves in doubt where a request ends is answered once, and the connection ends behind it. Requests are told
apart in `parser.py`; one and its answer are in `transaction.py`, the task that answers in `turns.py`, connections in
their number and their start and end in `connection.py`. In what it differs from Hypercorn's own is held by
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

from smetric.errors import HttpError, RequestError
from smetric.proxy.asgi import App, Scope
from smetric.proxy.client import LINGER_BYTES, LINGER_S
from smetric.proxy.error_response import FAULT
from smetric.proxy.inflow import Inflow, polled
from smetric.proxy.intake import Refused, unheard
from smetric.proxy.limits import Limits
from smetric.proxy.parser import Parser
from smetric.proxy.refusal import refusal
from smetric.proxy.scope import scope_over
from smetric.proxy.transaction import HIGH_WATER, Stage, Transaction
from smetric.proxy.turns import Turns
from smetric.proxy.watchdog import Timer

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
        app: what answers requests.
        limits: bounds on one request, and on waiting for one.
        state: the lifespan's state, copied into each scope.
        lost: called when the connection is no more.
        timer: of deadlines; shared with other connections of the loop, None for one of its own.
        refused: told of each request that the app does not see, or not the end of, for what is wrong with it.
    """

    __slots__ = (
        "_current",
        "_drain",
        "_dropped",
        "_has_left",
        "_inflow",
        "_is_closing",
        "_limits",
        "_loop",
        "_lost",
        "_parser",
        "_refused",
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
        self._refused(problem, self._scope, is_seen)
        said = refusal(problem, scope, self._parser.url)
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
