"""Gets ended spans out of the process without ever holding it up: bounded queue, drops counted, bounded shutdown.

Imported only when traces are exported. What a span says is not here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence

import requests
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult

from smetric.errors import ConfigError
from smetric.telemetry.collector import Collector
from smetric.telemetry.destination import check, endpoint, protocol_of
from smetric.telemetry.otlp import Encoded

_DEFAULT_QUEUE = 2048
#: Names something that hands the SDK's exporter a session of its own.
_SESSIONS = tuple(f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{name}CREDENTIAL_PROVIDER" for name in ("", "TRACES_"))


class BoundedProcessor(SpanProcessor):
    """A `BatchSpanProcessor` that counts what is lost.

    The SDK's own drops the oldest span in silence. This one refuses the newest when as many are waiting as the queue
    holds, and counts it together with the batches the exporter gave up.

    Args:
        exporter: sends batches, in the processor's own thread.
        collector: knows what was rejected of them.
        environ: for `OTEL_BSP_MAX_QUEUE_SIZE`; the SDK reads the other `OTEL_BSP_*`.
    """

    def __init__(self, exporter: SpanExporter, collector: Collector, environ: Mapping[str, str]) -> None:
        self._collector = collector
        self._limit = _queue_size(environ)
        self._counting = _CountingExporter(exporter)
        try:
            self._batches = BatchSpanProcessor(self._counting, max_queue_size=self._limit)
        except ValueError as error:
            raise ConfigError(f"OTEL_BSP_*: {error}") from error
        self._accepted = 0
        self._refused = 0

    @property
    def dropped(self) -> int:
        """Spans lost so far."""
        return self._refused + self._counting.failed + self._collector.rejected

    def on_end(self, span: ReadableSpan) -> None:
        """Queue *span*, or count it as lost."""
        if self._accepted - self._counting.taken >= self._limit:
            self._refused += 1
            return
        self._accepted += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        """Send what waits. Blocks for as long as the exporter does: call it in a thread."""
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def abandon(self) -> None:
        """Make a running export give up its retries."""
        self._counting.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Send what waits, now."""
        return self._batches.force_flush(timeout_millis)


class _CountingExporter(SpanExporter):
    """Counts the spans taken from the queue, and those of batches that could not be delivered."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._closed = False
        self.taken = 0
        self.failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:  # it may raise, as where standard output is closed
            if result is not SpanExportResult.SUCCESS:
                self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


def build(kind: str, environ: Mapping[str, str], collector: Collector) -> SpanExporter:
    """The exporter *kind*: `console` or `otlp`; headers, TLS and the like are the SDK's to read.

    Args:
        kind: which.
        environ: the `OTEL_EXPORTER_OTLP_*`.
        collector: reads what is answered over HTTP.

    Raises:
        ConfigError: an endpoint, header or protocol that cannot be used.
    """
    if kind == "console":
        return ConsoleSpanExporter(out=sys.stdout)
    check(environ)
    protocol = protocol_of(environ)
    if protocol == "grpc":
        try:
            module = importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
        except ImportError as error:
            raise ConfigError(
                "OTEL_EXPORTER_OTLP_PROTOCOL=grpc needs the package opentelemetry-exporter-otlp-proto-grpc; "
                "install it, or set http/protobuf and the collector's HTTP port (4318)"
            ) from error
        exporter: SpanExporter = module.OTLPSpanExporter()
        return exporter
    if protocol != "http/protobuf":
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL: {protocol!r} is not one of http/protobuf, grpc")
    own_session = any(environ.get(name) for name in _SESSIONS)
    return _http_exporter(endpoint(environ), None if own_session else collector.session())


def _http_exporter(endpoint: str | None, session: requests.Session | None) -> SpanExporter:
    """The SDK's exporter over HTTP, but for how it writes spans.

    It looks its encoder up in its own module, of which this makes a copy for itself; where another version does not,
    spans are written as the SDK writes them.
    """
    spec = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if hasattr(module, "encode_spans"):
        vars(module)["encode_spans"] = Encoded
    exporter: SpanExporter = module.OTLPSpanExporter(endpoint=endpoint, session=session)
    return exporter


def _queue_size(environ: Mapping[str, str]) -> int:
    text = environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "").strip()
    if not text:
        return _DEFAULT_QUEUE
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"OTEL_BSP_MAX_QUEUE_SIZE: {text!r} is not a positive number of spans")
    return int(text)
