"""What an attempt on an instance came to when it gave nothing that the client has seen, and whether another may do."""

from __future__ import annotations

from dataclasses import dataclass, field

from smetric.errors import HttpError
from smetric.proxy.headers import Headers

#: What an instance answers when it is overloaded, stopping or broken; another one may do better.
ELSEWHERE = frozenset({429, 500, 502, 503})
#: Such an answer is held back while another instance is tried, if its body is at most this many bytes.
HELD_BYTES = 16 * 1024
#: What an engine answers, with 500, from the moment it is told to stop to its end. The whole of a message: less may be
#: what a client sent.
SHUTTING_DOWN = tuple(b'"message":%b"cannot schedule new futures after shutdown"' % gap for gap in (b"", b" "))


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of ours, or an answer held back."""

    error: HttpError | None = None
    status: int = 0
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    #: Another instance may be tried.
    elsewhere: bool = True
