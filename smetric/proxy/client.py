"""Client of a request as an endpoint sees it."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from smetric.errors import RequestError
from smetric.http.headers import Headers, Message
from smetric.http.limits import Limits
from smetric.http.watchdog import Watchdog

#: After an answer to a half-read request, this much more of its body is read and dropped, for at most this long, so
#: that the client reads the answer instead of a reset.
LINGER_S = 1.0
LINGER_BYTES = 4 * 1024 * 1024

#: So many pieces of a body are few, and above that number they are put together where they are this small, in bytes: an
#: object takes as much, so that a body in chunks of two bytes would take thirty times its size.
FEW_PIECES = 1024
SMALL_PIECE = 64


class Room(Protocol):
    """What accounts for the memory that a body takes."""

    def grow(self, received: int) -> None:
        """*received* bytes of it have come, and more will; raises HttpError if there is no room for them."""

    def settle(self, size: int) -> None:
        """It has *size* bytes."""


class ClientGone(Exception):
    """The client left before its request was complete."""


class Client(Protocol):
    """One request's client. Its `__call__` is ASGI's `receive`, its `send` ASGI's `send`, with a deadline."""

    #: In which the request is served.
    task: asyncio.Task[Any]
    #: Holds the request's deadline.
    watchdog: Watchdog
    #: The whole request has arrived.
    complete: bool
    #: The client has left.
    gone: bool
    #: Of the answer, once its head has been handed to the server; 0 until then.
    status: int
    #: The connection ends with this answer.
    is_last: bool

    async def __call__(self) -> Message:
        """Receive one ASGI message."""

    async def send(self, message: Message) -> None:
        """Send one ASGI message; returns once the client has taken most of what it was sent, or has left."""

    async def body(self, room: Room) -> bytes:
        """The whole body.

        Args:
            room: told how much there is of it.

        Raises:
            RequestError: 413 above the limit, 400 where its framing breaks.
            ClientGone: the client left first.
        """

    def watch(self) -> None:
        """From now on, cancel the request's task as soon as the client leaves, unless the whole answer was sent."""

    def begin(self, status: int, headers: Headers, piece: bytes = b"", *, is_last: bool = False) -> bool:
        """Send the head of an answer, and its first piece if there is one already: one write for both, where it can be.

        Args:
            status: of the answer.
            headers: its fields.
            piece: the first of its body; empty if that is still to come.
            is_last: nothing follows *piece*.

        Returns:
            Whether the client takes less than it is sent: then wait until it is `drained` before more is sent.
        """

    def pass_on(self, piece: bytes, *, is_last: bool = False) -> bool:
        """Send *piece* of an answer that has begun; *is_last*: nothing follows. Returns what `begin` does."""

    async def drained(self) -> None:
        """Wait, within a deadline, until the client has taken most of what it was sent, or has left."""


def compact(pieces: list[bytes], size: int) -> list[bytes]:
    """More than a few *pieces*, of *size* bytes together: put together if they are small."""
    return [b"".join(pieces)] if size < SMALL_PIECE * len(pieces) else pieces


def too_large(limits: Limits) -> RequestError:
    """413 for a body above the limit."""
    return RequestError(
        f"the request body is larger than {limits.body_bytes} bytes (setting forward.max_body)",
        status=413,
        kind="request_too_large",
    )
