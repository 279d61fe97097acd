"""Guard of the admin port: token and rate of wrong ones."""

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
from smetric.sources.shared.peers import PATH as PLACEMENTS

log = structlog.get_logger("smetric.admin")

OPEN = frozenset({"/metrics", "/healthz", "/readyz", PAGE})
#: The files of the live page, which asks for the token itself.
_PAGE_FILES = f"{PAGE}/"
#: So many refusals of one address in so many seconds; beyond them it is not even compared, and not logged.
MOST_REFUSALS, WINDOW_S = 10, 60.0
_READING = frozenset({"GET", "HEAD"})
#: What paths end with that are asked by POST and change nothing.
_TRYING = "/try"


class AdminGuard:
    """Wraps the admin port's app.

    Args:
        app: what answers those who may.
        token: what they must know; None on a loopback address, where every local user may.
        clock: seconds.
    """

    def __init__(self, app: App, token: Credential | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._token = token
        self._clock = clock
        #: By address: when the window began, and refusals in it.
        self._refusals: LRUCache[str, tuple[float, int]] = LRUCache(1024)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
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

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                log.info("smetric.admin.changed", client=client, method=scope["method"], path=scope["path"][:200])
            await send(message)

        await self._app(scope, receive, told)

    def _problem(self, scope: Scope, client: str) -> tuple[int, str] | None:
        """Status and reason, if *client* may not."""
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
    """Why a request may be what a web page sends here: a browser says so, and cannot be made not to."""
    if method not in _READING and first(headers, b"origin") is not None:
        return 403, "browsers may change nothing here; use the commands, such as smetric drain, or curl -X POST"
    return None


def _by_a_name(headers: Iterable[tuple[bytes, bytes]]) -> tuple[int, str] | None:
    """Why a request may be that of a web page whose name was made to lead here."""
    host = (first(headers, b"host") or b"").decode("latin-1").rpartition(":")
    name = host[0] or host[2]
    if "." in name and not is_address(name.strip("[]")):
        return 403, "ask by address or by `localhost`; set admin.token to use other names"
    return None
