"""One HTTP/1 request and its response, as an ASGI app sees them, and the deadline of the task that serves it.

Requests are told apart in `connection`, which also decides what becomes of the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from http import HTTPStatus
from math import inf
from typing import Any, Protocol

from smetric.errors import HttpError
from smetric.http.headers import Headers, Message, Scope
from smetric.http.limits import HttpLimits, too_large

#: A piece of a body above this size is written beside its framing; a smaller one is copied into one buffer with it.
COPIED_BYTES = 16 * 1024
#: Pieces of a body that are kept apart. More are joined if they are this small on average, in bytes: an object takes as
#: much, so that a body in chunks of two bytes would take thirty times its size.
FEW_PIECES = 1024
SMALL_PIECE = 64

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}".encode() for each in HTTPStatus}
#: Response fields that the server sets itself.
_FRAMING_FIELDS = frozenset({b"connection", b"transfer-encoding", b"content-length"})

#: Least seconds between two checks of the deadlines: many that pass one after the other cost no more than a few.
GRAIN_S = 0.01
#: If the timer fires more than LATE_S late, the process was suspended or busy. The deadline is extended by RESUMED_S,
#: because the awaited data may have arrived during the pause and is read only now.
LATE_S, RESUMED_S = 1.0, 1.0


class Timer:
    """Timer shared by the watchdogs of a loop; it fires at the earliest of their deadlines, or before."""

    __slots__ = ("_handle", "at", "loop", "watchdogs")

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._handle: asyncio.TimerHandle | None = None
        #: When it fires, on the clock of `loop`.
        self.at = inf
        #: Watchdogs that may have a deadline.
        self.watchdogs: set[Watchdog] = set()

    def set(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        """Fire at *at* in *loop*, or before."""
        if self._handle is not None:
            self._handle.cancel()
        self.loop = loop
        self.at = at
        self._handle = loop.call_at(at, self._fire)

    def _fire(self) -> None:
        assert self.loop is not None
        self._handle, self.at = None, inf
        now, earliest = self.loop.time(), inf
        for watchdog in list(self.watchdogs):
            if now - watchdog.at > LATE_S:
                watchdog.at = now + RESUMED_S
            if watchdog.at <= now:
                watchdog.expire()
            elif watchdog.at < earliest:
                earliest = watchdog.at
        if earliest < self.at:
            self.set(self.loop, max(earliest, now + GRAIN_S))


class Watchdog:
    """Deadline of a task: cancels it when the deadline passes, and names the deadline in `expired`.

    Args:
        task: the task.
        timer: shared with others of the task's loop; None for one of its own.
    """

    __slots__ = ("_loop", "_task", "_timer", "_what", "at", "expired")

    def __init__(self, task: asyncio.Task[Any], timer: Timer | None = None) -> None:
        self._task = task
        self._loop = task.get_loop()
        self._timer = timer or Timer()
        self._what = ""
        #: The deadline, on the loop's clock.
        self.at = inf
        #: Name of the deadline that has passed.
        self.expired: str | None = None

    def arm(self, seconds: float, what: str) -> None:
        """Set the deadline, called *what*, to *seconds* from now."""
        self.at = at = self._loop.time() + seconds
        self._what = what
        timer = self._timer
        timer.watchdogs.add(self)
        if at < timer.at or timer.loop is not self._loop:
            timer.set(self._loop, at)

    def extend(self, seconds: float) -> None:
        """Move the deadline that was armed last to *seconds* from now, which is no earlier."""
        self.at = self._loop.time() + seconds

    def disarm(self) -> None:
        """Remove the deadline."""
        self.at = inf

    def expire(self) -> None:
        """Cancel the task."""
        self.at = inf
        self.expired = self._what
        self._task.cancel()

    def resume(self) -> None:
        """Let the task go on after the deadline has cancelled it."""
        self.expired = None
        self._task.uncancel()

    def close(self) -> None:
        """Remove the deadline and leave the timer."""
        self.at = inf
        self._timer.watchdogs.discard(self)


class Room(Protocol):
    """Accounting for the memory of one body."""

    def grow(self, received: int) -> None:
        """Account for *received* bytes, of more to come; raises HttpError if there is no room for them."""

    def settle(self, size: int) -> None:
        """Account for a complete body of *size* bytes."""


class ClientGone(Exception):
    """The client left before its request was complete."""


class ClientConnection(Protocol):
    """The connection of a transaction."""

    limits: HttpLimits
    transport: asyncio.Transport
    #: Nothing may be written any more.
    is_closing: bool
    #: The client takes less than it is sent.
    is_full: bool
    #: Nothing is read, as too much waits for the application.
    is_paused: bool
    #: The connection closes with the response that is being given.
    is_ending: bool

    async def drained(self) -> None:
        """Wait until the client has taken most of what was sent, or has left."""

    def body_taken(self) -> None:
        """Read on after a pause, now that the application has taken what there was of a body."""

    def answered(self, transaction: Transaction) -> None:
        """Go on after a whole response."""


class Framing(Enum):
    """How a client knows where a response ends."""

    LENGTH = auto()
    CHUNKED = auto()
    CLOSE = auto()
    NO_BODY = auto()


class Stage(Enum):
    """Progress of a response."""

    WAITING = auto()
    STARTED = auto()
    ENDED = auto()


# Each is compared several times a request, and an attribute of an enumeration costs as much as a call.
LENGTH, CHUNKED, CLOSE, NO_BODY = Framing
WAITING, STARTED, ENDED = Stage


@dataclass(slots=True, eq=False, repr=False)
class Transaction:
    """One request and its response. It is the ASGI `receive` of its request, and `send` is the ASGI `send`.

    Args:
        connection: the connection.
        scope: the ASGI scope.
        is_last: the connection closes after the response.
    """

    connection: ClientConnection
    scope: Scope
    is_last: bool
    #: Bytes of the body that the application has not taken yet.
    buffered: int = field(default=0, init=False)
    #: The whole request has arrived.
    complete: bool = field(default=False, init=False)
    #: The client has left, or its body is malformed.
    gone: bool = field(default=False, init=False)
    #: A disconnect cancels the task.
    is_watched: bool = field(default=False, init=False)
    stage: Stage = field(default=WAITING, init=False)
    #: Status of the response; 0 before the application has begun it.
    status: int = field(default=0, init=False)
    #: Task in which the request is served, and its deadline; both are set before `Handler.serve`.
    task: asyncio.Task[Any] = field(init=False)
    watchdog: Watchdog = field(init=False)
    _pieces: list[bytes] = field(default_factory=list, init=False)
    _waiter: asyncio.Future[None] | None = field(default=None, init=False)
    #: The application has asked for the body.
    _is_awaited: bool = field(default=False, init=False)
    #: The end of the body has been handed to the application.
    _is_delivered: bool = field(default=False, init=False)
    _framing: Framing = field(default=NO_BODY, init=False)
    _head: bytes = field(default=b"", init=False)
    _remaining: int = field(default=0, init=False)
    _problem: HttpError | None = field(default=None, init=False)

    @property
    def ends_by_close(self) -> bool:
        """Only the end of the connection marks the end of the response."""
        return self._framing is CLOSE

    # From the connection

    def feed(self, piece: bytes) -> None:
        """Take *piece* of the body."""
        if self.stage is not ENDED:
            self._pieces.append(piece)
            self.buffered += len(piece)
            if len(self._pieces) > FEW_PIECES:
                self._pieces = compact(self._pieces, self.buffered)
            self._wake()

    def end_body(self) -> None:
        """Note that the whole body has arrived."""
        self.complete = True
        self._wake()

    def leave(self, problem: HttpError | None = None) -> None:
        """Note that the client has left, or that its body has *problem*."""
        self.gone, self._problem = True, problem
        self._pieces.clear()
        self.buffered = 0
        self._wake()
        if self.is_watched and self.stage is not ENDED:
            self.is_watched = False
            self.task.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Request

    async def __call__(self) -> Message:
        """ASGI `receive`: all that has arrived of the body, then `http.disconnect` once the client leaves."""
        if not await self._arrival():
            return {"type": "http.disconnect"}
        if self.complete:
            self.watchdog.disarm()  # what the application does with it has no deadline
        return {"type": "http.request", "body": b"".join(self._take()), "more_body": not self.complete}

    async def body(self, room: Room) -> bytes:
        """Return the whole body.

        Args:
            room: accounts for its memory.

        Raises:
            RequestError: 413 above the limit, 400 for malformed framing.
            ClientGone: the client left first.
        """
        pieces: list[bytes] = []
        size = 0
        while True:
            if self.gone or not (self.complete or await self._arrival()):
                raise self._problem or ClientGone
            size += self.buffered
            pieces += self._take()
            if len(pieces) > FEW_PIECES:
                pieces = compact(pieces, size)
            if size > self.connection.limits.body_bytes:
                raise too_large(self.connection.limits)
            if self.complete:
                break
            room.grow(size)
        room.settle(size)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def watch(self) -> None:
        """From now on, cancel the task when the client leaves before the response is whole; at once if it has left."""
        self.is_watched = True
        if self.gone:
            self.task.cancel()

    async def _arrival(self) -> bool:
        """Wait for a piece of the body or its end; returns False once the client has left."""
        if not self._is_awaited:
            self._is_awaited = True
            if not (self.buffered or self.complete or self.gone) and self.stage is WAITING:
                scope = self.scope
                expect = dict(scope["headers"]).get(b"expect", b"") if scope["http_version"] == "1.1" else b""
                if expect.lower() == b"100-continue":
                    self._send(_CONTINUE)
        while True:
            if self.gone or self.stage is ENDED:
                return False
            if self._pieces or (self.complete and not self._is_delivered):
                return True
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _take(self) -> list[bytes]:
        """Return what has arrived of the body since the last call."""
        pieces, self._pieces = self._pieces, []
        self.buffered = 0
        self._is_delivered = self.complete
        if self.connection.is_paused:
            self.connection.body_taken()
        return pieces

    # Response

    def begin(self, status: int, headers: Headers, piece: bytes = b"", *, is_last: bool = False) -> bool:
        """Send the head of a response, in one write with its first piece if there is one.

        Args:
            status: of the response.
            headers: its fields.
            piece: the first of its body; empty if that is still to come.
            is_last: nothing follows *piece*.

        Returns:
            Whether the client takes less than it is sent: then wait for `drained` before sending more.
        """
        is_held = bool(piece) or is_last
        self._start(status, headers, is_held=is_held)
        if is_held:
            self._write(piece, is_last=is_last)
        return self.connection.is_full

    def pass_on(self, piece: bytes, *, is_last: bool = False) -> bool:
        """Send *piece* of a response that has begun; *is_last*: nothing follows. Returns the same as `begin`."""
        self._write(piece, is_last=is_last)
        return self.connection.is_full

    async def drained(self) -> None:
        """Wait, within a deadline, until the client has taken most of what it was sent, or has left."""
        self.watchdog.arm(self.connection.limits.send_timeout_s, "send")
        await self.connection.drained()
        self.watchdog.disarm()

    async def send(self, message: Message) -> None:
        """ASGI `send`; returns once the client has taken most of what it was sent, or has left.

        Raises:
            RuntimeError: the message is out of place, or the body differs from the response's Content-Length.
            ValueError: a header field would break the response's framing.
        """
        self.watchdog.disarm()
        kind = message["type"]
        if kind == "http.response.body":
            self._write(message.get("body", b""), is_last=not message.get("more_body", False))
        elif kind == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
        else:
            raise self._out_of_place(kind)
        if self.connection.is_full:
            await self.drained()

    def _out_of_place(self, kind: str) -> RuntimeError:
        return RuntimeError(f"{kind} is out of place: the answer is {self.stage.name.lower()}")

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]], *, is_held: bool = False) -> None:
        """Send the head; *is_held*: together with the piece that follows in the same tick. Raises as `send` does."""
        self.status = status
        if self.gone:
            return
        if self.stage is not WAITING:
            raise self._out_of_place("http.response.start")
        # The end of an unread request is unknown before it has been read.
        self.is_last = self.is_last or not self.complete or self.connection.is_ending
        head = self._response_head(status, headers)
        self.stage = STARTED
        if is_held:
            self._head = head
        else:
            self._send(head)

    def _response_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Return the head of the response and note its framing; the server's own fields in *headers* are dropped."""
        framing = CHUNKED if self.scope["http_version"] == "1.1" else CLOSE
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status]
        for pair in headers:
            if pair[0] in _FRAMING_FIELDS:
                name, value = pair
                if name != b"content-length":
                    self.is_last = self.is_last or (name == b"connection" and b"close" in value.lower())
                    continue
                framing = LENGTH
                self._remaining = int(value)
            lines.append(b": ".join(pair))
        if self.scope["method"] == "HEAD" or status in (204, 304):
            framing = NO_BODY
        elif framing is CHUNKED:
            lines.append(b"transfer-encoding: chunked")
        elif framing is CLOSE:
            self.is_last = True
        if self.is_last:
            lines.append(b"connection: close")
        text = b"".join(lines)
        if 10 in text or 13 in text or 0 in text:  # LF, CR, NUL
            raise ValueError("a header field of the answer holds a line break or a NUL")
        lines.append(b"\r\n")
        self._framing = framing
        return b"\r\n".join(lines)

    def _write(self, body: bytes, *, is_last: bool) -> None:
        """Send a piece of the response's body. Raises as `send` does."""
        if self.gone:
            return
        if self.stage is not STARTED:
            raise self._out_of_place("http.response.body")
        framing, head, end = self._framing, self._head, b""
        if head:
            self._head = b""
        if framing is CHUNKED:
            if body:
                head, end = b"%b%x\r\n" % (head, len(body)), b"\r\n0\r\n\r\n" if is_last else b"\r\n"
            elif is_last:
                head += b"0\r\n\r\n"
        elif framing is LENGTH:
            self._remaining -= len(body)
            if self._remaining < 0:
                raise RuntimeError("the answer is longer than its Content-Length")
        elif framing is NO_BODY:
            body = b""
        if not self.connection.is_closing:
            if len(body) > COPIED_BYTES:
                self.connection.transport.writelines((head, body, end))
            elif head or body:
                self.connection.transport.write(head + body + end)
        if is_last:
            if framing is LENGTH and self._remaining:
                raise RuntimeError("the answer is shorter than its Content-Length")
            self.stage = ENDED
            self.connection.answered(self)

    def _send(self, data: bytes) -> None:
        if not self.connection.is_closing:
            self.connection.transport.write(data)


def compact(pieces: list[bytes], size: int) -> list[bytes]:
    """Join *pieces*, more than a few and *size* bytes together, if they are small."""
    return [b"".join(pieces)] if size < SMALL_PIECE * len(pieces) else pieces
