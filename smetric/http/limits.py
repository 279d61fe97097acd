"""Limits on requests and connections, the check of a request's head, and the response to a refused request."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from itertools import chain
from math import inf
from urllib.parse import unquote

import httptools

from smetric.errors import HttpError, RequestError
from smetric.http.headers import MOST_DIGITS, Scope, is_end_to_end, named_fields, retry_fields

#: Bytes that the framing of a body may take, as a multiple of the body; the limit of a head is added.
FRAMING_SHARE = 16
METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
#: Value of the Allow field of a 405.
ALLOW = b"GET, HEAD, POST, DELETE, OPTIONS"
#: Fields that may stand only once: servers differ on which of two values counts.
SINGLE = frozenset({b"host", b"authorization", b"content-type", b"content-length", b"transfer-encoding"})
#: Fields that announce a body.
BODY_FIELDS = frozenset({b"content-length", b"transfer-encoding"})
HOST = re.compile(rb"[A-Za-z0-9._\-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
#: Target in absolute form (RFC 9112 §3.2.2): its authority, then the path.
_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
_HASH = ord("#")
#: Refusal of a WebSocket. Clients that can do without one, such as Codex, send the request by HTTP after a 426 only.
NO_WEBSOCKET = RequestError(
    "WebSockets are not spoken here; send the request by HTTP/1.1", status=426, kind="upgrade_required"
)
#: Name of the deadline of a body that is ended as it comes too slowly for its memory.
TOO_SLOW = "rate"
#: Connection fields of nearly all clients.
_USUAL = (None, b"keep-alive", b"close")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits on one request, on an idle connection, and on the number of connections; bytes and seconds."""

    body_bytes: int = 32 * 1024 * 1024
    header_count: int = 100
    header_bytes: int = 32 * 1024
    target_bytes: int = 8 * 1024
    idle_timeout_s: float = 10.0
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    #: Connections; 0 for as many as the file descriptors allow.
    connections: int = 0
    #: Field of the gateway with the name of the tenant, in lower case; empty for none.
    tenant_header: bytes = b""

    def overhead_bytes(self, body_bytes: int) -> int:
        """Return the bytes that a request may take around the first *body_bytes* of its body."""
        lines = self.header_count + 5  # of four bytes more each; the request line has twenty, with the last
        return self.header_bytes + self.target_bytes + 4 * lines + FRAMING_SHARE * body_bytes


def too_large(limits: HttpLimits) -> RequestError:
    """Return the 413 for a body above the limit."""
    return RequestError(
        f"the request body is larger than {limits.body_bytes} bytes (setting forward.max_body)",
        status=413,
        kind="request_too_large",
    )


def late_body(deadline: str | None, limits: HttpLimits) -> RequestError | None:
    """Return the 408 for a body that has missed *deadline*, `body` or `TOO_SLOW`; None for another deadline."""
    if deadline == "body":
        text = f"the request body did not arrive within {limits.body_timeout_s:g} s (setting limits.body_timeout)"
    elif deadline == TOO_SLOW:
        text = "the request body came too slowly while others needed its memory (setting overload.bodies)"
    else:
        return None
    return RequestError(text, status=408, kind="request_timeout")


def inspect_head(scope: Scope, limits: HttpLimits, received: float = inf) -> HttpError | None:
    """Return the reason to refuse a request by its head, or None.

    Args:
        scope: the ASGI scope.
        limits: limits on the head.
        received: an upper bound on the bytes of the head.
    """
    version: str = scope["http_version"]
    if version not in ("1.1", "1.0"):
        if version == "0.9":
            return RequestError("the request line lacks its HTTP version")
        return RequestError("HTTP/1.1 is spoken here", status=505, kind="http_version_not_supported")
    if scope["method"] not in METHODS:
        return RequestError("this method is not served here", status=405, kind="method_not_allowed")
    target: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    if target[:1] != b"/" or _HASH in target or _HASH in query:
        return RequestError("the request target must be a path that starts with `/`, or a URL, without a fragment")
    if len(target) + len(query) > limits.target_bytes:
        return RequestError(f"the request target is longer than {limits.target_bytes} bytes", status=414)
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if len(headers) > limits.header_count:
        return RequestError(f"more than {limits.header_count} header fields (setting limits.max_headers)", status=431)
    values = dict(headers)
    has_repeated = len(values) < len(headers)
    if has_repeated:
        names = [name for name, _ in headers]
        for name in names:
            if name in SINGLE and names.count(name) > 1:
                return RequestError(f"the header `{name.decode('ascii')}` stands more than once")
    if received > limits.header_bytes < sum(map(len, chain.from_iterable(headers))):
        return RequestError(
            f"header fields of more than {limits.header_bytes} bytes (setting limits.max_header_bytes)", status=431
        )
    if has_repeated or values.get(b"connection") not in _USUAL:
        problem = _inspect_connection(headers, limits)
        if problem is not None:
            return problem
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


def _inspect_connection(headers: list[tuple[bytes, bytes]], limits: HttpLimits) -> HttpError | None:
    """Return the reason to refuse a request whose Connection fields name a field that must reach the instance."""
    for name, value in headers:
        if name == b"connection":
            for named in named_fields(value):
                if named == limits.tenant_header or is_end_to_end(named):
                    text = named[:80].decode("latin-1")
                    return RequestError(f"the Connection header names `{text}`, which is not a field of one connection")
    return None


def drop_authority(scope: Scope) -> None:
    """Reduce a target in absolute form, such as `http://host/path`, to its path; no other target is changed."""
    match = _ABSOLUTE.fullmatch(scope["raw_path"])
    if match is not None and HOST.fullmatch(match[1]) is not None:
        scope["raw_path"] = match[2] or b"/"
        scope["path"] = unquote(scope["raw_path"].decode("latin-1"))


def has_body(scope: Scope) -> bool:
    """Return whether the head announces a body."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in scope["headers"]
    )


def explain(error: httptools.HttpParserError) -> RequestError:
    """Return the error for what httptools refused; its own text could quote the request."""
    reason = str(error)
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return RequestError("this method is not served here", status=405, kind="method_not_allowed")
    if "HTTP version" in reason or "PRI" in reason:
        return RequestError("HTTP/1.1 is spoken here", status=505, kind="http_version_not_supported")
    if "Transfer-Encoding" in reason or "Content-Length" in reason:
        return RequestError("Content-Length and Transfer-Encoding must say once, and plainly, where the body ends")
    return RequestError("the request is not well-formed HTTP/1.1")


def wants_websocket(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether the fields of an upgrade name WebSocket."""
    return any(name == b"upgrade" and b"websocket" in value.lower() for name, value in headers)


def error_fields(problem: HttpError) -> list[tuple[bytes, bytes]]:
    """Return the header fields that the status of *problem* requires, and Retry-After if it has one."""
    fields = {405: [(b"allow", ALLOW)], 426: [(b"upgrade", b"HTTP/1.1")]}.get(problem.status, [])
    return fields + retry_fields(problem)


def refusal(
    problem: HttpError, scope: Scope | None, url: bytes, error_body: Callable[[str, HttpError], bytes]
) -> bytes:
    """Return a whole response, after which the connection closes."""
    path = scope["path"] if scope is not None else url.decode("latin-1")
    body = error_body(path, problem)
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"date", formatdate(usegmt=True).encode()),
        (b"connection", b"close, upgrade" if problem.status == 426 else b"close"),
        *error_fields(problem),
    ]
    line = f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}".encode()
    head = b"\r\n".join([line, *map(b": ".join, fields), b"", b""])
    return head if scope is not None and scope["method"] == "HEAD" else head + body
