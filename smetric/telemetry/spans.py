"""Spans of requests, decisions and attempts, made late from the record.

Whether a trace is kept is decided once, when the outcome of the decision is known and before the request is sent. The
spans themselves are made at the end of the exchange, with their true times. By then no client waits, and the end may
show that an unkept request went wrong. Spans hold no text of a prompt and no session id.
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
from msgspec import Struct
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter, Setter, TextMapPropagator
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, Tracer
from opentelemetry.sdk.trace.sampling import Decision as SampleDecision
from opentelemetry.sdk.trace.sampling import (
    ParentBased,
    ParentBasedTraceIdRatio,
    Sampler,
    SamplingResult,
    StaticSampler,
    TraceIdRatioBased,
)
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
from smetric.fleet.instance import State
from smetric.fleet.record import CLIENT_TEXT_MAX, DecisionRecord, Shadowed, safe
from smetric.http.addresses import port_of
from smetric.policy.types import exact
from smetric.request.request import Api, Usage
from smetric.telemetry import decision_text
from smetric.telemetry.decision_text import LIMIT

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance
    from smetric.policy.decision import Decision
    from smetric.policy.policy import Policy
    from smetric.request.request import InferenceRequest

#: Attributes by which a request is sampled.
_OUTCOME, _MIGRATED, _FAILED = names.OUTCOME, names.MIGRATED_FROM, names.ERROR_TYPE
_NOWHERE = Context()
_HALF = (1 << 64) - 1
#: Headers of the W3C propagator.
_W3C = frozenset({"traceparent", "tracestate"})
_RANDOM = 2  # the flag of W3C Trace Context level 2 for a random trace id
_NAME = itemgetter(0)
#: No span of ours has as many attributes.
_FEW = 96
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)


class KeepSampler(Sampler):
    """Sampler that keeps unusual requests and leaves the others to another sampler.

    Args:
        inner: the sampler of `OTEL_TRACES_SAMPLER`.
        keep: outcomes that are kept whatever *inner* decides, of `names.KEPT`.
        keep_over_parent: keep them also if the caller does not record its trace, which is then only a fragment.
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


def _samples_ids_only(sampler: Sampler) -> bool:
    """Return whether *sampler* is one of the SDK's, which read only the trace id and the parent."""
    if type(sampler) in (ParentBased, ParentBasedTraceIdRatio):
        return all(map(_samples_ids_only, vars(sampler).values()))
    return type(sampler) in (StaticSampler, TraceIdRatioBased)


def _root_bound(sampler: Sampler) -> int:
    """Return the bound of the low half of trace ids below which *sampler*, of the SDK's kinds, takes roots."""
    taken, bound = 0, _HALF + 1
    while taken < bound:
        middle = (taken + bound) // 2
        if sampler.should_sample(_NOWHERE, middle, "").decision is SampleDecision.RECORD_AND_SAMPLE:
            taken = middle + 1
        else:
            bound = middle
    return bound


