"""Spans of requests, decisions and attempts, made late from the record.

Whether a trace is kept is decided once, when the outcome of the decision is known and before the request is sent. The
spans themselves are made at the end of the exchange, with the times they really had: nobody waits for them then, and
the end may show that an unkept request went wrong. Spans hold no text of a prompt and no session id.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter, Setter, TextMapPropagator
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, Tracer
from opentelemetry.sdk.trace.sampling import Decision as SampleDecision
from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    get_current_span,
    set_span_in_context,
)

import smetric
from smetric import names
from smetric.fleet.exchange import Attempt, Exchange, Headers, Listener
from smetric.fleet.record import CLIENT_TEXT_MAX, DecisionRecord, Shadowed, safe
from smetric.http.addresses import port_of
from smetric.policy.types import exact
from smetric.request.request import Api
from smetric.telemetry import decision_text
from smetric.telemetry.decision_text import LIMIT

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance
    from smetric.policy.decision import Decision
    from smetric.policy.policy import Policy
    from smetric.request.request import InferenceRequest

#: Attributes by which a request is sampled.
_OUTCOME, _MIGRATED, _FAILED = names.OUTCOME.name, names.MIGRATED_FROM.name, names.ERROR_TYPE.name
_NOWHERE = Context()
_RANDOM = 2  # the flag of W3C Trace Context level 2 for a random trace id
_NAME = itemgetter(0)
#: No span of ours has as many attributes.
_FEW = 96
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)


class KeepSampler(Sampler):
    """Sampler that keeps unusual requests, and asks another one about the rest.

    Args:
        inner: the sampler of `OTEL_TRACES_SAMPLER`.
        keep: what is kept whatever *inner* says, of `names.KEPT`.
        keep_over_parent: also where the caller that is continued does not record; its trace is a fragment then.
    """

    def __init__(self, inner: Sampler, keep: frozenset[str], keep_over_parent: bool) -> None:
        self._inner = inner
        self._keep = keep
        self._keep_over_parent = keep_over_parent

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Any = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Decide on a SERVER span by its outcome, its migration and its error."""
        about = attributes or {}
        kinds = {about.get(_OUTCOME)}
        if _MIGRATED in about:
            kinds.add(names.MIGRATION)
        if _FAILED in about:
            kinds.add(names.ERROR)
        if not self._keep.isdisjoint(kinds):
            parent = get_current_span(parent_context).get_span_context()
            if self._keep_over_parent or not parent.is_valid or parent.trace_flags.sampled:
                return SamplingResult(SampleDecision.RECORD_AND_SAMPLE, attributes, parent.trace_state)
        return self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links)

    def get_description(self) -> str:
        """Describe the sampler."""
        return f"KeepSampler{{{self._inner.get_description()}}}"


class LateSpan(ReadableSpan, Span):
    """Span that is made when it has ended.

    A processor may still change it in `on_start`. The SDK's own span checks each attribute, takes locks and asks the
    sampler again: 85 µs more a span.
    """

    def __init__(self, about: dict[str, Any], **fields: Any) -> None:
        super().__init__(attributes=about, **fields)
        self._about = about

    def get_span_context(self) -> SpanContext:
        """Return its ids."""
        assert self._context is not None
        return self._context

    def set_attribute(self, key: str, value: Any) -> None:
        """Set an attribute."""
        self._about[key] = value

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Set attributes."""
        self._about.update(attributes)

    def update_name(self, name: str) -> None:
        """Change its name."""
        self._name = name

    def is_recording(self) -> bool:
        """Whether it takes attributes: always."""
        return True

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Change its status."""
        self._status = status if isinstance(status, Status) else Status(status, description)

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        """Ignore an event: what happened to the request is in attributes."""

    def record_exception(self, exception: BaseException, *_: Any, **__: Any) -> None:
        """Ignore an exception."""

    def end(self, end_time: int | None = None) -> None:
        """Ignore the end: it has ended."""

    def bound(self, most: int | None, longest: int | None) -> None:
        """Apply the user's limits: *most* attributes, each of at most *longest* characters."""
        self._attributes = BoundedAttributes(most, self._about, immutable=True, max_value_len=longest)


