"""Spans of requests, attempts and decisions."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from smetric import names
from smetric.fleet.record import CLIENT_TEXT_MAX, safe
from smetric.http.addresses import port_of
from smetric.policy.types import exact
from smetric.request.request import Api
from smetric.telemetry import decision_text
from smetric.telemetry import decision_text as candidate_rows
from smetric.telemetry.decision_text import LIMIT, notes_of, summary_of

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance
    from smetric.fleet.record import DecisionRecord
    from smetric.policy.decision import Decision
    from smetric.policy.policy import Policy
    from smetric.request.request import InferenceRequest
    from smetric.telemetry.tracing import Tracing


# A span while it is open: a name, ids and a plain dict, handed to the exporter as the SDK's when it ends.
#
# Needs the SDK, whose own recording spans check every attribute, take locks and call samplers and processors: that
# costs more than all that is recorded here, where types are known, one thread writes, and what is sampled is decided
# before a span begins.

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)
#: Attributes of a span that need not be counted: no span of ours has as many.
_FEW = 96


class SpanMaker:
    """What all spans of a process have in common.

    Args:
        processor: takes ended spans.
        resource: what the process is.
        scope: who instruments it.
        limits: the user's; by default none that a span of ours could exceed.
    """

    def __init__(
        self, processor: SpanProcessor, resource: Resource, scope: InstrumentationScope, limits: SpanLimits
    ) -> None:
        self._processor = processor
        self._resource = resource
        self._scope = scope
        most, longest = limits.max_span_attributes, limits.max_span_attribute_length
        self._limits = (most, longest) if longest is not None or (most is not None and most < _FEW) else None

    def begin(
        self,
        name: str,
        trace_id: int,
        trace_state: TraceState | None,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: Mapping[str, Any],
        start_ns: int,
        links: Sequence[Link] = (),
    ) -> OpenSpan:
        """A span that begins at *start_ns*, Unix nanoseconds, below *parent*."""
        context = SpanContext(trace_id, random.getrandbits(64) or 1, False, _SAMPLED, trace_state)
        return OpenSpan(self, name, context, parent, kind, dict(attributes), start_ns, links)

    def finish(self, span: OpenSpan, end_ns: int) -> None:
        """Hand *span* over, as it is now."""
        attributes: Any = span.attributes
        if self._limits is not None:
            most, longest = self._limits
            attributes = BoundedAttributes(most, attributes, immutable=True, max_value_len=longest)
        self._processor.on_end(
            ReadableSpan(
                span.name,
                span.context,
                span.parent,
                self._resource,
                attributes,
                (),
                span.links,
                span.kind,
                None,
                span.status,
                span.start_ns,
                max(end_ns, span.start_ns),
                self._scope,
            )
        )


class OpenSpan:
    """One span."""

    __slots__ = ("_maker", "attributes", "context", "kind", "links", "name", "parent", "start_ns", "status")

    def __init__(
        self,
        maker: SpanMaker,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: dict[str, Any],
        start_ns: int,
        links: Sequence[Link],
    ) -> None:
        self._maker = maker
        self.name = name
        self.context = context
        self.parent = parent
        self.kind = kind
        self.attributes = attributes
        self.start_ns = start_ns
        self.links = links
        self.status = _UNSET

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Add *attributes*; values are of the types that the table of names says."""
        self.attributes.update(attributes)

    def failed(self) -> None:
        """What it stands for went wrong."""
        self.status = Status(StatusCode.ERROR)

    def end(self, end_ns: int) -> None:
        """It ended at *end_ns*, Unix nanoseconds; called once."""
        self._maker.finish(self, end_ns)


# What the spans of a request and of its attempts say, as HTTP and GenAI conventions put it.
#
# Never text of a prompt. What a decision's span says is in `decision_attributes.py`.

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
_OPERATIONS = {
    Api.CHAT: "chat",
    Api.COMPLETIONS: "text_completion",
    Api.MESSAGES: "chat",
    Api.RESPONSES: "chat",
}


def method_of(method: str) -> str:
    """*method* if it is a known one, else `_OTHER`."""
    return method if method in _METHODS else "_OTHER"


