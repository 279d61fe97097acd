"""A decision in words: its summary, and what else is to be told of it.

The words of what a policy decided are `candidates.py`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smetric.policy.figure import clipped, figure
from smetric.telemetry import candidates, names, shadowed

if TYPE_CHECKING:
    from smetric.telemetry.record import DecisionRecord


def summary_of(record: DecisionRecord) -> str:
    """The decision in one sentence, also where no policy ran."""
    if record.decision is not None:
        return candidates.summary(record.decision)
    if record.outcome == names.PINNED and record.instance is not None:
        return f"pinned: {record.instance.id} holds the response this request continues"
    if record.outcome == names.ERROR:
        return "the policy failed to evaluate"
    if record.instance is not None:
        return f"{record.instance.id}: no inference, so any instance serves it and no policy ran"
    return "no instance may serve this request"


def notes_of(record: DecisionRecord) -> list[str]:
    """What else is to be told of a decision: whom it left, what was expected of it, what shadows would have chosen."""
    notes = []
    migration, forecast = record.migration, record.forecast
    if migration is not None:
        left = "" if migration.left_tokens is None else f", which keeps {migration.left_tokens} tokens more"
        notes.append(f"moved    from {clipped(migration.source)}{left}: {clipped(migration.guard)}")
    if forecast is not None and forecast.ttft_s is not None:
        other = ""
        if forecast.other_ttft_s is not None:
            other = f", {figure(forecast.other_ttft_s)} s on {clipped(forecast.other)}"
        notes.append(f"expected {figure(forecast.ttft_s)} s to the first token{other}")
    return notes + [f"shadow   {shadowed.note_of(one)}" for one in record.shadowed]
