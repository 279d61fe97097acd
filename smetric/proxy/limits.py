"""The bounds that the settings put on the two ports; what they bound is described in `inbox.Limits`."""

from __future__ import annotations

from dataclasses import replace

from smetric.config import Settings
from smetric.proxy.inbox import Limits
from smetric.sources.placement import MAX_BATCH_BYTES

#: Connections of operators, of what scrapes and of other routers.
ADMIN_CONNECTIONS = 256


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
