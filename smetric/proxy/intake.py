"""Guard in front of every endpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from smetric.errors import HttpError, RequestError
from smetric.http.connection import FAULT, LINGER_BYTES, LINGER_S
from smetric.http.headers import App, Headers, Message, Receive, Scope, Send
from smetric.http.limits import Limits, has_body, inspect_head, too_large
from smetric.http.transaction import FEW_PIECES, ClientGone, Room, Timer, Transaction, Watchdog, compact
from smetric.proxy.client import Client
from smetric.proxy.error_response import error_body, send_error

# A client behind an ASGI server that is not ours: the same bounds, and the same word of its departure.
#
# One waits for its departure in a task of its own, and what is left of a body is read here: stock Hypercorn leaks the
# connection, its task and its buffers otherwise. What our own server makes of a client is in `transaction.py`.


class AsgiClient:
    """A `Client` behind any ASGI server; made in the task that serves its request.

    An answer to a half-read request must reach a client that is still sending: the rest of the body is read and dropped
    meanwhile, and the connection closed behind the answer.

    Args:
        receive: the server's.
        send: the server's.
        limits: bounds on the request.
        timer: of its deadlines.
        has_body: the head announces a body.
    """

    __slots__ = (
        "_limits",
        "_receive",
        "_send",
        "_settled",
        "_unsent",
        "_watcher",
        "answered",
        "complete",
        "gone",
        "is_last",
        "status",
        "task",
        "watchdog",
    )

    def __init__(self, receive: Receive, send: Send, limits: Limits, timer: Timer, *, has_body: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._receive = receive
        self._send = send
        self._limits = limits
        self._watcher: asyncio.Task[None] | None = None
        #: Set when enough has been read and dropped of a body that was half read as the answer began; None for others.
        self._settled: asyncio.Event | None = None
        self._unsent: deque[Message] = deque()
        self.task: asyncio.Task[Any] = task
        self.watchdog = Watchdog(task, timer)
        #: Nothing is left to read: the whole body has come, or none was announced.
        self.complete = not has_body
        self.gone = False
        self.status = 0
        self.is_last = False
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
        """The whole body; as of `Client`."""
        pieces: list[bytes] = []
        size = 0
        while not self.complete:
            message = await self()
            if self.gone:
                raise ClientGone
            piece = message.get("body", b"")
            pieces.append(piece)
            size += len(piece)
            if len(pieces) > FEW_PIECES:
                pieces = compact(pieces, size)
            if size > self._limits.body_bytes:
                raise too_large(self._limits)
            if not self.complete:
                room.grow(size)
        room.settle(size)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def watch(self) -> None:
        """From now on, cancel the request's task as soon as the client leaves."""
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._wait_until_gone())

    async def _wait_until_gone(self) -> None:
        while not self.gone:
            await self()
        if not self.answered:
            self.task.cancel()

    def begin(self, status: int, headers: Headers, piece: bytes = b"", *, is_last: bool = False) -> bool:
        """Have the head of an answer sent, and its first piece if there is one already, while waiting in `drained`."""
        self._unsent.append({"type": "http.response.start", "status": status, "headers": headers})
        return not (piece or is_last) or self.pass_on(piece, is_last=is_last)

    def pass_on(self, piece: bytes, *, is_last: bool = False) -> bool:
        """Have *piece* of an answer that has begun sent in `drained`; *is_last*: nothing follows."""
        self._unsent.append({"type": "http.response.body", "body": piece, "more_body": not is_last})
        return True

    async def drained(self) -> None:
        """Send what is to be sent, each message within the deadline."""
        while self._unsent:
            await self.send(self._unsent.popleft())

    async def send(self, message: Message) -> None:
        """Send one ASGI message within its deadline."""
        self.watchdog.arm(self._limits.send_timeout_s, "send")
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if not self.complete:
                self.is_last = True
                self._settled = asyncio.Event()
                self._watcher = asyncio.get_running_loop().create_task(self._drop(self._settled))
            if self.is_last:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        elif not message.get("more_body", False):
            if self._settled is not None:
                if message.get("body"):
                    await self._send({"type": "http.response.body", "body": message["body"], "more_body": True})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        await self._settled.wait()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            self.answered = True
        await self._send(message)
        self.watchdog.disarm()

    async def _drop(self, settled: asyncio.Event) -> None:
        """Read and drop what is left of the body, so that the server can go on reading the connection."""
        dropped = 0
        while not self.gone:
            dropped += len((await self()).get("body", b""))
            if self.complete or dropped > LINGER_BYTES:
                settled.set()
        settled.set()

    def close(self) -> None:
        """The request has ended. Behind an answer the watcher ends by itself, as the server says that the client left.

        A watcher that is cancelled holds its own traceback and with it itself: garbage that only the collector frees.
        """
        if self._watcher is not None and not self.answered:
            self._watcher.cancel()
        self._watcher = None
        self.watchdog.close()


