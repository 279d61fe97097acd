from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Decision, ParentBased, Sampler
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from structlog.testing import capture_logs

from smetric import names
from smetric.errors import ConfigError
from smetric.fleet.exchange import Exchanges
from smetric.telemetry.exchange import Telemetry
from smetric.telemetry.spans import KeepSampler
from smetric.telemetry.tracing import PassOn, Tracing, address, propagator_names, traced_id
from tests.telemetry.otlp_receiver import Receiver
from tests.telemetry.samples import ROUTE, begin, record, run_one, scope

TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"
PARENT = b"00-%b-%b-01" % (TRACE, SPAN)

# ── provider ─────────────────────────────────────────────────────────────────


async def test_base_endpoint_gets_the_path_appended(traced: Callable[..., Telemetry], receiver: Receiver) -> None:
    app = traced(EXPORTER_OTLP_HEADERS="x-key=secret")
    run_one(app, record())
    assert await app.tracing.shutdown()
    assert receiver.paths == ["/v1/traces"]
    assert receiver.headers[0]["x-key"] == "secret"


async def test_traces_endpoint_is_used_as_it_is_and_the_resource_as_named(
    traced: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = traced(
        EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
        EXPORTER_OTLP_TRACES_ENDPOINT=f"{receiver.url}/custom",
        SERVICE_NAME="router-7",
        RESOURCE_ATTRIBUTES="k8s.pod.name=p,service.namespace=prod",
    )
    run_one(app, record())
    assert await app.tracing.shutdown()
    assert receiver.paths == ["/custom"]
    resource = receiver.spans[0].resource
    assert resource["service.name"] == "router-7"
    assert resource["service.namespace"] == "prod"
    assert resource["k8s.pod.name"] == "p"
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
async def test_tracing_is_off_without_an_exporter(environ: dict[str, str]) -> None:
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
        ({"OTEL_TRACES_SAMPLER": "sometimes"}, "OTEL_TRACES_SAMPLER: unknown sampler 'sometimes'; known are always_on"),
        (
            {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "5%"},
            "OTEL_TRACES_SAMPLER_ARG: '5%' is not a share",
        ),
    ],
)
def test_variable_that_cannot_be_used_is_named_at_start(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Tracing(environ)


def test_limit_that_the_sdk_cannot_use_is_named_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "-1")
    with pytest.raises(ConfigError, match="OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT must be a non-negative integer"):
        Tracing({"OTEL_TRACES_EXPORTER": "console"})


def run(code: str, **environ: str) -> str:
    """Run *code* in a process of its own; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, **environ},
    )
    assert "warn" not in (done.stdout + done.stderr).lower()
    return done.stdout.splitlines()[-1]


def test_off_imports_neither_the_sdk_nor_an_exporter() -> None:
    assert (
        run(
            "import sys; from smetric.telemetry.tracing import Tracing; import smetric.telemetry.exchange;"
            "assert not Tracing({}).enabled;"
            "print([m for m in sys.modules if m.startswith(('opentelemetry', 'requests', 'google.protobuf'))])"
        )
        == "[]"
    )


class Seen(SpanProcessor):
    """Processor of a third party, which marks spans when they start."""

    def __init__(self) -> None:
        self.ended: list[ReadableSpan] = []

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        span.set_attribute("tenant", "red")

    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span)


async def test_third_party_processor_sees_and_marks_spans(app: Telemetry, receiver: Receiver) -> None:
    seen = Seen()
    assert app.tracing.provider is not None
    app.tracing.provider.add_span_processor(seen)
    run_one(app, record())
    assert await app.tracing.shutdown()
    assert sorted(span.name for span in seen.ended) == ["POST /v1/chat/completions", "chat m", "route sticky"]
    assert {span.attributes["tenant"] for span in receiver.spans} == {"red"}


def test_provider_that_is_set_globally_is_used() -> None:
    code = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.telemetry.samples import record, run_one, telemetry
provider, spans = TracerProvider(), InMemorySpanExporter()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
app = telemetry()
assert app.tracing.provider is provider
run_one(app, record())
ours = provider.get_tracer("another").start_span("x").end()
print(*sorted(span.name for span in spans.get_finished_spans()), sep="|")
"""
    assert run(code) == "POST /v1/chat/completions|chat m|route sticky|x"
    assert run(code, OTEL_TRACES_SAMPLER="always_off") == ""


# ── sampling ─────────────────────────────────────────────────────────────────


def is_kept(sampler: Sampler, flag: bool | None, outcome: str = names.ROUTED, **more: str) -> bool:
    """Whether *sampler* keeps a request of *outcome* whose caller has this sampled flag, None for no caller."""
    context = None
    if flag is not None:
        context = set_span_in_context(NonRecordingSpan(SpanContext(7, 7, True, TraceFlags(flag))))
    about = {names.OUTCOME: outcome} | more
    return sampler.should_sample(context, 7, "POST", attributes=about).decision is Decision.RECORD_AND_SAMPLE


