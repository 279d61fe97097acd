"""Client of a request as an endpoint sees it."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from smetric.http.headers import Headers, Message
from smetric.http.transaction import Room, Watchdog


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
