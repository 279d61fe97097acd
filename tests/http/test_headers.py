from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.errors import HttpError
from smetric.http.headers import (
    HOP_BY_HOP,
    MOST_ROUTERS,
    VIA,
    Headers,
    first,
    named_fields,
    response_headers,
    with_key,
)
from smetric.http.headers import request_headers as forwarded

OUR = (VIA, b"r1")


def request_headers(fields: Headers) -> Headers:
    """What passes, without what the router adds."""
    *passed, own = forwarded(fields, b"r1")
    assert own == OUR
    return passed


def test_request_headers_pass_end_to_end_fields_in_order_with_duplicates() -> None:
    fields = [(b"x-api-key", b"k"), (b"accept", b"a"), (b"anthropic-beta", b"one"), (b"anthropic-beta", b"two")]
    assert request_headers(fields) == fields


def test_request_headers_drop_hop_by_hop_fields_and_those_connection_names() -> None:
    fields = [(b"connection", b"X-Hop, close"), (b"x-hop", b"1"), (b"keep-alive", b"5"), (b"te", b"trailers")]
    assert request_headers([*fields, (b"accept", b"*/*")]) == [(b"accept", b"*/*")]
    assert response_headers([*fields, (b"Set-Cookie", b"a"), (b"set-cookie", b"b")]) == [
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
    ]


def test_request_headers_drop_fields_that_only_the_router_may_set() -> None:
    spelt = (
        b"x-smetric-rule",
        b"x_smetric_rule",
        b"x-smetric_rule",
        b"x_smetric-rule",
        b"x-gateway-destination-endpoint",
    )
    assert request_headers([(name, b"forged") for name in spelt]) == []


def test_response_headers_drop_fields_of_the_router() -> None:
    assert response_headers([(b"X-Smetric-Rule", b"forged"), (b"server", b"uvicorn")]) == [(b"server", b"uvicorn")]


def test_request_headers_drop_host_length_and_trace_context() -> None:
    names = (b"host", b"content-length", b"traceparent", b"tracestate", b"baggage")
    assert request_headers([(name, b"x") for name in names]) == []


def test_first_returns_the_first_value_of_a_field() -> None:
    assert first([(b"a", b"1"), (b"a", b"2")], b"a") == b"1"
    assert first([], b"a") is None


NAME = st.sampled_from([b"accept", b"x-a", b"connection", b"te", b"x-b", b"set-cookie", b"upgrade"])
VALUE = st.sampled_from([b"close", b"keep-alive", b"x-a", b"X-B, te", b"v"])


@pytest.mark.parametrize(
    ("value", "named"), [(b"", []), (b",", []), (b"Keep-Alive,", [b"keep-alive"]), (b", X-A ,, te", [b"te", b"x-a"])]
)
def test_named_fields_ignores_empty_elements(value: bytes, named: list[bytes]) -> None:
    assert sorted(named_fields(value)) == named


@given(st.lists(st.tuples(NAME, VALUE)))
def test_headers_pass_all_but_fields_of_the_connection(fields: list[tuple[bytes, bytes]]) -> None:
    named = {token.strip().lower() for name, value in fields if name == b"connection" for token in value.split(b",")}
    expected = [field for field in fields if field[0] not in HOP_BY_HOP and field[0] not in named]
    assert request_headers(fields) == response_headers(fields) == expected


def test_request_headers_list_the_routers_passed_in_order() -> None:
    fields = [(VIA, b"a, b"), (b"accept", b"*/*"), (VIA, b"c")]
    assert forwarded(fields, b"r1") == [(b"accept", b"*/*"), (VIA, b"a, b, c, r1")]
    assert forwarded([(VIA, b",a, ,"), (VIA, b"")], b"r1") == [(VIA, b"a, r1")]


@pytest.mark.parametrize("via", [b"r1", b"a,r1,b", b", ".join([b"x"] * MOST_ROUTERS)])
def test_request_headers_refuse_a_loop(via: bytes) -> None:
    with pytest.raises(HttpError) as refused:
        forwarded([(VIA, via)], b"r1")
    assert refused.value.status == 508


def test_with_key_replaces_the_credentials_of_the_client() -> None:
    fields = [(b"authorization", b"Bearer client"), (b"accept", b"*/*"), (b"x-api-key", b"client")]
    assert with_key(fields, "own") == [(b"accept", b"*/*"), (b"authorization", b"Bearer own")]
