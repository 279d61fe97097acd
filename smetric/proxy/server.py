"""Serves the data port and the admin port with Hypercorn in this process and loop, and ends in order.

What becomes of one connection is in `connection.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast

import hypercorn.asyncio.run
import structlog
from hypercorn.asyncio.run import worker_serve
from hypercorn.config import Sockets
from hypercorn.utils import wrap_app

from smetric.errors import ConfigError
from smetric.file_watch import watch
from smetric.proxy.asgi import App, Message, Receive, Scope, Send
from smetric.proxy.connection import Connections, ListenerConfig, connection_of, most_connections
from smetric.proxy.intake import Intake
from smetric.proxy.limits import Limits
from smetric.proxy.tls import Tls

if TYPE_CHECKING:
    from hypercorn.typing import Framework

log = structlog.get_logger("smetric.server")

#: The Hypercorn that `connection.py` was written against.
KNOWN_HYPERCORN = "0.18."
#: Connections that wait to be accepted.
BACKLOG = 1024


def harden() -> None:
    """Let `connection.py` serve the connections of our listeners; others in this process stay as they are.

    A Hypercorn that is not known is left as it is: what it does badly is then done badly, but it serves.
    """
    version = metadata.version("hypercorn")
    if version.startswith(KNOWN_HYPERCORN):
        hypercorn.asyncio.run.TCPServer = connection_of  # type: ignore[attr-defined,assignment]
    else:
        log.warning("smetric.hypercorn.unknown", version=version, known=f"{KNOWN_HYPERCORN}x")


def raise_fd_limit() -> None:
    """Let this process open as many files as it may: connections are bounded by that, and the usual 1,024 are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on *host*:*port*; port 0 takes a free one.

    Raises:
        ConfigError: the address is in use or not ours.
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = infos[0]
        sock = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else "not a host name"
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}; choose another address") from error
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


def address_of(sock: socket.socket, scheme: str = "http") -> str:
    """`http://host:port` of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def hypercorn_config(connections: Connections, limits: Limits, drain_s: float) -> ListenerConfig:
    """Hypercorn's settings for one listener (units: seconds, bytes)."""
    config = ListenerConfig(connections)
    config.ssl_handshake_timeout = limits.head_timeout_s
    config.alpn_protocols = ["http/1.1"]
    config.include_server_header = False
    config.include_date_header = False  # the engine's own answers carry theirs
    config.keep_alive_timeout = limits.idle_timeout_s
    config.keep_alive_max_requests = 1_000_000
    config.graceful_timeout = drain_s
    config.shutdown_timeout = drain_s + 10
    config.startup_timeout = 30
    config.h11_max_incomplete_size = limits.header_bytes
    config.backlog = BACKLOG
    config.accesslog = None
    config.errorlog = None
    return config


async def serve(
    app: App,
    sock: socket.socket,
    *,
    stop: Callable[[], Awaitable[Any]],
    drain_s: float,
    limits: Limits | None = None,
    tls: Tls | None = None,
) -> None:
    """Serve *app* on *sock* until *stop* returns, then let what is in flight end within *drain_s*.

    *limits* are those of the app's intake unless given; clients come by *tls*, whose files are watched, or without.
    """
    harden()
    raise_fd_limit()
    if limits is None:
        limits = app.limits if isinstance(app, Intake) else Limits()
    most = most_connections()
    connections = Connections(app, limits, min(limits.connections or most, most), tls)
    if isinstance(app, Intake):
        app.connections = connections.count
    config = hypercorn_config(connections, limits, drain_s)
    secure, plain = ([], [sock]) if tls is None else ([sock], [])
    twin = sock.dup()
    twin.setblocking(False)
    state: Mapping[str, Any] = {}
    last: list[asyncio.Task[None]] = []

    async def until_stopped() -> None:
        await stop()
        connections.end()
        last.append(asyncio.create_task(serve_the_last()))

    async def serve_the_last() -> None:
        """Serve who came in the loop's last round: those that wait on a socket when it closes are reset."""
        while sock.fileno() != -1:  # noqa: ASYNC110 - Hypercorn closes it, some rounds later, and says nothing
            await asyncio.sleep(0)
        accepted: list[socket.socket] = []
        with twin, contextlib.suppress(OSError):  # nobody is left, or no file for them
            while len(accepted) < BACKLOG:
                accepted.append(twin.accept()[0])
        await asyncio.gather(*map(serve_accepted, accepted))

    async def serve_accepted(accepted: socket.socket) -> None:
        reader = asyncio.StreamReader()
        with contextlib.suppress(OSError):  # it does not shake hands
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: asyncio.StreamReaderProtocol(reader),
                accepted,
                ssl=config.create_ssl_context(),
                ssl_handshake_timeout=None if tls is None else limits.head_timeout_s,
            )
            await connections.serve(reader, transport, state)

    async def outlived(scope: Scope, receive: Receive, send: Send) -> None:
        """The app, told to shut down only when the last of its connections has ended."""

        async def receive_in_order() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.gather(*last, connections.all_ended()), drain_s)
            return message

        if scope["type"] == "lifespan":
            nonlocal state
            state = scope["state"]
        await app(scope, receive_in_order if scope["type"] == "lifespan" else receive, send)

    watching = [] if tls is None else [asyncio.create_task(watch([tls]), name="certificate-watch")]
    try:
        await worker_serve(
            wrap_app(cast("Framework", outlived), config.wsgi_max_body_size, "asgi"),
            config,
            sockets=Sockets(secure_sockets=secure, insecure_sockets=plain, quic_sockets=[]),
            shutdown_trigger=until_stopped,
        )
    finally:
        twin.close()
        for task in (*watching, *last):
            task.cancel()
        await asyncio.gather(*watching, *last, return_exceptions=True)


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
