"""What a client is told by our server itself: that its request is none, or that nothing answers it, and why.

The errors of endpoints are `error_response.py`'s.
"""

from __future__ import annotations

from email.utils import formatdate
from http import HTTPStatus

import httptools

from smetric.errors import HttpError, RequestError
from smetric.proxy.asgi import Scope
from smetric.proxy.error_response import error_body, retry_fields


def explain(error: httptools.HttpParserError) -> RequestError:
    """What httptools refused, in our words: its own could quote the request."""
    reason = str(error)
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return RequestError("this method is not served here", status=405, kind="method_not_allowed")
    if "HTTP version" in reason or "PRI" in reason:
        return RequestError("HTTP/1.1 is spoken here", status=505, kind="http_version_not_supported")
    if "Transfer-Encoding" in reason or "Content-Length" in reason:
        return RequestError("Content-Length and Transfer-Encoding must say once, and plainly, where the body ends")
    return RequestError("the request is not well-formed HTTP/1.1")


def oddity(scope: Scope) -> HttpError | None:
    """What is wrong with a request of another protocol, or that asks for one."""
    if scope["http_version"] == "0.9":
        return RequestError("the request line lacks its HTTP version")
    if any(name == b"upgrade" and b"websocket" in value.lower() for name, value in scope["headers"]):
        return RequestError("WebSockets are not spoken here")
    return None


def refusal(problem: HttpError, scope: Scope | None, url: bytes) -> bytes:
    """A whole answer, with which the connection ends."""
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
