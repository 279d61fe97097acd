"""Listeners of the ports: sockets, connections, drain, systemd."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import random
import resource
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import hypercorn.asyncio.run
import structlog
from hypercorn.asyncio.run import worker_serve
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.config import Config, Sockets
from hypercorn.utils import wrap_app

from smetric.errors import ConfigError, HttpError
from smetric.files import watch
from smetric.http.addresses import port_of
from smetric.http.connection import LAST_REQUEST_S, Handler, Http1
from smetric.http.footprint import most_files
from smetric.http.headers import Message, Receive, Scope, Send
from smetric.http.limits import Limits
from smetric.http.tls import Tls
from smetric.http.watchdog import Timer

if TYPE_CHECKING:
    from hypercorn.typing import Framework


# The connections of one listener: how many there may be, how each begins and ends, and Hypercorn's part in it.
#
# Hypercorn accepts, counts tasks and drains; from the first byte on a connection is `http1.py`'s.

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
        handler: what answers their requests.
        most: how many there may be; those that have not shaken hands yet count.
        tls: by which clients come; None for plain HTTP.
    """

    def __init__(self, handler: Handler, most: int, tls: Tls | None = None) -> None:
        self._handler = handler
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
        protocol = Http1(self._handler, state, lost, self._timer)
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


# Serves the data port and the admin port with Hypercorn in this process and loop, and ends in order.
#
# What becomes of one connection is in `connection.py`.

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


async def serve_port(
    handler: Handler,
    sock: socket.socket,
    *,
    stop: Callable[[], Awaitable[Any]],
    drain_s: float,
    tls: Tls | None = None,
) -> None:
    """Serve *handler* on *sock* until *stop* returns, then let what is in flight end within *drain_s*.

    Clients come by *tls*, whose files are watched, or without.
    """
    harden()
    raise_fd_limit()
    limits = handler.limits
    most = most_connections()
    connections = Connections(handler, min(limits.connections or most, most), tls)
    handler.connections = connections.count
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
        await handler(scope, receive_in_order if scope["type"] == "lifespan" else receive, send)

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


# What a supervisor such as systemd hands over, sockets that listen already, and what it is told: when we are ready.
#
# A socket that is handed over outlives each process that serves it, so that one process can take over from another and
# no connection is refused. Sockets of our own are opened in `server.py`.

#: The first descriptor that is handed over (sd_listen_fds(3)).
FIRST_FD = 3
DATA, ADMIN = "data", "admin"


def handed_over(environ: Mapping[str, str], pid: int) -> dict[str, socket.socket]:
    """The listening sockets that the supervisor passed to the process *pid*, by port: `data`, and maybe `admin`.

    Raises:
        ConfigError: there are sockets this router has no use for, or what was passed is no listening TCP socket.
    """
    if environ.get("LISTEN_PID") != str(pid):
        return {}
    count = environ.get("LISTEN_FDS", "")
    if count not in ("1", "2"):
        raise ConfigError(f'LISTEN_FDS: expected 1 or 2 sockets, for data and admin, got "{count[:80]}"')
    if count == "1":
        names = [DATA]
    else:
        names = environ.get("LISTEN_FDNAMES", "").split(":")
        if sorted(names) != [ADMIN, DATA]:
            raise ConfigError(
                "LISTEN_FDNAMES: of two sockets, name one data and one admin (FileDescriptorName= of a socket unit)"
            )
    return {name: _listening(FIRST_FD + number, name) for number, name in enumerate(names)}


def _listening(fd: int, name: str) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.type == socket.SOCK_STREAM
    except OSError as error:
        raise ConfigError(f"LISTEN_FDS: descriptor {fd} ({name}) is no socket: {error.strerror}") from error
    if not listens or sock.family not in (socket.AF_INET, socket.AF_INET6):
        sock.close()
        raise ConfigError(f"LISTEN_FDS: descriptor {fd} ({name}) is not a TCP socket that listens")
    sock.setblocking(False)
    os.set_inheritable(fd, False)
    return sock


def notify(environ: Mapping[str, str], state: str) -> None:
    """Tell the supervisor *state*, such as `READY=1` (sd_notify(3)); nothing where none has asked to be told."""
    path = environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.connect("\0" + path[1:] if path.startswith("@") else path)
            sock.send(state.encode())
    except OSError as error:
        log.warning("smetric.supervisor.not_told", state=state, error=error.strerror or str(error))


# What a router refuses to start with: an admin port open to the network, and itself as one of its instances.


def refuse_open_admin(admin: socket.socket, *, has_token: bool) -> None:
    """Raise ConfigError if others than this machine's users reach the admin port, and it asks for no token."""
    host = admin.getsockname()[0]
    if not has_token and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise ConfigError(
            f"admin.token: not set, but the admin port listens on {host}, where others reach it; set it or "
            "admin.token_file"
        )


def refuse_self(urls: Iterable[str], ports: Sequence[socket.socket]) -> None:
    """Raise ConfigError if one of *urls* leads to one of *ports*: requests would go round in circles."""
    own = [port.getsockname()[:2] for port in ports]
    for url in urls:
        parts = urlsplit(url)
        port = port_of(parts)
        hosts = [host for host, number in own if number == port]
        found = _addresses(parts.hostname or "", port) if hosts else ()
        if any(is_reached(address, host) for address in found for host in hosts):
            raise ConfigError(f"instances: {url} is this router itself; name the engines")


def _addresses(host: str, port: int) -> set[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()  # a name that leads nowhere now may lead to an engine later
    return {str(address[0]) for *_, address in found}


def is_reached(address: str, listening: str) -> bool:
    """Whether a listener on the address *listening* of this machine is reached at *address*."""
    if not ipaddress.ip_address(listening.partition("%")[0]).is_unspecified:
        return address == listening
    return (":" in listening or ":" not in address) and is_here(address)


def is_here(address: str) -> bool:
    """Whether *address* is one of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))  # no other can be bound
        except OSError:
            return False
    return True
