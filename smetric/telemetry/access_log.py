"""The access log: one line for every request, at a fraction of what the loggers' processors cost.

Where lines go and how they look is set up in `logs.py`, and honoured here.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from msgspec import UNSET, UnsetType

from smetric.telemetry.client_text import safe
from smetric.telemetry.logs import JsonLines, Line

if TYPE_CHECKING:
    from smetric.telemetry.exchange import Exchange
    from smetric.telemetry.record import DecisionRecord


class AccessLine(Line):
    """What is said of one request, bounded and printable; what is UNSET is not said."""

    path: str | UnsetType = UNSET
    status: int | UnsetType = UNSET
    bytes: int | UnsetType = UNSET
    duration_s: float | UnsetType = UNSET
    trace_id: str | UnsetType = UNSET
    ttft_s: float | UnsetType = UNSET
    error_type: str | UnsetType = UNSET
    gave_up: str | UnsetType = UNSET
    decision_id: str | UnsetType = UNSET
    outcome: str | UnsetType = UNSET
    route: str | UnsetType = UNSET
    policy: str | UnsetType = UNSET
    rule: str | UnsetType = UNSET
    instance: str | UnsetType = UNSET
    api: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    turn: int | UnsetType | None = UNSET
    prompt_len: int | UnsetType = UNSET
    hit: int | UnsetType = UNSET
    prompt_tokens: int | UnsetType | None = UNSET
    cached_tokens: int | UnsetType | None = UNSET
    completion_tokens: int | UnsetType | None = UNSET
    held_s: float | UnsetType = UNSET
    lookup_s: float | UnsetType = UNSET
    arm: str | UnsetType = UNSET
    migrated_from: str | UnsetType = UNSET
    guard: str | UnsetType = UNSET
    left_tokens: int | UnsetType | None = UNSET
    attempts: int | UnsetType = UNSET
    event: str = "request"


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
        record, ttft_s = exchange.record, exchange.ttft_s
        self.write(
            AccessLine(  # by position: by name it takes twice as long
                exchange.route,
                status,
                bytes_out,
                _rounded(duration_s),
                exchange.trace_id or UNSET,
                UNSET if ttft_s is None else _rounded(ttft_s),
                error_type or UNSET,
                exchange.gave_up or UNSET,
                *(() if record is None else _of_decision(record, exchange.attempts)),
            )
        )

    def answered_here(self, route: str, status: int, bytes_out: int, error_type: str, duration_s: float) -> None:
        """A request that concerns no instance was answered; arguments as of `Telemetry.answered_here`."""
        if self.is_on:
            self.write(AccessLine(route, status, bytes_out, _rounded(duration_s), error_type=error_type or UNSET))

    def write(self, line: AccessLine) -> None:
        """One request."""
        last = self._processors[-1] if self._processors else None
        if isinstance(last, JsonLines):
            last.write_soon(line)
        else:  # lines for people, or another set-up than ours
            fields = msgspec.to_builtins(line)
            del fields["level"], fields["timestamp"]
            self._logger.info(**fields)


def _of_decision(record: DecisionRecord, attempts: int) -> tuple[Any, ...]:
    """The fields from `decision_id` on."""
    request, usage, hit, migration = record.request, record.usage, record.hit, record.migration
    return (
        record.id,
        record.outcome,
        record.route,
        record.policy.name,
        safe(record.rule),
        safe(record.instance.id) if record.instance is not None else "",
        request.api._value_,  # which `value` takes a detour to
        safe(request.model),
        request.turn,
        request.prompt_len,
        UNSET if hit is None else hit[0],
        UNSET if usage is None else usage.prompt_tokens,
        UNSET if usage is None else usage.cached_tokens,
        UNSET if usage is None else usage.completion_tokens,
        _rounded(record.held_s) if record.held_s else UNSET,
        _rounded(record.lookup_s) if record.lookup_s else UNSET,
        record.arm or UNSET,
        UNSET if migration is None else migration.source,
        UNSET if migration is None else safe(migration.guard),
        UNSET if migration is None else migration.left_tokens,
        attempts,
    )


def _rounded(seconds: float) -> float:
    """To microseconds, half a one up; `round` costs four times as much, and to so many places goes through text."""
    return (seconds * 1e6 + 0.5) // 1.0 / 1e6
