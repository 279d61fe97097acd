from __future__ import annotations

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from structlog.testing import capture_logs

from tests.telemetry.otlp_receiver import receiving
from tests.telemetry.samples import record, run_one, telemetry


async def dropped(monkeypatch: pytest.MonkeyPatch, url: str) -> int:
    """Spans lost of one request, which has three, and a second one."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    app = telemetry({"OTEL_EXPORTER_OTLP_ENDPOINT": url})
    for _ in range(2):
        run_one(app, record())
        await app.tracing.flush()
    assert await app.tracing.shutdown()
    return app.tracing.dropped


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_no_success(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    with receiving(status) as receiver:
        assert await dropped(monkeypatch, receiver.url) == 6


async def test_what_a_collector_rejects_of_a_batch_is_counted_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    partial = ExportTracePartialSuccess(rejected_spans=2, error_message="too old")
    answer = ExportTraceServiceResponse(partial_success=partial).SerializeToString()
    with receiving(answer=answer) as receiver, capture_logs() as lines:
        assert await dropped(monkeypatch, receiver.url) == 4
    told = [line for line in lines if line["event"] == "smetric.tracing.rejected"]
    assert [(line["spans"], line["problem"], line["log_level"]) for line in told] == [(2, "too old", "warning")]


@pytest.mark.parametrize("answer", [b"", b"OK", ExportTraceServiceResponse().SerializeToString()])
async def test_an_answer_that_says_nothing_is_success(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    with receiving(answer=answer) as receiver, capture_logs() as lines:
        assert await dropped(monkeypatch, receiver.url) == 0
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == []
    assert len(receiver.spans) == 6


async def test_white_space_around_an_address_is_not_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        assert await dropped(monkeypatch, f" {receiver.url}/\r") == 0
    assert receiver.paths == ["/v1/traces"] * 2
