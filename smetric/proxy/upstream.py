"""The client side of the proxy, behind a seam of two classes: `Upstream.send` gives an `Answer`.

The one safe resend and the request's framing are here; connections are `pool.py`'s and what comes over them
`wire.py`'s. Deadlines for the first byte and between pieces are the caller's, as is the choice of another instance.
Nothing is followed or remembered: no redirects, no cookies, no proxies of the environment, no decoding.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from functools import cache

from smetric.fleet.instance import Instance
from smetric.proxy.answer import Answer
from smetric.proxy.headers import Headers, breaks_out, with_key
from smetric.proxy.pool import Ages, Pool
from smetric.proxy.wire import READ_BYTES, UpstreamFailed
from smetric.sources.addresses import Resolve, resolve

#: Methods whose lack of a body is told: some servers wait for one otherwise.
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_SPACE = 0x20


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
