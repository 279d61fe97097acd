from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.telemetry.tracing import Propagation

TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"
PARENT = b"00-%b-%b-01" % (TRACE, SPAN)
DEFAULT = Propagation.from_environ({})


def extract(*headers: tuple[bytes, bytes], trusted: bool = True, propagation: Propagation = DEFAULT):  # type: ignore[no-untyped-def]
    return propagation.extract(headers, trusted=trusted)


def test_a_valid_context_is_read_with_its_flag_and_state() -> None:
    parent, baggage = extract(
        (b"host", b"x"), (b"traceparent", PARENT), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")
    )
    assert (parent.trace_id, parent.span_id, parent.sampled, parent.trusted) == (TRACE, SPAN, True, True)
    assert parent.tracestate == b"a=1,b=2"
    assert baggage == b""
    assert parent.headers(sampled=False) == [
        (b"traceparent", b"00-%b-%b-00" % (TRACE, SPAN)),
        (b"tracestate", b"a=1,b=2"),
    ]


def test_whether_ids_are_random_is_passed_on_as_it_came_and_other_flags_are_not() -> None:
    for came, sent in ((b"00", b"01"), (b"02", b"03"), (b"03", b"03"), (b"ff", b"03"), (b"f4", b"01")):
        parent, _ = extract((b"traceparent", PARENT[:-2] + came))
        assert parent.headers(sampled=True) == [(b"traceparent", PARENT[:-2] + sent)]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"garbage",
        PARENT.upper(),
        PARENT + b"-more",
        PARENT + b" ",
        b"ff" + PARENT[2:],
        b"00-%b-%b-01" % (b"0" * 32, SPAN),
        b"00-%b-%b-01" % (TRACE, b"0" * 16),
        b"00-%b-%b-1" % (TRACE, SPAN),
        b"00-%b-%b-01\r\nx: y" % (TRACE, SPAN),
        b"00-%b-%b-01" % (TRACE[:-1], SPAN),
    ],
)
def test_a_bad_traceparent_is_none(value: bytes) -> None:
    assert extract((b"traceparent", value)) == (None, b"")


def test_a_later_version_may_say_more() -> None:
    parent, _ = extract((b"traceparent", b"01" + PARENT[2:] + b"-more"))
    assert parent.trace_id == TRACE


def test_two_traceparents_are_none() -> None:
    assert extract((b"traceparent", PARENT), (b"traceparent", PARENT))[0] is None


@pytest.mark.parametrize(
    "state",
    [
        b",".join(b"k%d=v" % i for i in range(500)),
        b"k=" + b"v" * 600,
        b",".join(b"k%d=v" % i for i in range(33)),
        b"k=1,k=2",
        b"K=1",
        b"k",
        b"k=a=b",
        b"k=\x01",
    ],
)
def test_a_tracestate_that_is_long_or_invalid_is_dropped_as_a_whole(state: bytes) -> None:
    parent, _ = extract((b"traceparent", PARENT), (b"tracestate", state))
    assert parent.trace_id == TRACE
    assert parent.tracestate == b""


def test_an_untrusted_peer_hands_no_state_and_no_baggage_on() -> None:
    asks = Propagation.from_environ({"OTEL_PROPAGATORS": "tracecontext,baggage"})
    parent, baggage = extract(
        (b"traceparent", PARENT), (b"tracestate", b"a=1"), (b"baggage", b"k=v"), trusted=False, propagation=asks
    )
    assert not parent.trusted
    assert parent.tracestate == b""
    assert baggage == b""


def test_baggage_passes_only_when_asked_for_and_short() -> None:
    asks = Propagation.from_environ({"OTEL_PROPAGATORS": "tracecontext, baggage"})
    assert extract((b"baggage", b"k=v"))[1] == b""
    assert extract((b"baggage", b"k=v"), (b"baggage", b"l=w"), propagation=asks)[1] == b"k=v,l=w"
    assert extract((b"baggage", b"k=" + b"v" * 60_000), propagation=asks)[1] == b""


def test_no_propagator_reads_nothing_and_unknown_ones_are_named() -> None:
    assert (
        extract((b"traceparent", PARENT), propagation=Propagation.from_environ({"OTEL_PROPAGATORS": "none"}))[0] is None
    )
    assert Propagation.from_environ({"OTEL_PROPAGATORS": "b3,tracecontext"}).unknown == ("b3",)


@given(st.binary(max_size=80))
def test_no_bytes_raise(value: bytes) -> None:
    extract((b"traceparent", value), (b"tracestate", value))
    extract((b"traceparent", PARENT), (b"tracestate", value))
