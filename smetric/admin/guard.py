"""Guard of the admin port: its token, a limit on wrong tokens, and requests that a web page may have sent."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable

import orjson
import structlog
from cachetools import LRUCache

from smetric.admin.live import PAGE
from smetric.config.credential import Credential
from smetric.config.values import is_address
from smetric.http.headers import App, Message, Receive, Scope, Send, first
from smetric.sources.shared import PATH as PLACEMENTS

log = structlog.get_logger("smetric.admin")

OPEN = frozenset({"/metrics", "/healthz", "/readyz", PAGE})
#: Files of the live page; the page itself asks for the token.
_PAGE_FILES = f"{PAGE}/"
#: Refusals of one address in a window; above them, tokens are neither compared nor logged.
MOST_REFUSALS, WINDOW_S = 10, 60.0
_READING = frozenset({"GET", "HEAD"})
#: Suffix of paths that are asked by POST and change nothing.
_TRYING = "/try"


class AdminGuard:
    """ASGI guard around the app of the admin port.

    Args:
        app: the app.
        token: the token; None on a loopback address, open to every local user.
        clock: seconds.
    """

    def __init__(self, app: App, token: Credential | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._token = token
        self._clock = clock
        #: By address: begin of the window, and refusals in it.
        self._refusals: LRUCache[str, tuple[float, int]] = LRUCache(1024)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] in OPEN or scope["path"].startswith(_PAGE_FILES):
            await self._app(scope, receive, send)
            return
        client = (scope.get("client") or ("unknown", 0))[0]
        problem = self._problem(scope, client)
        if problem is not None:
            await self._refuse(scope, send, client, *problem)
            return
        if scope["method"] in _READING or scope["path"].endswith(_TRYING) or scope["path"] == PLACEMENTS:
            await self._app(scope, receive, send)
            return

        async def logged(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                log.info("smetric.admin.changed", client=client, method=scope["method"], path=scope["path"][:200])
            await send(message)

        await self._app(scope, receive, logged)

    def _problem(self, scope: Scope, client: str) -> tuple[int, str] | None:
        """Return status and reason of a refusal, or None."""
        if scope["path"] == PLACEMENTS:
            return _by_a_page(scope["method"], scope["headers"])
        if self._token is None:
            return _by_a_page(scope["method"], scope["headers"]) or _by_a_name(scope["headers"])
        began, refusals = self._refusals.get(client, (0.0, 0))
        if refusals >= MOST_REFUSALS and self._clock() - began < WINDOW_S:
            return 429, "too many requests without the right token"
        given = first(scope["headers"], b"authorization") or b""
        if hmac.compare_digest(given, b"Bearer " + self._token.text.encode()):
            return None
        return 401, "send the token of admin.token as `Authorization: Bearer …`"

    async def _refuse(self, scope: Scope, send: Send, client: str, status: int, reason: str) -> None:
        now = self._clock()
        began, refusals = self._refusals.get(client, (now, 0))
        if now - began >= WINDOW_S:
            began, refusals = now, 0
        self._refusals[client] = began, refusals + 1
        if refusals < MOST_REFUSALS:
            log.warning("smetric.admin.refused", client=client, status=status, path=scope["path"][:200])
        body = orjson.dumps({"error": reason})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if status == 429:
            headers.append((b"retry-after", str(int(WINDOW_S)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _by_a_page(method: str, headers: Iterable[tuple[bytes, bytes]]) -> tuple[int, str] | None:
    """Return a refusal of a change that a web page may have sent; a page cannot remove the `Origin` of a browser."""
    if method not in _READING and first(headers, b"origin") is not None:
        return 403, "browsers may change nothing here; use the commands, such as smetric drain, or curl -X POST"
    return None


def _by_a_name(headers: Iterable[tuple[bytes, bytes]]) -> tuple[int, str] | None:
    """Return a refusal of a request that a web page may have sent by a name that resolves to this address."""
    host = (first(headers, b"host") or b"").decode("latin-1").rpartition(":")
    name = host[0] or host[2]
    if "." in name and not is_address(name.strip("[]")):
        return 403, "ask by address or by `localhost`; set admin.token to use other names"
    return None
