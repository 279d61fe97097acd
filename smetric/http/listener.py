"""Listener of a port: sockets, connections and their limit, lifespan, drain; systemd's part in them."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import random
import resource
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import structlog

from smetric.errors import ConfigError, HttpError
from smetric.files import watch
from smetric.http.addresses import port_of
from smetric.http.connection import LAST_REQUEST_S, Connection, Handler
from smetric.http.footprint import most_files
from smetric.http.headers import App, Message
from smetric.http.tls import Tls
from smetric.http.transaction import Timer
from smetric.log_limit import LogLimit

log = structlog.get_logger("smetric.server")

#: File descriptors reserved for everything but connections of clients and to instances.
RESERVED_FDS = 64
#: Connections beyond the limit that are answered 503; more are dropped.
MAX_REFUSED = 32
#: Length of the queue of connections that wait to be accepted.
BACKLOG = 4096
#: Connections accepted in a round of the event loop: uvloop accepts one, so that new clients would wait for hundreds of
#: rounds behind busy ones.
ACCEPTED_AT_ONCE = 64
#: Seconds in which the application must start.
STARTUP_S = 30.0
#: Seconds that the application has to stop, beyond those of the drain.
SHUTDOWN_S = 10.0
#: Seconds in which the event loop begins the connections that it accepted last.
ACCEPTED_S = 0.02


async def serve_port(
    handler: Handler,
    sock: socket.socket,
    *,
    stop: Callable[[], Awaitable[Any]],
    drain_s: float,
    tls: Tls | None = None,
) -> None:
    """Serve *handler* on *sock* until *stop* returns, then wait for running requests for at most *drain_s* seconds.

    Args:
        handler: the application; its lifespan spans that of the port.
        sock: listens already; it is closed in the end.
        stop: returns when no more connections are to be accepted.
        drain_s: seconds after which running requests are cancelled.
        tls: certificate, whose files are watched; None for plain HTTP.

    Raises:
        TimeoutError: the application does not start in time; it may raise anything else itself.
    """
    raise_fd_limit()
    most = most_connections()
    listener = PortListener(handler, min(handler.limits.connections or most, most), tls)
    watching = [] if tls is None else [asyncio.create_task(watch([tls]), name="certificate-watch")]
    lifespan = Lifespan(handler)
    try:
        async with asyncio.timeout(STARTUP_S):
            await lifespan.send("startup")
        try:
            await listener.open(sock)
            await stop()
            await listener.drain(drain_s)
        finally:
            await listener.close()
            async with asyncio.timeout(drain_s + SHUTDOWN_S):
                await lifespan.send("shutdown")
    finally:
        for task in (*watching, lifespan.task):
            task.cancel()
        await asyncio.gather(*watching, lifespan.task, return_exceptions=True)


class Lifespan:
    """ASGI lifespan of an application.

    Args:
        app: the application.
    """

    def __init__(self, app: App) -> None:
        self._events: asyncio.Queue[Message] = asyncio.Queue()
        self._done = asyncio.Event()
        self._failure = ""
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}}
        self.task: asyncio.Future[None] = asyncio.ensure_future(app(scope, self._events.get, self._receive))

    async def _receive(self, message: Message) -> None:
        if message["type"].endswith(".failed"):
            self._failure = message.get("message") or "the application failed"
        else:
            self._done.set()  # an application that has failed ends by itself, mostly by its error

    async def send(self, event: str) -> None:
        """Send *event*, `startup` or `shutdown`, and wait for its completion; raises what the application raises."""
        self._done.clear()
        self._events.put_nowait({"type": f"lifespan.{event}"})
        done: asyncio.Future[Any] = asyncio.ensure_future(self._done.wait())
        try:
            await asyncio.wait((done, self.task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            done.cancel()
        if self.task.done():
            self.task.result()
        if self._failure:
            raise RuntimeError(self._failure)


class PortListener:
    """Listening socket and its connections.

    Args:
        handler: answers the requests.
        most: limit on connections; TLS handshakes under way count.
        tls: certificate; None for plain HTTP.
    """

    def __init__(self, handler: Handler, most: int, tls: Tls | None = None) -> None:
        self._handler = handler
        self._most = most
        self._tls = tls
        self._context = None if tls is None else tls.context(self._has_room)
        self._handshake_timeout_s = None if tls is None else handler.limits.head_timeout_s
        self._timer = Timer()
        self._sock: socket.socket
        self._server: asyncio.Server | None = None
        self._open: set[Connection] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()
        #: Tasks that begin accepted connections; kept, as the event loop refers to them weakly.
        self._beginning: set[asyncio.Task[None]] = set()
        #: Tasks of connections that are lost.
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ending = self._is_closed = False
        self._turned_away = 0
        self._log_limit = LogLimit()
        handler.connections = self.count

    def count(self) -> tuple[int, int]:
        """Return the number of connections and their limit."""
        return len(self._open) + (0 if self._tls is None else self._tls.handshakes()), self._most

    async def open(self, sock: socket.socket) -> None:
        """Accept connections on *sock*."""
        self._sock = sock
        self._server = await asyncio.get_running_loop().create_server(
            self._accept_more,
            sock=sock,
            backlog=BACKLOG,
            ssl=self._context,
            ssl_handshake_timeout=self._handshake_timeout_s,
        )

    async def drain(self, within_s: float) -> None:
        """Accept no more connections and wait for the open ones to end, for at most *within_s* seconds."""
        waiting = self._stop_accepting()
        self._is_ending = True
        for connection in self._open:
            connection.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await asyncio.gather(*map(self._begin, waiting))
                is_shaking = self._tls is not None and self._tls.handshakes()
                await asyncio.sleep(LAST_REQUEST_S if is_shaking else ACCEPTED_S)
                await self._none_open.wait()
                if self._tasks:
                    await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel running requests and close all connections."""
        for sock in self._stop_accepting():
            sock.close()
        self._is_closed = True
        tasks = self._tasks | {each.task for each in self._open if each.task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for connection in list(self._open):
            connection.abort()
        await self._none_open.wait()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _stop_accepting(self) -> list[socket.socket]:
        """Close the listening socket and return the connections that wait on it, which its close would reset."""
        accepted: list[socket.socket] = []
        if self._server is not None:
            with self._sock.dup() as twin, contextlib.suppress(OSError):  # BlockingIOError, or no file for one more
                self._server.close()
                self._server = None
                twin.setblocking(False)
                while len(accepted) < BACKLOG:
                    accepted.append(twin.accept()[0])
        return accepted

    def _accept_more(self) -> Connection:
        """Return a connection for the accepted socket, and accept the sockets that wait behind it."""
        with contextlib.suppress(OSError):  # BlockingIOError, or no file for one more
            for _ in range(ACCEPTED_AT_ONCE - 1):
                task = asyncio.create_task(self._begin(self._sock.accept()[0]))
                self._beginning.add(task)
                task.add_done_callback(self._beginning.discard)
        return self._connection()

    async def _begin(self, sock: socket.socket) -> None:
        """Begin an accepted connection."""
        with contextlib.suppress(OSError):  # its TLS handshake fails
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connection, sock, ssl=self._context, ssl_handshake_timeout=self._handshake_timeout_s
            )

    def _connection(self) -> Connection:
        return Connection(self._handler, self._made, self._lost, self._timer)

    def _made(self, connection: Connection) -> None:
        number, most = self.count()
        if number < most + MAX_REFUSED:
            self._open.add(connection)
            self._none_open.clear()
        if self._is_closed:
            connection.abort()
        elif self._is_ending:
            connection.end()
        elif number >= most:
            self._log_full()
            if number >= most + MAX_REFUSED:
                connection.abort()
            else:
                retry_after_s = random.uniform(1.0, 3.0)  # clients would come back all at once
                busy = HttpError(503, "too many connections", "service_unavailable", retry_after_s=retry_after_s)
                connection.refuse(busy)

    def _lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._none_open.set()
        task = connection.task
        if task is not None and not task.done():
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _has_room(self) -> bool:
        """Return whether a connection may begin its TLS handshake; if the port is full, to be answered 503."""
        number, most = self.count()
        if number < most + MAX_REFUSED:
            return True
        self._log_full()
        return False

    def _log_full(self) -> None:
        """Count a connection that is turned away; log it once a minute."""
        self._turned_away += 1
        if self._log_limit.passes("") is not None:
            log.warning("smetric.connections.full", most=self._most, turned_away=self._turned_away)


