"""Client side of the proxy: connections to one instance."""

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
from smetric.http.answer import READ_BYTES, Answer, Unreachable, UpstreamFailed, Wire
from smetric.http.headers import Headers, breaks_out, with_key

# The connections to one instance: made with a deadline, kept while idle for a few seconds, replaced when old.
#
# What goes over them is `wire.py`'s; when a request is sent once more is `upstream.py`'s.

#: Seconds an idle connection is kept. Engines on uvicorn close theirs after exactly 5.
KEEPALIVE_S = 3.0
#: Seconds of silence after which the system asks whether the other host is there, seconds between two times it asks,
#: and how many times: one that has lost its power or its network is as silent as one in a long prefill.
ASKED_AFTER_S, ASKED_EVERY_S, ASKED_TIMES = 10, 5, 3
#: Seconds after which a connection is replaced: it pins the address it was made to, whatever the name says by then.
LIFE_S = 300.0


@dataclass(frozen=True, slots=True)
class Ages:
    """Seconds: how long a connection is kept idle, and after which it is replaced however busy."""

    idle_s: float = KEEPALIVE_S
    life_s: float = LIFE_S


class Pool:
    """The connections to one instance. Made within the loop that uses it.

    Args:
        url: the instance's base address.
        connect_timeout_s: bound on looking up its name, connecting and TLS together.
        ages: bounds on a connection's age.
        resolve: how its name is looked up.
        tls: the context for https; called once, for the first connection that needs it.
        just_read: what all connections of the loop read into.
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
        #: What the Host field says.
        self.authority = parts.netloc.encode("ascii")
        self._connect_timeout_s = connect_timeout_s
        self._ages = ages
        self._tls = tls
        self._just_read = just_read
        self._loop = asyncio.get_running_loop()
        self.addresses = Addresses(self._host, self._port, resolve)
        self._wires: set[Wire] = set()
        #: Those without a request, the longest idle first.
        self._idle: list[Wire] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False

    def reuse(self) -> Wire | None:
        """The connection that was used last, if one is fit for another request."""
        now = self._loop.time()
        while self._idle:
            wire = self._idle.pop()
            if now - wire.idle_since < self._ages.idle_s and wire.is_fresh():
                return wire
            wire.abort()
        return None

    async def connect(self) -> Wire:
        """A new connection.

        Raises:
            Unreachable: connect_error or connect_timeout.
            UpstreamFailed: connect_error where TLS could not be agreed on; exhausted where this process can open no
                more connections; closed if this pool is.
        """
        if self._is_closed:
            raise UpstreamFailed("closed")
        try:
            return await self.addresses.connect(self._connect, self._connect_timeout_s)
        except TimeoutError as error:
            raise Unreachable("connect_timeout") from error
        except ssl.SSLError as error:
            raise UpstreamFailed("connect_error") from error  # no matter of waiting
        except OSError as error:
            if is_own_fault(error):
                raise UpstreamFailed("exhausted") from error
            raise Unreachable("connect_error") from error

    async def _connect(self, address: str) -> Wire:
        tls = self._tls() if self._is_tls else None
        name = self._host if self._is_tls else None
        transport, wire = await self._loop.create_connection(
            self._wire, address, self._port, ssl=tls, server_hostname=name
        )
        _notice_silence(transport.get_extra_info("socket"))
        return wire

    def _wire(self) -> Wire:
        return Wire(self._loop, self._just_read, self._made, self._idled, self._lost)

    def _made(self, wire: Wire) -> None:
        self._wires.add(wire)

    def _idled(self, wire: Wire) -> None:
        now = self._loop.time()
        if now - wire.born_at >= self._ages.life_s:
            wire.abort()
            return
        wire.idle_since = now
        self._idle.append(wire)
        if self._sweep is None:
            self._sweep = self._loop.call_at(now + self._ages.idle_s, self._drop_old)

    def _lost(self, wire: Wire) -> None:
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
        """Close all connections, busy ones too, and make no more."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        self.addresses.close()
        for wire in list(self._wires):
            wire.abort()


def _notice_silence(sock: socket.socket) -> None:
    """Have the system end the connection of *sock* when its other end acknowledges nothing any more."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    longest_ms = 1000 * (ASKED_AFTER_S + ASKED_EVERY_S * ASKED_TIMES)
    for name, value in (
        ("TCP_KEEPIDLE", ASKED_AFTER_S),
        ("TCP_KEEPINTVL", ASKED_EVERY_S),
        ("TCP_KEEPCNT", ASKED_TIMES),
        ("TCP_USER_TIMEOUT", longest_ms),  # while what was sent is not acknowledged, nothing is asked
    ):
        if (option := getattr(socket, name, None)) is not None:  # not all systems have all of them
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


# The client side of the proxy, behind a seam of two classes: `Upstream.send` gives an `Answer`.
#
# The one safe resend and the request's framing are here; connections are `pool.py`'s and what comes over them
# `wire.py`'s. Deadlines for the first byte and between pieces are the caller's, as is the choice of another instance.
# Nothing is followed or remembered: no redirects, no cookies, no proxies of the environment, no decoding.

#: Methods whose lack of a body is told: some servers wait for one otherwise.
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_SPACE = 0x20


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
        """Key to show in place of the client's; None: the client's passes."""


class Upstream:
    """Sends requests to instances over pooled connections.

    Args:
        connect_timeout_s: bound on establishing a connection.
        ages: how long connections are kept.
        resolve: how names are looked up.
    """

    def __init__(self, *, connect_timeout_s: float = 2.0, ages: Ages | None = None, resolve: Resolve = resolve) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._ages = ages or Ages()
        self._resolve = resolve
        self._tls = cache(_tls)
        #: By base address; as many as there are instances.
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
    ) -> Answer:
        """Send a request and wait for the head of its answer.

        A reused connection that dies before any byte of the answer is the race every keep-alive client loses now and
        then; the request is sent once more, on a fresh connection.

        Args:
            destination: where to.
            method: HTTP method.
            target: path and query as they came, still encoded.
            headers: end-to-end headers; Host and Content-Length are set here.
            body: the whole body, or None.
            on_resend: told when the request is sent once more.

        Raises:
            UpstreamFailed: no answer came.
        """
        pool = self._pools.get(destination.url) or self._open(destination.url)
        if destination.key is not None:
            headers = with_key(headers, destination.key.text)
        head = request_head(pool.authority, method, target, headers, body)
        is_head = method == "HEAD"
        wire = pool.reuse()
        if wire is not None:
            answer = Answer(wire, is_head)
            try:
                return await wire.ask(answer, head, body)
            except UpstreamFailed as failed:
                if failed.reason != "closed" or not answer.is_silent:
                    raise
            if on_resend is not None:
                on_resend()
        wire = await pool.connect()
        return await wire.ask(Answer(wire, is_head), head, body)

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
    """The head of a request, the empty line included.

    Raises:
        UpstreamFailed: protocol: a value holds a line break or the target a space, which would let it say more than it
            may. Servers refuse such requests; this does not rely on it.
    """
    lines = [b"%b %b HTTP/1.1" % (method.encode("ascii"), target), b"Host: " + authority]
    lines += map(b": ".join, headers)
    if body is not None:
        lines.append(b"Content-Length: %d" % len(body))
    elif method in WITH_BODY:
        lines.append(b"Content-Length: 0")
    if breaks_out(b"".join(lines)) or _SPACE in target:
        raise UpstreamFailed("protocol")
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def _tls() -> ssl.SSLContext:
    """Certificates and names are verified, against the system's authorities or those of SSL_CERT_FILE."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
