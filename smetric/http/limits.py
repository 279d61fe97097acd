"""Limits on requests and connections, the check of a request's head, and the response to a refused request."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from itertools import chain
from math import inf

import httptools

from smetric.errors import HttpError, RequestError
from smetric.http.headers import MOST_DIGITS, Scope, retry_fields

#: Bytes that the framing of a body may take, as a multiple of the body; the limit of a head is added.
FRAMING_SHARE = 16
METHODS = frozenset({"GET", "HEAD", "POST", "DELETE"})
#: Fields that may stand only once: servers differ on which of two values counts.
SINGLE = frozenset({b"host", b"authorization", b"content-type", b"content-length", b"transfer-encoding"})
#: Fields that announce a body.
BODY_FIELDS = frozenset({b"content-length", b"transfer-encoding"})
HOST = re.compile(rb"[A-Za-z0-9._\-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
_HASH = ord("#")


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


def inspect_head(scope: Scope, limits: HttpLimits, received: float = inf) -> HttpError | None:
    """Return the reason to refuse a request by its head, or None.

    Args:
        scope: the ASGI scope.
        limits: limits on the head.
        received: an upper bound on the bytes of the head.
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


def inspect_protocol(scope: Scope) -> HttpError | None:
    """Return the reason to refuse a request of another protocol, or None."""
    if scope["http_version"] == "0.9":
        return RequestError("the request line lacks its HTTP version")
    if any(name == b"upgrade" and b"websocket" in value.lower() for name, value in scope["headers"]):
        return RequestError("WebSockets are not spoken here")
    return None


def refusal(
    problem: HttpError, scope: Scope | None, url: bytes, error_body: Callable[[str, HttpError], bytes]
) -> bytes:
    """Return a whole response, after which the connection closes."""
    path = scope["path"] if scope is not None else url.decode("latin-1")
    body = error_body(path, problem)
    lines = [
        f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"date: {formatdate(usegmt=True)}",
        "connection: close",
    ]
    if problem.status == 405:
        lines.append("allow: GET, HEAD, POST, DELETE")
    lines += [f"{name.decode()}: {value.decode()}" for name, value in retry_fields(problem)]
    head = "\r\n".join([*lines, "", ""]).encode("ascii")
    return head if scope is not None and scope["method"] == "HEAD" else head + body
