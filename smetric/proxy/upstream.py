"""The client side of the proxy, behind a seam of two classes: `Upstream.send` gives an `Answer`.

The one safe resend and the request's framing are here; connections are `pool.py`'s and what comes over them
`wire.py`'s. Deadlines for the first byte and between pieces are the caller's, as is the choice of another instance.
Nothing is followed or remembered: no redirects, no cookies, no proxies of the environment, no decoding.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from typing import Any

from smetric.fleet.instance import Instance
from smetric.proxy.addresses import Resolve, resolve
from smetric.proxy.headers import with_key
from smetric.proxy.pool import Ages, Pool
from smetric.proxy.reply import Headers, Reply
from smetric.proxy.wire import READ_BYTES, UpstreamFailed, Wire

#: Methods whose lack of a body is told: some servers wait for one otherwise.
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class Answer:
    """One response: its head, then its body piece by piece. `close` or `finish` must be called, whatever happens."""

    __slots__ = ("_is_over", "_reply", "_wire", "headers", "status")

    def __init__(self, wire: Wire, reply: Reply) -> None:
        self._wire = wire
        self._reply = reply
        #: Afterwards the connection is somebody else's.
        self._is_over = False
        self.status = reply.status
        #: As received: order, case and duplicates kept.
        self.headers: Sequence[tuple[bytes, bytes]] = reply.fields

    def read(self) -> Coroutine[Any, Any, bytes]:
        """Whatever has arrived of the body; empty at its end.

        Raises:
            AnswerBroken: the connection ended or spoke nonsense in the middle.
        """
        return self._wire.read(self._reply)

    @property
    def has_piece(self) -> bool:
        """`read` gives something without waiting."""
        return self._reply.has_piece

    @property
    def is_whole(self) -> bool:
        """All of the body has been read."""
        return self._reply.is_whole

    def finish(self) -> None:
        """The body was read to its end: the connection may serve another request."""
        if not self._is_over:
            self._is_over = True
            self._wire.finish()

    def close(self) -> None:
        """Give the answer up: the connection is closed, which tells the engine to stop."""
        if not self._is_over:
            self._is_over = True
            self._wire.abort()


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
        instance: Instance,
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
            instance: where to.
            method: HTTP method.
            target: path and query as they came, still encoded.
            headers: end-to-end headers; Host and Content-Length are set here.
            body: the whole body, or None.
            on_resend: told when the request is sent once more.

        Raises:
            UpstreamFailed: no answer came.
        """
        pool = self._pools.get(instance.url) or self._open(instance.url)
        if instance.key is not None:
            headers = with_key(headers, instance.key.text)
        head = request_head(pool.authority, method, target, headers, body)
        is_head = method == "HEAD"
        wire = pool.reuse()
        if wire is not None:
            try:
                return Answer(wire, await wire.ask(head, body, is_head=is_head))
            except UpstreamFailed as failed:
                if failed.reason != "closed" or wire.reply is None or not wire.reply.is_silent:
                    raise
            if on_resend is not None:
                on_resend()
        wire = await pool.connect()
        return Answer(wire, await wire.ask(head, body, is_head=is_head))

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
    lines = [b"%b %b HTTP/1.1\r\nHost: %b" % (method.encode("ascii"), target, authority)]
    lines += map(b": ".join, headers)
    if body is not None:
        lines.append(b"Content-Length: %d" % len(body))
    elif method in WITH_BODY:
        lines.append(b"Content-Length: 0")
    head = b"\r\n".join(lines) + b"\r\n\r\n"
    breaks = len(lines) + 2
    if head.count(b"\n") != breaks or head.count(b"\r") != breaks or b" " in target or b"\0" in head:
        raise UpstreamFailed("protocol")
    return head


def _tls() -> ssl.SSLContext:
    """Certificates and names are verified, against the system's authorities or those of SSL_CERT_FILE."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
