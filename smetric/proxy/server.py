"""Serves the data port and the admin port with Hypercorn in this process and loop, and ends in order.

Hypercorn is hardened here where its settings cannot: no cleartext HTTP/2, and no connection that outlives its client.
Each deviation names its reason and has a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

import hypercorn.protocol
import structlog
from hypercorn.asyncio.run import worker_serve
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config, Sockets
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.utils import wrap_app

from smetric.errors import ConfigError
from smetric.proxy.asgi import App

if TYPE_CHECKING:
    import h11
    from hypercorn.typing import Framework

log = structlog.get_logger("smetric.server")

#: The Hypercorn that the deviations below were written against (pyproject.toml holds it to this minor version).
KNOWN_HYPERCORN = "0.18."
#: How long a closing connection may wait for its client to take what is buffered.
CLOSE_TIMEOUT_S = 2.0
#: Connections that wait to be accepted.
BACKLOG = 1024


class _NoUpgrade(H11Protocol):
    """HTTP/1.1 only: `Upgrade: h2c` and the cleartext HTTP/2 preface let a client tunnel past a front proxy's rules."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """Ignore every upgrade; the intake refuses whatever is not HTTP/1.x."""


async def _close_bounded(self: TCPServer) -> None:
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


_read_data = TCPServer._read_data


async def _read_then_stop_idling(self: TCPServer) -> None:
    """Read until the client leaves, then stop waiting for its next request.

    Hypercorn waits on, with three tasks for each connection, until the keep-alive time is over.
    """
    await _read_data(self)
    await self.idle_task.stop()


def harden() -> None:
    """Put the deviations in place, once per process."""
    hypercorn.protocol.H11Protocol = _NoUpgrade  # type: ignore[attr-defined]
    TCPServer._close = _close_bounded  # type: ignore[method-assign]
    TCPServer._read_data = _read_then_stop_idling  # type: ignore[method-assign]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on *host*:*port*; port 0 takes a free one.

    Raises:
        ConfigError: the address is in use or not ours.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = infos[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # At once: who reads the address may connect, and a second process on the same port is found out here.
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another address or port"
        ) from error
    return sock


def address_of(sock: socket.socket) -> str:
    """`http://host:port` of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def hypercorn_config(drain_s: float) -> Config:
    """Hypercorn's settings for one listener (units: seconds, bytes)."""
    config = Config()
    config.alpn_protocols = ["http/1.1"]
    config.include_server_header = False
    config.include_date_header = False  # the engine's own answers carry theirs
    config.keep_alive_timeout = 10
    config.keep_alive_max_requests = 1_000_000
    config.graceful_timeout = drain_s
    config.shutdown_timeout = 10
    config.startup_timeout = 30
    config.h11_max_incomplete_size = 32 * 1024
    config.backlog = BACKLOG
    config.accesslog = None
    config.errorlog = None
    return config


async def serve(app: App, sock: socket.socket, *, stop: Callable[[], Awaitable[Any]], drain_s: float) -> None:
    """Serve *app* on *sock* until *stop* returns, then let what is in flight end within *drain_s*."""
    harden()
    config = hypercorn_config(drain_s)
    await worker_serve(
        wrap_app(cast("Framework", app), config.wsgi_max_body_size, "asgi"),
        config,
        sockets=Sockets(secure_sockets=[], insecure_sockets=[sock], quic_sockets=[]),
        shutdown_trigger=stop,
    )


class Shutdown:
    """SIGTERM or SIGINT: readiness goes first, then the data port drains; a second signal ends at once."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.forced = asyncio.Event()

    def install(self) -> None:
        """Take over SIGTERM and SIGINT of the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.signalled)

    def signalled(self) -> None:
        """One more signal."""
        (self.forced if self.draining.is_set() else self.draining).set()
