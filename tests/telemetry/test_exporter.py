from __future__ import annotations

import asyncio
import io
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from structlog.testing import capture_logs

from smetric.errors import ConfigError
from smetric.telemetry.exchange import Telemetry
from smetric.telemetry.exporter import OtlpExporter, encoded, exporter_of
from tests.telemetry.otlp_receiver import Receiver, receiving
from tests.telemetry.samples import record, run_one, telemetry

# ── delivery ─────────────────────────────────────────────────────────────────


def two_batches(monkeypatch: pytest.MonkeyPatch, url: str) -> int:
    """Export two requests of three spans, each in a batch of its own; return the spans lost."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")

    async def run() -> int:
        app = telemetry({"OTEL_EXPORTER_OTLP_ENDPOINT": url})
        for _ in range(2):
            run_one(app, record())
            await app.tracing.flush()
        assert await app.tracing.shutdown()
        return app.tracing.dropped

    return asyncio.run(run())


@pytest.mark.parametrize("status", [301, 302, 307, 308, 413])
def test_batch_that_is_redirected_or_refused_is_lost_and_logged(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    with receiving(status) as receiver, capture_logs() as lines:
        assert two_batches(monkeypatch, receiver.url) == 6
    (line,) = [line for line in lines if line["event"] == "smetric.tracing.lost"]
    assert (line["spans"], line["problem"], line["log_level"]) == (3, f"HTTP {status}", "warning")


def test_spans_that_a_collector_rejects_are_counted_and_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    partial = ExportTracePartialSuccess(rejected_spans=2, error_message="too old")
    answer = ExportTraceServiceResponse(partial_success=partial).SerializeToString()
    with receiving(answer=answer) as receiver, capture_logs() as lines:
        assert two_batches(monkeypatch, receiver.url) == 4
    told = [line for line in lines if line["event"] == "smetric.tracing.rejected"]
    assert [(line["spans"], line["problem"], line["log_level"]) for line in told] == [(2, "too old", "warning")]


@pytest.mark.parametrize("answer", [b"", b"OK", ExportTraceServiceResponse().SerializeToString()])
def test_answer_without_a_partial_success_is_success(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    with receiving(answer=answer) as receiver, capture_logs() as lines:
        assert two_batches(monkeypatch, receiver.url) == 0
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == []
    assert len(receiver.spans) == 6


def test_endpoint_is_stripped_of_white_space(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        assert two_batches(monkeypatch, f" {receiver.url}/\r") == 0
    assert receiver.paths == ["/v1/traces"] * 2


async def test_exporter_gives_up_retries_at_the_end(receiver: Receiver) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        exporter = OtlpExporter({"OTEL_EXPORTER_OTLP_ENDPOINT": address})
        running = asyncio.create_task(asyncio.to_thread(exporter.export, [span({}, SpanContext(1, 2, False))]))
        await asyncio.sleep(0.2)
        exporter.shutdown()
        started = time.monotonic()
        assert await running is SpanExportResult.FAILURE
        assert time.monotonic() - started < 1


async def test_exporter_sends_a_batch_again_that_a_busy_collector_refused() -> None:
    with receiving(503) as busy:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": busy.url, "OTEL_EXPORTER_OTLP_TIMEOUT": "2.5"}
        exporter = OtlpExporter(environ)
        result = await asyncio.to_thread(exporter.export, [span({}, SpanContext(1, 2, False))])
    assert result is SpanExportResult.FAILURE
    assert len(busy.paths) == 2  # after 0, 1 and 3 seconds, the last one too late


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_exporter_compresses_and_sends_headers_as_asked(compression: str) -> None:
    with receiving() as receiver:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
            "OTEL_EXPORTER_OTLP_COMPRESSION": compression,
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-key=a%20b,authorization=Basic%20c",
        }
        assert OtlpExporter(environ).export([span({}, SpanContext(1, 2, False))]) is SpanExportResult.SUCCESS
    (headers,) = receiver.headers
    assert (headers["content-encoding"], headers["x-key"]) == (compression, "a b")
    assert (headers["authorization"], headers["content-type"]) == ("Basic c", "application/x-protobuf")
    assert len(receiver.spans) == 1


def test_credential_provider_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match="OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER: 'mine' is no"):
        exporter_of("otlp_proto_http", {"OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER": "mine"})


async def test_collector_that_refuses_connections_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        app = telemetry({"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{closed.getsockname()[1]}"})
        for _ in range(3):
            assert run_one(app, record()).exemplar is not None
        started = time.monotonic()
        await app.tracing.shutdown(0.5)
    assert time.monotonic() - started < 2


# ── queue ────────────────────────────────────────────────────────────────────


async def test_collector_that_hangs_fills_a_bounded_queue_and_delays_the_end_by_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as hung:
        hung.bind(("127.0.0.1", 0))
        hung.listen()
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{hung.getsockname()[1]}",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "5",
            "OTEL_BSP_MAX_QUEUE_SIZE": "6",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "3",
        }
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        app = telemetry(environ)
        for _ in range(20):
            run_one(app, record())
            await asyncio.sleep(0)
        # 60 spans: at most two batches are with the exporter by now, six spans wait.
        assert 60 - 6 - 2 * 3 <= app.tracing.dropped < 60
        started = time.monotonic()
        assert not await app.tracing.shutdown(0.2)
        assert time.monotonic() - started < 1.5


async def test_lost_spans_are_counted_once_each(traced: Callable[..., Telemetry], receiver: Receiver) -> None:
    app = traced(BSP_MAX_QUEUE_SIZE="9", BSP_MAX_EXPORT_BATCH_SIZE="9", BSP_SCHEDULE_DELAY="60000")
    for _ in range(30):
        run_one(app, record())
    await app.tracing.shutdown()
    assert len(receiver.spans) + app.tracing.dropped == 90


async def test_console_exporter_writes_spans(capsys: pytest.CaptureFixture[str]) -> None:
    app = telemetry({"OTEL_TRACES_EXPORTER": "console"})
    run_one(app, record())
    assert await app.tracing.shutdown()
    assert '"name": "route sticky"' in capsys.readouterr().out


async def test_spans_for_a_console_that_is_gone_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    console = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", console)
        app = telemetry({"OTEL_TRACES_EXPORTER": "console"})
    console.close()
    run_one(app, record())
    assert await app.tracing.shutdown()
    assert app.tracing.dropped == 3


# ── encoding, against the SDK's ──────────────────────────────────────────────

SCOPE = InstrumentationScope("smetric", "1.0")
RESOURCE = Resource({"service.name": "smetric", "n": 3, "ratio": 0.5, "tags": ("a", "b")})
TEXTS = st.text(st.characters(codec="utf-8"), max_size=3000)
VALUES = (
    TEXTS
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.binary(max_size=9)
    | st.lists(st.text(st.characters(codec="utf-8"), max_size=9), max_size=3)
)
CONTEXTS = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.booleans(),
    st.just(TraceFlags(1)),
    st.sampled_from([None, TraceState([("vendor", "1"), ("other", "2")])]),
)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=200)


def span(attributes: dict[str, Any], context: SpanContext, **fields: Any) -> ReadableSpan:
    given = {
        "parent": None,
        "links": (),
        "kind": SpanKind.SERVER,
        "status": Status(StatusCode.UNSET),
        "events": (),
        "resource": RESOURCE,
        "instrumentation_scope": SCOPE,
        "start_time": 1_700_000_000_000_000_001,
        "end_time": 1_700_000_000_000_000_002,
    }
    return ReadableSpan("route smetric", context, attributes=attributes, **(given | fields))


def same(spans: list[ReadableSpan]) -> bool:
    return bool(ExportTraceServiceRequest.FromString(encoded(spans)) == encode_spans(spans))


@settings(max_examples=150)
@given(
    st.dictionaries(NAMES, VALUES, max_size=12),
    CONTEXTS,
    st.none() | CONTEXTS,
    st.sampled_from([SpanKind.INTERNAL, SpanKind.SERVER, SpanKind.CLIENT]),
    st.sampled_from([Status(StatusCode.UNSET), Status(StatusCode.OK), Status(StatusCode.ERROR, "it failed")]),
)
def test_span_is_encoded_as_the_sdk_encodes_it(
    attributes: dict[str, Any], context: SpanContext, parent: SpanContext | None, kind: SpanKind, status: Status
) -> None:
    made = span(attributes, context, parent=parent, kind=kind, status=status)
    linked = span(attributes, context, links=(Link(context), Link(context, {"why": "untrusted"})))
    assert same([made, linked])


def test_span_of_another_library_is_encoded_with_its_scope_and_events() -> None:
    context = SpanContext(1, 2, False)
    scope = InstrumentationScope("other", "2", "https://schema", {"a": 1})
    event = Event("retried", {"after": 0.5}, 1_700_000_000_000_000_001)
    assert same([span({"x": 1}, context, instrumentation_scope=scope, events=(event, event))])
    mixed = ExportTraceServiceRequest.FromString(
        encoded([span({}, context), span({}, context, instrumentation_scope=scope), span({}, context)])
    )
    scopes = [one.scope_spans[0] for one in mixed.resource_spans]
    assert [(one.scope.name, len(one.spans)) for one in scopes] == [("smetric", 2), ("other", 1)]


def test_text_that_is_no_utf_8_is_replaced() -> None:
    message = ExportTraceServiceRequest.FromString(encoded([span({"x": "a\ud800"}, SpanContext(1, 2, False))]))
    (attribute,) = message.resource_spans[0].scope_spans[0].spans[0].attributes
    assert attribute.value.string_value == "a?"
