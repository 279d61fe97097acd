"""One client connection as Hypercorn serves it, hardened where its settings cannot, and relieved of what costs most.

Each deviation names its reason and has a test. Listening, draining and ending are in `server.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, cast

import h11
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config
from hypercorn.events import RawData
from hypercorn.protocol.h11 import H11Protocol

#: How long a closing connection may wait for its client to take what is buffered.
CLOSE_TIMEOUT_S = 2.0


class Http1(H11Protocol):
    """HTTP/1.1 only, and an answer's head in one write with its first piece where that is there already.

    `Upgrade: h2c` and the cleartext HTTP/2 preface would let a client tunnel past a front proxy's rules.
    """

    _head = b""

    async def _check_protocol(self, event: h11.Request) -> None:
        """Ignore every upgrade; the intake refuses whatever is not HTTP/1.x."""

    async def _send_h11_event(self, event: h11.Event) -> None:
        try:
            data = self.connection.send(cast(Any, event))
        except h11.LocalProtocolError:
            if self.connection.their_state != h11.ERROR:
                raise
            return
        assert data is not None
        if isinstance(event, h11.Response):
            self._head = data
            asyncio.get_running_loop().call_soon(self._write_head)
            return
        if self._head:
            data = self._head + data
            self._head = b""
        if data:
            await self.send(RawData(data))

    def _write_head(self) -> None:
        """Write the head alone: nothing of the body came in the same tick."""
        if self._head:
            cast(Any, self.send).__self__.writer.write(self._head)
            self._head = b""

    async def _maybe_recycle(self) -> None:
        self._write_head()
        await super()._maybe_recycle()


class Connection(TCPServer):
    """A connection whose idle time is a timer, and that never outlives its client."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self.config, ListenerConfig)
        self.idle_task = cast(Any, IdleTimer(self, self.config.idle))

    async def _read_data(self) -> None:
        """Read until the client leaves, then stop waiting for its next request."""
        await super()._read_data()
        await self.idle_task.stop()

    async def _close(self) -> None:
        """Close, and abort if the client takes nothing: Hypercorn waits for ever for one that never reads."""
        with contextlib.suppress(NotImplementedError, OSError, RuntimeError):
            self.writer.write_eof()
        try:
            self.writer.close()
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.writer.wait_closed()
        except TimeoutError:
            self.writer.transport.abort()
        except (OSError, RuntimeError, asyncio.CancelledError):
            pass
        finally:
            await self.idle_task.stop()

    async def close_idle(self) -> None:
        """Close it: no request came in time, or the server ends."""
        await self._initiate_server_close()


class IdleTimer:
    """Closes a connection that waits too long for its next request, or when its listener ends.

    In place of Hypercorn's task, which starts and cancels two tasks for every request.
    """

    __slots__ = ("_connection", "_handle", "_idle")

    def __init__(self, connection: Connection, idle: IdleConnections) -> None:
        self._connection = connection
        self._idle = idle
        self._handle: asyncio.TimerHandle | None = None

    async def restart(self, _: object, __: Callable[..., Any]) -> None:
        """The connection is idle from now on."""
        await self.stop()
        connection = self._connection
        seconds = 0 if self._idle.has_ended else connection.config.keep_alive_timeout
        self._handle = connection.loop.call_later(seconds, self._idle.close, connection)
        self._idle.add(connection)

    async def stop(self) -> None:
        """A request came, or the connection has ended."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
            self._idle.discard(self._connection)


class IdleConnections:
    """The connections of one listener that wait for a request: they have nothing to lose when it ends."""

    def __init__(self) -> None:
        #: No connection may wait any more.
        self.has_ended = False
        self._waiting: set[Connection] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def add(self, connection: Connection) -> None:
        """*connection* waits from now on."""
        self._waiting.add(connection)

    def discard(self, connection: Connection) -> None:
        """*connection* waits no more."""
        self._waiting.discard(connection)

    def close(self, connection: Connection) -> None:
        """Close *connection*."""
        self.discard(connection)
        task = connection.loop.create_task(connection.close_idle())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def end(self) -> None:
        """Close all of them, and each that has nothing to do from now on."""
        self.has_ended = True
        for connection in list(self._waiting):
            self.close(connection)


class ListenerConfig(Config):
    """Hypercorn's settings for one listener, and its idle connections: the one object every connection is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = IdleConnections()


def protocol_of(app: Any, config: Config, *args: Any) -> H11Protocol:
    """Hypercorn's choice of a protocol: ours for our listeners."""
    return (Http1 if isinstance(config, ListenerConfig) else H11Protocol)(app, config, *args)


def connection_of(app: Any, loop: asyncio.AbstractEventLoop, config: Config, *args: Any) -> TCPServer:
    """Hypercorn's choice of a connection: ours for our listeners."""
    return (Connection if isinstance(config, ListenerConfig) else TCPServer)(app, loop, config, *args)
