"""The client side of the proxy, behind a seam of two classes: `Upstream.send` gives an `Answer`.

Keep-alive pools, connect deadlines and the one safe resend are here; deadlines for the first byte and between chunks
are the caller's, as is the choice of another instance.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from cachetools import LRUCache
from yarl import URL

from smetric.fleet.instance import Instance

Headers = list[tuple[bytes, bytes]]

#: Seconds an idle connection is kept. Engines on uvicorn close theirs after exactly 5.
KEEPALIVE_S = 3.0
#: A body of at most this many bytes is handed to the socket as a whole.
WHOLE_BYTES = 1024 * 1024

#: Whether the connection used last in this task had served a request before.
_reused: ContextVar[bool] = ContextVar("reused", default=False)


class UpstreamFailed(Exception):
    """A request to an instance failed before any byte of its answer.

    `reason` is one of: connect_error (refused, unreachable, no name), connect_timeout, closed (the connection ended),
    protocol (what came was not HTTP). The cause's text is never shown to clients: it can quote bytes.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class AnswerBroken(Exception):
    """An answer ended before it was complete."""


class Answer:
    """One response: its head, then its body piece by piece. `close` or `finish` must be called, whatever happens."""

    __slots__ = ("_response", "headers", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        #: As received: order, case and duplicates kept.
        self.headers: Sequence[tuple[bytes, bytes]] = response.raw_headers

    async def read(self) -> bytes:
        """Whatever has arrived of the body; empty at its end.

        Raises:
            AnswerBroken: the connection ended or spoke nonsense in the middle.
        """
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise AnswerBroken from error

    @property
    def is_whole(self) -> bool:
        """All of the body has been read."""
        return self._response.content.at_eof()

    def finish(self) -> None:
        """The body was read to its end: the connection may serve another request."""
        self._response.release()

    def close(self) -> None:
        """Give the answer up: the connection is closed, which tells the engine to stop."""
        self._response.close()


class Upstream:
    """Sends requests to instances over pooled connections.

    Args:
        connect_timeout_s: bound on establishing a connection.
    """

    def __init__(self, *, connect_timeout_s: float = 2.0) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_connect=connect_timeout_s, sock_read=None)
        self._pooled: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None
        # Parsing an address costs more than looking it up; clients choose targets, so the cache is bounded.
        self._urls: LRUCache[tuple[str, bytes], URL] = LRUCache(1024)

    async def start(self) -> None:
        """Open the pools, in the loop that will use them."""
        self._pooled = _session(_Connector(keepalive_timeout=KEEPALIVE_S, limit=0, limit_per_host=0, ttl_dns_cache=10))
        self._fresh = _session(_Connector(force_close=True, limit=0, limit_per_host=0, ttl_dns_cache=10))

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
        url = self._url(instance.url, target)
        fields = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        assert self._pooled is not None, "start() comes first"
        assert self._fresh is not None
        _reused.set(False)
        try:
            return Answer(await self._request(self._pooled, method, url, fields, body))
        except UpstreamFailed as failed:
            if failed.reason != "closed" or not _reused.get():
                raise
        if on_resend is not None:
            on_resend()
        return Answer(await self._request(self._fresh, method, url, fields, body))

    async def _request(
        self, session: aiohttp.ClientSession, method: str, url: URL, headers: list[tuple[str, str]], body: bytes | None
    ) -> aiohttp.ClientResponse:
        # A large body goes out piece by piece, so that other requests are served in between.
        data = io.BytesIO(body) if body is not None and len(body) > WHOLE_BYTES else body
        try:
            return await session.request(
                method, url, headers=headers, data=data, allow_redirects=False, timeout=self._timeout
            )
        except aiohttp.ServerTimeoutError as error:
            raise UpstreamFailed("connect_timeout") from error
        except aiohttp.ClientConnectorError as error:
            raise UpstreamFailed("connect_error") from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError) as error:
            raise UpstreamFailed("closed") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise UpstreamFailed("protocol") from error

    def _url(self, base: str, target: bytes) -> URL:
        key = (base, target)
        url = self._urls.get(key)
        if url is None:
            url = self._urls[key] = URL(base + target.decode("ascii"), encoded=True)
        return url

    async def close(self) -> None:
        """Close all connections."""
        for session in (self._pooled, self._fresh):
            if session is not None:
                await session.close()


class _Protocol(ResponseHandler):
    """Ends the answer when its connection ends; aiohttp leaves it open for ever where a chunk's size was nonsense."""

    #: A request has been sent on it.
    has_served = False

    def connection_lost(self, exc: BaseException | None) -> None:
        answer = self._payload
        super().connection_lost(exc)
        if answer is not None and not answer.is_eof() and answer.exception() is None:
            answer.set_exception(aiohttp.ClientPayloadError("the connection ended within the answer"))


def _protocol(loop: asyncio.AbstractEventLoop) -> ResponseHandler:
    return _Protocol(loop)


class _Connector(aiohttp.TCPConnector):
    """A connector that tells whether a connection had served a request before."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory = partial(_protocol, self._loop)

    async def connect(self, *args: Any, **kwargs: Any) -> Any:
        connection = await super().connect(*args, **kwargs)
        protocol = connection.protocol
        assert isinstance(protocol, _Protocol)
        _reused.set(protocol.has_served)
        protocol.has_served = True
        return connection


def _session(connector: aiohttp.BaseConnector) -> aiohttp.ClientSession:
    """A session that changes nothing on the way: no cookies, redirects, decoding, proxies or headers of its own."""
    return aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        trust_env=False,
        max_line_size=16 * 1024,
        max_field_size=16 * 1024,
        read_bufsize=128 * 1024,
    )
