"""HTTP client for instances: pooled keep-alive connections, the request's framing, one safe resend.

`Upstream.send` returns an `UpstreamResponse`. Its deadlines, and the choice of another instance, are the caller's.
There are no redirects, cookies or proxies of the environment, and nothing is decoded.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol
from urllib.parse import urlsplit

from smetric.http.addresses import Addresses, Resolve, is_own_fault, port_of, resolve
from smetric.http.answer import READ_BYTES, InstanceUnreachable, UpstreamConnection, UpstreamFailed, UpstreamResponse
from smetric.http.headers import Headers, with_key

#: Seconds an idle connection is kept. Engines on uvicorn close theirs after 5.
KEEPALIVE_S = 3.0
#: TCP keep-alive: seconds of silence before the first probe, seconds between probes, probes. A host without power or
#: network is as silent as one in a long prefill.
PROBE_AFTER_S, PROBE_EVERY_S, PROBES = 10, 5, 3
#: Seconds after which a connection is replaced, as its host name may lead elsewhere by then.
LIFE_S = 300.0
#: Methods that announce the lack of a body; some servers wait for one otherwise.
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
#: Status of a server that closes an idle connection, as HAProxy does.
REQUEST_TIMEOUT = 408
_SPACE = 0x20


@dataclass(frozen=True, slots=True)
class Ages:
    """Limits on the age of a connection in seconds: idle, and since it was made."""

    idle_s: float = KEEPALIVE_S
    life_s: float = LIFE_S


class Pool:
    """Connections to one instance. Made within the event loop that uses it.

    Args:
        url: base address of the instance.
        connect_timeout_s: timeout of the name's resolution, the connection and TLS together.
        ages: limits on the age of connections.
        resolve: resolver.
        tls: returns the context for https; called for the first connection that needs it.
        just_read: buffer that all connections of the loop read into.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float,
        ages: Ages,
        resolve: Resolve,
        tls: Callable[[], ssl.SSLContext],
        just_read: memoryview,
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, "the configuration takes only addresses with a host"
        self._host = parts.hostname
        self._is_tls = parts.scheme == "https"
        self._port = port_of(parts)
        #: Value of the Host field.
        self.authority = parts.netloc.encode("ascii")
        self._connect_timeout_s = connect_timeout_s
        self._ages = ages
        self._tls = tls
        self._just_read = just_read
        self._loop = asyncio.get_running_loop()
        self.addresses = Addresses(self._host, self._port, resolve)
        self._wires: set[UpstreamConnection] = set()
        #: Connections without a request, the longest idle first.
        self._idle: list[UpstreamConnection] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False

    def reuse(self) -> UpstreamConnection | None:
        """Return the connection that was used last, if any can serve another request."""
        now = self._loop.time()
        while self._idle:
            wire = self._idle.pop()
            if now - wire.idle_since < self._ages.idle_s and wire.is_fresh():
                return wire
            wire.abort()
        return None

    async def connect(self) -> UpstreamConnection:
        """Return a new connection.

        Raises:
            InstanceUnreachable: connect_error or connect_timeout.
            UpstreamFailed: connect_error if TLS fails; exhausted if this process can open no more connections; closed
                if the pool is.
        """
        if self._is_closed:
            raise UpstreamFailed("closed")
        try:
            return await self.addresses.connect(self._connect, self._connect_timeout_s)
        except TimeoutError as error:
            raise InstanceUnreachable("connect_timeout") from error
        except ssl.SSLError as error:
            raise UpstreamFailed("connect_error") from error  # waiting does not help
        except OSError as error:
            if is_own_fault(error):
                raise UpstreamFailed("exhausted") from error
            raise InstanceUnreachable("connect_error") from error

    async def _connect(self, address: str) -> UpstreamConnection:
        tls = self._tls() if self._is_tls else None
        name = self._host if self._is_tls else None
        transport, wire = await self._loop.create_connection(
            self._wire, address, self._port, ssl=tls, server_hostname=name
        )
        _notice_silence(transport.get_extra_info("socket"))
        return wire

    def _wire(self) -> UpstreamConnection:
        return UpstreamConnection(self._loop, self._just_read, self._made, self._idled, self._lost)

    def _made(self, wire: UpstreamConnection) -> None:
        self._wires.add(wire)

    def _idled(self, wire: UpstreamConnection) -> None:
        now = self._loop.time()
        if now - wire.born_at >= self._ages.life_s:
            wire.abort()
            return
        wire.idle_since = now
        self._idle.append(wire)
        if self._sweep is None:
            self._sweep = self._loop.call_at(now + self._ages.idle_s, self._drop_old)

    def _lost(self, wire: UpstreamConnection) -> None:
        self._wires.discard(wire)
        if wire in self._idle:
            self._idle.remove(wire)

    def _drop_old(self) -> None:
        self._sweep = None
        now = self._loop.time()
        while self._idle and now - self._idle[0].idle_since >= self._ages.idle_s:
            self._idle.pop(0).abort()
        if self._idle:
            self._sweep = self._loop.call_at(self._idle[0].idle_since + self._ages.idle_s, self._drop_old)

    def close(self) -> None:
        """Close all connections, and make no more."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        self.addresses.close()
        for wire in list(self._wires):
            wire.abort()


def _notice_silence(sock: socket.socket) -> None:
    """Have the system end the connection of *sock* when the other host acknowledges nothing any more."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    longest_ms = 1000 * (PROBE_AFTER_S + PROBE_EVERY_S * PROBES)
    for name, value in (
        ("TCP_KEEPIDLE", PROBE_AFTER_S),
        ("TCP_KEEPINTVL", PROBE_EVERY_S),
        ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", longest_ms),  # there are no probes while data is unacknowledged
    ):
        if (option := getattr(socket, name, None)) is not None:  # some systems lack some
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Secret(Protocol):
    """Text that may change while it is used."""

    @property
    def text(self) -> str:
        """The present text."""


