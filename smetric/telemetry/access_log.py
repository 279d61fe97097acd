"""The access log: one line for every request, at a fraction of what the loggers' processors cost.

Where lines go and how they look is set up in `logs.py`, and honoured here.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import structlog

from smetric.telemetry import names
from smetric.telemetry.attributes import safe
from smetric.telemetry.logs import JsonLines

if TYPE_CHECKING:
    from smetric.telemetry.exchange import Exchange
    from smetric.telemetry.record import DecisionRecord


class AccessLog:
    """Writes lines the way that logging was set up when this was made: before the first request, after the settings."""

    def __init__(self) -> None:
        # Bound here: binding anew for each line costs more than the line.
        self._logger = structlog.get_logger("smetric.access").bind()
        self._processors: list[Any] = structlog.get_config()["processors"]
        #: Whether lines are wanted at all; if not, none need be made.
        self.is_on: bool = self._logger.is_enabled_for(logging.INFO)

    def ended(self, exchange: Exchange, status: int, bytes_out: int, error_type: str, duration_s: float) -> None:
        """The request of *exchange* has ended; arguments as of `Exchange.end`."""
        fields: dict[str, Any] = {
            "path": exchange.route,
            "status": status,
            "bytes": bytes_out,
            "duration_s": _rounded(duration_s),
        }
        if trace_id := exchange.trace_id:
            fields["trace_id"] = trace_id
        if exchange.ttft_s is not None:
            fields["ttft_s"] = _rounded(exchange.ttft_s)
        if error_type:
            fields["error_type"] = error_type
        if exchange.gave_up:
            fields["gave_up"] = exchange.gave_up
        record = exchange.record
        if record is not None:
            _add_decision(fields, record)
            fields["attempts"] = exchange.attempts
        self.write(fields)

    def answered_here(self, route: str, status: int, bytes_out: int, error_type: str, duration_s: float) -> None:
        """A request that concerns no instance was answered; arguments as of `Telemetry.answered_here`."""
        fields = {"path": route, "status": status, "bytes": bytes_out, "duration_s": _rounded(duration_s)}
        self.write(fields | ({"error_type": error_type} if error_type else {}))

    def write(self, fields: dict[str, Any]) -> None:
        """One request; *fields* are bounded and printable, and belong to this from now on."""
        if not self.is_on:
            return
        last = self._processors[-1] if self._processors else None
        if isinstance(last, JsonLines):
            last.write_soon(names.REQUEST_EVENT.name, "info", fields)
        else:  # lines for people, or another set-up than ours
            self._logger.info(names.REQUEST_EVENT.name, **fields)


def _add_decision(fields: dict[str, Any], record: DecisionRecord) -> None:
    request, usage, hit, migration = record.request, record.usage, record.hit, record.migration
    fields["decision_id"] = record.id
    fields["outcome"] = record.outcome
    fields["route"] = record.route
    fields["policy"] = record.policy.name
    fields["rule"] = safe(record.rule)
    fields["instance"] = safe(record.instance.id) if record.instance is not None else ""
    fields["api"] = request.api._value_  # which `value` takes a detour to
    fields["model"] = safe(request.model)
    fields["turn"] = request.turn
    fields["prompt_len"] = request.prompt_len
    if hit is not None:
        fields["hit"] = hit[0]
    if usage is not None:
        fields["prompt_tokens"] = usage.prompt_tokens
        fields["cached_tokens"] = usage.cached_tokens
        fields["completion_tokens"] = usage.completion_tokens
    if record.held_s:
        fields["held_s"] = _rounded(record.held_s)
    if record.lookup_s:
        fields["lookup_s"] = _rounded(record.lookup_s)
    if record.arm:
        fields["arm"] = record.arm
    if migration is not None:
        fields["migrated_from"] = migration.source
        fields["guard"] = safe(migration.guard)
        fields["left_tokens"] = migration.left_tokens


def _rounded(seconds: float) -> float:
    """To microseconds, half a one up; `round` costs four times as much, and to so many places goes through text."""
    return (seconds * 1e6 + 0.5) // 1.0 / 1e6
