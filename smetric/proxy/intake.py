"""Guard in front of every endpoint, and the clients that endpoints see behind it.

Behind our own listener a client is an `http.transaction.Transaction`; behind another ASGI server it is an `AsgiClient`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import structlog

from smetric.errors import HttpError
from smetric.http.connection import FAULT, LINGER_BYTES, LINGER_S
from smetric.http.headers import App, Headers, Message, Receive, Scope, Send
from smetric.http.limits import (
    NO_WEBSOCKET,
    HttpLimits,
    drop_authority,
    has_body,
    inspect_head,
    late_body,
    too_large,
)
from smetric.http.transaction import FEW_PIECES, ClientGone, Room, Timer, Transaction, Watchdog, compact
from smetric.proxy.error_response import error_body, send_error

log = structlog.get_logger("smetric.intake")


class Client(Protocol):
    """Client of one request. Calling it is ASGI's `receive`; `send` is ASGI's `send` with a deadline."""

    #: Serves the request.
    task: asyncio.Task[Any]
    #: Holds the deadline of the request.
    watchdog: Watchdog
    #: The whole request has arrived.
    complete: bool
    #: The client has disconnected.
    gone: bool
    #: Status of the answer once its head has gone to the server; 0 until then.
    status: int
    #: The connection ends with this answer.
    is_last: bool

    async def __call__(self) -> Message:
        """Receive an ASGI message."""

    async def send(self, message: Message) -> None:
        """Send an ASGI message; return once the client has taken most of what it was sent, or has disconnected."""

    async def body(self, room: Room) -> bytes:
        """Return the whole body, accounted for in *room*.

        Raises:
            RequestError: 413 above the limit, 400 for broken framing.
            ClientGone: the client disconnected first.
        """

    def watch(self) -> None:
        """From now on, cancel the task once the client disconnects, unless the whole answer was sent."""

    def begin(self, status: int, headers: Headers, piece: bytes = b"", *, is_last: bool = False) -> bool:
        """Send the head of an answer and, if possible in the same write, the first piece of its body.

        Args:
            status: of the answer.
            headers: its fields.
            piece: empty if the body is still to come.
            is_last: nothing follows *piece*.

        Returns:
            Whether the client takes less than it is sent. Then wait for `drained` before sending more.
        """

    def pass_on(self, piece: bytes, *, is_last: bool = False) -> bool:
        """Send a piece of an answer that has begun; *is_last*: nothing follows. Return what `begin` returns."""

    async def drained(self) -> None:
        """Wait, within a deadline, until the client has taken most of what it was sent, or has disconnected."""


class AsgiClient:
    """Client behind any ASGI server, with the same bounds as behind our own; made in the task of its request.

    It waits for the disconnect in a task of its own. While an answer to a half-read request is sent, the rest of the
    request is read and dropped, so that the client can read the answer. Hypercorn would otherwise leak the connection,
    its task and its buffers.

    Args:
        receive: the server's.
        send: the server's.
        limits: bounds on the request.
        timer: timer of its deadlines.
        has_body: the head announces a body.
    """

    def __init__(self, receive: Receive, send: Send, limits: HttpLimits, timer: Timer, *, has_body: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._receive = receive
        self._send = send
        self._limits = limits
        self._watcher: asyncio.Task[None] | None = None
        #: Set once enough of a half-read body was dropped; None for a body that was read before the answer began.
        self._settled: asyncio.Event | None = None
        self._unsent: deque[Message] = deque()
        self.task: asyncio.Task[Any] = task
        self.watchdog = Watchdog(task, timer)
        self.complete = not has_body
        self.gone = False
        self.status = 0
        self.is_last = False
        #: The end of the answer has gone to the server. From then on the server reports each client as disconnected.
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
        """Return the whole body; as of `Client`."""
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
        """From now on, cancel the task once the client disconnects."""
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._wait_until_gone())

    async def _wait_until_gone(self) -> None:
        while not self.gone:
            await self()
        if not self.answered:
            self.task.cancel()

    def begin(self, status: int, headers: Headers, piece: bytes = b"", *, is_last: bool = False) -> bool:
        """Queue the head of an answer, and its first piece if there is one, for `drained` to send."""
        self._unsent.append({"type": "http.response.start", "status": status, "headers": headers})
        return not (piece or is_last) or self.pass_on(piece, is_last=is_last)

    def pass_on(self, piece: bytes, *, is_last: bool = False) -> bool:
        """Queue *piece* for `drained` to send; *is_last*: nothing follows."""
        self._unsent.append({"type": "http.response.body", "body": piece, "more_body": not is_last})
        return True

    async def drained(self) -> None:
        """Send what is queued, each message within the deadline."""
        while self._unsent:
            await self.send(self._unsent.popleft())

    async def send(self, message: Message) -> None:
        """Send an ASGI message within its deadline."""
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
        """Read and drop the rest of the body, so that the server goes on reading the connection."""
        dropped = 0
        while not self.gone:
            dropped += len((await self()).get("body", b""))
            if self.complete or dropped > LINGER_BYTES:
                settled.set()
        settled.set()

    def close(self) -> None:
        """End the request. After an answer the watcher ends by itself, as the server then reports a disconnect.

        A cancelled watcher holds its own traceback and with it itself, which only the garbage collector frees.
        """
        if self._watcher is not None and not self.answered:
            self._watcher.cancel()
        self._watcher = None
        self.watchdog.close()


def ignore_refusal(_problem: HttpError, _scope: Scope, _is_seen: bool) -> None:
    """Ignore a refused request."""


class Intake:
    """Guard of an app: refuses malformed requests before it reads anything, ends overdue ones, answers faults.

    Args:
        app: serves well-formed requests; its `receive` is a `Client`.
        limits: bounds on one request.
        refused: called for requests of which *app* sees nothing, or not the end.
    """

    def __init__(
        self, app: App, limits: HttpLimits, refused: Callable[[HttpError, Scope, bool], object] = ignore_refusal
    ) -> None:
        self._app = app
        self.limits = limits
        self._refused = refused
        self._timer = Timer()
        self.connections: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def refused(self, problem: HttpError, scope: Scope, is_seen: bool) -> None:
        """Count a request that was refused before its end; *is_seen*: an endpoint has it, and counts it itself."""
        self._refused(problem, scope, is_seen)

    def error_body(self, path: str, problem: HttpError) -> bytes:
        """Return the JSON body of *problem* in the shape of the API of *path*."""
        return error_body(path, problem)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request on an ASGI server."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await self._refuse_websocket(scope, send)
        else:
            drop_authority(scope)
            client = AsgiClient(receive, send, self.limits, self._timer, has_body=has_body(scope))
            try:
                await self._answer(scope, client, inspect_head(scope, self.limits))
            finally:
                client.close()

    async def _refuse_websocket(self, scope: Scope, send: Send) -> None:
        self.refused(NO_WEBSOCKET, scope, False)
        if "websocket.http.response" not in scope.get("extensions", ()):
            await send({"type": "websocket.close", "code": 1003})  # the server answers 403
            return

        async def send_before_handshake(message: Message) -> None:
            await send({**message, "type": f"websocket.{message['type']}"})

        await send_error(send_before_handshake, scope["path"], NO_WEBSOCKET)

    def serve(self, scope: Scope, client: Transaction) -> Coroutine[Any, Any, None]:
        """Answer a request on our own listener, which has inspected its head."""
        return self._answer(scope, client, None)

    async def _answer(self, scope: Scope, client: Client, problem: HttpError | None) -> None:
        watchdog = client.watchdog
        try:
            if problem is not None:
                # The end of this request is in doubt, and with it the beginning of the next one.
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
            # No other request suffers.
            log.exception("smetric.request.failed", method=scope["method"])
            if not client.status:
                await send_error(client.send, scope["path"], FAULT)
        except asyncio.CancelledError:
            expired = watchdog.expired
            if not client.gone and expired is None:
                raise  # the server stops
            client.task.uncancel()
            problem = late_body(expired, self.limits)
            if problem is not None and not client.status:
                await send_error(client.send, scope["path"], problem)
