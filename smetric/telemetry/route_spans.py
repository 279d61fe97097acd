"""The spans of decisions: `hold`, `route` and `shadow`, made when nobody waits any more, with the times they had."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smetric.telemetry import candidates, decision_attributes, names, shadowed

if TYPE_CHECKING:
    from smetric.telemetry.open_span import OpenSpan
    from smetric.telemetry.record import DecisionRecord
    from smetric.telemetry.tracing import Tracing

#: What UIs show of a request's own span, in lists and when they open it; text is what they take for granted.
_HINTS = tuple(one.name for one in (names.UI_KIND, names.UI_OUTPUT, names.UI_SESSION))


def make_spans(
    tracing: Tracing, server: OpenSpan, record: DecisionRecord, configured: int, left_out: str, salt: bytes
) -> None:
    """Make those of *record* below *server*, which UIs show in lists and open first: it says the same as the decision.

    Args:
        tracing: makes spans.
        server: the request's own span.
        record: one of its decisions.
        configured: how many instances there were.
        left_out: why the policy was not given all of them.
        salt: key of the session hash.
    """
    from opentelemetry.trace import SpanKind

    about = decision_attributes.of_decision(
        record,
        configured=configured,
        left_out=left_out,
        top=tracing.candidates,
        limit=tracing.value_limit,
        ui_hints=tracing.ui_hints,
        salt=salt,
    )
    if tracing.ui_hints:
        server.set_attributes({name: about[name] for name in _HINTS if name in about})
    start_ns = record.time_ns - int(record.evaluate_s * 1e9)
    if record.held_s:
        began_ns = start_ns - int(record.held_s * 1e9)
        hold = tracing.child("hold", server, SpanKind.INTERNAL, _of_hold(record, tracing.ui_hints), began_ns)
        hold.end(start_ns)
    tracing.child(f"route {record.policy.name}", server, SpanKind.INTERNAL, about, start_ns).end(record.time_ns)
    for one in record.shadowed:
        about = shadowed.span_of(one, top=tracing.candidates, limit=tracing.value_limit, ui_hints=tracing.ui_hints)
        about = decision_attributes.bounded(about)
        span = tracing.child(f"shadow {one.policy.name}", server, SpanKind.INTERNAL, about, record.time_ns)
        span.end(record.time_ns + int(one.evaluate_s * 1e9))


def _of_hold(record: DecisionRecord, ui_hints: bool) -> dict[str, Any]:
    """What a request waited for in the queue."""
    by = record.held_by
    result: dict[str, Any] = {
        names.DECISION_ID.name: record.id,
        names.HOLD_DURATION.name: record.held_s,
        names.HOLD_REASON.name: names.HELD_BY_RULE if by is not None else names.HELD_FOR_PLACE,
    }
    if by is not None:
        summary = candidates.summary(by)
        result |= {names.POLICY_NAME.name: record.policy.name, names.RULE.name: by.rule, names.SUMMARY.name: summary}
    else:
        summary = "all places for requests under way were taken"
    if ui_hints:
        result |= {names.UI_KIND.name: "CHAIN", names.UI_OUTPUT.name: summary, names.UI_OUTPUT_TYPE.name: "text/plain"}
    return decision_attributes.bounded(result)
