"""Check of a request's head."""

from __future__ import annotations

import pytest

from smetric.http.headers import Scope
from smetric.http.limits import HttpLimits, inspect_head


def get(*fields: tuple[bytes, bytes]) -> Scope:
    headers = [(b"host", b"x"), *fields]
    return {"http_version": "1.1", "method": "GET", "raw_path": b"/", "query_string": b"", "headers": headers}


@pytest.mark.parametrize("tenant_header", [b"", b"x-team"], ids=["admin", "data"])
def test_empty_elements_of_connection_name_no_field(tenant_header: bytes) -> None:
    limits = HttpLimits(tenant_header=tenant_header)
    for value in (b"", b",", b"keep-alive,", b", close", b"x-hop, ,te"):
        assert inspect_head(get((b"connection", value)), limits) is None, value
    assert (inspect_head(get((b"connection", b",x-team")), limits) is None) == (not tenant_header)
    refused = inspect_head(get((b"connection", b"keep-alive,, authorization")), limits)
    assert refused is not None
    assert "names `authorization`" in refused.message
