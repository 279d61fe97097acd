"""What a client sends: its body, read within bounds and a deadline, and its presence.

Any ASGI server will do. Where it is ours the client's presence costs no task; with others one waits for it, and reads
what is left of a body: stock Hypercorn leaks the connection, its task and its buffers otherwise.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

from smetric.errors import RequestError
from smetric.proxy.asgi import Message, Receive
from smetric.proxy.transaction import Transaction
from smetric.proxy.watchdog import Watchdog

#: After an answer to a half-read request, this much more of its body is read and dropped, for at most this long, so
#: that the client reads the answer instead of a reset.
LINGER_S = 1.0
LINGER_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one request, on a connection that waits for one, and on connections; bytes and seconds."""

    body_bytes: int = 32 * 1024 * 1024
    header_count: int = 100
    header_bytes: int = 32 * 1024
    target_bytes: int = 8 * 1024
    idle_timeout_s: float = 10.0
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    #: Connections; 0 for as many as the file descriptors allow.
    connections: int = 0


class Room(Protocol):
    """What accounts for the memory that a body takes."""

    def grow(self, received: int) -> None:
        """*received* bytes of it have come, and more will; raises HttpError if there is no room for them."""

    def settle(self, size: int) -> None:
        """It has *size* bytes."""


class ClientGone(Exception):
    """The client left before its request was complete."""


class Inbox:
    """A request's body and its client's presence. Callable as an ASGI `receive`."""

    __slots__ = (
        "_dropped",
        "_limits",
        "_receive",
        "_settled",
        "_watcher",
        "answered",
        "complete",
        "gone",
        "task",
        "transaction",
        "watchdog",
    )

    def __init__(
        self, receive: Receive, limits: Limits, watchdog: Watchdog, task: asyncio.Task[Any], *, has_body: bool
    ) -> None:
        self._receive = receive
        self._limits = limits
        self._watcher: asyncio.Task[None] | None = None
        self._dropped = 0
        self._settled: asyncio.Event | None = None
        #: The request as our own server has it; None behind another one.
        self.transaction = receive if isinstance(receive, Transaction) else None
        #: In which the request is served.
        self.task = task
        self.watchdog = watchdog
        #: Nothing is left to read: the whole body has come, or none was announced.
        self.complete = not has_body
        #: The client has left.
        self.gone = False
        #: The last of the answer has been handed to the server, which from then on says "gone" to every request.
        self.answered = False

    async def __call__(self) -> Message:
        """Receive one ASGI message."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = True
        elif not message.get("more_body", False):
            self.complete = True
        return message

    async def body(self, room: Room) -> bytes:
        """The whole body.

        Args:
            room: told how much there is of it.

        Raises:
            RequestError: 413 above the limit, 408 when it takes longer than allowed.
            ClientGone: the client left first.
        """
        pieces: list[bytes] = []
        size = 0
        while not self.complete:
            news = await self._news()
            pieces += news
            size += sum(map(len, news))
            if size > self._limits.body_bytes:
                raise too_large(self._limits)
            if not self.complete:
                room.grow(size)
        room.settle(size)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _news(self) -> list[bytes]:
        """What has arrived of the body, put together by nobody: copies of large bodies cost more than anything here."""
        transaction = self.transaction
        if transaction is None:
            message = await self()
            if self.gone:
                raise ClientGone
            return [message.get("body", b"")]
        if not await transaction.arrival():
            self.gone = True
            raise ClientGone
        self.complete = transaction.complete
        return transaction.take()

    def watch(self) -> None:
        """From now on, cancel the request's task as soon as the client leaves."""
        if self.transaction is not None:
            self.transaction.on_departure(self._leave)
        elif self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._wait_until_gone())

    def _leave(self) -> None:
        self.gone = True
        if not self.answered:
            self.task.cancel()

    async def _wait_until_gone(self) -> None:
        while not self.gone:
            await self()
        self._leave()

    @property
    def must_drain(self) -> bool:
        """Something is left of the body, and the server leaves it to the app to read that."""
        return self.transaction is None and not self.complete

    def drain(self) -> None:
        """Read and drop what is left of the body, so that the server can go on reading the connection."""
        if self.must_drain and self._watcher is None and not self.gone:
            self._settled = asyncio.Event()
            self._watcher = asyncio.get_running_loop().create_task(self._drop(self._settled))

    async def _drop(self, settled: asyncio.Event) -> None:
        while not self.gone:
            message = await self()
            self._dropped += len(message.get("body", b""))
            if self.complete or self._dropped > LINGER_BYTES:
                settled.set()
        settled.set()

    async def linger(self) -> None:
        """Wait until the client has sent the body that is drained, or left; bounded in time and bytes."""
        if self._settled is None:
            return
        try:
            async with asyncio.timeout(LINGER_S):
                await self._settled.wait()
        except TimeoutError:
            pass

    def close(self) -> None:
        """Stop watching. Behind an answer the watcher ends by itself: the server then says that the client has left.

        A watcher that is cancelled holds its own traceback and with it itself: garbage that only the collector frees.
        """
        if self.transaction is not None:
            self.transaction.on_departure(None)
        elif self._watcher is not None and not self.answered:
            self._watcher.cancel()
        self._watcher = None


def too_large(limits: Limits) -> RequestError:
    """413 for a body above the limit."""
    return RequestError(
        f"the request body is larger than {limits.body_bytes} bytes (setting forward.max_body)",
        status=413,
        kind="request_too_large",
    )
