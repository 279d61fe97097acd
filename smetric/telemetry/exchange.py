"""One request as telemetry sees it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from smetric import names
from smetric.errors import HttpError, RequestError
from smetric.fleet.record import DecisionRecord, Judge
from smetric.log_limit import CHANGES_TOLD, LogLimit
from smetric.request.request import Usage
from smetric.telemetry import spans
from smetric.telemetry.decisions import Activity, DecisionLog
from smetric.telemetry.logs import AccessLog
from smetric.telemetry.metrics import Metrics, ModelLabels
from smetric.telemetry.outcomes import Consequences
from smetric.telemetry.spans import make_spans
from smetric.telemetry.tracing import Headers, Tracing

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance
    from smetric.records.recorder import Recorder
    from smetric.records.traffic import Traffic
    from smetric.request.request import InferenceRequest
    from smetric.telemetry.spans import OpenSpan


# One attempt on one instance: its CLIENT span, the trace headers that go with it, and how it ended.


class Attempt:
    """One attempt on one instance."""

    __slots__ = ("_exchange", "_record", "_span", "headers", "result", "started", "status")

    def __init__(self, exchange: Exchange, record: DecisionRecord, path: str, number: int) -> None:
        self._exchange = exchange
        self._record = record
        #: When it began, monotonic seconds.
        self.started = time.perf_counter()
        #: How it ended, one of `names.RESULTS`, and what the instance answered; empty and None until then.
        self.result = ""
        self.status: int | None = None
        self._span: OpenSpan | None = None
        if exchange.server is not None:
            self._span = self._start_span(exchange.server, path, number)
        #: The trace headers to send: they replace whatever the client sent under these names.
        self.headers: Headers = self._trace_headers()

    def _start_span(self, server: OpenSpan, path: str, number: int) -> OpenSpan:
        from opentelemetry.trace import SpanKind

        telemetry, route = self._exchange.telemetry, self._exchange.route
        model = telemetry.models.of(self._record.request.model)
        name = f"{spans.operation_of(self._record.request, route)} {model}".rstrip()
        about = spans.of_attempt(self._record, self._exchange.method, route, path, number)
        return telemetry.tracing.child(name, server, SpanKind.CLIENT, about, self._now_ns())

    def _now_ns(self) -> int:
        """Unix nanoseconds on the exchange's own clock, which never steps back."""
        return self._exchange.arrival_ns + int(self._exchange.elapsed_s() * 1e9)

    def _trace_headers(self) -> Headers:
        exchange = self._exchange
        parent, tracing = exchange.parent, exchange.telemetry.tracing
        if not tracing.propagation.tracecontext:
            headers: Headers = []
        elif self._span is not None:
            context = self._span.context
            flags = 3 if parent is not None and parent.trusted and parent.is_random else 1
            headers = [(b"traceparent", b"00-%032x-%016x-0%d" % (context.trace_id, context.span_id, flags))]
            if parent is not None and parent.tracestate:
                headers.append((b"tracestate", parent.tracestate))
        elif parent is not None and parent.trusted:
            headers = parent.headers(sampled=parent.sampled and not tracing.enabled)
        elif tracing.enabled:
            # Says "do not record": without it the instance would begin a trace of its own.
            span_id = (random.getrandbits(64) | 1).to_bytes(8, "big").hex()
            headers = [(b"traceparent", f"00-{exchange.trace_id}-{span_id}-00".encode())]
        else:
            headers = []
        if exchange.baggage:
            headers.append((b"baggage", exchange.baggage))
        return headers

    def first_byte(self) -> float:
        """The first byte of the answer's body came: so many seconds after the attempt began."""
        now = time.perf_counter()
        self._exchange.ttft_s = now - self._exchange.started
        self._record.ttfc_s = ttfc_s = now - self.started
        return ttfc_s

    def resent(self) -> None:
        """The request was sent once more to the same instance, on a fresh connection."""
        instance = self._record.instance
        assert instance is not None
        self._exchange.telemetry.metrics.attempted(instance.id, names.RESENT)

    @property
    def is_recorded(self) -> bool:
        """Whether it has a span, which more can be told of."""
        return self._span is not None

    def end(
        self, result: str, *, status: int | None = None, usage: Usage | None = None, finish_reason: str = ""
    ) -> None:
        """The attempt is over; only the first call counts.

        Args:
            result: one of `names.RESULTS`.
            status: what the instance answered, None if it did not.
            usage: tokens as it counted them.
            finish_reason: why it ended its answer, as it says; for the span.
        """
        if self.result:
            return
        self.result, self.status = result, status
        instance = self._record.instance
        assert instance is not None
        self._exchange.telemetry.metrics.attempted(instance.id, result)
        if self._span is not None:
            self._finish_span(self._span, result, status, usage, finish_reason)

    def _finish_span(
        self, span: OpenSpan, result: str, status: int | None, usage: Usage | None, finish_reason: str
    ) -> None:
        about: dict[str, Any] = {names.RESULT.name: result}
        if status is not None:
            about[names.HTTP_STATUS.name] = status
        if self._record.ttfc_s is not None:
            about[names.GEN_AI_TTFC.name] = self._record.ttfc_s
        if finish_reason:
            about[names.GEN_AI_FINISH.name] = [finish_reason]
        if usage is not None:
            counts = (
                (names.GEN_AI_INPUT.name, usage.prompt_tokens),
                (names.GEN_AI_OUTPUT.name, usage.completion_tokens),
                (names.GEN_AI_CACHED.name, usage.cached_tokens),
                (names.ACTUAL_HIT_TOKENS.name, usage.cached_tokens),
            )
            about.update((name, count) for name, count in counts if count is not None)
        failed = result not in (names.OK, names.ABORTED) or (status is not None and status >= 400)
        if failed:
            about[names.ERROR_TYPE.name] = str(status) if result == names.OK else result
            span.failed()
        span.set_attributes(about)
        span.end(self._now_ns())


