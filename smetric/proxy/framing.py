"""The head of an answer to a client, and by what the client knows where the answer ends.

What comes behind the head is `transaction.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from http import HTTPStatus

from smetric.proxy.asgi import Scope
from smetric.proxy.headers import breaks_out

_STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}".encode() for each in HTTPStatus}
#: Fields that say where the answer or its connection ends.
_FRAMING = frozenset({b"connection", b"transfer-encoding", b"content-length"})


class Framing(Enum):
    """How a client knows where the answer ends."""

    LENGTH = auto()
    CHUNKED = auto()
    CLOSE = auto()
    NO_BODY = auto()


# They are compared several times for each request, and a look into an enumeration costs as much as a call.
LENGTH, CHUNKED, CLOSE, NO_BODY = Framing


def head_of(
    status: int, headers: Iterable[tuple[bytes, bytes]], scope: Scope, is_last: bool
) -> tuple[bytes, Framing, int, bool]:
    """The head of the answer to the request of *scope*.

    Args:
        status: of the answer.
        headers: the app's fields; those that are this server's to say are dropped.
        scope: of the request.
        is_last: the connection ends behind the answer in any case.

    Returns:
        The head; how the answer is framed; its Content-Length, 0 without one; whether the connection ends behind it.

    Raises:
        ValueError: a header field would break the answer's framing.
    """
    framing = CHUNKED if scope["http_version"] == "1.1" else CLOSE
    length = 0
    lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d " % status]
    for field in headers:
        if field[0] in _FRAMING:
            name, value = field
            if name != b"content-length":  # this server's to say
                is_last = is_last or (name == b"connection" and b"close" in value.lower())
                continue
            framing = LENGTH
            length = int(value)
        lines.append(b": ".join(field))
    if scope["method"] == "HEAD" or status in (204, 304):
        framing = NO_BODY
    elif framing is CHUNKED:
        lines.append(b"transfer-encoding: chunked")
    elif framing is CLOSE:
        is_last = True
    if is_last:
        lines.append(b"connection: close")
    if breaks_out(b"".join(lines)):
        raise ValueError("a header field of the answer holds a line break or a NUL")
    lines.append(b"\r\n")
    return b"\r\n".join(lines), framing, length, is_last
