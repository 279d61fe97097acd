"""One attempt on one instance: its CLIENT span, the trace headers that go with it, and how it ended."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from smetric.telemetry import http_attributes, names
from smetric.telemetry.context import Headers
from smetric.telemetry.record import DecisionRecord
from smetric.usage import Usage

if TYPE_CHECKING:
    from smetric.telemetry.exchange import Exchange
    from smetric.telemetry.open_span import OpenSpan


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
        name = f"{http_attributes.operation_of(self._record.request, route)} {model}".rstrip()
        about = http_attributes.of_attempt(self._record, self._exchange.method, route, path, number)
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
