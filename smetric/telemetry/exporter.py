"""Export of ended spans: bounded queue, OTLP over HTTP, and an encoder that costs a quarter of the SDK's.

Imported only when spans are exported. Exporters of other kinds are those that are installed.
"""

from __future__ import annotations

import gzip
import os
import random
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import requests
import structlog
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanContext, StatusCode
from opentelemetry.util.re import parse_env_headers

from smetric.errors import ConfigError
from smetric.log_limit import LogLimit

_TRACES, _ALL = "OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_"
_DEFAULT_ENDPOINT = "http://localhost:4318"
_DEFAULT_TIMEOUT_S = 10.0
_DEFAULT_QUEUE = 2048
#: Statuses by which a collector asks for the batch again, and how often it is sent.
_AGAIN = frozenset({429, 502, 503, 504})
_TRIES = 6
_COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
_CREDENTIALS = tuple(f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{name}CREDENTIAL_PROVIDER" for name in ("", "TRACES_"))

log = structlog.get_logger("smetric.telemetry")


class BoundedProcessor(BatchSpanProcessor):
    """`BatchSpanProcessor` that counts the spans that are lost.

    The SDK's own drops the oldest span without a count. This one refuses the newest when the queue is full, and counts
    it together with the spans of batches that were not delivered.

    Args:
        exporter: sends batches, in the processor's own thread.
        environ: for `OTEL_BSP_MAX_QUEUE_SIZE`; the SDK reads the other `OTEL_BSP_*`.

    Raises:
        ConfigError: one of these cannot be used.
    """

    def __init__(self, exporter: SpanExporter, environ: Mapping[str, str]) -> None:
        text = environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "").strip() or str(_DEFAULT_QUEUE)
        if not text.isdecimal() or int(text) == 0:
            raise ConfigError(f"OTEL_BSP_MAX_QUEUE_SIZE: {text!r} is not a positive number of spans")
        self._most = int(text)
        self._counting = _CountingExporter(exporter)
        self._accepted = 0
        self._refused = 0
        try:
            super().__init__(self._counting, max_queue_size=self._most)
        except ValueError as error:
            raise ConfigError(f"OTEL_BSP_*: {error}") from error

    @property
    def dropped(self) -> int:
        """Spans lost so far."""
        return self._refused + self._counting.lost

    def on_end(self, span: ReadableSpan) -> None:
        """Queue *span*, or count it as lost."""
        if self._accepted - self._counting.taken >= self._most:
            self._refused += 1
            return
        self._accepted += 1
        super().on_end(span)

    def abandon(self) -> None:
        """Make a running export give up its retries."""
        self._counting.shutdown()