# One request as telemetry sees it, from arrival to the end of its answer: spans, metrics, access line, decision log.
#
# The proxy makes five kinds of call, all synchronous, none of which raises or waits for anything:
#
#     exchange = telemetry.begin(scope, "/v1/chat/completions", trusted=True)    at arrival
#     exchange.decided(record)                                                   after each decision, also a refusal
#     attempt = exchange.attempt("/v1/chat/completions")                         before sending; attempt.headers go
# along
#     attempt.first_byte(); attempt.end("ok", status=200)                        as the answer comes and ends
#     exchange.end(200, bytes_out=5120, usage=Usage(...))                        once, whatever happened
#
# Spans start late: whether a trace is recorded is decided once, in `decided`, when the outcome is known, and an
# unrecorded request never makes one. `route` spans are made at the end, with the times they really had: rendering one
# takes longer than deciding. Where the end shows that an unrecorded request went wrong, its SERVER and `route` spans
# are still made. A request that ends before any decision has a SERVER span only.


class Exchange:
    """One request; see the module's text for the order of calls."""

    __slots__ = (
        "_ended",
        "_model",
        "_routes",
        "_scope",
        "_trace",
        "arrival_ns",
        "attempts",
        "baggage",
        "gave_up",
        "parent",
        "record",
        "route",
        "server",
        "started",
        "telemetry",
        "trace_id",
        "ttft_s",
    )

    def __init__(self, telemetry: Telemetry, scope: Mapping[str, Any], route: str, trusted: bool) -> None:
        #: When it arrived, Unix nanoseconds and monotonic seconds.
        self.arrival_ns = time.time_ns()
        self.started = time.perf_counter()
        self.telemetry = telemetry
        #: The last decision.
        self.record: DecisionRecord | None = None
        #: The incoming trace context, and the baggage to pass on.
        self.parent, self.baggage = telemetry.tracing.propagation.extract(scope["headers"], trusted=trusted)
        #: The caller's trace if it is continued, else our own: 128 bits, and as 32 hex digits, empty without either.
        self._trace = 0
        self.trace_id = ""
        if self.parent is not None and self.parent.trusted:
            self.trace_id = self.parent.trace_id.decode()
            self._trace = int(self.trace_id, 16)
        elif telemetry.tracing.enabled:
            self._trace = _new_trace()
            self.trace_id = self._trace.to_bytes(16, "big").hex()
        #: The SERVER span; None until the trace is recorded.
        self.server: OpenSpan | None = None
        #: Why it was not tried on another instance: one of `names.NOT_RETRIED`; empty unless `give_up` was called.
        self.gave_up = ""
        #: Seconds from arrival to the first byte of the answer, None until then.
        self.ttft_s: float | None = None
        self._scope = scope
        #: The matched route template.
        self.route = route
        #: How many attempts there were.
        self.attempts = 0
        #: Decisions of a recorded trace: record, number of instances, why some were left out.
        self._routes: list[tuple[DecisionRecord, int, str]] = []
        #: The label of the model that was decided for.
        self._model = ""
        self._ended = False

    @property
    def method(self) -> str:
        """The request's method, as it came."""
        method: str = self._scope["method"]
        return method

    def elapsed_s(self) -> float:
        """Seconds since arrival."""
        return time.perf_counter() - self.started

    def decided(self, record: DecisionRecord) -> None:
        """A decision was made, in the tick it was made in."""
        previous, self.record = self.record, record
        if previous is not None:
            record.rank = previous.rank + 1
            previous.followed_by = record.id
            self.telemetry.activity.ended(previous)
        record.trace_id = self.trace_id
        telemetry = self.telemetry
        self._model = telemetry.models.of(record.request.model)
        telemetry.metrics.decided(record, self._model)
        telemetry.consequences.decided(record)
        telemetry.decisions.add(record)
        telemetry.activity.decided(record)
        if telemetry.watcher is not None:
            telemetry.watcher.decided(record, previous)
        if telemetry.recorder is not None:
            telemetry.recorder.decided(record, previous)
        if telemetry.traffic is not None and previous is None and record.is_inference:
            telemetry.traffic.decided(record, self.arrival_ns)
        if not telemetry.tracing.enabled:
            return
        # Decided once; only an outcome out of the ordinary reopens the question on a retry.
        if self.server is None and (previous is None or record.is_odd):
            self.server = self._start_server(record.kinds)
        if self.server is not None:
            self._note_route(self.server, record)

    def attempt(self, path: str) -> Attempt:
        """The request is about to be sent to the chosen instance, to *path*."""
        assert self.record is not None
        self.attempts += 1
        attempt = Attempt(self, self.record, path, self.attempts)
        if self.attempts == 1:
            self.telemetry.metrics.sent(attempt.started - self.started)
        return attempt

    def give_up(self, reason: str) -> None:
        """The attempt has failed, and no other is made for *reason*, one of `names.NOT_RETRIED`."""
        self.gave_up = reason
        self.telemetry.metrics.retry_refused()

    def answering(self) -> None:
        """The chosen instance has begun to answer; called once, and only where it is no refusal."""
        if self.record is not None:
            self.telemetry.consequences.answering(self.record)
            if self.record.judge is not None:
                self._judge(self.record, self.record.judge)

    def _judge(self, record: DecisionRecord, judge: Judge) -> None:
        """Find out what the policies in shadow would have decided, once."""
        record.judge = None
        record.shadowed = judge(record)
        for one in record.shadowed:
            self.telemetry.metrics.shadowed(one)

    def end(
        self, status: int, *, bytes_out: int = 0, events: int = 0, usage: Usage | None = None, error_type: str = ""
    ) -> None:
        """The answer has ended; only the first call counts.

        Args:
            status: what the client was sent; 499 if it left, or read nothing any more, before the end.
            bytes_out: bytes of the body sent to it.
            events: events of the stream sent to it.
            usage: tokens as the instance counted them.
            error_type: what went wrong, from a closed list; empty for nothing.
        """
        if self._ended:
            return
        self._ended = True
        duration_s = self.elapsed_s()
        telemetry, record = self.telemetry, self.record
        if record is not None and record.judge is not None:
            self._judge(record, record.judge)
        failed = status >= 500 or bool(error_type and status < 400)
        if telemetry.tracing.enabled and self.server is None:
            if record is None:
                # What an overloaded router refuses is the ordinary case then, and a span of each would be more of it.
                is_odd = failed and error_type != names.OVERLOADED
                self.server = self._start_server((names.ERROR,) if is_odd else ())
            elif failed:
                self.server = self._start_server((names.ERROR,))
                if self.server is not None:
                    self._note_route(self.server, record)
        if self.server is not None:
            for one, configured, left_out in self._routes:
                make_spans(telemetry.tracing, self.server, one, configured, left_out, telemetry.salt)
            self._finish_server(self.server, status, error_type, failed, duration_s)
        gap_s = None
        if events > 1 and self.ttft_s is not None:
            gap_s = (duration_s - self.ttft_s) / (events - 1)
        if record is not None:
            record.status, record.duration_s = status, duration_s
            if record.is_inference:
                record.ttft_s = self.ttft_s
            record.usage, record.error_type = usage, error_type
            if usage is not None and telemetry.answered is not None:
                telemetry.answered(record.request, usage)
            telemetry.consequences.ended(record, gap_s)
            if record.arm:
                telemetry.metrics.arm_ended(record)
            if telemetry.watcher is not None:
                telemetry.watcher.ended(record)
            if telemetry.recorder is not None:
                telemetry.recorder.ended(record)
            if telemetry.traffic is not None:
                telemetry.traffic.ended(record, self.arrival_ns)
            telemetry.activity.ended(record)
            # The record outlives the request in the decision log, and must not keep its body alive.
            record.request.let_go()
        telemetry.metrics.ended(
            self.route,
            self._model,
            status=status,
            duration_s=duration_s,
            ttft_s=record.ttft_s if record is not None else None,
            gap_s=gap_s,
            usage=usage,
            exemplar={"trace_id": self.trace_id}
            if self.server is not None and telemetry.tracing.has_exemplars
            else None,
        )
        if telemetry.access.is_on:
            telemetry.access.ended(self, status, bytes_out, error_type, duration_s)

    def _start_server(self, kinds: tuple[str, ...]) -> OpenSpan | None:
        """Begin the SERVER span of a request of these *kinds*, if the sampler keeps it."""
        tracing, parent, trace_id = self.telemetry.tracing, self.parent, self._trace
        continued = parent.sampled if parent is not None and parent.trusted else None
        if not tracing.sampler.keeps(trace_id, continued, kinds):
            return None
        about = spans.of_request(self._scope, self.route)
        name = f"{about[names.HTTP_METHOD.name]} {self.route}"
        return tracing.root(name, trace_id, parent, about, self.arrival_ns)

    def _note_route(self, server: OpenSpan, record: DecisionRecord) -> None:
        """Remember what a `route` span needs of this tick; its texts are rendered when nobody waits any more."""
        server.set_attributes({names.DECISION_ID.name: record.id, names.OUTCOME.name: record.outcome})
        record.is_traced = True
        instances, decision = self.telemetry.instances(), record.decision
        left_out = spans.left_out(decision, instances, record.request.model) if decision is not None else ""
        self._routes.append((record, len(instances), left_out))

    def _finish_server(self, server: OpenSpan, status: int, error_type: str, failed: bool, duration_s: float) -> None:
        server.attributes[names.HTTP_STATUS.name] = status
        if error_type or failed:
            server.attributes[names.ERROR_TYPE.name] = error_type or str(status)
        if self.gave_up:
            server.attributes[names.GAVE_UP.name] = self.gave_up
        if failed:
            server.failed()
        server.end(self.arrival_ns + int(duration_s * 1e9))


