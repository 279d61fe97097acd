"""The access log: one line for every request, at a fraction of what the loggers' processors cost.

What it says is `exchange.py`'s; where lines go and how they look is set up in `logs.py`, and honoured here.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog

from smetric.telemetry import names
from smetric.telemetry.logs import JsonLines


class AccessLog:
    """Writes lines the way that logging was set up when this was made: before the first request, after the settings."""

    def __init__(self) -> None:
        # Bound here: binding anew for each line costs more than the line.
        self._logger = structlog.get_logger("smetric.access").bind()
        self._processors: list[Any] = structlog.get_config()["processors"]
        #: Whether lines are wanted at all; if not, none need be made.
        self.is_on: bool = self._logger.is_enabled_for(logging.INFO)

    def write(self, fields: dict[str, Any]) -> None:
        """One request; *fields* are bounded and printable, and belong to this from now on."""
        if not self.is_on:
            return
        last = self._processors[-1] if self._processors else None
        if isinstance(last, JsonLines):
            last.write_soon(names.REQUEST_EVENT.name, "info", fields)
        else:  # lines for people, or another set-up than ours
            self._logger.info(names.REQUEST_EVENT.name, **fields)
