"""The guard in front of every endpoint: refuses malformed requests before anything is read, and ends what is overdue.

Pure ASGI. Bodies and answers are the clients' (`client.py`), what is answered the endpoints'.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from itertools import chain
from math import inf

import structlog

from smetric.errors import HttpError, RequestError
from smetric.proxy.asgi import App, Receive, Scope, Send
from smetric.proxy.asgi_client import AsgiClient
from smetric.proxy.client import Client, ClientGone, too_large
from smetric.proxy.error_response import FAULT, send_error
from smetric.proxy.headers import MOST_DIGITS
from smetric.proxy.limits import Limits
from smetric.proxy.transaction import Transaction
from smetric.proxy.watchdog import Timer

log = structlog.get_logger("smetric.intake")

METHODS = frozenset({"GET", "HEAD", "POST", "DELETE"})
#: One value only: which of two would count is a matter of opinion, and opinions differ between servers.
SINGLE = frozenset({b"host", b"authorization", b"content-type", b"content-length", b"transfer-encoding"})
#: What announces a body.
BODY_FIELDS = frozenset({b"content-length", b"transfer-encoding"})
_HASH = ord("#")
#: Told of a request that is refused before it is whole: what is wrong, a scope that names the client, and whether an
#: endpoint has seen its head, and so counts it itself.
Refused = Callable[[HttpError, Scope, bool], object]
HOST = re.compile(rb"[A-Za-z0-9._\-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")


def unheard(_problem: HttpError, _scope: Scope, _is_seen: bool) -> None:
    """Tell nobody of a refused request."""


class Intake:
    """Wraps the data port's app.

    Args:
        app: what answers a well-formed request; its `receive` is a `Client`.
        limits: bounds on one request.
        refused: told of those that *app* does not see, or not the end of.
    """

    def __init__(self, app: App, limits: Limits, refused: Refused = unheard) -> None:
        self._app = app
        self.limits = limits
        self.refused = refused
        self._timer = Timer()
        #: Of clients: how many there are and may be, where our own server counts them.
        self.connections: Callable[[], tuple[int, int]] = lambda: (0, 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Guard one request."""
        client: Client
        foreign: AsgiClient | None = None
        problem: HttpError | None = None
        if isinstance(receive, Transaction):  # then its head has been inspected
            client = receive
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        else:
            client = foreign = AsgiClient(receive, send, self.limits, self._timer, has_body=has_body(scope))
            problem = inspect_head(scope, self.limits)
        watchdog = client.watchdog
        try:
            if problem is not None:
                # Where this request ends is in doubt, and with it where the next one begins.
                client.is_last = True
                self.refused(problem, scope, False)
                await send_error(client.send, scope["path"], problem)
            else:
                if not client.complete:
                    watchdog.arm(self.limits.body_timeout_s, "body")
                await self._app(scope, client, client.send)
        except ClientGone:
            pass
        except Exception:
            # The request is the only one to suffer.
            log.exception("smetric.request.failed", method=scope["method"])
            if not client.status:
                await send_error(client.send, scope["path"], FAULT)
        except asyncio.CancelledError:
            expired = watchdog.expired
            if not client.gone and expired is None:
                raise  # the server is shutting down
            client.task.uncancel()
            if expired == "body" and not client.status:
                await send_error(
                    client.send,
                    scope["path"],
                    RequestError(
                        f"the request body did not arrive within {self.limits.body_timeout_s:g} s "
                        "(setting limits.body_timeout)",
                        status=408,
                        kind="request_timeout",
                    ),
                )
        finally:
            if foreign is not None:
                foreign.close()


def inspect_head(scope: Scope, limits: Limits, received: float = inf) -> HttpError | None:
    """What is wrong with a request's head, or None. Looks at nothing but the head and awaits nothing.

    Args:
        scope: what the head says.
        limits: bounds on it.
        received: bytes that the head is known not to exceed.
    """
    version: str = scope["http_version"]
    if version not in ("1.1", "1.0"):
        return RequestError("HTTP/1.1 is spoken here", status=505, kind="http_version_not_supported")
    if scope["method"] not in METHODS:
        return RequestError("this method is not served here", status=405, kind="method_not_allowed")
    target: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    if target[:1] != b"/" or _HASH in target or _HASH in query:
        return RequestError("the request target must be a path that starts with `/`, without a fragment")
    if len(target) + len(query) > limits.target_bytes:
        return RequestError(f"the request target is longer than {limits.target_bytes} bytes", status=414)
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if len(headers) > limits.header_count:
        return RequestError(f"more than {limits.header_count} header fields (setting limits.max_headers)", status=431)
    values = dict(headers)
    if len(values) < len(headers):
        names = [name for name, _ in headers]
        for name in names:
            if name in SINGLE and names.count(name) > 1:
                return RequestError(f"the header `{name.decode('ascii')}` stands more than once")
    if received > limits.header_bytes < sum(map(len, chain.from_iterable(headers))):
        return RequestError(
            f"header fields of more than {limits.header_bytes} bytes (setting limits.max_header_bytes)", status=431
        )
    host = values.get(b"host")
    if (host is None and version == "1.1") or (host and HOST.fullmatch(host) is None):
        return RequestError("the Host header must be one host name or address, with an optional port")
    length = values.get(b"content-length")
    coding = values.get(b"transfer-encoding")
    if coding is not None:
        if length is not None:
            return RequestError("Content-Length and Transfer-Encoding exclude each other")
        if version == "1.0":
            return RequestError("Transfer-Encoding needs HTTP/1.1")
        if coding.lower() != b"chunked":
            return RequestError("the only Transfer-Encoding taken is `chunked`", status=501, kind="not_implemented")
    if length is not None:
        if not length.isdigit() or len(length) > MOST_DIGITS:
            return RequestError("Content-Length must be one number")
        if int(length) > limits.body_bytes:
            return too_large(limits)
    return None


def has_body(scope: Scope) -> bool:
    """Whether the head announces a body."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in scope["headers"]
    )
