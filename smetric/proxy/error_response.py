"""Errors in the shape of each API."""

from __future__ import annotations

from email.utils import formatdate
from http import HTTPStatus

import httptools
import orjson

from smetric.errors import HttpError, RequestError
from smetric.http.headers import Scope, Send

# Errors as clients expect them: each API's own error body, and its own error event in a stream.
#
# Bodies hold our own text only; never a piece of a prompt, of an upstream's bytes or of an exception.

#: What went wrong is for the router's own log.
FAULT = HttpError(500, "a fault in the router; its log says where", "internal_error")


def is_messages(path: str) -> bool:
    """Whether *path* belongs to the Anthropic API."""
    return path.startswith("/v1/messages")


#: Anthropic's error types by status; others are api_error.
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(path: str, error: HttpError) -> bytes:
    """The JSON body of *error* in the shape of the API that *path* belongs to."""
    if is_messages(path):
        kind = ANTHROPIC_TYPES.get(error.status, "api_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})
    return orjson.dumps(
        {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}}
    )


def error_event(path: str, error: HttpError) -> bytes:
    """The server-sent event that ends a broken stream, in the shape of the API that *path* belongs to."""
    if is_messages(path):
        return b"event: error\ndata: " + error_body(path, error) + b"\n\n"
    if path.startswith("/v1/responses"):
        data = {"type": "error", "code": error.kind, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + orjson.dumps(data) + b"\n\n"
    return b"data: " + error_body(path, error) + b"\n\n"


def retry_fields(error: HttpError) -> list[tuple[bytes, bytes]]:
    """The header fields that say when to come back, where *error* does.

    Whole seconds are few; the clients of OpenAI and Anthropic go by milliseconds, and so do not come back all at once.
    """
    if error.retry_after_s is None:
        return []
    seconds = max(0.0, error.retry_after_s)  # a policy may compute it: `retry 2s - req.held`
    return [(b"retry-after", b"%d" % max(1, round(seconds))), (b"retry-after-ms", b"%d" % round(1000 * seconds))]


async def send_error(send: Send, path: str, error: HttpError, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Answer *error*, with Retry-After where it has one."""
    body = error_body(path, error)
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"date", formatdate(usegmt=True).encode()),
        *(headers or []),
    ]
    fields += retry_fields(error)
    if error.status == 405 and not headers:
        fields.append((b"allow", b"GET, HEAD, POST, DELETE"))
    await send({"type": "http.response.start", "status": error.status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})


# What a client is told by our server itself: that its request is none, or that nothing answers it, and why.
#
# The errors of endpoints are `error_response.py`'s.


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
