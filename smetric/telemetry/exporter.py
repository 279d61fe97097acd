"""Export of ended spans."""

from __future__ import annotations

import importlib
import importlib.util
import re
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import requests
import structlog
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.trace import Link, SpanContext, StatusCode

from smetric.errors import ConfigError
from smetric.log_limit import LogLimit

# Where `OTEL_*` say that spans go: by which exporter, over which protocol, to which address. Needs no SDK.
#
# What sends them there is `exporter.py`.

#: The variables that name an OTLP endpoint; the first one set counts.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
#: A header as the SDK reads it. It logs others whole, secrets and all, and goes on without them.
_HEADER = re.compile(r"""\s*[-!#$%&'*+.^_`|~0-9A-Za-z]+\s*=[^"\\;\x00-\x1f\x7f-\U0010ffff]*""")
_USER = re.compile(r"//[^/]*@")


def exporter_kind(environ: Mapping[str, str]) -> str:
    """`otlp`, `console`, or empty for off."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    asked = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if asked in ("otlp", "console"):
        return asked
    if asked == "none":
        return ""
    if asked:
        raise ConfigError(f"OTEL_TRACES_EXPORTER: {asked!r} is not one of otlp, console, none")
    return "otlp" if any(environ.get(name, "").strip() for name in ENDPOINTS) else ""


def address(environ: Mapping[str, str]) -> str:
    """Host and port of the endpoint configured; its path and credentials stay out of the log."""
    named = (environ.get(name, "").strip() for name in ENDPOINTS)
    default = "localhost:4317" if protocol_of(environ) == "grpc" else "localhost:4318"
    at = next(filter(None, named), default)
    return urlsplit(at if "//" in at else f"//{at}").netloc.rpartition("@")[2]


def endpoint(environ: Mapping[str, str]) -> str | None:
    """Where traces go over HTTP; None for the SDK's default."""
    traces, base = (environ.get(name, "").strip() for name in ENDPOINTS)
    return traces or (f"{base.rstrip('/')}/v1/traces" if base else None)


def protocol_of(environ: Mapping[str, str]) -> str:
    """The OTLP protocol asked for."""
    return (
        environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "").strip()
        or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "").strip()
        or "http/protobuf"
    )


def check(environ: Mapping[str, str]) -> None:
    """Refuse endpoints and headers that the SDK would choke on, or leave out in silence.

    Raises:
        ConfigError: one cannot be used.
    """
    _check_endpoint(environ)
    _check_headers(environ)


def _check_endpoint(environ: Mapping[str, str]) -> None:
    for name in ENDPOINTS:
        value = environ.get(name, "").strip()
        # gRPC endpoints may be written without a scheme.
        if value and protocol_of(environ) != "grpc" and not _is_address(value):
            shown = _USER.sub("//…@", value).partition("?")[0]  # neither passwords nor keys
            raise ConfigError(f"{name}: {shown!r} is not an address such as http://collector:4318")


def _is_address(value: str) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_headers(environ: Mapping[str, str]) -> None:
    for name in _HEADERS:
        for place, header in enumerate(environ.get(name, "").split(","), 1):
            if header.strip() and not (_HEADER.fullmatch(header) and unquote(header.strip()).isprintable()):
                raise ConfigError(
                    f"{name}: header {place} is not written as name=value, with all but plain characters of the value "
                    "as %XX (a quotation mark is %22, a semicolon %3B)"
                )


# What a collector answers to an export: spans it did not take although the SDK believes so are found out here.
#
# The SDK counts a redirect, which it does not follow, as success, and does not read that a part of a batch was
# rejected. Retries and time limits are the SDK's.

log = structlog.get_logger("smetric.telemetry")