class _Incoming(Getter[Headers]):
    """Reads the headers of an ASGI scope."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        wanted = key.encode()
        values = [value.decode("latin-1") for name, value in carrier if name == wanted]
        # Two traceparents are none: which of them is meant is unknown.
        return None if not values or (key == "traceparent" and len(values) > 1) else values

    def keys(self, carrier: Headers) -> list[str]:
        return [name.decode("latin-1") for name, _ in carrier]


class _Outgoing(Setter[Headers]):
    """Adds to the headers of an attempt."""

    def set(self, carrier: Headers, key: str, value: str) -> None:
        carrier.append((key.lower().encode(), value.encode("latin-1")))


_INCOMING, _OUTGOING = _Incoming(), _Outgoing()


class _Trace:
    """Trace of one exchange."""

    __slots__ = ("about", "baggage", "context", "id", "inside", "links", "name", "parent", "routes", "server")

    def __init__(self) -> None:
        self.id = 0
        #: The caller's span that is continued, also as a context; and the link to a caller that is not trusted.
        self.parent: SpanContext | None = None
        self.context = _NOWHERE
        self.links: tuple[Link, ...] = ()
        self.baggage = b""
        #: Name and attributes of the SERVER span.
        self.name = ""
        self.about: dict[str, Any] = {}
        #: Ids of the SERVER span, as a context too; None unless the trace is kept.
        self.server: SpanContext | None = None
        self.inside = _NOWHERE
        #: Decisions: record, number of instances, why some were no candidates.
        self.routes: list[tuple[DecisionRecord, int, str]] = []


class Spans(Listener):
    """Listener that makes the spans of exchanges and the trace headers of their attempts.

    Args:
        tracer: makes spans.
        propagator: reads and writes trace headers.
        instances: all instances, for the counts on a `route` span.
        keep: what is kept whatever the sampler says, of `names.KEPT`.
        keep_over_parent: also where the caller that is continued does not record.
        baggage: reads the baggage of a trusted peer from its headers, to be passed on; None for no baggage.
        candidates: candidates that a decision span shows at most.
        limit: bytes of the attributes that show them.
        ui_hints: add the attributes by which tracing UIs lay a span out.
        has_exemplars: name kept traces in metrics.
    """

    def __init__(
        self,
        tracer: Tracer,
        propagator: TextMapPropagator,
        *,
        instances: Callable[[], Sequence[Instance]],
        keep: frozenset[str] = frozenset(names.KEPT),
        keep_over_parent: bool = True,
        baggage: Callable[[Headers], bytes] | None = None,
        candidates: int = 8,
        limit: int = LIMIT,
        ui_hints: bool = True,
        has_exemplars: bool = True,
    ) -> None:
        self._ids = tracer.id_generator
        self._sampler = KeepSampler(tracer.sampler, keep, keep_over_parent)
        self._processor = tracer.span_processor
        self._resource = tracer.resource
        self._scope = InstrumentationScope(names.SCOPE, smetric.__version__)
        limits = SpanLimits()
        most, longest = limits.max_span_attributes, limits.max_span_attribute_length
        #: The user's limits; None for limits that no span of ours exceeds.
        self._limits = (most, longest) if longest is not None or (most is not None and most < _FEW) else None
        self._propagator = propagator
        self._wanted = frozenset(name.encode() for name in (*propagator.fields, "baggage"))
        self.instances = instances
        self._baggage = baggage
        self._top = candidates
        self._limit = limit
        self._ui_hints = ui_hints
        self._has_exemplars = has_exemplars
        #: Key of the session hash; a new one each start, so that hashes of two runs cannot be compared.
        self._salt = os.urandom(16)

    def arrived(self, exchange: Exchange) -> None:
        """Continue the trace of a trusted caller, or begin one."""
        if not exchange.is_routed:
            return
        trace = exchange.trace = _Trace()
        headers = exchange.scope["headers"]
        if not self._wanted.isdisjoint(map(_NAME, headers)):
            self._extract(trace, headers, exchange.trusted)
        trace.id = trace.id or self._ids.generate_trace_id()
        exchange.trace_id = f"{trace.id:032x}"

    def _extract(self, trace: _Trace, headers: Headers, trusted: bool) -> None:
        if trusted and self._baggage is not None:
            trace.baggage = self._baggage(headers)
        found = get_current_span(self._propagator.extract(headers, _NOWHERE, _INCOMING)).get_span_context()
        if not found.is_valid:
            return
        if not trusted:
            trace.links = (Link(SpanContext(found.trace_id, found.span_id, True, found.trace_flags)),)
            return
        trace.id, trace.parent = found.trace_id, found
        trace.context = set_span_in_context(NonRecordingSpan(found), _NOWHERE)

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Decide whether the trace is kept; after a retry only an odd outcome reopens the question."""
        trace: _Trace | None = exchange.trace
        if trace is None:
            return
        if trace.server is not None:
            self._note_route(trace, record)
        elif exchange.previous is None or record.is_odd:
            self._sample(exchange, trace, record)

    def _sample(self, exchange: Exchange, trace: _Trace, record: DecisionRecord | None, error: str = "") -> None:
        """Ask the sampler about a request, by its decision and what went wrong; begin the trace if it is kept."""
        about = of_request(exchange.scope, exchange.route)
        trace.name = f"{about[names.HTTP_METHOD.name]} {exchange.route}"
        if record is not None:
            about[_OUTCOME] = record.outcome
            if record.migration is not None:
                about[_MIGRATED] = record.migration.source
        if error:
            about[_FAILED] = error
        kind, parent = SpanKind.SERVER, trace.parent
        result = self._sampler.should_sample(trace.context, trace.id, trace.name, kind, about, trace.links)
        if result.decision is not SampleDecision.RECORD_AND_SAMPLE:
            return
        flags = TraceFlags(TraceFlags.SAMPLED | (parent.trace_flags & _RANDOM if parent is not None else 0))
        trace.server = SpanContext(trace.id, self._ids.generate_span_id(), False, flags, result.trace_state)
        trace.inside = set_span_in_context(NonRecordingSpan(trace.server), _NOWHERE)
        trace.about = dict(result.attributes or about)  # a sampler may add to them
        trace.about.pop(_MIGRATED, None)  # the decision's own span says so
        if record is not None:
            self._note_route(trace, record)

    def _note_route(self, trace: _Trace, record: DecisionRecord) -> None:
        """Remember what a `route` span needs of this tick."""
        record.is_traced = True
        instances, decision = self.instances(), record.decision
        left_out = _left_out(decision, instances, record.request.model) if decision is not None else ""
        trace.routes.append((record, len(instances), left_out))

    def sent(self, exchange: Exchange, attempt: Attempt) -> None:
        """Set the trace headers of an attempt; an unkept trace tells the instance not to record."""
        trace: _Trace | None = exchange.trace
        if trace is None:
            return
        parent = trace.parent
        if trace.server is not None:
            context = attempt.span = self._below(trace)
        elif parent is not None:
            flags = TraceFlags(parent.trace_flags & _RANDOM)
            context = SpanContext(trace.id, parent.span_id, True, flags, parent.trace_state)
        else:
            context = SpanContext(trace.id, self._ids.generate_span_id(), False, TraceFlags())
        self._propagator.inject(attempt.headers, set_span_in_context(NonRecordingSpan(context), _NOWHERE), _OUTGOING)
        if trace.baggage:
            attempt.headers.append((b"baggage", trace.baggage))

    def ended(self, exchange: Exchange) -> None:
        """Make the spans of a kept trace, and of a request that has failed."""
        trace: _Trace | None = exchange.trace
        if trace is None:
            return
        record, failed = exchange.record, exchange.has_failed
        error = exchange.error_type or (str(exchange.status) if failed else "")
        if trace.server is None and (failed or record is None):
            # An overloaded router refuses many: these are the ordinary case, and spans of them are more load.
            is_odd = failed and (record is not None or error != names.OVERLOADED)
            self._sample(exchange, trace, record, error if is_odd else "")
        server = trace.server
        if server is None:
            return
        about = trace.about
        for one, configured, left_out in trace.routes:
            about |= self._make_route(trace, one, configured, left_out)
        for attempt in exchange.attempts:
            if attempt.span is not None:
                self._make_attempt(exchange, trace, attempt)
        about[names.HTTP_STATUS.name] = exchange.status
        if error:
            about[_FAILED] = error
        if exchange.gave_up:
            about[names.GAVE_UP.name] = exchange.gave_up
        end_ns = exchange.arrival_ns + int(exchange.duration_s * 1e9)
        kind, start_ns = SpanKind.SERVER, exchange.arrival_ns
        self._make(trace.name, server, trace.context, trace.parent, kind, about, start_ns, end_ns, failed, trace.links)
        if self._has_exemplars:
            exchange.exemplar = {"trace_id": exchange.trace_id}

    def _make(
        self,
        name: str,
        ids: SpanContext,
        context: Context,
        parent: SpanContext | None,
        kind: SpanKind,
        about: dict[str, Any],
        start_ns: int,
        end_ns: int,
        failed: bool = False,
        links: Sequence[Link] = (),
    ) -> None:
        """Hand a span to the processors; *context* is that of its *parent*."""
        span = LateSpan(
            about,
            name=name,
            context=ids,
            parent=parent,
            resource=self._resource,
            links=links,
            kind=kind,
            status=_ERROR if failed else _UNSET,
            start_time=start_ns,
            end_time=max(start_ns, end_ns),
            instrumentation_scope=self._scope,
        )
        self._processor.on_start(span, context)  # type: ignore[arg-type]
        if self._limits is not None:
            span.bound(*self._limits)
        self._processor.on_end(span)

    def _make_inside(self, trace: _Trace, name: str, about: dict[str, Any], start_ns: int, end_ns: int) -> None:
        """Make an INTERNAL span below the SERVER span."""
        self._make(name, self._below(trace), trace.inside, trace.server, SpanKind.INTERNAL, about, start_ns, end_ns)

    def _below(self, trace: _Trace) -> SpanContext:
        """Return new ids below the SERVER span."""
        server = trace.server
        assert server is not None
        return SpanContext(trace.id, self._ids.generate_span_id(), False, server.trace_flags, server.trace_state)

    def _make_route(self, trace: _Trace, record: DecisionRecord, configured: int, left_out: str) -> dict[str, Any]:
        """Make the spans of a decision, and return what the SERVER span repeats: UIs list it and open it first."""
        about = of_decision(
            record,
            configured=configured,
            left_out=left_out,
            top=self._top,
            limit=self._limit,
            ui_hints=self._ui_hints,
            salt=self._salt,
        )
        start_ns = record.time_ns - int(record.evaluate_s * 1e9)
        if record.held_s:
            held = of_hold(record, self._ui_hints)
            self._make_inside(trace, "hold", held, start_ns - int(record.held_s * 1e9), start_ns)
        self._make_inside(trace, f"route {record.policy.name}", about, start_ns, record.time_ns)
        for one in record.shadowed:
            shadow = of_shadow(one, top=self._top, limit=self._limit, ui_hints=self._ui_hints)
            end_ns = record.time_ns + int(one.evaluate_s * 1e9)
            self._make_inside(trace, f"shadow {one.policy.name}", shadow, record.time_ns, end_ns)
        return {name: about[name] for name in _REPEATED if name in about}

    def _make_attempt(self, exchange: Exchange, trace: _Trace, attempt: Attempt) -> None:
        name = f"{operation_of(attempt.record.request, exchange.route)} {exchange.model}".rstrip()
        about, failed = of_attempt(attempt, exchange.scope["method"], exchange.route)
        start_ns = exchange.arrival_ns + int((attempt.started - exchange.started) * 1e9)
        end_ns = exchange.arrival_ns + int(attempt.ended_s * 1e9)
        kind = SpanKind.CLIENT
        self._make(name, attempt.span, trace.inside, trace.server, kind, about, start_ns, end_ns, failed)


