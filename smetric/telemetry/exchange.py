"""One request as telemetry sees it, from arrival to the end of its answer: spans, metrics, access line, decision log.

The proxy makes five kinds of call, all synchronous, none of which raises or waits for anything:

    exchange = telemetry.begin(scope, "/v1/chat/completions", trusted=True)    at arrival
    exchange.decided(record)                                                   after each decision, also a refusal
    attempt = exchange.attempt("/v1/chat/completions")                         before sending; attempt.headers go along
    attempt.first_byte(); attempt.end("ok", status=200)                        as the answer comes and ends
    exchange.end(200, bytes_out=5120, usage=Usage(...))                        once, whatever happened

Spans start late: whether a trace is recorded is decided once, in `decided`, when the outcome is known, and an
unrecorded request never makes one. `route` spans are made at the end, with the times they really had: rendering one
takes longer than deciding. Where the end shows that an unrecorded request went wrong, its SERVER and `route` spans are
still made. A request that ends before any decision has a SERVER span only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smetric.telemetry import decision_attributes, http_attributes, names
from smetric.telemetry.attempt import Attempt
from smetric.telemetry.record import DecisionRecord, Judge
from smetric.telemetry.route_spans import make_spans
from smetric.usage import Usage

if TYPE_CHECKING:
    from smetric.telemetry.open_span import OpenSpan
    from smetric.telemetry.telemetry import Telemetry


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
        about = http_attributes.of_request(self._scope, self.route)
        name = f"{about[names.HTTP_METHOD.name]} {self.route}"
        return tracing.root(name, trace_id, parent, about, self.arrival_ns)

    def _note_route(self, server: OpenSpan, record: DecisionRecord) -> None:
        """Remember what a `route` span needs of this tick; its texts are rendered when nobody waits any more."""
        server.set_attributes({names.DECISION_ID.name: record.id, names.OUTCOME.name: record.outcome})
        record.is_traced = True
        instances, decision = self.telemetry.instances(), record.decision
        left_out = (
            decision_attributes.left_out(decision, instances, record.request.model) if decision is not None else ""
        )
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