def of_request(scope: Mapping[str, Any], route: str) -> dict[str, Any]:
    """The SERVER span's HTTP attributes, from an ASGI scope."""
    result: dict[str, Any] = {
        names.HTTP_METHOD.name: method_of(scope["method"]),
        names.HTTP_ROUTE.name: route,
        names.URL_PATH.name: safe(scope["path"]),
        names.URL_SCHEME.name: scope.get("scheme", "http"),
        names.PROTOCOL_VERSION.name: scope.get("http_version", "1.1"),
    }
    client, server = scope.get("client"), scope.get("server")
    if client:
        result[names.CLIENT_ADDRESS.name] = client[0]
    if server:
        result[names.SERVER_ADDRESS.name] = server[0]
        if server[1] is not None:
            result[names.SERVER_PORT.name] = server[1]
    return result


def operation_of(request: InferenceRequest, route: str) -> str:
    """`gen_ai.operation.name`: of what is only passed on the end of *route*, as in `embeddings` and `rerank`."""
    return _OPERATIONS.get(request.api) or route.removeprefix("/v1/")


def of_attempt(record: DecisionRecord, method: str, route: str, path: str, number: int) -> dict[str, Any]:
    """The CLIENT span's attributes as it starts."""
    request, instance = record.request, record.instance
    assert instance is not None
    parts = urlsplit(instance.url)
    result: dict[str, Any] = {
        names.HTTP_METHOD.name: method_of(method),
        names.URL_FULL.name: instance.url + safe(path),
        names.SERVER_ADDRESS.name: parts.hostname or "",
        names.SERVER_PORT.name: port_of(parts),
        names.INSTANCE_ID.name: instance.id,
        names.DECISION_ID.name: record.id,
        names.ATTEMPT.name: number,
        names.GEN_AI_OPERATION.name: operation_of(request, route),
        names.GEN_AI_PROVIDER.name: "vllm",
        names.GEN_AI_MODEL.name: safe(request.model),
        names.GEN_AI_STREAM.name: request.stream,
    }
    if (hit := record.hit) is not None:
        result[names.HIT_TOKENS.name] = hit[0]
    if number > 1:
        result[names.HTTP_RESEND.name] = number - 1
    return result


# What the span of a decision says: its record as attributes.
#
# Never text of a prompt, never a raw session id. The rows and texts within are laid out in `candidates.py`,
# `decision_text.py` and `shadowed.py`.

_CURSOR_MAX = 256
_LOADS = {
    "requests": names.LOAD_REQUESTS.name,
    "running": names.LOAD_RUNNING.name,
    "waiting": names.LOAD_WAITING.name,
    "kv_usage": names.LOAD_KV_USAGE.name,
}


def left_out(decision: Decision, instances: Sequence[Instance], model: str) -> str:
    """Why the instances the policy was not given were left out, e.g. `draining=1 model=3`; empty for none.

    Args:
        decision: on what was given.
        instances: all, as they are in the tick of the decision.
        model: the model asked for.
    """
    given = decision.snapshot.ids
    if len(given) == len(instances):
        return ""
    reasons: dict[str, int] = {}
    ids = set(given)
    for instance in instances:
        if instance.id in ids:
            continue
        if not instance.serves(model):
            reason = "model"
        elif instance.draining:
            reason = "draining"
        elif not instance.healthy:
            reason = "unhealthy"
        else:
            reason = "spared" if instance.deprioritized else "excluded"
        reasons[reason] = reasons.get(reason, 0) + 1
    return " ".join(f"{name}={count}" for name, count in sorted(reasons.items()))