#: Attributes of a decision that the SERVER span repeats.
_REPEATED = tuple(
    one.name for one in (names.DECISION_ID, names.OUTCOME, names.UI_KIND, names.UI_OUTPUT, names.UI_SESSION)
)


# ── attributes ───────────────────────────────────────────────────────────────

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})
_OPERATIONS = {
    Api.CHAT: "chat",
    Api.COMPLETIONS: "text_completion",
    Api.MESSAGES: "chat",
    Api.RESPONSES: "chat",
}
_LOADS = {
    "requests": names.LOAD_REQUESTS.name,
    "running": names.LOAD_RUNNING.name,
    "waiting": names.LOAD_WAITING.name,
    "kv_usage": names.LOAD_KV_USAGE.name,
}


def of_request(scope: Mapping[str, Any], route: str) -> dict[str, Any]:
    """Return the HTTP attributes of a SERVER span, from an ASGI scope."""
    result: dict[str, Any] = {
        names.HTTP_METHOD.name: _method(scope["method"]),
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


def _method(method: str) -> str:
    return method if method in _METHODS else "_OTHER"


def operation_of(request: InferenceRequest, route: str) -> str:
    """Return `gen_ai.operation.name`; where a body is not read, the end of *route*: `embeddings`, `rerank`."""
    return _OPERATIONS.get(request.api) or route.removeprefix("/v1/")


def of_attempt(attempt: Attempt, method: str, route: str) -> tuple[dict[str, Any], bool]:
    """Return the attributes of a CLIENT span, and whether the attempt has failed."""
    record, status, usage = attempt.record, attempt.status, attempt.usage
    request, instance = record.request, record.instance
    assert instance is not None
    parts = urlsplit(instance.url)
    result: dict[str, Any] = {
        names.HTTP_METHOD.name: _method(method),
        names.URL_FULL.name: instance.url + safe(attempt.path),
        names.SERVER_ADDRESS.name: parts.hostname or "",
        names.SERVER_PORT.name: port_of(parts),
        names.INSTANCE_ID.name: instance.id,
        names.DECISION_ID.name: record.id,
        names.ATTEMPT.name: attempt.number,
        names.GEN_AI_OPERATION.name: operation_of(request, route),
        names.GEN_AI_PROVIDER.name: "vllm",
        names.GEN_AI_MODEL.name: safe(request.model),
        names.GEN_AI_STREAM.name: request.stream,
        names.RESULT.name: attempt.result,
    }
    if record.hit is not None:
        result[names.HIT_TOKENS.name] = record.hit[0]
    if attempt.number > 1:
        result[names.HTTP_RESEND.name] = attempt.number - 1
    if status is not None:
        result[names.HTTP_STATUS.name] = status
    if record.ttfc_s is not None:
        result[names.GEN_AI_TTFC.name] = record.ttfc_s
    if attempt.finish_reason:
        result[names.GEN_AI_FINISH.name] = [attempt.finish_reason]
    if usage is not None:
        counts = (
            (names.GEN_AI_INPUT.name, usage.prompt_tokens),
            (names.GEN_AI_OUTPUT.name, usage.completion_tokens),
            (names.GEN_AI_CACHED.name, usage.cached_tokens),
            (names.ACTUAL_HIT_TOKENS.name, usage.cached_tokens),
        )
        result.update((name, count) for name, count in counts if count is not None)
    failed = attempt.result not in (names.OK, names.ABORTED) or (status is not None and status >= 400)
    if failed:
        result[names.ERROR_TYPE.name] = str(status) if attempt.result == names.OK else attempt.result
    return result, failed


def of_decision(
    record: DecisionRecord, *, configured: int, left_out: str, top: int, limit: int, ui_hints: bool, salt: bytes
) -> dict[str, Any]:
    """Return the attributes of a `route` span.

    Args:
        record: the decision.
        configured: number of instances.
        left_out: why some of them were no candidates.
        top: candidates shown at most.
        limit: bytes of the attributes that show them.
        ui_hints: add attributes for tracing UIs.
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
        if left_out:
            result[names.FILTER_REASONS.name] = left_out
        _add_decision(result, decision)
        _add_ages(result, decision)
        _add_outlook(result, record)
        result |= of_shadows(record.shadowed)
        result[names.CANDIDATES_JSON.name] = decision_text.as_json(decision, top, limit)
    if record.hit is not None:
        tokens, source = record.hit
        result[names.HIT_TOKENS.name] = tokens
        result[names.HIT_RATIO.name] = tokens / request.prompt_len if request.prompt_len else 0.0
        if source:
            result[names.HIT_SOURCE.name] = source
    summary = result[names.SUMMARY.name] = decision_text.summary_of(record)
    if ui_hints:
        numbers = {"turn": request.turn, "prompt_len": request.prompt_len, "est_hit": request.est_hit}
        result[names.UI_INPUT.name] = orjson.dumps(numbers).decode()
        result[names.UI_INPUT_TYPE.name] = "application/json"
        notes = decision_text.notes_of(record)
        text = summary if decision is None else decision_text.as_text(decision, summary, top, limit, notes)
        result |= _shown(text)
        if session:
            result[names.UI_SESSION.name] = session
    return bounded(result)


def _add_decision(result: dict[str, Any], decision: Decision) -> None:
    """Add the rule that fired, what filters and guards left of the candidates, and the score."""
    candidates = len(decision.snapshot.ids)
    result[names.RULE.name] = decision.rule
    result[names.ELIGIBLE.name] = candidates
    if decision.survivors:
        result[names.FILTERED.name] = candidates - len(decision.survivors[-1])
    result[names.SEED.name] = decision.seed
    failed = [label for _, guards in decision.guards for label, held in guards if held is False]
    if failed:
        result[names.GUARD_FAILED.name] = ", ".join(failed)[:CLIENT_TEXT_MAX]
    if decision.cursors:
        cursors = " ".join(f"{pick}={instance}" for pick, instance in decision.cursors.items())
        result[names.CURSOR.name] = cursors[:CLIENT_TEXT_MAX]
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


def _add_ages(result: dict[str, Any], decision: Decision) -> None:
    """Add the ages of what was measured, and the load of the chosen instance."""
    snapshot, index = decision.snapshot, decision.index
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


def _add_outlook(result: dict[str, Any], record: DecisionRecord) -> None:
    """Add the instance that a later turn left, and the expected times to first token."""
    migration, forecast = record.migration, record.forecast
    if migration is not None:
        result[names.MIGRATED_FROM.name] = migration.source
        result[names.MIGRATION_GUARD.name] = migration.guard[:CLIENT_TEXT_MAX]
        if migration.left_tokens is not None:
            result[names.MIGRATION_TOKENS.name] = migration.left_tokens
    if forecast is not None:
        if forecast.ttft_s is not None:
            result[names.FORECAST_TTFT.name] = forecast.ttft_s
        if forecast.other:
            result[names.FORECAST_OTHER.name] = forecast.other
        if forecast.other_ttft_s is not None:
            result[names.FORECAST_OTHER_TTFT.name] = forecast.other_ttft_s


def of_shadows(shadowed: Sequence[Shadowed]) -> dict[str, Any]:
    """Return the attributes of a `route` span on the policies in shadow; several are separated by commas."""
    if not shadowed:
        return {}
    result: dict[str, Any] = {
        names.SHADOW_POLICY.name: ", ".join(one.policy.name for one in shadowed)[:CLIENT_TEXT_MAX],
        names.SHADOW_INSTANCE.name: ", ".join(one.choice for one in shadowed)[:CLIENT_TEXT_MAX],
    }
    answers = [one.agrees for one in shadowed]
    if None not in answers:
        result[names.SHADOW_AGREES.name] = all(answers)
    regrets = [one.regret for one in shadowed if one.regret is not None]
    if regrets:
        result[names.SHADOW_REGRET.name] = max(regrets)
    had_diverged = [one.had_diverged for one in shadowed if one.had_diverged is not None]
    if had_diverged:
        result[names.SHADOW_DIVERGED.name] = any(had_diverged)
    return result


def of_shadow(shadowed: Shadowed, *, top: int, limit: int, ui_hints: bool) -> dict[str, Any]:
    """Return the attributes of a `shadow` span; arguments as of `of_decision`."""
    policy, decision = shadowed.policy, shadowed.decision
    result: dict[str, Any] = {
        names.ORIGIN.name: names.SHADOW,
        names.POLICY_NAME.name: policy.name,
        names.POLICY_HASH.name: policy.digest,
        names.POLICY_GENERATION.name: shadowed.generation,
        names.DURATION.name: shadowed.evaluate_s,
    }
    if shadowed.agrees is not None:
        result[names.SHADOW_AGREES.name] = shadowed.agrees
    said = shadowed.choice if decision is None else decision_text.summary(decision)
    summary = text = result[names.SUMMARY.name] = f"{policy.name} (shadow): {said}"
    if decision is not None:
        result[names.RULE.name] = decision.rule
        result[names.CANDIDATES_JSON.name] = decision_text.as_json(decision, top, limit)
        if decision.instance is not None:
            result[names.INSTANCE_ID.name] = decision.instance
        if decision.score is not None and decision.index >= 0:
            result[names.SCORE_CHOSEN.name] = float(decision.score[decision.index])
        if (margin := decision.margin) is not None:
            result[names.SCORE_MARGIN.name] = float(margin)
        if ui_hints:
            text = decision_text.as_text(decision, summary, top, limit)
    if ui_hints:
        result |= _shown(text)
    return bounded(result)


def of_hold(record: DecisionRecord, ui_hints: bool) -> dict[str, Any]:
    """Return the attributes of a `hold` span."""
    by = record.held_by
    result: dict[str, Any] = {
        names.DECISION_ID.name: record.id,
        names.HOLD_DURATION.name: record.held_s,
        names.HOLD_REASON.name: names.HELD_BY_RULE if by is not None else names.HELD_FOR_PLACE,
    }
    text = "all places for requests under way were taken"
    if by is not None:
        text = decision_text.summary(by)
        result |= {names.POLICY_NAME.name: record.policy.name, names.RULE.name: by.rule, names.SUMMARY.name: text}
    if ui_hints:
        result |= _shown(text)
    return bounded(result)


def _shown(text: str) -> dict[str, Any]:
    """Return the hints by which tracing UIs show *text*."""
    return {names.UI_KIND.name: "CHAIN", names.UI_OUTPUT.name: text, names.UI_OUTPUT_TYPE.name: "text/plain"}


def bounded(attributes: dict[str, Any]) -> dict[str, Any]:
    """Cut texts of *attributes* that are longer than collectors keep."""
    for name, value in attributes.items():
        if type(value) is str and len(value) > CLIENT_TEXT_MAX:
            encoded = value.encode(errors="replace")
            if len(encoded) > LIMIT:
                attributes[name] = encoded[: LIMIT - 3].decode(errors="ignore") + "…"
    return attributes


@lru_cache(maxsize=16)  # each decision of a policy shows them
def params_of(policy: Policy) -> str:
    """Return the parameters of a policy, `*` where configuration set one, e.g. `OVERLOAD=1.5* LOAD=requests`."""

    def text(value: Any) -> str:
        if isinstance(value, float):
            return exact(value)
        return str(value).lower() if isinstance(value, bool) else str(value)

    shown = (f"{name}={text(one.value)}{'*' * one.configured}" for name, one in policy.params.items())
    return " ".join(shown)[:CLIENT_TEXT_MAX]


def session_hash(session: str, salt: bytes) -> str:
    """Return the keyed hash of a session id, 16 hex digits; empty for none."""
    return hashlib.blake2b(session.encode(), digest_size=8, key=salt).hexdigest() if session else ""


def _left_out(decision: Decision, instances: Sequence[Instance], model: str) -> str:
    """Return why instances were no candidates, e.g. `draining=1 model=3`; empty if all were."""
    candidates = set(decision.snapshot.ids)
    if len(candidates) == len(instances):
        return ""
    reasons: dict[str, int] = {}
    for instance in instances:
        if instance.id in candidates:
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