def _new_trace() -> int:
    """128 random bits that are not all 0."""
    while not (drawn := random.getrandbits(128)):
        pass
    return drawn


# What exchanges (`exchange.py`) write to: spans, metrics, lines, records, and whoever else wants to know.

log = structlog.get_logger("smetric.access")


class Watcher(Protocol):
    """Wants to know what becomes of decisions."""

    def decided(self, record: DecisionRecord, previous: DecisionRecord | None) -> None:
        """*record* is the newest decision of a request; *previous*, the one before it, led nowhere."""

    def ended(self, record: DecisionRecord) -> None:
        """The request of *record*, its last decision, has ended."""


class Telemetry:
    """What exchanges write to.

    Args:
        tracing: makes spans, or none.
        metrics: counts.
        decisions: the last decisions.
        consequences: what decisions come to.
        models: model names as labels.
        instances: all instances, for the counts on a `route` span.
        recorder: writes decisions down; None for not at all.
        traffic: writes the traffic down; None for not at all.
        watcher: told of decisions, and of each decided request that has ended.
        answered: called with each request whose prompt an instance counted, before what is known of it is let go.
    """

    def __init__(
        self,
        *,
        tracing: Tracing,
        metrics: Metrics,
        decisions: DecisionLog,
        consequences: Consequences,
        models: ModelLabels,
        instances: Callable[[], Sequence[Instance]],
        recorder: Recorder | None = None,
        traffic: Traffic | None = None,
        watcher: Watcher | None = None,
        answered: Callable[[InferenceRequest, Usage], None] | None = None,
    ) -> None:
        self.tracing = tracing
        self.metrics = metrics
        self.decisions = decisions
        self.consequences = consequences
        for collector in consequences.collectors():
            metrics.register(collector)
        self.models = models
        self.instances = instances
        self.recorder = recorder
        self.traffic = traffic
        self.watcher = watcher
        self.answered = answered
        #: Key of the session hash; a new one each start, so that hashes of two runs cannot be compared.
        self.salt = os.urandom(16)
        self.access = AccessLog()
        self._refusals = LogLimit(lines=CHANGES_TOLD)
        #: What has happened since the live page's feed last looked.
        self.activity = Activity()

    def begin(self, scope: Mapping[str, Any], route: str, *, trusted: bool) -> Exchange:
        """A request arrived.

        Args:
            scope: the ASGI scope.
            route: the matched route template, from a bounded set.
            trusted: the peer may continue its trace here.
        """
        self.metrics.began()
        return Exchange(self, scope, route, trusted)

    def answered_here(
        self, route: str, status: int, *, duration_s: float, bytes_out: int = 0, error_type: str = ""
    ) -> None:
        """A request that concerns no instance was answered: counted and logged, for there is nothing to trace.

        Args:
            route: the matched route template, `OTHER` for none: a path may hold anything.
            status: what the client was sent.
            duration_s: seconds that took.
            bytes_out: bytes of the body sent to it.
            error_type: what went wrong; empty for nothing.
        """
        self.metrics.began()
        self.metrics.ended(route, "", status=status, duration_s=duration_s, ttft_s=None, usage=None, exemplar=None)
        self.access.answered_here(route, status, bytes_out, error_type, duration_s)

    def refused(self, problem: HttpError, scope: Mapping[str, Any], is_seen: bool) -> None:
        """A request was refused for its head, or for how its body was sent; a broken client may send nothing else.

        Args:
            problem: what is wrong with it; told of no more than a few of one kind.
            scope: an ASGI scope that names the client.
            is_seen: an endpoint has seen it, and counts it.
        """
        if not is_seen:
            self.metrics.refused_unseen(problem.status)
        # Others than these say nothing of the request.
        if isinstance(problem, RequestError) and (kept_back := self._refusals.passes(problem.message)) is not None:
            client = scope["client"]
            log.warning(
                "smetric.request.refused",
                status=problem.status,
                reason=problem.message,
                client=client[0] if client else "",
                kept_back=kept_back,
            )