# The guard in front of every endpoint: refuses malformed requests before anything is read, and ends what is overdue.
#
# Pure ASGI. Bodies and answers are the clients' (`client.py`), what is answered the endpoints'.

log = structlog.get_logger("smetric.intake")


def ignore_refusal(_problem: HttpError, _scope: Scope, _is_seen: bool) -> None:
    """Ignore a refused request."""


class Intake:
    """Wraps the data port's app.

    Args:
        app: what answers a well-formed request; its `receive` is a `Client`.
        limits: bounds on one request.
        refused: told of those that *app* does not see, or not the end of.
    """

    def __init__(
        self, app: App, limits: Limits, refused: Callable[[HttpError, Scope, bool], object] = ignore_refusal
    ) -> None:
        self._app = app
        self.limits = limits
        self._refused = refused
        self._timer = Timer()
        self.connections: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def refused(self, problem: HttpError, scope: Scope, is_seen: bool) -> None:
        """Count a request that was refused before it was whole; *is_seen*: an endpoint has it, and counts it itself."""
        self._refused(problem, scope, is_seen)

    def error_body(self, path: str, problem: HttpError) -> bytes:
        """Return the JSON body of *problem* in the shape of the API of *path*."""
        return error_body(path, problem)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request on an ASGI server."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
        else:
            client = AsgiClient(receive, send, self.limits, self._timer, has_body=has_body(scope))
            try:
                await self._answer(scope, client, inspect_head(scope, self.limits))
            finally:
                client.close()

    def serve(self, scope: Scope, client: Transaction) -> Coroutine[Any, Any, None]:
        """Answer one request on our own server, which has inspected its head."""
        return self._answer(scope, client, None)

    async def _answer(self, scope: Scope, client: Client, problem: HttpError | None) -> None:
        watchdog = client.watchdog
        try:
            if problem is not None:
                # Where this request ends is in doubt, and with it where the next one begins.
                client.is_last = True
                self.refused(problem, scope, False)
                await send_error(client.send, scope["path"], problem)
            else:
                if not client.complete:
                    watchdog.arm(self.limits.body_timeout_s, "body")
                await self._app(scope, client, client.send)
        except ClientGone:
            pass
        except Exception:
            # The request is the only one to suffer.
            log.exception("smetric.request.failed", method=scope["method"])
            if not client.status:
                await send_error(client.send, scope["path"], FAULT)
        except asyncio.CancelledError:
            expired = watchdog.expired
            if not client.gone and expired is None:
                raise  # the server is shutting down
            client.task.uncancel()
            if expired == "body" and not client.status:
                await send_error(
                    client.send,
                    scope["path"],
                    RequestError(
                        f"the request body did not arrive within {self.limits.body_timeout_s:g} s "
                        "(setting limits.body_timeout)",
                        status=408,
                        kind="request_timeout",
                    ),
                )