class Collector:
    """The receiver of an exporter over HTTP.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        #: Spans that it rejected out of batches that it took.
        self.rejected = 0
        self._limit = LogLimit(clock)

    def session(self) -> requests.Session:
        """What an exporter sends with."""
        session = requests.Session()
        session.hooks["response"].append(self._read)
        return session

    def _read(self, answer: requests.Response, **_: Any) -> None:
        """Read *answer*; what is raised is to the exporter a batch that failed."""
        if 300 <= answer.status_code < 400:
            answer.close()
            raise requests.RequestException(
                f"HTTP {answer.status_code}, a redirect, which is not followed: name the endpoint it leads to"
            )
        if not answer.ok or not answer.content:
            return
        try:
            partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
        except DecodeError:  # no OTLP: some collectors answer with a word
            return
        self.rejected += partial.rejected_spans
        if not partial.rejected_spans and not partial.error_message:
            return
        kept_back = self._limit.passes("partial")
        if kept_back is not None:
            log.warning(
                "smetric.tracing.rejected",
                spans=partial.rejected_spans,
                problem=partial.error_message,
                kept_back=kept_back,
            )


# Spans as OTLP's protobuf, written straight into bytes: the SDK builds an object for each attribute, at a high price.
#
# Field numbers are those of opentelemetry-proto 1.x (`trace/v1/trace.proto`, `common/v1/common.proto`), which are
# stable. What sends the bytes is the SDK's exporter (`exporter.py`); a test compares them with what the SDK would have
# sent.

_double = struct.Struct("<d").pack
_fixed64 = struct.Struct("<Q").pack
_fixed32 = struct.Struct("<I").pack
#: Keys of attributes that are remembered in their encoded form.
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
    """A field that holds bytes; *tag* is its number and type."""
    return tag + _varint(len(body)) + body


class Encoded:
    """An export request, as the SDK's exporter wants it.

    Args:
        spans: one at least; all of one process and of one scope, as `open_span.py` makes them.
    """

    def __init__(self, spans: Sequence[ReadableSpan]) -> None:
        resource, scope = spans[0].resource, spans[0].instrumentation_scope
        assert scope is not None
        about = _field(b"\x0a", scope.name.encode()) + _field(b"\x12", (scope.version or "").encode())
        made = b"".join([_field(b"\x12", _span(span)) for span in spans])
        of_scope = _field(b"\x12", _field(b"\x0a", about) + made)
        self._bytes = _field(b"\x0a", _field(b"\x0a", _attributes(b"\x0a", resource.attributes)) + of_scope)

    def SerializeToString(self) -> bytes:  # noqa: N802
        """The bytes."""
        return self._bytes

    SerializePartialToString = SerializeToString


def _span(span: ReadableSpan) -> bytes:
    context, parent = span.get_span_context(), span.parent
    assert context is not None
    parts = [b"\x0a\x10", context.trace_id.to_bytes(16, "big"), b"\x12\x08", context.span_id.to_bytes(8, "big")]
    if context.trace_state:
        parts.append(_field(b"\x1a", context.trace_state.to_header().encode()))
    if parent is not None:
        parts += (b"\x22\x08", parent.span_id.to_bytes(8, "big"))
    parts.append(_field(b"\x2a", span.name.encode(errors="replace")))
    # The API's kinds begin at 0 with INTERNAL, OTLP's at 1.
    parts += (b"\x30", _varint(span.kind.value + 1))
    parts += (b"\x39", _fixed64(span.start_time or 0), b"\x41", _fixed64(span.end_time or 0))
    parts.append(_attributes(b"\x4a", span.attributes or {}))
    if span.dropped_attributes:
        parts += (b"\x50", _varint(span.dropped_attributes))
    parts += [_field(b"\x6a", _link(link)) for link in span.links]
    code = span.status.status_code
    parts.append(b"\x7a\x00" if code is StatusCode.UNSET else b"\x7a\x02\x18" + _varint(code.value))
    parts += (b"\x85\x01", _fixed32(_flags(parent)))
    return b"".join(parts)


def _link(link: Link) -> bytes:
    context = link.context
    head = b"\x0a\x10" + context.trace_id.to_bytes(16, "big") + b"\x12\x08" + context.span_id.to_bytes(8, "big")
    return head + _attributes(b"\x22", link.attributes or {}) + b"\x35" + _fixed32(_flags(context))


def _flags(parent: SpanContext | None) -> int:
    return _IS_REMOTE_KNOWN | _IS_REMOTE if parent is not None and parent.is_remote else _IS_REMOTE_KNOWN


def _attributes(tag: bytes, attributes: Mapping[str, Any]) -> bytes:
    """Each as a field of its own with *tag*."""
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
    """An `AnyValue`."""
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
    if isinstance(value, Iterable):
        return _field(b"\x2a", b"".join(_field(b"\x0a", _value(each)) for each in value))
    return _value(str(value))


# Gets ended spans out of the process without ever holding it up: bounded queue, drops counted, bounded shutdown.
#
# Imported only when traces are exported. What a span says is not here.

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
