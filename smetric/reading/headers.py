"""What headers say of a request: whose it is, which session's, and how urgent."""

from __future__ import annotations

from collections.abc import Collection
from operator import itemgetter

from smetric.reading.fields import number
from smetric.request import InferenceRequest

#: Headers in which agents name their session, best first (Claude Code, Codex, OpenCode, Dynamo).
SESSION_HEADERS = (b"x-claude-code-session-id", b"session-id", b"x-session-id", b"x-dynamo-session-id")
#: These, and all others that are read whatever is configured.
_READ_HEADERS = frozenset({*SESSION_HEADERS, b"x-request-id", b"x-vllm-priority", b"x-session-turn"})
_NAME = itemgetter(0)
#: Longest value taken from a header, in bytes.
MAX_HEADER_VALUE = 256


def read_headers(
    request: InferenceRequest, headers: Collection[tuple[bytes, bytes]], tenant_header: str, trusts_session: bool
) -> int | None:
    """Fill what *headers* say; returns the turn where one overrides what the body says.

    Args:
        request: to be filled.
        headers: names in lower case, and values.
        tenant_header: the one that names the tenant, in lower case; empty for none.
        trusts_session: `x-session-turn` counts.

    Raises:
        RequestError: one that is to be a number is none.
    """
    turn = None
    tenant = tenant_header.encode()
    wanted = _READ_HEADERS | {tenant} if tenant else _READ_HEADERS
    if wanted.isdisjoint(map(_NAME, headers)):
        return None  # as of most clients
    session_rank = len(SESSION_HEADERS)
    for name, value in headers:
        if name in SESSION_HEADERS:
            rank = SESSION_HEADERS.index(name)
            if rank < session_rank:
                session_rank = rank
                request.session = _header_text(value)
        elif name == b"x-request-id":
            request.id = _header_text(value)
        elif name == b"x-vllm-priority":
            request.priority = -number("X-Vllm-Priority", value.strip())
        elif name == b"x-session-turn" and trusts_session:
            turn = int(min(max(0.0, number("X-Session-Turn", value.strip())), 1e6))
        if tenant and name == tenant:
            request.tenant = _header_text(value)
    return turn


def _header_text(value: bytes) -> str:
    return value.strip()[:MAX_HEADER_VALUE].decode("latin-1")