class LateSpan(ReadableSpan, Span):
    """Finished span: made with its end, once the exchange is over.

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


class _Trace(Struct, eq=False):
    """Trace of one exchange.

    Args:
        id: the trace id, 0 for none so far.
        parent: the caller's span that is continued.
        context: the same as a context.
        links: the link to a caller that is not trusted.
        baggage: the baggage that is passed on.
        name: name of the SERVER span.
        about: its attributes.
        server: its ids; None unless the trace is kept.
        inside: the same as a context.
        routes: decisions: record, number of instances, why some were no candidates.
    """

    id: int = 0
    parent: SpanContext | None = None
    context: Context = _NOWHERE
    links: tuple[Link, ...] = ()
    baggage: bytes = b""
    name: str = ""
    about: dict[str, Any] = {}
    server: SpanContext | None = None
    inside: Context = _NOWHERE
    routes: list[tuple[DecisionRecord, int, str]] = []


class Spans(Listener):
    """Listener that makes the spans of exchanges and the trace headers of their attempts.

    Args:
        tracer: makes spans.
        propagator: reads and writes trace headers.
        instances: all instances, for the counts on a `route` span.
        keep: outcomes that are kept whatever the sampler decides, of `names.KEPT`.
        keep_over_parent: keep them also if the caller does not record its trace.
        baggage: reads the baggage of a trusted peer from its headers, to be passed on; None for no baggage.
        candidates: candidates that a decision span shows at most.
        ui_hints: add the attributes by which tracing UIs lay a span out.
        has_exemplars: name kept traces in metrics.
    """

    def __init__(
        self,
        tracer: Tracer,
        propagator: TextMapPropagator,
        instances: Callable[[], Sequence[Instance]],
        *,
        keep: frozenset[str] = frozenset(names.KEPT),
        keep_over_parent: bool = True,
        baggage: Callable[[Headers], bytes] | None = None,
        candidates: int = 8,
        ui_hints: bool = True,
        has_exemplars: bool = True,
    ) -> None:
        self._ids = tracer.id_generator
        self._sampler = KeepSampler(tracer.sampler, keep, keep_over_parent)
        #: The sampler may read the attributes of the request.
        self._samples_attributes = not _samples_ids_only(tracer.sampler)
        #: A root whose low half of the trace id is not below is not sampled for its id alone.
        self._root_bound = _HALF + 1 if self._samples_attributes else _root_bound(tracer.sampler)
        self._processor = tracer.span_processor
        self._resource = tracer.resource
        self._scope = InstrumentationScope(names.SCOPE, smetric.__version__)
        limits = SpanLimits()
        most, longest = limits.max_span_attributes, limits.max_span_attribute_length
        #: The user's limits; None for limits that no span of ours exceeds.
        self._limits = (most, longest) if longest is not None or (most is not None and most < _FEW) else None
        self._propagator = propagator
        self._is_w3c = propagator.fields == _W3C
        self._wanted = frozenset(name.encode() for name in (*propagator.fields, "baggage"))
        self.instances = instances
        self._baggage = baggage
        self._top = candidates
        #: Bytes of the attributes that show candidates; the user's limit would cut longer ones.
        self._limit = LIMIT if longest is None else min(LIMIT, longest)
        self._ui_hints = ui_hints
        self._has_exemplars = has_exemplars
        #: Key of the session hash; a new one each start, so that hashes of two runs cannot be compared.
        self._salt = os.urandom(16)

    def arrived(self, exchange: Exchange) -> None:
        """Continue the trace of a trusted caller, or begin one."""
        if not exchange.is_routed:
            return
        trace, headers = _Trace(), exchange.scope["headers"]
        if not self._wanted.isdisjoint(map(_NAME, headers)):
            self._extract(trace, headers, exchange.trusted)
        trace.id = trace.id or self._ids.generate_trace_id()
        exchange.trace, exchange.trace_id = trace, f"{trace.id:032x}"

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
            return
        may_be_sampled = trace.parent is not None or trace.id & _HALF < self._root_bound
        if (may_be_sampled and exchange.previous is None) or record.is_odd:
            self._sample(exchange, trace, record)

    def _sample(self, exchange: Exchange, trace: _Trace, record: DecisionRecord | None, error: str = "") -> None:
        """Ask the sampler about a request, by its decision and what went wrong; begin the trace if it is kept.

        Few requests are kept: the attributes of the others are made only for a sampler that may read them.
        """
        samples_attributes, parent = self._samples_attributes, trace.parent
        about = of_request(exchange.scope, exchange.route) if samples_attributes else {}
        if record is not None:
            about[_OUTCOME] = record.outcome
            if record.migration is not None:
                about[_MIGRATED] = record.migration.source
        if error:
            about[_FAILED] = error
        name = f"{_method(exchange.scope['method'])} {exchange.route}"
        result = self._sampler.should_sample(trace.context, trace.id, name, SpanKind.SERVER, about, trace.links)
        if result.decision is not SampleDecision.RECORD_AND_SAMPLE:
            return
        trace.name = name
        flags = TraceFlags(TraceFlags.SAMPLED | (parent.trace_flags & _RANDOM if parent is not None else 0))
        trace.server = SpanContext(trace.id, self._ids.generate_span_id(), False, flags, result.trace_state)
        trace.inside = set_span_in_context(NonRecordingSpan(trace.server), _NOWHERE)
        if samples_attributes:
            trace.about = dict(result.attributes or about)  # a sampler may add to them
        else:
            trace.about = of_request(exchange.scope, exchange.route) | about
        trace.about.pop(_MIGRATED, None)  # the decision's own span says so
        if record is not None:
            self._note_route(trace, record)

    def _note_route(self, trace: _Trace, record: DecisionRecord) -> None:
        """Keep the values that the `route` span needs, as they are now."""
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
        if trace.server is None and parent is None and self._is_w3c:
            # Most requests: the propagator takes 5 us for the same header.
            span_id = self._ids.generate_span_id()
            attempt.headers.append((b"traceparent", f"00-{exchange.trace_id}-{span_id:016x}-00".encode()))
            if trace.baggage:
                attempt.headers.append((b"baggage", trace.baggage))
            return
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
        record, failed = exchange.record, exchange.failed
        if trace.server is None and record is not None and not failed:
            return
        error = exchange.error_type or (str(exchange.status) if failed else "")
        if trace.server is None:
            # An overloaded router refuses many: these are the ordinary case, and spans of them are more load.
            is_odd = failed and (record is not None or error != names.OVERLOADED)
            self._sample(exchange, trace, record, error if is_odd else "")
        server, about = trace.server, trace.about
        if server is None:
            return
        spans: list[LateSpan] = []
        for one, configured, left_out in trace.routes:
            about |= self._add_route(spans, trace, one, configured, left_out)
        for attempt in exchange.attempts:
            if attempt.span is not None:
                self._add_attempt(spans, trace, exchange, attempt)
        about[names.HTTP_STATUS] = exchange.status
        if error:
            about[_FAILED] = error
        if exchange.gave_up:
            about[names.GAVE_UP] = exchange.gave_up
        times = exchange.arrival_ns, exchange.arrival_ns + int(exchange.duration_s * 1e9)
        last = self._span(trace.name, server, trace.parent, SpanKind.SERVER, about, *times, failed, trace.links)
        for span in (*spans, last):
            self._processor.on_start(span, trace.context if span is last else trace.inside)  # type: ignore[arg-type]
            if self._limits is not None:
                span.bound(*self._limits)
            self._processor.on_end(span)
        if self._has_exemplars:
            exchange.exemplar = {"trace_id": exchange.trace_id}

    def _add_route(
        self, spans: list[LateSpan], trace: _Trace, record: DecisionRecord, configured: int, left_out: str
    ) -> dict[str, Any]:
        """Add the spans of a decision, and return what the SERVER span repeats: UIs list it and open it first."""
        top, limit, ui_hints = self._top, self._limit, self._ui_hints
        about = of_decision(
            record,
            configured=configured,
            left_out=left_out,
            top=top,
            limit=limit,
            ui_hints=ui_hints,
            salt=self._salt,
        )
        started_ns = record.time_ns - int(record.evaluate_s * 1e9)
        made: list[tuple[str, dict[str, Any], int, int]] = []
        if record.held_s:
            held_ns = int(record.held_s * 1e9)
            made.append(("hold", of_hold(record, ui_hints), started_ns - held_ns, started_ns))
        made.append((f"route {record.policy.name}", about, started_ns, record.time_ns))
        for one in record.shadowed:
            shadow = of_shadow(one, top=top, limit=limit, ui_hints=ui_hints)
            end_ns = record.time_ns + int(one.evaluate_s * 1e9)
            made.append((f"shadow {one.policy.name}", shadow, record.time_ns, end_ns))
        for name, what, start_ns, end_ns in made:
            ids = self._below(trace)
            spans.append(self._span(name, ids, trace.server, SpanKind.INTERNAL, what, start_ns, end_ns))
        return {name: about[name] for name in _REPEATED if name in about}

    def _add_attempt(self, spans: list[LateSpan], trace: _Trace, exchange: Exchange, attempt: Attempt) -> None:
        """Add the span of an attempt."""
        name = f"{operation_of(attempt.record.request, exchange.route)} {exchange.model}".rstrip()
        about, failed = of_attempt(attempt, exchange.scope["method"], exchange.route)
        start_ns = exchange.arrival_ns + int((attempt.started - exchange.started) * 1e9)
        end_ns = exchange.arrival_ns + int(attempt.ended_s * 1e9)
        spans.append(self._span(name, attempt.span, trace.server, SpanKind.CLIENT, about, start_ns, end_ns, failed))

    def _below(self, trace: _Trace) -> SpanContext:
        """Return new ids below the SERVER span."""
        server = trace.server
        assert server is not None
        return SpanContext(trace.id, self._ids.generate_span_id(), False, server.trace_flags, server.trace_state)

    def _span(
        self,
        name: str,
        ids: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        about: dict[str, Any],
        start_ns: int,
        end_ns: int,
        failed: bool = False,
        links: Sequence[Link] = (),
    ) -> LateSpan:
        return LateSpan(
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
    "requests": names.LOAD_REQUESTS,
    "running": names.LOAD_RUNNING,
    "waiting": names.LOAD_WAITING,
    "kv_usage": names.LOAD_KV_USAGE,
}


def of_request(scope: Mapping[str, Any], route: str) -> dict[str, Any]:
    """Return the HTTP attributes of a SERVER span, from an ASGI scope."""
    client, server = scope.get("client") or (None,), scope.get("server") or (None, None)
    return _finished(
        {
            names.HTTP_METHOD: _method(scope["method"]),
            names.HTTP_ROUTE: route,
            names.URL_PATH: safe(scope["path"]),
            names.URL_SCHEME: scope.get("scheme", "http"),
            names.PROTOCOL_VERSION: scope.get("http_version", "1.1"),
            names.CLIENT_ADDRESS: client[0],
            names.SERVER_ADDRESS: server[0],
            names.SERVER_PORT: server[1],
        }
    )


def _method(method: str) -> str:
    return method if method in _METHODS else "_OTHER"


def operation_of(request: InferenceRequest, route: str) -> str:
    """Return `gen_ai.operation.name`; where a body is not read, the end of *route*: `embeddings`, `rerank`."""
    return _OPERATIONS.get(request.api) or route.removeprefix("/v1/")


def of_attempt(attempt: Attempt, method: str, route: str) -> tuple[dict[str, Any], bool]:
    """Return the attributes of a CLIENT span, and whether the attempt has failed."""
    record, status, usage = attempt.record, attempt.status, attempt.usage or Usage()
    request, instance = record.request, record.instance
    assert instance is not None
    parts, path, model = urlsplit(instance.url), safe(attempt.path), safe(request.model)
    failed = attempt.result not in (names.OK, names.ABORTED) or (status is not None and status >= 400)
    about: dict[str, Any] = {
        names.HTTP_METHOD: _method(method),
        names.HTTP_STATUS: status,
        names.HTTP_RESEND: attempt.number - 1 or None,
        names.URL_FULL: instance.url + path,
        names.SERVER_ADDRESS: parts.hostname or "",
        names.SERVER_PORT: port_of(parts),
        names.INSTANCE_ID: instance.id,
        names.DECISION_ID: record.id,
        names.ATTEMPT: attempt.number,
        names.RESULT: attempt.result,
        names.ERROR_TYPE: (str(status) if attempt.result == names.OK else attempt.result) if failed else None,
        names.HIT_TOKENS: record.hit[0] if record.hit is not None else None,
        names.ACTUAL_HIT_TOKENS: usage.cached_tokens,
        names.GEN_AI_OPERATION: operation_of(request, route),
        names.GEN_AI_PROVIDER: "vllm",
        names.GEN_AI_MODEL: model,
        names.GEN_AI_STREAM: request.stream,
        names.GEN_AI_TTFC: record.ttfc_s,
        names.GEN_AI_FINISH: [attempt.finish_reason] if attempt.finish_reason else None,
        names.GEN_AI_INPUT: usage.prompt_tokens,
        names.GEN_AI_OUTPUT: usage.completion_tokens,
        names.GEN_AI_CACHED: usage.cached_tokens,
    }
    return _finished(about), failed


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
    hit, source = record.hit or (None, "")
    session = session_hash(request.session, salt) or None
    summary = decision_text.summary_of(record)
    about: dict[str, Any] = {
        names.DECISION_ID: record.id,
        names.OUTCOME: record.outcome,
        names.REASON: record.reason,
        names.SUMMARY: summary,
        names.DURATION: record.evaluate_s,
        names.LOOKUP_DURATION: record.lookup_s,
        names.HOLD_DURATION: record.held_s or None,
        names.POLICY_NAME: policy.name,
        names.POLICY_HASH: policy.digest,
        names.POLICY_SOURCE: policy.path.rpartition("/")[2],
        names.POLICY_GENERATION: record.generation,
        names.POLICY_ORIGIN: str(record.policy_origin),  # a member of its enumeration
        names.POLICY_PARAMS: params_of(policy),
        names.ORIGIN: record.origin,
        names.ROUTE: record.route,
        names.ARM: record.arm or None,
        names.CANDIDATES: configured,
        names.INSTANCE_ID: record.instance.id if record.instance is not None else None,
        names.INSTANCE_RANK: record.rank,
        names.TURN: request.turn,
        names.EST_HIT: request.est_hit,
        names.SESSION_HASH: session,
        names.PROMPT_TOKENS: request.prompt_len,
        names.PROMPT_SOURCE: record.tokens_source,
        names.HIT_TOKENS: hit,
        names.HIT_RATIO: None if hit is None else hit / request.prompt_len if request.prompt_len else 0.0,
        names.HIT_SOURCE: source or None,
    }
    text = summary
    if decision is not None:
        about[names.FILTER_REASONS] = left_out or None
        about |= _of_outcome(decision)
        about |= _of_snapshot(decision)
        about |= _of_outlook(record)
        about |= of_shadows(record.shadowed)
        about[names.CANDIDATES_JSON] = decision_text.as_json(decision, top, limit)
        if ui_hints:
            text = decision_text.as_text(decision, summary, top, limit, decision_text.notes_of(record))
    if ui_hints:
        numbers = {"turn": request.turn, "prompt_len": request.prompt_len, "est_hit": request.est_hit}
        about[names.UI_INPUT] = orjson.dumps(numbers).decode()
        about[names.UI_INPUT_TYPE] = "application/json"
        about[names.UI_SESSION] = session
        about |= _shown(text)
    return _finished(about)


def _of_outcome(decision: Decision) -> dict[str, Any]:
    """Return the rule that fired, what filters and guards left of the candidates, and the score."""
    count, chosen, score = len(decision.snapshot.ids), decision.index, decision.score
    rule, traces, cursors = decision.rule, decision.guards, decision.cursors
    tied = decision.tied if chosen >= 0 else None
    failed = [label for _, guards in traces for label, held in guards if held is False]
    advanced = " ".join(f"{pick}={instance}" for pick, instance in cursors.items())
    about: dict[str, Any] = {
        names.RULE: rule,
        names.SEED: decision.seed,
        names.ELIGIBLE: count,
        names.FILTERED: count - len(decision.survivors[-1]) if decision.survivors else None,
        names.GUARD_FAILED: ", ".join(failed)[:CLIENT_TEXT_MAX] or None,
        names.CURSOR: advanced[:CLIENT_TEXT_MAX] or None,
        names.TIED: tied,
    }
    return about | _of_score(decision, score) if chosen >= 0 and score is not None else about


def _of_score(decision: Decision, score: Sequence[float]) -> dict[str, Any]:
    """Return the score of the chosen instance, and how the others compare with it."""
    direction, second, candidates = decision.direction, decision.runner_up_index, decision.candidates
    is_lowest, mine, values = direction != "max", score[decision.index], list(map(score.__getitem__, candidates))
    about: dict[str, Any] = {
        names.SCORE_CHOSEN: float(mine),
        names.SCORE_DIRECTION: "min" if is_lowest else "max",
        names.SCORE_WORST: float(max(values) if is_lowest else min(values)),
    }
    if second is not None:
        about[names.RUNNER_UP] = decision.snapshot.ids[second]
        about[names.SCORE_RUNNER_UP] = float(score[second])
        about[names.SCORE_MARGIN] = float(abs(score[second] - mine))
    return about


def _of_snapshot(decision: Decision) -> dict[str, Any]:
    """Return the ages of what was measured, and the load of the chosen instance."""
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
    about: dict[str, Any] = {
        names.MAX_AGE: max(0.0, snapshot.now - min(oldest)) if oldest else None,
        names.CHOSEN_AGE: max(0.0, snapshot.now - min(of_chosen)) if of_chosen else None,
    }
    if index >= 0:
        columns = snapshot.columns
        about |= {name: float(columns[feature][index]) for feature, name in _LOADS.items() if feature in columns}
    return about


def _of_outlook(record: DecisionRecord) -> dict[str, Any]:
    """Return the instance that a later turn left, and the expected times to first token."""
    about: dict[str, Any] = {}
    if (migration := record.migration) is not None:
        about[names.MIGRATED_FROM] = migration.source
        about[names.MIGRATION_GUARD] = migration.guard[:CLIENT_TEXT_MAX]
        about[names.MIGRATION_TOKENS] = migration.left_tokens
    if (forecast := record.forecast) is not None:
        about[names.FORECAST_TTFT] = forecast.ttft_s
        about[names.FORECAST_OTHER] = forecast.other or None
        about[names.FORECAST_OTHER_TTFT] = forecast.other_ttft_s
    return about


def of_shadows(shadowed: Sequence[Shadowed]) -> dict[str, Any]:
    """Return the attributes of a `route` span on the policies in shadow; several are separated by commas."""
    if not shadowed:
        return {}
    answers = [one.agrees for one in shadowed]
    had_diverged = [one.had_diverged for one in shadowed if one.had_diverged is not None]
    return _finished(
        {
            names.SHADOW_POLICY: ", ".join(one.policy.name for one in shadowed)[:CLIENT_TEXT_MAX],
            names.SHADOW_INSTANCE: ", ".join(one.choice for one in shadowed)[:CLIENT_TEXT_MAX],
            names.SHADOW_AGREES: None if None in answers else all(answers),
            names.SHADOW_REGRET: max((one.regret for one in shadowed if one.regret is not None), default=None),
            names.SHADOW_DIVERGED: any(had_diverged) if had_diverged else None,
        }
    )


def of_shadow(shadowed: Shadowed, *, top: int, limit: int, ui_hints: bool) -> dict[str, Any]:
    """Return the attributes of a `shadow` span; arguments as of `of_decision`."""
    policy, decision = shadowed.policy, shadowed.decision
    said = shadowed.choice if decision is None else decision_text.summary(decision)
    text = summary = f"{policy.name} (shadow): {said}"
    about: dict[str, Any] = {
        names.ORIGIN: names.SHADOW,
        names.SUMMARY: summary,
        names.DURATION: shadowed.evaluate_s,
        names.POLICY_NAME: policy.name,
        names.POLICY_HASH: policy.digest,
        names.POLICY_GENERATION: shadowed.generation,
        names.SHADOW_AGREES: shadowed.agrees,
    }
    if decision is not None:
        margin, score = decision.margin, decision.score
        about[names.RULE] = decision.rule
        about[names.INSTANCE_ID] = decision.instance
        about[names.SCORE_CHOSEN] = float(score[decision.index]) if score is not None and decision.index >= 0 else None
        about[names.SCORE_MARGIN] = None if margin is None else float(margin)
        about[names.CANDIDATES_JSON] = decision_text.as_json(decision, top, limit)
        if ui_hints:
            text = decision_text.as_text(decision, summary, top, limit)
    if ui_hints:
        about |= _shown(text)
    return _finished(about)


def of_hold(record: DecisionRecord, ui_hints: bool) -> dict[str, Any]:
    """Return the attributes of a `hold` span."""
    by = record.held_by
    about: dict[str, Any] = {
        names.DECISION_ID: record.id,
        names.HOLD_DURATION: record.held_s,
        names.HOLD_REASON: names.HELD_BY_RULE if by is not None else names.HELD_FOR_PLACE,
    }
    text = "all places for requests under way were taken"
    if by is not None:
        text = decision_text.summary(by)
        about |= {names.POLICY_NAME: record.policy.name, names.RULE: by.rule, names.SUMMARY: text}
    if ui_hints:
        about |= _shown(text)
    return _finished(about)


def _shown(text: str) -> dict[str, Any]:
    """Return the hints by which tracing UIs show *text*."""
    return {names.UI_KIND: "CHAIN", names.UI_OUTPUT: text, names.UI_OUTPUT_TYPE: "text/plain"}


def _finished(about: dict[str, Any]) -> dict[str, Any]:
    """Return *about* without unknown values, and with its texts cut where collectors would cut them."""
    return {
        name: _cut(value) if type(value) is str and len(value) > CLIENT_TEXT_MAX else value
        for name, value in about.items()
        if value is not None
    }


def _cut(text: str) -> str:
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= LIMIT else encoded[: LIMIT - 3].decode(errors="ignore") + "…"


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
            reason = "asleep" if instance.state is State.ASLEEP else "draining"
        elif instance.role == "prefill":
            reason = "role"
        elif not instance.healthy:
            reason = "unhealthy"
        else:
            reason = "spared" if instance.deprioritized else "excluded"
        reasons[reason] = reasons.get(reason, 0) + 1
    return " ".join(f"{name}={count}" for name, count in sorted(reasons.items()))
