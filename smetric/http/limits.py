"""Bounds on requests and connections."""

from __future__ import annotations

from dataclasses import dataclass, replace

from smetric.config import Settings
from smetric.sources.shared.peers import MAX_BATCH_BYTES

#: Connections of operators, of what scrapes and of other routers.
ADMIN_CONNECTIONS = 256
#: A body's framing may cost this many times the body, beyond what a head may.
FRAMING_SHARE = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one request, on a connection that waits for one, and on connections; bytes and seconds."""

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
        """How many bytes a request may take around the *body_bytes* that have come of its body."""
        lines = self.header_count + 5  # of four bytes more each; the request line has twenty, with the last
        return self.header_bytes + self.target_bytes + 4 * lines + FRAMING_SHARE * body_bytes


def data_limits(settings: Settings) -> Limits:
    """Of the data port."""
    return Limits(
        body_bytes=settings.forward.max_body,
        header_count=settings.limits.max_headers,
        header_bytes=settings.limits.max_header_bytes,
        idle_timeout_s=settings.limits.idle_timeout,
        head_timeout_s=settings.limits.head_timeout,
        body_timeout_s=settings.limits.body_timeout,
        send_timeout_s=settings.limits.send_timeout,
        connections=settings.limits.max_connections,
    )


def admin_limits(settings: Settings) -> Limits:
    """Of the admin port: the same deadlines; nothing there is longer than what routers tell each other."""
    return replace(data_limits(settings), body_bytes=MAX_BATCH_BYTES, connections=ADMIN_CONNECTIONS)
