"""One HTTP/1 request and its answer, as an ASGI app sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Protocol

import structlog

from smetric.errors import HttpError
from smetric.http.headers import Headers, Message, Scope, breaks_out
from smetric.http.limits import Limits, too_large
from smetric.http.watchdog import Watchdog

# The head of an answer to a client, and by what the client knows where the answer ends.
#
# What comes behind the head is `transaction.py`'s.

_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}".encode() for each in HTTPStatus}
#: Fields that say where the answer or its connection ends.
_FRAMING = frozenset({b"connection", b"transfer-encoding", b"content-length"})


class Framing(Enum):
    """How a client knows where the answer ends."""

    LENGTH = auto()
    CHUNKED = auto()
    CLOSE = auto()
    NO_BODY = auto()


# They are compared several times for each request, and a look into an enumeration costs as much as a call.
LENGTH, CHUNKED, CLOSE, NO_BODY = Framing


def head_of(
    status: int, headers: Iterable[tuple[bytes, bytes]], scope: Scope, is_last: bool
) -> tuple[bytes, Framing, int, bool]:
    """The head of the answer to the request of *scope*.

    Args:
        status: of the answer.
        headers: the app's fields; those that are this server's to say are dropped.
        scope: of the request.
        is_last: the connection ends behind the answer in any case.

    Returns:
        The head; how the answer is framed; its Content-Length, 0 without one; whether the connection ends behind it.

    Raises:
        ValueError: a header field would break the answer's framing.
    """
    framing = CHUNKED if scope["http_version"] == "1.1" else CLOSE
    length = 0
    lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status]
    for field in headers:
        if field[0] in _FRAMING:
            name, value = field
            if name != b"content-length":  # this server's to say
                is_last = is_last or (name == b"connection" and b"close" in value.lower())
                continue
            framing = LENGTH
            length = int(value)
        lines.append(b": ".join(field))
    if scope["method"] == "HEAD" or status in (204, 304):
        framing = NO_BODY
    elif framing is CHUNKED:
        lines.append(b"transfer-encoding: chunked")
    elif framing is CLOSE:
        is_last = True
    if is_last:
        lines.append(b"connection: close")
    if breaks_out(b"".join(lines)):
        raise ValueError("a header field of the answer holds a line break or a NUL")
    lines.append(b"\r\n")
    return b"\r\n".join(lines), framing, length, is_last


# One HTTP/1 request and its answer, as an ASGI app sees them: `receive`, `send`, and word of the client's departure.
#
# The app's `receive` is the transaction itself, which is all that a `Client` is. Who finds that it is one knows two
# things more: the head has been inspected, and what is left unread of a body is the server's business.
#
# What is on the wire around it, and what comes before and after it on the connection, is in `http1.py`.

log = structlog.get_logger("smetric.server")

#: Bytes of a body that may wait for the app before reading pauses.
HIGH_WATER = 256 * 1024
#: A piece above this size is written beside its framing instead of being copied into one buffer with it.
COPIED_BYTES = 16 * 1024

#: Pieces of a body that are kept apart; more are joined if they are this small on average, in bytes. An object takes as
#: much, so that a body in chunks of two bytes would take thirty times its size.
FEW_PIECES = 1024
SMALL_PIECE = 64

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ClientGone(Exception):
    """The client left before its request was complete."""


class Room(Protocol):
    """Accounting for the memory of one body."""

    def grow(self, received: int) -> None:
        """Account for *received* bytes, of more to come; raises HttpError if there is no room for them."""

    def settle(self, size: int) -> None:
        """Account for a complete body of *size* bytes."""


def compact(pieces: list[bytes], size: int) -> list[bytes]:
    """Join *pieces*, more than a few and *size* bytes together, if they are small."""
    return [b"".join(pieces)] if size < SMALL_PIECE * len(pieces) else pieces


class Wire(Protocol):
    """What a transaction needs of its connection."""

    #: The client takes less than it is sent.
    is_full: bool
    #: The connection ends with the answer that is being given.
    is_ending: bool

    def write(self, *pieces: bytes) -> None:
        """Send *pieces*."""

    async def drained(self) -> None:
        """Wait until the client has taken most of what was sent, or has left."""

    def taken(self) -> None:
        """The app has taken what there was of the body."""

    def answered(self, transaction: Transaction) -> None:
        """The last of the answer has been written."""

    def failed(self, transaction: Transaction) -> None:
        """The app has ended before its answer was whole."""


class Stage(Enum):
    """How far the answer is."""

    WAITING = auto()
    STARTED = auto()
    ENDED = auto()


# They are compared a dozen times for each request, and a look into an enumeration costs as much as a call.
_WAITING, _STARTED, _ENDED = Stage


class Transaction:
    """One request and its answer.

    Args:
        wire: the connection.
        scope: the ASGI scope.
        limits: bounds on it.
        keep_alive: the client will send another request on this connection.
    """

    __slots__ = (
        "_delivered",
        "_framing",
        "_head",
        "_is_awaited",
        "_is_watched",
        "_limits",
        "_pieces",
        "_problem",
        "_remaining",
        "_waiter",
        "_wire",
        "buffered",
        "complete",
        "gone",
        "is_last",
        "scope",
        "stage",
        "status",
        "task",
        "watchdog",
    )

    def __init__(self, wire: Wire, scope: Scope, limits: Limits, keep_alive: bool) -> None:
        self._wire = wire
        self._limits = limits
        self._pieces: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        #: The app has asked for the body.
        self._is_awaited = False
        self._is_watched = False
        self._delivered = False
        self._framing: Framing = NO_BODY
        self._head = b""
        self._remaining = 0
        self.scope = scope
        #: Bytes of the body that the app has not taken yet.
        self.buffered = 0
        #: The whole request has arrived.
        self.complete = False
        #: The client has left, or what it sent cannot be made sense of.
        self.gone = False
        self._problem: HttpError | None = None
        #: The connection ends behind the answer.
        self.is_last = not keep_alive
        self.stage = _WAITING
        #: Of the answer, once the app has begun it; 0 until then.
        self.status = 0
        #: In which the app answers, and what holds its deadline; from `run` on.
        self.task: asyncio.Task[Any]
        self.watchdog: Watchdog

    @property
    def ends_by_close(self) -> bool:
        """The end of the connection is all that tells the client where the answer ends."""
        return self._framing is CLOSE

    async def run(
        self, serve: Callable[[Scope, Transaction], Awaitable[None]], task: asyncio.Task[Any], watchdog: Watchdog
    ) -> None:
        """Let *serve* answer in *task*, whose deadlines *watchdog* holds."""
        self.task = task
        self.watchdog = watchdog
        watchdog.expired = None  # as it may have for a request before
        try:
            await serve(self.scope, self)
        except Exception:
            log.exception("smetric.request.failed", method=self.scope["method"])
        finally:
            watchdog.close()
            self._is_watched = False
            if self.stage is not _ENDED and not self.gone:
                self._wire.failed(self)

    def watch(self) -> None:
        """From now on, cancel the task as soon as the client leaves before the answer is whole; at once if it has."""
        self._is_watched = True
        if self.gone:
            self.task.cancel()

    def leave(self, problem: HttpError | None = None) -> None:
        """The client has left, or is told of *problem*, which what it sends of its body has."""
        self.gone, self._problem = True, problem
        self._pieces.clear()
        self.buffered = 0
        if self._waiter is not None:
            self._wake(self._waiter)
        if self._is_watched and self.stage is not _ENDED:
            self._is_watched = False
            self.task.cancel()

    def feed(self, piece: bytes) -> None:
        """*piece* of the body has arrived."""
        if self.stage is not _ENDED:
            self._pieces.append(piece)
            self.buffered += len(piece)
            if len(self._pieces) > FEW_PIECES:
                self._pieces = compact(self._pieces, self.buffered)
            if self._waiter is not None:
                self._wake(self._waiter)

    def end_body(self) -> None:
        """The whole body has arrived."""
        self.complete = True
        if self._waiter is not None:
            self._wake(self._waiter)

    @staticmethod
    def _wake(waiter: asyncio.Future[None]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    async def __call__(self) -> Message:
        """ASGI `receive`: all that has arrived of the body, then `http.disconnect` once the client leaves."""
        if not await self.arrival():
            return {"type": "http.disconnect"}
        if self.complete:
            self.watchdog.disarm()  # what the app does with it has no deadline
        return {"type": "http.request", "body": b"".join(self.take()), "more_body": not self.complete}

    async def body(self, room: Room) -> bytes:
        """The whole body, put together once: copies of large bodies cost more than anything here; as of `Client`."""
        pieces: list[bytes] = []
        size = 0
        while True:
            if self.gone or not (self.complete or await self.arrival()):
                raise self._problem or ClientGone
            size += self.buffered
            pieces += self.take()
            if len(pieces) > FEW_PIECES:
                pieces = compact(pieces, size)
            if size > self._limits.body_bytes:
                raise too_large(self._limits)
            if self.complete:
                break
            room.grow(size)
        room.settle(size)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def arrival(self) -> bool:
        """Wait until there is something of the body to take, or its end; False once the client has left."""
        if not self._is_awaited:
            self._is_awaited = True
            if not (self.buffered or self.complete or self.gone) and self.stage is _WAITING:
                self._ask_on()
        while True:
            if self.gone or self.stage is _ENDED:
                return False
            if self._pieces or (self.complete and not self._delivered):
                return True
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _ask_on(self) -> None:
        """Tell a client to send its body, if it waits for that."""
        scope = self.scope
        if scope["http_version"] == "1.1" and dict(scope["headers"]).get(b"expect", b"").lower() == b"100-continue":
            self._wire.write(_CONTINUE)

    def take(self) -> list[bytes]:
        """What has arrived of the body since the last time: all of it, if it is `complete` and this the first time."""
        pieces, self._pieces = self._pieces, []
        self.buffered = 0
        self._delivered = self.complete
        self._wire.taken()
        return pieces

    def begin(self, status: int, headers: Headers, piece: bytes = b"", *, is_last: bool = False) -> bool:
        """Send the head of an answer, in one write with its first piece if there is one already; as of `Client`."""
        is_held = bool(piece) or is_last
        self.start(status, headers, is_held=is_held)
        if is_held:
            self.write(piece, is_last=is_last)
        return self._wire.is_full

    def pass_on(self, piece: bytes, *, is_last: bool = False) -> bool:
        """Send *piece* of an answer that has begun; *is_last*: nothing follows. As of `Client`."""
        self.write(piece, is_last=is_last)
        return self._wire.is_full

    async def drained(self) -> None:
        """Wait, within a deadline, until the client has taken most of what it was sent, or has left."""
        self.watchdog.arm(self._limits.send_timeout_s, "send")
        await self._wire.drained()
        self.watchdog.disarm()

    async def send(self, message: Message) -> None:
        """ASGI `send`; returns once the client has taken most of what it was sent, or has left.

        Raises:
            RuntimeError: the message is out of place, or more than the answer's Content-Length announced.
            ValueError: a header field would break the answer's framing.
        """
        self.watchdog.disarm()
        kind = message["type"]
        if kind == "http.response.body":
            self.write(message.get("body", b""), is_last=not message.get("more_body", False))
        elif kind == "http.response.start":
            self.start(message["status"], message.get("headers", ()))
        else:
            raise RuntimeError(f"{kind} is out of place: the answer is {self.stage.name.lower()}")
        if self._wire.is_full:
            await self.drained()

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]], *, is_held: bool = False) -> None:
        """Send the head of the answer; *is_held*: together with the piece that `write` is given in the same tick.

        Raises: as of `send`.
        """
        self.status = status
        if self.gone:
            return
        if self.stage is not _WAITING:
            raise RuntimeError(f"http.response.start is out of place: the answer is {self.stage.name.lower()}")
        # Where an unread request ends is not known before it has been read.
        is_last = self.is_last or not self.complete or self._wire.is_ending
        head, self._framing, self._remaining, self.is_last = head_of(status, headers, self.scope, is_last)
        self.stage = _STARTED
        if is_held:
            self._head = head
        else:
            self._wire.write(head)

    def write(self, body: bytes, *, is_last: bool) -> None:
        """Send a piece of the answer's body.

        Raises: as of `send`.
        """
        if self.gone:
            return
        if self.stage is not _STARTED:
            raise RuntimeError(f"http.response.body is out of place: the answer is {self.stage.name.lower()}")
        head, self._head = self._head, b""
        framing = self._framing
        if framing is CHUNKED:
            if body:
                end = b"\r\n0\r\n\r\n" if is_last else b"\r\n"
                if len(body) > COPIED_BYTES:
                    self._wire.write(b"%b%x\r\n" % (head, len(body)), body, end)
                else:
                    self._wire.write(b"%b%x\r\n%b%b" % (head, len(body), body, end))
            elif head or is_last:
                self._wire.write(head + b"0\r\n\r\n" if is_last else head)
        elif framing is NO_BODY or not body:
            if head:
                self._wire.write(head)
        else:
            if framing is LENGTH:
                self._remaining -= len(body)
                if self._remaining < 0:
                    raise RuntimeError("the answer is longer than its Content-Length")
            if not head:
                self._wire.write(body)
            elif len(body) > COPIED_BYTES:
                self._wire.write(head, body)
            else:
                self._wire.write(head + body)
        if is_last:
            if framing is LENGTH and self._remaining:
                raise RuntimeError("the answer is shorter than its Content-Length")
            self.stage = _ENDED
            self._wire.answered(self)