def of_decision(
    record: DecisionRecord, *, configured: int, left_out: str, top: int, limit: int, ui_hints: bool, salt: bytes
) -> dict[str, Any]:
    """The attributes of a `route` span.

    Args:
        record: the decision.
        configured: how many instances there were.
        left_out: why the policy was not given all of them.
        top: candidates shown at most.
        limit: bytes of the attributes that show them.
        ui_hints: whether to add what tracing UIs lay out.
        salt: key of the session hash.
    """
    request, policy, decision = record.request, record.policy, record.decision
    result: dict[str, Any] = {
        names.DECISION_ID.name: record.id,
        names.OUTCOME.name: record.outcome,
        names.REASON.name: record.reason,
        names.DURATION.name: record.evaluate_s,
        names.LOOKUP_DURATION.name: record.lookup_s,
        names.POLICY_NAME.name: policy.name,
        names.POLICY_HASH.name: policy.digest,
        names.POLICY_SOURCE.name: policy.path.rpartition("/")[2],
        names.POLICY_GENERATION.name: record.generation,
        names.POLICY_ORIGIN.name: str(record.policy_origin),  # a member of its enumeration
        names.POLICY_PARAMS.name: params_of(policy),
        names.ORIGIN.name: record.origin,
        names.ROUTE.name: record.route,
        names.CANDIDATES.name: configured,
        names.INSTANCE_RANK.name: record.rank,
        names.PROMPT_TOKENS.name: request.prompt_len,
        names.PROMPT_SOURCE.name: record.tokens_source,
    }
    if record.arm:
        result[names.ARM.name] = record.arm
    if record.held_s:
        result[names.HOLD_DURATION.name] = record.held_s
    if record.instance is not None:
        result[names.INSTANCE_ID.name] = record.instance.id
    if request.turn is not None:
        result[names.TURN.name] = request.turn
    if request.est_hit is not None:
        result[names.EST_HIT.name] = request.est_hit
    session = session_hash(request.session, salt)
    if session:
        result[names.SESSION_HASH.name] = session
    if decision is not None:
        result[names.RULE.name] = decision.rule
        result[names.ELIGIBLE.name] = len(decision.snapshot.ids)
        if decision.survivors:
            result[names.FILTERED.name] = len(decision.snapshot.ids) - len(decision.survivors[-1])
        if left_out:
            result[names.FILTER_REASONS.name] = left_out
        _add_score(result, decision)
        _add_snapshot(result, decision)
        _add_outlook(result, record)
        result |= decision_text.attributes_of(record.shadowed)
        result[names.CANDIDATES_JSON.name] = candidate_rows.as_json(decision, top, limit)
    hit = record.hit
    if hit is not None:
        result[names.HIT_TOKENS.name] = hit[0]
        result[names.HIT_RATIO.name] = hit[0] / request.prompt_len if request.prompt_len else 0.0
        if hit[1]:
            result[names.HIT_SOURCE.name] = hit[1]
    summary = result[names.SUMMARY.name] = summary_of(record)
    if ui_hints:
        result[names.UI_KIND.name] = "CHAIN"
        result[names.UI_INPUT.name] = orjson.dumps(
            {"turn": request.turn, "prompt_len": request.prompt_len, "est_hit": request.est_hit}
        ).decode()
        result[names.UI_INPUT_TYPE.name] = "application/json"
        result[names.UI_OUTPUT.name] = (
            summary if decision is None else candidate_rows.as_text(decision, summary, top, limit, notes_of(record))
        )
        result[names.UI_OUTPUT_TYPE.name] = "text/plain"
        if session:
            result[names.UI_SESSION.name] = session
    return bounded(result)


def bounded(attributes: dict[str, Any]) -> dict[str, Any]:
    """*attributes* with no text longer than collectors keep; what is laid out is shorter already."""
    for name, value in attributes.items():
        if (
            type(value) is str
            and len(value) > CLIENT_TEXT_MAX
            and len(encoded := value.encode(errors="replace")) > LIMIT
        ):
            attributes[name] = encoded[: LIMIT - 3].decode(errors="ignore") + "…"
    return attributes


@lru_cache(maxsize=16)  # each traced decision shows them
def params_of(policy: Policy) -> str:
    """The values of a policy's parameters, `*` where configuration set one, e.g. `OVERLOAD=1.5* LOAD=requests`."""
    return " ".join(
        f"{name}={exact(one.value)}{'*' * one.configured}"
        if isinstance(one.value, float)
        else f"{name}={str(one.value).lower() if isinstance(one.value, bool) else one.value}{'*' * one.configured}"
        for name, one in policy.params.items()
    )[:CLIENT_TEXT_MAX]


