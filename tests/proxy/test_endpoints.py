from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.config.credential import Credential
from smetric.errors import RequestError
from smetric.proxy.endpoints import TenantSalt
from smetric.request.request import Api

SALT = TenantSalt("x-tenant", Credential("tenants.secret", "a-secret-of-17-ch", ""))
NAMED = [(b"x-tenant", b"red"), (b"content-type", b"application/json")]


def salted(body: bytes, headers: list[tuple[bytes, bytes]] = NAMED, api: Api = Api.CHAT) -> bytes:
    return SALT.salted(api, headers, body, trusted=True)


def test_salt_changes_its_own_field_alone() -> None:
    body = b' { "model" : "m", "cache_salt":  "mine" , "x": [1.10, "\\u00e9"] }'
    before, after = body.split(b'"mine"')
    new = salted(body)
    assert new.startswith(before)
    assert new.endswith(after)
    assert salted(b"{}") == b'{"cache_salt":"%b"}' % json.loads(salted(b"{}"))["cache_salt"].encode()


def test_salt_has_a_form_that_engines_accept() -> None:
    salt = json.loads(salted(b"{}"))["cache_salt"]
    assert len(salt) <= 128
    assert not set(salt) & set("@/\\\0")


PAIR = st.tuples(
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20), st.none() | st.text()
)


@given(PAIR, PAIR)
def test_salts_are_equal_if_tenant_and_sent_salt_are(
    one: tuple[str, str | None], other: tuple[str, str | None]
) -> None:
    def salt(pair: tuple[str, str | None]) -> Any:
        body = json.dumps({} if pair[1] is None else {"cache_salt": pair[1]}).encode()
        return json.loads(salted(body, [(b"x-tenant", pair[0].encode())]))["cache_salt"]

    assert (salt(one) == salt(other)) == (one == other)


def test_salt_that_is_no_string_is_refused() -> None:
    with pytest.raises(RequestError, match="cache_salt"):
        salted(b'{"cache_salt": 1}')


@pytest.mark.parametrize("kind", [b"Application/JSON", b"application/json;charset=utf-8", b"application/x+json", b""])
def test_salt_is_set_for_each_spelling_of_json(kind: bytes) -> None:
    """Engines compare without case or not at all: a spelling unknown here would go around the salt."""
    headers = [(b"x-tenant", b"red"), (b"content-type", kind)]
    assert json.loads(salted(b"{}", headers, Api.OTHER)) == json.loads(salted(b"{}"))


def test_file_to_transcribe_gets_no_salt() -> None:
    headers = [(b"x-tenant", b"red"), (b"content-type", b"multipart/form-data; boundary=x")]
    assert salted(b"--x--", headers, Api.OTHER) == b"--x--"
    with pytest.raises(RequestError):
        salted(b"--x--", headers, Api.CHAT)
