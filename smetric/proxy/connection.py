"""The connections of one listener: how many there may be, how each begins and ends, and Hypercorn's part in it.

Hypercorn accepts, counts tasks and drains; from the first byte on a connection is `http1.py`'s.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Mapping
from typing import Any, cast

import structlog
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config

from smetric.errors import HttpError
from smetric.proxy.asgi import App
from smetric.proxy.footprint import most_files
from smetric.proxy.http1 import LAST_REQUEST_S, Http1
from smetric.proxy.intake import Intake, unheard
from smetric.proxy.limits import Limits
from smetric.proxy.tls import Tls
from smetric.proxy.watchdog import Timer

log = structlog.get_logger("smetric.server")

#: File descriptors left for what is neither a client's connection nor an instance's.
RESERVED_FDS = 64
#: Connections beyond the most allowed that are told so; more are dropped without a word.
TOLD = 32
#: Seconds between two log lines on connections turned away.
LOG_EVERY_S = 10.0


def most_connections() -> int:
    """How many connections of clients the file descriptors allow: each may need another one to an instance."""
    return max(8, (most_files() - RESERVED_FDS) // 2)


class Connections:
    """The connections of one listener.

    Args:
        app: what answers their requests.
        limits: bounds on each.
        most: how many there may be; those that have not shaken hands yet count.
        tls: by which clients come; None for plain HTTP.
    """

    def __init__(self, app: App, limits: Limits, most: int, tls: Tls | None = None) -> None:
        self._app = app
        self._refused = app.refused if isinstance(app, Intake) else unheard
        self._limits = limits
        self._most = most
        self._tls = tls
        self._timer = Timer()
        self._open: set[Http1] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._has_ended = False
        self._turned_away = 0
        self._log_at = 0.0

    async def serve(self, reader: asyncio.StreamReader, transport: asyncio.Transport, state: Mapping[str, Any]) -> None:
        """Serve one connection, from what *reader* holds of it on, until it is lost and its app has ended."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def lost(protocol: Http1) -> None:
            self._open.discard(protocol)
            if not self._open:
                self._none_open.set()
            if not ended.done():
                ended.set_result(None)

        early = _already_read(reader)
        if reader.at_eof():
            transport.abort()
            return
        protocol = Http1(self._app, self._limits, state, lost, self._timer, self._refused)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        self._begin(protocol, loop)
        if early:
            protocol.data_received(early)
        try:
            await ended
        except asyncio.CancelledError:
            # The listener ends, and its patience with what is under way has. Here this ends: streams log it otherwise.
            if protocol.turns.task is not None:
                protocol.turns.task.cancel()
        if protocol.turns.task is not None:
            await asyncio.wait((protocol.turns.task,))
        protocol.abort()

    def _begin(self, protocol: Http1, loop: asyncio.AbstractEventLoop) -> None:
        number, most = self.count()
        if number < most + TOLD:
            self._open.add(protocol)
            self._none_open.clear()
        if self._has_ended:
            protocol.end()
        elif number >= most:
            self._tell(loop)
            if number >= most + TOLD:
                protocol.abort()
            else:
                retry_after_s = random.uniform(1.0, 3.0)  # not all at the same time again
                busy = HttpError(503, "too many connections", "service_unavailable", retry_after_s=retry_after_s)
                protocol.refuse(busy)

    def _has_room(self) -> bool:
        """Whether a connection may shake hands, be it to be told that there are too many."""
        number, most = self.count()
        if number < most + TOLD:
            return True
        self._tell(asyncio.get_running_loop())
        return False

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        """One more is turned away."""
        self._turned_away += 1
        if loop.time() >= self._log_at:
            self._log_at = loop.time() + LOG_EVERY_S
            log.warning("smetric.connections.full", most=self._most, turned_away=self._turned_away)

    def count(self) -> tuple[int, int]:
        """How many there are, and how many there may be."""
        return len(self._open) + (self._tls.handshakes() if self._tls is not None else 0), self._most

    def tls_context(self) -> ssl.SSLContext | None:
        """How they speak TLS; None for plain HTTP."""
        return self._tls.context(self._has_room) if self._tls is not None else None

    def end(self) -> None:
        """Close each a moment after it has nothing under way any more."""
        self._has_ended = True
        for protocol in self._open:
            protocol.end()

    async def all_ended(self) -> None:
        """Wait until there is none. Hypercorn waits only for those that had begun when it stopped accepting.

        Those that shake hands have as long for it as others for a last request.
        """
        is_shaking = self._tls is not None and self._tls.handshakes()
        await asyncio.sleep(LAST_REQUEST_S if is_shaking else 0)  # what was accepted last has begun by then
        await self._none_open.wait()


class ListenerConfig(Config):
    """Hypercorn's settings for one listener, and its connections: the one object every connection is handed.

    Args:
        connections: those of the listener.
    """

    def __init__(self, connections: Connections) -> None:
        super().__init__()
        self.connections = connections
        self._tls = connections.tls_context()

    @property
    def ssl_enabled(self) -> bool:
        """Whether it speaks TLS."""
        return self._tls is not None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        """How it speaks TLS."""
        return self._tls


async def connection_of(
    app: Any,
    loop: asyncio.AbstractEventLoop,
    config: Config,
    context: Any,
    state: Any,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """What Hypercorn does with a connection: ours for our listeners, its own for others in this process."""
    if isinstance(config, ListenerConfig):
        await config.connections.serve(reader, cast(asyncio.Transport, writer.transport), state)
    else:
        await TCPServer(app, loop, config, context, state, reader, writer)


def _already_read(reader: asyncio.StreamReader) -> bytes:
    """What has come before our protocol took over; one step only, for the reader would wait for more."""
    reading = reader.read(1 << 20)
    try:
        reading.send(None)
    except StopIteration as done:
        return cast(bytes, done.value)
    except OSError:
        reader.feed_eof()  # lost already
        return b""
    reading.close()
    return b""