class Destination(Protocol):
    """Server that requests are sent to."""

    @property
    def url(self) -> str:
        """Base address, such as `https://host:port`."""

    @property
    def key(self) -> Secret | None:
        """API key to send in place of the client's; None: the client's is passed on."""


class Upstream:
    """HTTP client with a pool of connections to each instance.

    Args:
        connect_timeout_s: timeout of establishing a connection.
        ages: limits on the age of connections.
        resolve: resolver.
    """

    def __init__(self, *, connect_timeout_s: float = 2.0, ages: Ages | None = None, resolve: Resolve = resolve) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._ages = ages or Ages()
        self._resolve = resolve
        self._tls = cache(_tls)
        #: By base address.
        self._pools: dict[str, Pool] = {}
        self._just_read = memoryview(bytearray(READ_BYTES))

    async def send(
        self,
        destination: Destination,
        method: str,
        target: bytes,
        headers: Headers,
        body: bytes | None,
        on_resend: Callable[[], None] | None = None,
    ) -> UpstreamResponse:
        """Send a request and wait for the head of its answer.

        The request is sent once more, on a new connection, if a reused one ends before any byte of the answer: the
        server had closed it at the same time. A 408 on a reused connection is such an end too, as some servers announce
        it; on a new one it is the answer.

        Args:
            destination: the instance.
            method: HTTP method.
            target: path and query, still encoded.
            headers: end-to-end fields; Host and Content-Length are set here.
            body: the whole body, or None.
            on_resend: called when the request is sent once more.

        Raises:
            UpstreamFailed: there is no answer.
        """
        pool = self._pools.get(destination.url) or self._open(destination.url)
        if destination.key is not None:
            headers = with_key(headers, destination.key.text)
        head = request_head(pool.authority, method, target, headers, body)
        is_head = method == "HEAD"
        wire = pool.reuse()
        if wire is not None:
            answer = UpstreamResponse(wire, is_head)
            try:
                await wire.ask(answer, head, body)
                if answer.status != REQUEST_TIMEOUT:
                    return answer
                answer.close()
            except UpstreamFailed as failed:
                if failed.reason != "closed" or not answer.is_silent:
                    raise
            if on_resend is not None:
                on_resend()
        wire = await pool.connect()
        return await wire.ask(UpstreamResponse(wire, is_head), head, body)

    def _open(self, url: str) -> Pool:
        pool = Pool(
            url,
            connect_timeout_s=self._connect_timeout_s,
            ages=self._ages,
            resolve=self._resolve,
            tls=self._tls,
            just_read=self._just_read,
        )
        self._pools[url] = pool
        return pool

    async def close(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        await asyncio.sleep(0)  # sockets are closed in the loop's next round


def request_head(authority: bytes, method: str, target: bytes, headers: Headers, body: bytes | None) -> bytes:
    """Return the head of a request, with the empty line.

    Raises:
        UpstreamFailed: protocol: a field holds a line break, or the target a space.
    """
    lines = [b"%b %b HTTP/1.1" % (method.encode("ascii"), target), b"Host: " + authority]
    lines += map(b": ".join, headers)
    if body is not None:
        lines.append(b"Content-Length: %d" % len(body))
    elif method in WITH_BODY:
        lines.append(b"Content-Length: 0")
    text = b"".join(lines)
    if 10 in text or 13 in text or 0 in text or _SPACE in target:  # the bytes are LF, CR and NUL
        raise UpstreamFailed("protocol")
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def _tls() -> ssl.SSLContext:
    """Return a context that verifies certificates and names, by the system's authorities or those of SSL_CERT_FILE."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