ALL = frozenset(names.KEPT)
MOVED, FAILED = {names.MIGRATED_FROM: "gpu-1"}, {names.ERROR_TYPE: "closed"}


@pytest.mark.parametrize("flag", [None, False, True])
@pytest.mark.parametrize(
    ("inner", "keep", "over_parent", "outcome", "more", "kept"),
    [
        *((ALWAYS_OFF, ALL, True, outcome, {}, True) for outcome in sorted(set(names.OUTCOMES) - names.ORDINARY)),
        (ParentBased(ALWAYS_OFF), ALL, True, names.REJECTED, {}, True),
        (ALWAYS_OFF, ALL, True, names.ROUTED, MOVED, True),
        (ALWAYS_OFF, ALL, True, names.ROUTED, FAILED, True),
        (ALWAYS_OFF, frozenset({names.HELD}), True, names.REJECTED, {}, False),
        # The user's sampler decides on the rest.
        (ALWAYS_ON, ALL, True, names.ROUTED, {}, True),
        (ALWAYS_OFF, ALL, True, names.ROUTED, {}, False),
        (ParentBased(ALWAYS_ON), ALL, True, names.ROUTED, {}, {False: False}),
        (ParentBased(ALWAYS_OFF), ALL, True, names.PINNED, {}, {None: False, False: False}),
        # A caller that does not record may be followed.
        (ParentBased(ALWAYS_ON), ALL, False, names.REJECTED, {}, {False: False}),
        (ALWAYS_OFF, ALL, False, names.REJECTED, {}, {False: False}),
        (ALWAYS_ON, ALL, False, names.REJECTED, {}, True),
    ],
)
def test_sampler_keeps_odd_requests_and_asks_the_users_one_about_the_rest(
    inner: Sampler, keep: frozenset[str], over_parent: bool, outcome: str, more: Any, kept: Any, flag: bool | None
) -> None:
    expected = kept if isinstance(kept, bool) else kept.get(flag, True)
    assert is_kept(KeepSampler(inner, keep, over_parent), flag, outcome, **more) is expected


async def test_sampler_of_the_environment_decides(traced: Callable[..., Telemetry], receiver: Receiver) -> None:
    app = traced(TRACES_SAMPLER="always_off")
    assert run_one(app, record()).exemplar is None
    assert begin(app).exemplar is None
    assert await app.tracing.shutdown()
    assert receiver.spans == []


# ── context ──────────────────────────────────────────────────────────────────


def passed(
    *headers: tuple[bytes, bytes], trusted: bool = True, propagators: str = "tracecontext"
) -> list[tuple[bytes, bytes]]:
    """Return the trace headers that an instance gets while tracing is off."""
    wanted = propagator_names({"OTEL_PROPAGATORS": propagators})
    exchange = Exchanges([PassOn("tracecontext" in wanted, "baggage" in wanted)]).begin(
        scope(*headers), ROUTE, trusted=trusted
    )
    exchange.decided(record())
    return exchange.attempt(ROUTE).headers


async def sent(app: Telemetry, *headers: tuple[bytes, bytes], trusted: bool = True) -> dict[bytes, bytes]:
    """Return the trace headers that an instance gets while spans are made."""
    exchange = begin(app, *headers, trusted=trusted)
    exchange.decided(record())
    return dict(exchange.attempt(ROUTE).headers)


BAD_PARENTS = [
    b"",
    b"garbage",
    PARENT.upper(),
    PARENT + b"-more",
    b"ff" + PARENT[2:],
    b"00-%b-%b-01" % (b"0" * 32, SPAN),
    b"00-%b-%b-01" % (TRACE, b"0" * 16),
    b"00-%b-%b-1" % (TRACE, SPAN),
    b"00-%b-%b-01\r\nx: y" % (TRACE, SPAN),
    b"00-%b-%b-01" % (TRACE[:-1], SPAN),
]
BAD_STATES = [
    b",".join(b"k%d=v" % i for i in range(500)),
    b"k=" + b"v" * 600,
]
INVALID_STATES = [b",".join(b"k%d=v" % i for i in range(33)), b"k=1,k=2", b"K=1", b"k", b"k=a=b", b"k=\x01"]


async def test_bad_traceparent_is_none(app: Telemetry) -> None:
    for value in BAD_PARENTS:
        assert passed((b"traceparent", value)) == []
        assert TRACE not in (await sent(app, (b"traceparent", value)))[b"traceparent"]
    assert passed((b"traceparent", PARENT), (b"traceparent", PARENT)) == []
    assert TRACE not in (await sent(app, (b"traceparent", PARENT), (b"traceparent", PARENT)))[b"traceparent"]
    await app.tracing.shutdown()


