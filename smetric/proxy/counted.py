"""Counts and logs the answers of an endpoint that concerns no instance in particular, such as the list of models.

Requests that are decided have an exchange (`smetric.telemetry.exchange`).
"""

from __future__ import annotations

import time

from smetric.proxy.asgi import App, Message, Receive, Scope, Send
from smetric.telemetry.telemetry import Telemetry


class Counted:
    """An endpoint that concerns no instance in particular: its answers are counted and logged.

    Args:
        app: what answers.
        route: the path template.
        telemetry: where that is told.
    """

    def __init__(self, app: App, route: str, telemetry: Telemetry) -> None:
        self._app = app
        self._route = route
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        started = time.perf_counter()
        status, bytes_out = 500, 0

        async def seen(message: Message) -> None:
            nonlocal status, bytes_out
            if message["type"] == "http.response.start":
                status = message["status"]
            elif scope["method"] != "HEAD":
                bytes_out += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            self._telemetry.answered_here(
                self._route,
                status,
                duration_s=time.perf_counter() - started,
                bytes_out=bytes_out,
                error_type=str(status) if status >= 500 else "",
            )
