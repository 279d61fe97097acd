"""Whether a decision took a later turn away from where most of its prompt is believed cached."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smetric.telemetry.record import DecisionRecord


def moved_from(record: DecisionRecord) -> tuple[str, int] | None:
    """Whom a later turn was taken away from, and the tokens of its prompt left there; None where it was not.

    Only where hits were looked up: of what nobody asked nothing is known.
    """
    decision, request = record.decision, record.request
    if decision is None or decision.index < 0 or not request.turn:
        return None
    snapshot = decision.snapshot
    hits = snapshot.columns.get("hit_len")
    if hits is None:
        return None
    known = snapshot.known.get("hit_len")
    best = max(range(len(hits)), key=lambda i: hits[i] if known is None or known[i] else -1)
    if hits[best] <= hits[decision.index] or (known is not None and not known[best]):
        return None
    return snapshot.ids[best], int(hits[best] - hits[decision.index])
