"""Listeners of a router's exchanges."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from smetric import names
from smetric.fleet.exchange import Attempt, Exchange, Exchanges, Headers, Listener
from smetric.fleet.record import DecisionRecord
from smetric.telemetry.decisions import Activity, DecisionLog
from smetric.telemetry.logs import AccessLog
from smetric.telemetry.metrics import Metrics, ModelLabels
from smetric.telemetry.outcomes import Outcomes
from smetric.telemetry.tracing import Parent, Tracing

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance
    from smetric.telemetry.spans import OpenSpan


class _Trace:
    """Trace of one exchange."""

    __slots__ = ("baggage", "id", "parent", "routes", "server")

    def __init__(self, parent: Parent | None, baggage: bytes) -> None:
        #: The incoming trace context, and the baggage to pass on.
        self.parent = parent
        self.baggage = baggage
        #: The caller's trace if it is continued, else our own; 0 without either.
        self.id = 0
        #: The SERVER span; None until the trace is recorded.
        self.server: OpenSpan | None = None
        #: Decisions of a recorded trace: record, number of instances, why some were left out.
        self.routes: list[tuple[DecisionRecord, int, str]] = []


class Spans(Listener):
    """Makes the spans of an exchange, and the trace headers of its attempts.

    Spans start late: whether a trace is recorded is decided once, in `decided`, when the outcome is known, and an
    unrecorded request never makes one. `route` spans are made at the end, with the times they really had: rendering one
    takes longer than deciding. Where the end shows that an unrecorded request went wrong, its SERVER and `route` spans
    are still made. A request that ends before any decision has a SERVER span only.

    Args:
        tracing: makes spans, or none.
        instances: all instances, for the counts on a `route` span.
    """

    def __init__(self, tracing: Tracing, instances: Callable[[], Sequence[Instance]]) -> None:
        self._tracing = tracing
        self.instances = instances
        #: Key of the session hash; a new one each start, so that hashes of two runs cannot be compared.
        self._salt = os.urandom(16)

    def arrived(self, exchange: Exchange) -> None:
        """Read the caller's trace context, or begin a trace."""
        if not exchange.is_routed:
            return
        parent, baggage = self._tracing.propagation.extract(exchange.scope["headers"], trusted=exchange.trusted)
        trace = exchange.trace = _Trace(parent, baggage)
        if parent is not None and parent.trusted:
            exchange.trace_id = parent.trace_id.decode()
            trace.id = int(exchange.trace_id, 16)
        elif self._tracing.enabled:
            trace.id = random.getrandbits(128) or 1
            exchange.trace_id = f"{trace.id:032x}"

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Decide whether the trace is recorded; only an odd outcome reopens the question on a retry."""
        if not self._tracing.enabled:
            return
        trace: _Trace = exchange.trace
        if trace.server is None and (exchange.previous is None or record.is_odd):
            trace.server = self._start_server(exchange, trace, record.kinds)
        if trace.server is not None:
            self._note_route(trace, trace.server, record)

    def sent(self, exchange: Exchange, attempt: Attempt) -> None:
        """Start the CLIENT span and set the trace headers."""
        trace: _Trace = exchange.trace
        if trace.server is not None:
            from opentelemetry.trace import SpanKind

            from smetric.telemetry import spans

            record, route = attempt.record, exchange.route
            name = f"{spans.operation_of(record.request, route)} {exchange.model}".rstrip()
            about = spans.of_attempt(record, exchange.scope["method"], route, attempt.path, attempt.number)
            attempt.span = self._tracing.child(name, trace.server, SpanKind.CLIENT, about, _now_ns(exchange))
        attempt.headers = self._headers(exchange, trace, attempt.span)

    def _headers(self, exchange: Exchange, trace: _Trace, span: OpenSpan | None) -> Headers:
        parent, tracing = trace.parent, self._tracing
        headers: Headers = []
        if not tracing.propagation.tracecontext:
            pass
        elif span is not None:
            context = span.context
            flags = 3 if parent is not None and parent.trusted and parent.is_random else 1
            headers = [(b"traceparent", b"00-%032x-%016x-0%d" % (context.trace_id, context.span_id, flags))]
            if parent is not None and parent.tracestate:
                headers.append((b"tracestate", parent.tracestate))
        elif parent is not None and parent.trusted:
            headers = parent.headers(sampled=parent.sampled and not tracing.enabled)
        elif tracing.enabled:
            # Says "do not record": without it the instance would begin a trace of its own.
            headers = [(b"traceparent", f"00-{exchange.trace_id}-{random.getrandbits(64) | 1:016x}-00".encode())]
        if trace.baggage:
            headers.append((b"baggage", trace.baggage))
        return headers

    def attempt_ended(self, exchange: Exchange, attempt: Attempt) -> None:
        """End the CLIENT span."""
        span = attempt.span
        if span is None:
            return
        result, status, usage, record = attempt.result, attempt.status, attempt.usage, attempt.record
        about: dict[str, Any] = {names.RESULT.name: result}
        if status is not None:
            about[names.HTTP_STATUS.name] = status
        if record.ttfc_s is not None:
            about[names.GEN_AI_TTFC.name] = record.ttfc_s
        if attempt.finish_reason:
            about[names.GEN_AI_FINISH.name] = [attempt.finish_reason]
        if usage is not None:
            counts = (
                (names.GEN_AI_INPUT.name, usage.prompt_tokens),
                (names.GEN_AI_OUTPUT.name, usage.completion_tokens),
                (names.GEN_AI_CACHED.name, usage.cached_tokens),
                (names.ACTUAL_HIT_TOKENS.name, usage.cached_tokens),
            )
            about.update((name, count) for name, count in counts if count is not None)
        if result not in (names.OK, names.ABORTED) or (status is not None and status >= 400):
            about[names.ERROR_TYPE.name] = str(status) if result == names.OK else result
            span.failed()
        span.set_attributes(about)
        span.end(_now_ns(exchange))

    def ended(self, exchange: Exchange) -> None:
        """Make the spans of a recorded trace; of a failed request also where it was not recorded so far."""
        tracing = self._tracing
        trace: _Trace | None = exchange.trace
        if trace is None or not tracing.enabled:
            return
        record, failed = exchange.record, exchange.has_failed
        if trace.server is None:
            if record is None:
                # What an overloaded router refuses is the ordinary case then, and a span of each would be more of it.
                is_odd = failed and exchange.error_type != names.OVERLOADED
                trace.server = self._start_server(exchange, trace, (names.ERROR,) if is_odd else ())
            elif failed:
                trace.server = self._start_server(exchange, trace, (names.ERROR,))
                if trace.server is not None:
                    self._note_route(trace, trace.server, record)
        server = trace.server
        if server is None:
            return
        from smetric.telemetry import spans

        for one, configured, left_out in trace.routes:
            spans.make_spans(tracing, server, one, configured, left_out, self._salt)
        server.attributes[names.HTTP_STATUS.name] = exchange.status
        if exchange.error_type or failed:
            server.attributes[names.ERROR_TYPE.name] = exchange.error_type or str(exchange.status)
        if exchange.gave_up:
            server.attributes[names.GAVE_UP.name] = exchange.gave_up
        if failed:
            server.failed()
        server.end(exchange.arrival_ns + int(exchange.duration_s * 1e9))
        if tracing.has_exemplars:
            exchange.exemplar = {"trace_id": exchange.trace_id}

    def _start_server(self, exchange: Exchange, trace: _Trace, kinds: tuple[str, ...]) -> OpenSpan | None:
        """Begin the SERVER span of a request of these *kinds*, if the sampler keeps it."""
        tracing, parent = self._tracing, trace.parent
        continued = parent.sampled if parent is not None and parent.trusted else None
        if not tracing.sampler.keeps(trace.id, continued, kinds):
            return None
        from smetric.telemetry import spans

        about = spans.of_request(exchange.scope, exchange.route)
        name = f"{about[names.HTTP_METHOD.name]} {exchange.route}"
        return tracing.root(name, trace.id, parent, about, exchange.arrival_ns)

    def _note_route(self, trace: _Trace, server: OpenSpan, record: DecisionRecord) -> None:
        """Remember what a `route` span needs of this tick; its texts are rendered at the end."""
        from smetric.telemetry import spans

        server.set_attributes({names.DECISION_ID.name: record.id, names.OUTCOME.name: record.outcome})
        record.is_traced = True
        instances, decision = self.instances(), record.decision
        left_out = spans.left_out(decision, instances, record.request.model) if decision is not None else ""
        trace.routes.append((record, len(instances), left_out))


def _now_ns(exchange: Exchange) -> int:
    """Unix nanoseconds on the exchange's own clock, which never steps back."""
    return exchange.arrival_ns + int(exchange.elapsed_s() * 1e9)


class Telemetry:
    """The listeners of this room, and the exchanges that they listen to.

    Args:
        tracing: makes spans, or none.
        metrics: counts.
        decisions: the last decisions.
        outcomes: what decisions lead to.
        models: model names as labels.
        instances: all instances, for the counts on a `route` span.
        others: listeners of other rooms. They are called after the decision's outcomes are noted in its record, and
            before the end is counted and logged.
    """

    def __init__(
        self,
        *,
        tracing: Tracing,
        metrics: Metrics,
        decisions: DecisionLog,
        outcomes: Outcomes,
        models: ModelLabels,
        instances: Callable[[], Sequence[Instance]],
        others: Sequence[Listener] = (),
    ) -> None:
        self.tracing = tracing
        self.metrics = metrics
        self.decisions = decisions
        self.outcomes = outcomes
        self.spans = Spans(tracing, instances)
        #: What has happened since the live page's feed last looked.
        self.activity = Activity()
        self.exchanges = Exchanges(
            (outcomes, *others, self.spans, decisions, self.activity, metrics, AccessLog()),
            model_label=models.of,
            on_failure=metrics.listener_failed,
        )
        self.begin = self.exchanges.begin
