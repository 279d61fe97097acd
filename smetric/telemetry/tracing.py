"""Builds the tracer from `OTEL_*` at start-up, makes spans, and shuts the export down within a bound.

No endpoint configured: tracing is off, the SDK is not even imported, and only incoming contexts are passed on. When
spans are made and what they say is in `exchange.py`, `http_attributes.py` and `decision_attributes.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import structlog

import smetric
from smetric.errors import ConfigError
from smetric.telemetry import names
from smetric.telemetry.candidates import LIMIT
from smetric.telemetry.context import Parent, Propagation
from smetric.telemetry.destination import address, exporter_kind
from smetric.telemetry.sampling import Sampler

if TYPE_CHECKING:
    from opentelemetry.trace import SpanKind

    from smetric.telemetry.exporter import BoundedProcessor
    from smetric.telemetry.open_span import OpenSpan, SpanMaker

#: Seconds an export may hold up the end of the process.
SHUTDOWN_S = 2.0

log = structlog.get_logger("smetric.telemetry")


class Tracing:
    """Makes spans, or none.

    Args:
        environ: `OTEL_SDK_DISABLED`, `OTEL_TRACES_EXPORTER` (otlp, console, none), `OTEL_EXPORTER_OTLP_*`,
            `OTEL_TRACES_SAMPLER*`, `OTEL_PROPAGATORS`, `OTEL_BSP_*`, `OTEL_METRICS_EXEMPLAR_FILTER` are honoured. The
            SDK reads most of them from the process's environment by itself.
        candidates: how many candidates a decision span shows.
        ui_hints: add the attributes by which tracing UIs lay a span out.
        keep: what is recorded whatever the sampler says, of `names.KEPT`.
        keep_over_parent: this too where the caller that is continued does not record.
        resource: more resource attributes, e.g. the policy at start.

    Raises:
        ConfigError: one of these variables cannot be used.
    """

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        *,
        candidates: int = 8,
        ui_hints: bool = True,
        keep: Collection[str] = names.KEPT,
        keep_over_parent: bool = True,
        resource: Mapping[str, str] | None = None,
    ) -> None:
        self.candidates = candidates
        self.ui_hints = ui_hints
        self.propagation = Propagation.from_environ(environ)
        self.sampler = Sampler.from_environ(environ, keep, keep_over_parent=keep_over_parent)
        #: Bytes of the candidates' attributes: the SDK, too, would cut what is longer than the user's limit.
        self.value_limit = LIMIT
        #: Whether histograms name the traces that are recorded.
        self.has_exemplars = _has_exemplars(environ)
        #: Whether any span can be made.
        self.enabled = False
        self._processor: BoundedProcessor | None = None
        self._maker: SpanMaker | None = None
        if self.propagation.unknown:
            log.warning("smetric.tracing", unknown_propagators=list(self.propagation.unknown))
        kind = exporter_kind(environ)
        if kind:
            try:
                self._build(kind, environ, resource or {})
            except (ValueError, RuntimeError) as error:  # as the SDK tells of a limit that is no number, and the like
                raise ConfigError(f"OTEL_*: {error}") from error
        to = address(environ) if kind == "otlp" else ""
        log.info("smetric.tracing", exporter=kind or "off", **({"to": to} if to else {}))

    def _build(self, kind: str, environ: Mapping[str, str], extra: Mapping[str, str]) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import SpanLimits
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from smetric.telemetry import exporter
        from smetric.telemetry.collector import Collector
        from smetric.telemetry.open_span import SpanMaker

        own = {"service.name": "smetric", "service.version": smetric.__version__, **extra}
        # What `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` say wins over what we say of ourselves.
        resource = Resource.create({**own, **OTELResourceDetector().detect().attributes})
        limits = SpanLimits()
        if limits.max_span_attribute_length is not None:
            self.value_limit = min(LIMIT, limits.max_span_attribute_length)
        collector = Collector()
        self._processor = exporter.BoundedProcessor(exporter.build(kind, environ, collector), collector, environ)
        scope = InstrumentationScope(names.SCOPE, smetric.__version__)
        self._maker = SpanMaker(self._processor, resource, scope, limits)
        self.enabled = True

    @property
    def dropped(self) -> int:
        """Spans lost so far."""
        return self._processor.dropped if self._processor is not None else 0

    def root(
        self, name: str, trace_id: int, parent: Parent | None, attributes: Mapping[str, Any], start_ns: int
    ) -> OpenSpan:
        """A SERVER span: continues *parent* if it is trusted, else begins *trace_id* and links to *parent*.

        Args:
            name: from a bounded set.
            trace_id: 128 bits, for a root.
            parent: the incoming context.
            attributes: by which it starts.
            start_ns: Unix nanoseconds.
        """
        from opentelemetry import trace

        assert self._maker is not None
        state, above, links = None, None, tuple[trace.Link, ...]()
        if parent is not None:
            state = trace.TraceState.from_header([parent.tracestate.decode()]) if parent.tracestate else None
            remote = trace.SpanContext(
                int(parent.trace_id, 16), int(parent.span_id, 16), True, trace.TraceFlags(parent.sampled), state
            )
            if parent.trusted:
                trace_id, above = remote.trace_id, remote
            else:
                links = (trace.Link(remote),)
        return self._maker.begin(name, trace_id, state, above, trace.SpanKind.SERVER, attributes, start_ns, links)

    def child(
        self, name: str, parent: OpenSpan, kind: SpanKind, attributes: Mapping[str, Any], start_ns: int
    ) -> OpenSpan:
        """A span below *parent*; arguments as of `root`."""
        assert self._maker is not None
        above = parent.context
        return self._maker.begin(name, above.trace_id, above.trace_state, above, kind, attributes, start_ns)

    async def flush(self) -> None:
        """Send what waits, without blocking the loop; for tests and tools."""
        if self._processor is not None:
            await asyncio.to_thread(self._processor.force_flush)

    async def shutdown(self, within_s: float = SHUTDOWN_S) -> bool:
        """Send what waits; after *within_s* seconds give it up. False if it was given up."""
        processor = self._processor
        if processor is None:
            return True
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            processor.shutdown()
            # The loop may be gone by now, and with it whoever waited.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set)

        # A daemon thread, not the loop's executor: the interpreter would wait for that one at exit.
        threading.Thread(target=send, name="smetric-trace-shutdown", daemon=True).start()
        try:
            async with asyncio.timeout(within_s):
                await done.wait()
        except TimeoutError:
            processor.abandon()
            log.warning("smetric.tracing", abandoned_after_s=within_s)
            return False
        return True


def _has_exemplars(environ: Mapping[str, str]) -> bool:
    asked = environ.get("OTEL_METRICS_EXEMPLAR_FILTER", "").strip().lower() or "trace_based"
    if asked not in ("always_on", "always_off", "trace_based"):
        raise ConfigError(f"OTEL_METRICS_EXEMPLAR_FILTER: {asked!r} is not one of always_on, always_off, trace_based")
    return asked != "always_off"
