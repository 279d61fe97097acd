"""Errors in the shape of each API: its own error body, and its own error event in a stream.

Bodies contain our own text only: no part of a prompt, of an instance's bytes or of an exception.
"""

from __future__ import annotations

from email.utils import formatdate

import orjson

from smetric.errors import HttpError
from smetric.http.headers import Send
from smetric.http.limits import error_fields

#: Beginning of the paths of the Anthropic API.
MESSAGES = "/v1/messages"
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
    """Return the JSON body of *error* in the shape of the API that *path* belongs to."""
    if path.startswith(MESSAGES):
        kind = ANTHROPIC_TYPES.get(error.status, "api_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": error.message}})
    return orjson.dumps(
        {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}}
    )


def error_event(path: str, error: HttpError) -> bytes:
    """Return the server-sent event that ends a broken stream, in the shape of the API that *path* belongs to."""
    if path.startswith(MESSAGES):
        return b"event: error\ndata: " + error_body(path, error) + b"\n\n"
    if path.startswith("/v1/responses"):
        data = {"type": "error", "code": error.kind, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + orjson.dumps(data) + b"\n\n"
    return b"data: " + error_body(path, error) + b"\n\n"


async def send_error(send: Send, path: str, error: HttpError, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Answer *error*, with the fields that its status asks for, and Retry-After where it has one."""
    body = error_body(path, error)
    fields = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"date", formatdate(usegmt=True).encode()),
        *(headers or []),
    ]
    fields += [field for field in error_fields(error) if field[0] not in dict(headers or [])]
    await send({"type": "http.response.start", "status": error.status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})