class _CountingExporter(SpanExporter):
    """Counts the spans taken from the queue, and those that were not delivered."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._closed = False
        self.taken = 0
        self._failed = 0

    @property
    def lost(self) -> int:
        return self._failed + (self._inner.rejected if isinstance(self._inner, OtlpExporter) else 0)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:  # an exporter may raise, as where standard output is closed
            if result is not SpanExportResult.SUCCESS:
                self._failed += len(spans)
        return result

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


def exporter_of(kind: str, environ: Mapping[str, str]) -> SpanExporter:
    """Build the exporter *kind*, one of ours or the name of an installed one.

    Raises:
        ConfigError: it is not installed.
    """
    if kind == "console":
        return ConsoleSpanExporter(out=sys.stdout)
    if kind == "otlp_proto_http":
        return OtlpExporter(environ)
    for found in entry_points(group="opentelemetry_traces_exporter", name=kind):
        exporter: SpanExporter = found.load()()
        return exporter
    if kind == "otlp_proto_grpc":
        raise ConfigError(
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc needs the package opentelemetry-exporter-otlp-proto-grpc; "
            "install it, or set http/protobuf and the collector's HTTP port (4318)"
        )
    raise ConfigError(f"OTEL_TRACES_EXPORTER: {kind!r} is not one of otlp, console, none, and no exporter installed")


class OtlpExporter(SpanExporter):
    """Exporter over OTLP/HTTP.

    It notices what the SDK's exporter takes for success: a redirect, and a batch that was accepted in part.

    Args:
        environ: the `OTEL_EXPORTER_OTLP_*`, by the specification's rules.
        clock: monotonic seconds, for the log.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic) -> None:
        def setting(name: str, default: str = "") -> str:
            return environ.get(_TRACES + name, "").strip() or environ.get(_ALL + name, "").strip() or default

        base = environ.get(_ALL + "ENDPOINT", "").strip() or _DEFAULT_ENDPOINT
        self._endpoint = environ.get(_TRACES + "ENDPOINT", "").strip() or f"{base.removesuffix('/')}/v1/traces"
        try:
            self._timeout_s = float(setting("TIMEOUT", str(_DEFAULT_TIMEOUT_S)))
        except ValueError:
            self._timeout_s = _DEFAULT_TIMEOUT_S
        self._session = _session(environ)
        self._session.headers.update({"content-type": "application/x-protobuf", "user-agent": "OTel-OTLP-SMetric"})
        self._session.headers.update(parse_env_headers(setting("HEADERS"), liberal=True))
        self._session.verify = setting("CERTIFICATE") or True
        certificate, key = setting("CLIENT_CERTIFICATE"), setting("CLIENT_KEY")
        if certificate:
            self._session.cert = (certificate, key) if key else certificate
        compression = setting("COMPRESSION", "none").lower()
        self._compress = _COMPRESSIONS.get(compression)
        if self._compress is not None:
            self._session.headers["content-encoding"] = compression
        #: Spans that the collector rejected out of batches that it accepted.
        self.rejected = 0
        self._stopped = threading.Event()
        self._limit = LogLimit(clock)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send *spans*; try again within the timeout where the collector may take them later."""
        data = encoded(spans)
        if self._compress is not None:
            data = self._compress(data)
        deadline = time.monotonic() + self._timeout_s
        problem = "the exporter has ended"
        for number in range(_TRIES):
            if self._stopped.is_set():
                break
            wait_s = 2**number * random.uniform(0.8, 1.2)
            try:
                answer = self._session.post(
                    self._endpoint, data, timeout=max(deadline - time.monotonic(), 0.001), allow_redirects=False
                )
            except (requests.ConnectionError, requests.Timeout) as error:
                problem = type(error).__name__  # its text may hold keys of the endpoint
            except requests.RequestException as error:
                problem = type(error).__name__
                break
            else:
                if 200 <= answer.status_code < 300:
                    self._read(answer.content)
                    return SpanExportResult.SUCCESS
                problem = f"HTTP {answer.status_code}"
                if answer.status_code not in _AGAIN:
                    break
                after = answer.headers.get("retry-after", "")
                wait_s = float(after) if after.isdecimal() else wait_s
            if time.monotonic() + wait_s > deadline:
                break
            self._stopped.wait(wait_s)
        if (kept_back := self._limit.passes(problem)) is not None:
            log.warning("smetric.tracing.lost", spans=len(spans), problem=problem, kept_back=kept_back)
        return SpanExportResult.FAILURE

    def _read(self, content: bytes) -> None:
        """Notice a batch that was accepted in part."""
        try:
            partial = ExportTraceServiceResponse.FromString(content).partial_success
        except DecodeError:  # no OTLP: some collectors answer with a word
            return
        self.rejected += partial.rejected_spans
        if not partial.rejected_spans and not partial.error_message:
            return
        if (kept_back := self._limit.passes("partial")) is not None:
            log.warning(
                "smetric.tracing.rejected",
                spans=partial.rejected_spans,
                problem=partial.error_message,
                kept_back=kept_back,
            )

    def shutdown(self) -> None:
        """Give up retries."""
        self._stopped.set()
        self._session.close()


def _session(environ: Mapping[str, str]) -> requests.Session:
    """Return a new session, or that of an installed credential provider."""
    for name in filter(None, (environ.get(variable, "").strip() for variable in _CREDENTIALS)):
        for found in entry_points(group="opentelemetry_otlp_credential_provider", name=name):
            session = found.load()()
            if isinstance(session, requests.Session):
                return session
        raise ConfigError(f"{_CREDENTIALS[0]}: {name!r} is no installed provider of a requests.Session")
    return requests.Session()


# ── protobuf ─────────────────────────────────────────────────────────────────
# Field numbers are those of opentelemetry-proto 1.x (`trace/v1/trace.proto`, `common/v1/common.proto`), which are
# stable; a test compares the bytes with the SDK's encoder, which builds an object for each attribute: 116 against 26 µs
# a span.

_double = struct.Struct("<d").pack
_fixed64 = struct.Struct("<Q").pack
_fixed32 = struct.Struct("<I").pack
#: Attribute names that are kept in encoded form.
_MOST_KEYS = 1024
_IS_REMOTE_KNOWN, _IS_REMOTE = 0x100, 0x200


def _long_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_VARINTS = [_long_varint(value) for value in range(2304)]
_keys: dict[str, bytes] = {}


def _varint(value: int) -> bytes:
    return _VARINTS[value] if value < 2304 else _long_varint(value)


def _field(tag: bytes, body: bytes) -> bytes:
    """Encode a field that holds bytes; *tag* is its number and type."""
    return tag + _varint(len(body)) + body


def _text(tag: bytes, text: str | None) -> bytes:
    return _field(tag, text.encode(errors="replace")) if text else b""


def encoded(spans: Sequence[ReadableSpan]) -> bytes:
    """Encode *spans* as an `ExportTraceServiceRequest`."""
    groups: dict[tuple[int, int], list[ReadableSpan]] = {}
    for span in spans:
        groups.setdefault((id(span.resource), id(span.instrumentation_scope)), []).append(span)
    return b"".join([_field(b"\x0a", _resource_spans(group)) for group in groups.values()])


def _resource_spans(spans: Sequence[ReadableSpan]) -> bytes:
    """Encode spans of one resource and one scope."""
    resource, scope = spans[0].resource, spans[0].instrumentation_scope
    about = url = b""
    if scope is not None:
        about = _text(b"\x0a", scope.name) + _text(b"\x12", scope.version)
        about += _attributes(b"\x1a", scope.attributes or {})
        url = _text(b"\x1a", scope.schema_url)
    made = b"".join([_field(b"\x12", _span(span)) for span in spans])
    of_scope = _field(b"\x12", _field(b"\x0a", about) + made + url)
    return _field(b"\x0a", _attributes(b"\x0a", resource.attributes)) + of_scope + _text(b"\x1a", resource.schema_url)


def _span(span: ReadableSpan) -> bytes:
    context, parent, status = span.get_span_context(), span.parent, span.status
    assert context is not None
    parts = [b"\x0a\x10", context.trace_id.to_bytes(16, "big"), b"\x12\x08", context.span_id.to_bytes(8, "big")]
    if context.trace_state:
        parts.append(_text(b"\x1a", context.trace_state.to_header()))
    if parent is not None:
        parts += (b"\x22\x08", parent.span_id.to_bytes(8, "big"))
    parts.append(_field(b"\x2a", span.name.encode(errors="replace")))
    # The API's kinds begin at 0 with INTERNAL, OTLP's at 1.
    parts += (b"\x30", _varint(span.kind.value + 1))
    parts += (b"\x39", _fixed64(span.start_time or 0), b"\x41", _fixed64(span.end_time or 0))
    parts.append(_attributes(b"\x4a", span.attributes or {}))
    if span.dropped_attributes:
        parts += (b"\x50", _varint(span.dropped_attributes))
    if span.events:
        parts += [_field(b"\x5a", _event(event)) for event in span.events]
    if span.dropped_events:
        parts += (b"\x60", _varint(span.dropped_events))
    if span.links:
        parts += [_field(b"\x6a", _link(link)) for link in span.links]
    if span.dropped_links:
        parts += (b"\x70", _varint(span.dropped_links))
    code = status.status_code
    said = b"" if code is StatusCode.UNSET else b"\x18" + _varint(code.value)
    parts.append(_field(b"\x7a", _text(b"\x12", status.description) + said))
    parts += (b"\x85\x01", _fixed32(_flags(parent)))
    return b"".join(parts)


def _event(event: Event) -> bytes:
    about = _attributes(b"\x1a", event.attributes or {})
    return b"\x09" + _fixed64(event.timestamp) + _text(b"\x12", event.name) + about


def _link(link: Link) -> bytes:
    context = link.context
    head = b"\x0a\x10" + context.trace_id.to_bytes(16, "big") + b"\x12\x08" + context.span_id.to_bytes(8, "big")
    return head + _attributes(b"\x22", link.attributes or {}) + b"\x35" + _fixed32(_flags(context))


def _flags(parent: SpanContext | None) -> int:
    return _IS_REMOTE_KNOWN | _IS_REMOTE if parent is not None and parent.is_remote else _IS_REMOTE_KNOWN


def _attributes(tag: bytes, attributes: Mapping[str, Any]) -> bytes:
    """Encode each attribute as a field of its own with *tag*."""
    parts: list[bytes] = []
    for name, value in attributes.items():
        key = _keys.get(name) or _key(name)
        body = _value(value)
        length = _varint(len(body))
        parts += (tag, _varint(len(key) + 1 + len(length) + len(body)), key, b"\x12", length, body)
    return b"".join(parts)


def _key(name: str) -> bytes:
    key = _field(b"\x0a", name.encode(errors="replace"))
    if len(_keys) < _MOST_KEYS:
        _keys[name] = key
    return key


def _value(value: Any) -> bytes:
    """Encode an `AnyValue`."""
    kind = type(value)
    if kind is str:
        text = value.encode(errors="replace")
        return b"\x0a" + _varint(len(text)) + text  # type: ignore[no-any-return]
    if kind is bool:
        return b"\x10\x01" if value else b"\x10\x00"
    if kind is int:
        return b"\x18" + (_VARINTS[value] if 0 <= value < 2304 else _long_varint(value & 0xFFFF_FFFF_FFFF_FFFF))
    if kind is float:
        return b"\x21" + _double(value)
    if kind is bytes:
        return _field(b"\x3a", value)
    if isinstance(value, Iterable):
        return _field(b"\x2a", b"".join(_field(b"\x0a", _value(each)) for each in value))
    return _value(str(value))