async def test_later_version_of_traceparent_may_have_more_fields(app: Telemetry) -> None:
    later = b"01" + PARENT[2:] + b"-more"
    assert passed((b"traceparent", later)) == [(b"traceparent", later)]
    assert TRACE in (await sent(app, (b"traceparent", later)))[b"traceparent"]
    await app.tracing.shutdown()


async def test_tracestate_is_joined_and_dropped_as_a_whole_if_it_is_long_or_invalid(app: Telemetry) -> None:
    two = (b"traceparent", PARENT), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")
    assert passed(*two) == [(b"traceparent", PARENT), (b"tracestate", b"a=1,b=2")]
    assert (await sent(app, *two))[b"tracestate"] == b"a=1,b=2"
    for state in BAD_STATES:
        assert passed((b"traceparent", PARENT), (b"tracestate", state)) == [(b"traceparent", PARENT)]
    for state in BAD_STATES + INVALID_STATES:
        headers = await sent(app, (b"traceparent", PARENT), (b"tracestate", state))
        assert TRACE in headers[b"traceparent"]
        assert b"tracestate" not in headers
    await app.tracing.shutdown()


async def test_flags_other_than_sampled_and_random_are_not_passed_on(app: Telemetry) -> None:
    for came, goes in ((b"01", b"01"), (b"03", b"03"), (b"ff", b"03"), (b"f5", b"01")):
        assert (await sent(app, (b"traceparent", PARENT[:-2] + came)))[b"traceparent"].endswith(b"-" + goes)
    await app.tracing.shutdown()


async def test_untrusted_peer_hands_no_state_and_no_baggage_on(traced: Callable[..., Telemetry]) -> None:
    app = traced(PROPAGATORS="tracecontext,baggage")
    headers = (b"traceparent", PARENT), (b"tracestate", b"a=1"), (b"baggage", b"k=v")
    assert (await sent(app, *headers)).keys() == {b"traceparent", b"tracestate", b"baggage"}
    assert (await sent(app, *headers, trusted=False)).keys() == {b"traceparent"}
    assert passed(*headers, trusted=False, propagators="tracecontext,baggage") == []
    await app.tracing.shutdown()


async def test_baggage_passes_byte_for_byte_only_when_asked_for_and_short(traced: Callable[..., Telemetry]) -> None:
    app = traced(PROPAGATORS="tracecontext, baggage")
    headers = (b"baggage", b"k=v;p=1"), (b"baggage", b"l= w")
    assert passed(*headers) == []
    assert passed(*headers, propagators="tracecontext, baggage") == [(b"baggage", b"k=v;p=1,l= w")]
    assert (await sent(app, *headers))[b"baggage"] == b"k=v;p=1,l= w"
    long = (b"baggage", b"k=" + b"v" * 60_000)
    assert passed(long, propagators="baggage") == []
    assert b"baggage" not in await sent(app, long)
    await app.tracing.shutdown()


async def test_propagators_are_those_that_are_asked_for_and_unknown_ones_are_logged(
    traced: Callable[..., Telemetry],
) -> None:
    assert passed((b"traceparent", PARENT), propagators="none") == []
    app = traced(PROPAGATORS="none")
    assert await sent(app, (b"traceparent", PARENT)) == {}
    await app.tracing.shutdown()
    with capture_logs() as lines:
        assert propagator_names({"OTEL_PROPAGATORS": "b3,tracecontext"}) == ["tracecontext"]
    assert [line["unknown_propagators"] for line in lines] == [["b3"]]


@given(st.binary(max_size=80))
def test_trace_headers_of_any_bytes_pass_on_without_an_error(value: bytes) -> None:
    assert traced_id([(b"traceparent", value)]) in ("", TRACE.decode())
    passed((b"traceparent", PARENT), (b"tracestate", value), (b"baggage", value))


async def test_trace_headers_of_odd_bytes_are_extracted_without_an_error(app: Telemetry) -> None:
    for value in (b"\xff" * 40, b"\x00", b"00-\xe4-1-01", b"=,;"):
        await sent(app, (b"traceparent", value), (b"tracestate", value))
        await sent(app, (b"traceparent", PARENT), (b"tracestate", value))
    await app.tracing.shutdown()


# ── what the log says ────────────────────────────────────────────────────────

GRPC = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, "localhost:4318"),
        (GRPC, "localhost:4317"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "localhost:4317"),
        (GRPC | {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "collector:4317"),
        (GRPC | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[::1]:4317"}, "[::1]:4317"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://me:secret@collector/key?k=secret"}, "collector"),
    ],
)
def test_address_is_the_exporters_without_path_and_secrets(environ: dict[str, str], told: str) -> None:
    assert address(environ) == told
