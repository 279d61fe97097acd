from __future__ import annotations

import asyncio
import io
import socket
import subprocess
import sys
import time

import pytest

from smetric import names
from smetric.errors import ConfigError
from smetric.telemetry.tracing import Tracing
from tests.telemetry.otlp_receiver import receiving
from tests.telemetry.samples import begin, record, run_one, telemetry


async def test_the_base_endpoint_gets_the_path_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_EXPORTER_OTLP_HEADERS": "x-key=secret"}
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        app = telemetry(environ)
        run_one(app, record())
        assert await app.tracing.shutdown()
    assert receiver.paths == ["/v1/traces"]
    assert receiver.headers[0]["x-key"] == "secret"


async def test_the_traces_endpoint_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{receiver.url}/custom",
            "OTEL_SERVICE_NAME": "router-7",
            "OTEL_RESOURCE_ATTRIBUTES": "k8s.pod.name=p,service.namespace=prod",
        }
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        app = telemetry(environ, resource={"smetric.policy.default": "sticky"})
        run_one(app, record())
        assert await app.tracing.shutdown()
    assert receiver.paths == ["/custom"]
    resource = receiver.spans[0].resource
    assert resource["service.name"] == "router-7"
    assert resource["service.namespace"] == "prod"
    assert resource["k8s.pod.name"] == "p"
    assert resource["smetric.policy.default"] == "sticky"
    assert resource["service.version"]
    assert resource["service.instance.id"]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"},
        {"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"},
    ],
)
async def test_tracing_is_off_without_an_endpoint_or_when_told_so(environ: dict[str, str]) -> None:
    tracing = Tracing(environ)
    assert not tracing.enabled
    assert await tracing.shutdown()
    assert tracing.dropped == 0


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "OTEL_TRACES_EXPORTER: 'jaeger' is not one of otlp, console, none"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT: 'collector:4318' is not"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_PROTOCOL: 'http/json' is not one of",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
            "needs the package opentelemetry-exporter-otlp-proto-grpc",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:99999"}, "OTEL_EXPORTER_OTLP_ENDPOINT: 'http://c:99999' is not"),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "c://me:secret@c/v1?key=secret"},
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT: 'c://…@c/v1' is not",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_HEADERS": "a=b, x-key: secret"},
            "OTEL_EXPORTER_OTLP_HEADERS: header 2 is not written as name=value, with all but [^:]*$",
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "x-key=a%0Ab"},
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS: header 1 is not",
        ),
        ({"OTEL_METRICS_EXEMPLAR_FILTER": "some"}, "OTEL_METRICS_EXEMPLAR_FILTER: 'some' is not one of always_on, "),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "OTEL_BSP_MAX_QUEUE_SIZE: 'many'"),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_BSP_MAX_QUEUE_SIZE": "5"}, "OTEL_BSP_.*: max_export_batch_size"),
    ],
)
def test_what_cannot_be_used_is_named_at_start(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Tracing(environ)


def test_a_limit_that_the_sdk_cannot_use_is_named_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "-1")
    with pytest.raises(ConfigError, match="OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT must be a non-negative integer"):
        Tracing({"OTEL_TRACES_EXPORTER": "console"})


def test_off_imports_neither_the_sdk_nor_an_exporter() -> None:
    code = (
        "import sys; from smetric.telemetry.tracing import Tracing; import smetric.telemetry.exchange;"
        "assert not Tracing({}).enabled;"
        "print([m for m in sys.modules if m.startswith(('opentelemetry', 'requests', 'google.protobuf'))])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
    assert "warn" not in (run.stdout + run.stderr).lower()


async def test_a_collector_that_refuses_changes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        app = telemetry({"OTEL_EXPORTER_OTLP_ENDPOINT": address})
        for _ in range(3):
            exchange = run_one(app, record())
            assert exchange.trace.server is not None
        started = time.monotonic()
        await app.tracing.shutdown(0.5)
    assert time.monotonic() - started < 2


async def test_a_collector_that_answers_413_costs_the_batch_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving(status=413) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        app = telemetry({"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url})
        run_one(app, record())
        assert await app.tracing.shutdown()
        assert app.tracing.dropped == 3


async def test_a_collector_that_hangs_fills_a_bounded_queue_and_delays_the_end_by_the_bound(
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


async def test_spans_lost_are_counted_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
            "OTEL_BSP_MAX_QUEUE_SIZE": "9",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "9",
            "OTEL_BSP_SCHEDULE_DELAY": "60000",
        }
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        app = telemetry(environ)
        for _ in range(30):
            run_one(app, record())
        await app.tracing.shutdown()
        assert len(receiver.spans) + app.tracing.dropped == 90


async def test_the_console_exporter_writes_spans(capsys: pytest.CaptureFixture[str]) -> None:
    app = telemetry({"OTEL_TRACES_EXPORTER": "console"})
    run_one(app, record())
    assert await app.tracing.shutdown()
    assert '"name": "route sticky"' in capsys.readouterr().out


async def test_spans_for_a_console_that_is_gone_are_counted_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    console = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", console)
        app = telemetry({"OTEL_TRACES_EXPORTER": "console"})
    console.close()
    run_one(app, record())
    assert await app.tracing.shutdown()
    assert app.tracing.dropped == 3


async def test_an_unrecorded_request_makes_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    app = telemetry({"OTEL_TRACES_EXPORTER": "console", "OTEL_TRACES_SAMPLER": "always_off"})

    def refuse(*_: object) -> None:
        raise AssertionError("a span was made")

    monkeypatch.setattr(app.tracing, "root", refuse)
    monkeypatch.setattr(app.tracing, "child", refuse)
    exchange = run_one(app, record())
    assert exchange.trace.server is None
    assert begin(app).trace.server is None
    assert await app.tracing.shutdown()


def test_the_span_names_of_the_table_are_the_ones_made() -> None:
    assert set(names.SPANS) == {"{method} {route}", "hold", "route {policy}", "shadow {policy}", "{operation} {model}"}