def most_connections() -> int:
    """Return the number of client connections that the file descriptors allow, with one to an instance for each."""
    return max(8, (most_files() - RESERVED_FDS) // 2)


def raise_fd_limit() -> None:
    """Raise the limit on open files, which limits connections, as far as this process may; often it is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket on *host*:*port*; port 0 takes a free one.

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
        # Clients may connect as soon as they know the address, and a second process on the same port must fail here.
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another address or port"
        ) from error
    return sock


def address_of(sock: socket.socket, scheme: str = "http") -> str:
    """Return the URL `http://host:port` of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


#: The first file descriptor of systemd's socket activation (sd_listen_fds(3)). Such a socket outlives the processes
#: that serve it, so that one process can take over from another and no connection is refused.
FIRST_FD = 3
DATA, ADMIN = "data", "admin"


def handed_over(environ: Mapping[str, str], pid: int) -> dict[str, socket.socket]:
    """Return the sockets of systemd's socket activation by their names, `data` and maybe `admin`.

    Args:
        environ: holds LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES.
        pid: this process; sockets for another are ignored.

    Raises:
        ConfigError: there are unknown sockets, or one is no listening TCP socket.
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
    """Send *state*, such as `READY=1`, to systemd (sd_notify(3)), if NOTIFY_SOCKET is set."""
    path = environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.connect("\0" + path[1:] if path.startswith("@") else path)
            sock.send(state.encode())
    except OSError as error:
        log.warning("smetric.supervisor.unreachable", state=state, error=error.strerror or str(error))


def refuse_open_admin(host: str, *, has_token: bool) -> None:
    """Raise ConfigError if the admin port has no token and its address *host* is not loopback."""
    if not has_token and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise ConfigError(
            f"admin.token: not set, but the admin port listens on {host}, where others reach it; set it or "
            "admin.token_file"
        )


def refuse_self(urls: Iterable[str], own: Sequence[tuple[str, int]]) -> None:
    """Raise ConfigError if one of *urls* leads to one of our *own* addresses and ports: requests would loop."""
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
        return set()  # an unknown name may lead to an instance later
    return {str(address[0]) for *_, address in found}


def is_reached(address: str, listening: str) -> bool:
    """Return whether *address* reaches a listener on the address *listening* of this machine."""
    if not ipaddress.ip_address(listening.partition("%")[0]).is_unspecified:
        return address == listening
    return (":" in listening or ":" not in address) and is_here(address)


def is_here(address: str) -> bool:
    """Return whether *address* is one of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))  # fails for an address of another machine
        except OSError:
            return False
    return True