def session_hash(session: str, salt: bytes) -> str:
    """A keyed hash of a session id, 16 hex digits; empty for none."""
    return hashlib.blake2b(session.encode(), digest_size=8, key=salt).hexdigest() if session else ""


def _add_score(result: dict[str, Any], decision: Decision) -> None:
    score, chosen = decision.score, decision.index
    if chosen < 0:
        return
    result[names.TIED.name] = decision.tied
    if score is None:
        return
    lowest = decision.direction != "max"
    values = [score[index] for index in decision.candidates]
    result[names.SCORE_CHOSEN.name] = float(score[chosen])
    result[names.SCORE_DIRECTION.name] = "min" if lowest else "max"
    result[names.SCORE_WORST.name] = float(max(values) if lowest else min(values))
    at = decision.runner_up_index
    if at is not None:
        result[names.RUNNER_UP.name] = decision.snapshot.ids[at]
        result[names.SCORE_RUNNER_UP.name] = float(score[at])
        result[names.SCORE_MARGIN.name] = float(abs(score[at] - score[chosen]))


def _add_outlook(result: dict[str, Any], record: DecisionRecord) -> None:
    """Whom a later turn left, and what was expected of the chosen instance and of the other one."""
    migration, forecast = record.migration, record.forecast
    if migration is not None:
        result[names.MIGRATED_FROM.name] = migration.source
        result[names.MIGRATION_GUARD.name] = migration.guard[:CLIENT_TEXT_MAX]
        if migration.left_tokens is not None:
            result[names.MIGRATION_TOKENS.name] = migration.left_tokens
    if forecast is None:
        return
    if forecast.ttft_s is not None:
        result[names.FORECAST_TTFT.name] = forecast.ttft_s
    if forecast.other:
        result[names.FORECAST_OTHER.name] = forecast.other
    if forecast.other_ttft_s is not None:
        result[names.FORECAST_OTHER_TTFT.name] = forecast.other_ttft_s


def _add_snapshot(result: dict[str, Any], decision: Decision) -> None:
    snapshot, index = decision.snapshot, decision.index
    result[names.SEED.name] = decision.seed
    failed = [label for _, guards in decision.guards for label, held in guards if held is False]
    if failed:
        result[names.GUARD_FAILED.name] = ", ".join(failed)[:CLIENT_TEXT_MAX]
    if decision.cursors:
        result[names.CURSOR.name] = " ".join(f"{k}={v}" for k, v in decision.cursors.items())[:_CURSOR_MAX]
    oldest: list[float] = []
    of_chosen: list[float] = []
    for feature, stamps in snapshot.stamps.items():
        known = snapshot.known.get(feature)
        measured = [at for at in (stamps if known is None else compress(stamps, known)) if at is not None]
        if measured:
            oldest.append(min(measured))
            if index >= 0 and (at := stamps[index]) is not None and (known is None or known[index]):
                of_chosen.append(at)
    if oldest:
        result[names.MAX_AGE.name] = max(0.0, snapshot.now - min(oldest))
    if of_chosen:
        result[names.CHOSEN_AGE.name] = max(0.0, snapshot.now - min(of_chosen))
    if index >= 0:
        for feature, name in _LOADS.items():
            column = snapshot.columns.get(feature)
            if column is not None:
                result[name] = float(column[index])


# The spans of decisions: `hold`, `route` and `shadow`, made when nobody waits any more, with the times they had.

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

    about = of_decision(
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
        about = decision_text.span_of(one, top=tracing.candidates, limit=tracing.value_limit, ui_hints=tracing.ui_hints)
        about = bounded(about)
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
        summary = decision_text.summary(by)
        result |= {names.POLICY_NAME.name: record.policy.name, names.RULE.name: by.rule, names.SUMMARY.name: summary}
    else:
        summary = "all places for requests under way were taken"
    if ui_hints:
        result |= {names.UI_KIND.name: "CHAIN", names.UI_OUTPUT.name: summary, names.UI_OUTPUT_TYPE.name: "text/plain"}
    return bounded(result)
