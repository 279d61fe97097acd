"""Our bytes, against those that the SDK would have sent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from smetric.telemetry import exporter
from smetric.telemetry.exporter import Collector, Encoded

SCOPE = InstrumentationScope("smetric", "1.0")
RESOURCE = Resource({"service.name": "smetric", "n": 3, "ratio": 0.5, "tags": ("a", "b")})
TEXTS = st.text(st.characters(codec="utf-8"), max_size=3000)
VALUES = (
    TEXTS
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
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
    given = {"parent": None, "links": (), "kind": SpanKind.SERVER, "status": Status(StatusCode.UNSET)} | fields
    return ReadableSpan(
        "route smetric",
        context,
        given["parent"],
        RESOURCE,
        attributes,
        (),
        given["links"],
        given["kind"],
        None,
        given["status"],
        1_700_000_000_000_000_001,
        1_700_000_000_000_000_002,
        SCOPE,
    )


def same(spans: list[ReadableSpan]) -> bool:
    ours = ExportTraceServiceRequest.FromString(Encoded(spans).SerializeToString())
    return bool(ours == encode_spans(spans))


@settings(max_examples=150)
@given(
    st.dictionaries(NAMES, VALUES, max_size=12),
    CONTEXTS,
    st.none() | CONTEXTS,
    st.sampled_from([SpanKind.INTERNAL, SpanKind.SERVER, SpanKind.CLIENT]),
    st.sampled_from([StatusCode.UNSET, StatusCode.OK, StatusCode.ERROR]),
)
def test_any_span_is_written_as_the_sdk_writes_it(
    attributes: dict[str, Any], context: SpanContext, parent: SpanContext | None, kind: SpanKind, code: StatusCode
) -> None:
    made = span(attributes, context, parent=parent, kind=kind, status=Status(code))
    linked = span(attributes, context, links=(Link(context), Link(context, {"why": "untrusted"})))
    assert same([made, linked])


def test_a_text_that_is_no_utf_8_is_replaced_and_not_the_end_of_the_batch() -> None:
    context = SpanContext(1, 2, False)
    message = ExportTraceServiceRequest.FromString(Encoded([span({"x": "a\ud800"}, context)]).SerializeToString())
    (attribute,) = message.resource_spans[0].scope_spans[0].spans[0].attributes
    assert attribute.value.string_value == "a?"


def test_the_sdks_exporter_takes_it_and_others_exporters_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.exporter.otlp.proto.http import trace_exporter

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    made = exporter.build("otlp", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, Collector())
    assert type(made).export.__globals__["encode_spans"] is Encoded
    assert vars(trace_exporter)["encode_spans"] is encode_spans
