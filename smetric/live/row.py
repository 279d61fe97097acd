"""A decision as one row of the stream, and what is added to it when its request has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smetric.live.wish import failed_guards, margin_of
from smetric.telemetry.decision_text import summary_of
from smetric.telemetry.decisions import brief

if TYPE_CHECKING:
    from smetric.telemetry.record import DecisionRecord
    from smetric.telemetry.shadowed import Shadowed


def row(record: DecisionRecord) -> dict[str, Any]:
    """The row."""
    decision = record.decision
    moved, hit, margin = record.migration, record.hit, margin_of(record)
    return {
        **brief(record),
        "time_ms": record.time_ns // 1_000_000,
        "rank": record.rank,
        "sentence": summary_of(record),
        "failed_guard": next(iter(failed_guards(decision)), None) if decision is not None else None,
        "moved_from": moved.source if moved is not None else None,
        "moved_by": moved.guard if moved is not None else None,
        "left_behind": moved.left_tokens if moved is not None else None,
        "hit": hit[0] if hit is not None else None,
        "margin": round(margin, 4) if margin is not None else None,
        "shadows": [shadow_of(one) for one in record.shadowed],
    }


def shadow_of(shadowed: Shadowed) -> dict[str, Any]:
    """What a policy in shadow would have done; `agrees` is None where it could not answer."""
    return {"policy": shadowed.policy.name, "choice": shadowed.choice, "agrees": shadowed.agrees}


def ending(record: DecisionRecord) -> dict[str, Any]:
    """What became of the request."""
    usage = record.usage
    return {
        "id": record.id,
        "followed_by": record.followed_by or None,
        "status": record.status,
        "ttft_s": record.ttft_s,
        "duration_s": record.duration_s,
        "error_type": record.error_type or None,
        "cached": usage.cached_tokens if usage is not None else None,
        "shadows": [shadow_of(one) for one in record.shadowed],
    }
