"""The top level of a body: what is refused, and where each value lies."""

from __future__ import annotations

import gzip
import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from smetric.errors import RequestError
from smetric.request.body import MAX_NAMES_BYTES, members, patch_model, screen, spans

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
TOP = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), JSON, max_size=6)


def top_of(body: bytes) -> dict[str, Raw]:
    return members(screen(body).body)


@given(TOP, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_each_value_lies_where_the_walk_says(top: dict[str, Any], ascii_only: bool, indent: int | str | None) -> None:
    body = json.dumps(top, ensure_ascii=ascii_only, indent=indent).encode()
    found = top_of(body)
    walked = {name: json.loads(body[start:end]) for name, start, end in spans(body, found)}
    assert walked == top
    assert list(walked) == list(top)


@given(TOP, st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_patching_the_model_changes_that_value_and_nothing_else(top: dict[str, Any], old: str, new: str) -> None:
    top = top | {"model": old, "tools": [{"model": old}], "note": '"model":"x"'}
    body = json.dumps(top).encode()
    (start, end) = next((start, end) for name, start, end in spans(body, top_of(body)) if name == "model")
    patched = patch_model(body, new)
    assert json.loads(patched) == top | {"model": new}
    assert patched.startswith(body[:start])
    assert patched.endswith(body[end:])


def test_patching_keeps_spacing_order_and_unknown_fields() -> None:
    body = b' { "x" : [1 , 2],\n"model"\t:  "alias" , "y":{"model":"alias"} } \n'
    assert patch_model(body, 'a"b') == b' { "x" : [1 , 2],\n"model"\t:  "a\\"b" , "y":{"model":"alias"} } \n'


def test_a_body_without_a_model_cannot_be_patched() -> None:
    with pytest.raises(ValueError, match="no top-level `model`"):
        patch_model(b'{"messages":[{"model":"x"}]}', "y")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"a"}',
        b'{"model":"a","model":"longer"}',
        b'{"model":"longer","stream":true,"model":"a"}',
        b'{"mod\\u0065l":"a","model":"b"}',
        b'{"stream":true,"model":"a","stream":false}',
        b'{"cache_salt":"a","x":{},"cache_salt":"b"}',
    ],
)
def test_a_field_given_twice_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="twice"):
        top_of(body)


def test_equal_names_below_the_top_level_are_no_duplicates() -> None:
    assert set(top_of(b'{"model":"a","tools":[{"model":1,"stream":2}],"meta":{"model":"b"}}')) == {
        "model",
        "tools",
        "meta",
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"[1]", "JSON object"),
        (b'"text"', "JSON object"),
        (b"null", "JSON object"),
        (b'{"a":1} trailing', "not valid JSON"),
        (b'{"a":', "not valid JSON"),
        (b'{"a":NaN}', "NaN"),
        (b'{"a":-Infinity}', "Infinity"),
        (b'{"a":"line\nbreak"}', "not valid JSON"),
        (b'\xef\xbb\xbf{"a":1}', "byte order mark"),
        (gzip.compress(b'{"a":1}'), "compressed"),
        ('{"a":1}'.encode("utf-16"), "UTF-16"),
        ('{"a":1}'.encode("utf-16-le"), "UTF-16"),
        ('{"a":1}'.encode("utf-32-be"), "UTF-32"),
        (b'{"\xff":1}', "UTF-8"),
        (b'{"a":"\\ud800"}', "surrogate"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "more than 65536"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{bytes(value[:12])!r}",
)
def test_what_is_no_sound_json_object_is_refused_with_the_rule(body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        top_of(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_a_body_nests_no_deeper_than_this_python_reads(opening: bytes, closing: bytes) -> None:
    deep = opening * 30_000 + b"1" + closing * 30_000
    if sys.version_info >= (3, 14):  # as deep as the stack is, which the bound on values keeps from its end
        assert bytes(top_of(b'{"a":' + deep + b"}")["a"]) == deep
        return
    with pytest.raises(RequestError, match="nests") as caught:
        top_of(b'{"a":' + deep + b"}")
    assert caught.value.status == 400


def test_a_top_level_of_absurdly_many_fields_is_refused() -> None:
    with pytest.raises(RequestError, match="top-level fields"):
        top_of(json.dumps({f"k{i}": i for i in range(2000)}).encode())


def test_names_of_absurd_length_at_the_top_level_are_refused() -> None:
    assert len(members(b'{"%b":1}' % (b"k" * MAX_NAMES_BYTES))) == 1
    with pytest.raises(RequestError, match="names of the body's top-level fields take more than 16384 bytes"):
        members(b'{"%b":1,"b":2}' % (b"k" * MAX_NAMES_BYTES))


def test_huge_numbers_pass_as_engines_take_them() -> None:
    body = b'{"a":1e400,"b":' + b"9" * 4000 + b"}"
    assert bytes(top_of(body)["b"]) == b"9" * 4000


def test_an_error_quotes_nothing_that_was_sent() -> None:
    with pytest.raises(RequestError) as caught:
        top_of(b'{"secret canary": "secret canary" "secret canary"}')
    assert "canary" not in str(caught.value)


@given(
    st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), JSON), max_size=6),
    st.sampled_from([(",", ":"), (", ", ": "), (",", ": "), (", ", ":")]),
    st.booleans(),
)
def test_a_name_given_twice_is_found_however_the_body_is_spaced_and_escaped(
    given_members: list[tuple[str, Any]], separators: tuple[str, str], escaped: bool
) -> None:
    texts = [separators[1].join(json.dumps(one, ensure_ascii=escaped) for one in pair) for pair in given_members]
    body = ("{" + separators[0].join(texts) + "}").encode()
    if len(dict(given_members)) == len(given_members):
        assert {name: json.loads(bytes(value)) for name, value in top_of(body).items()} == dict(given_members)
    else:
        with pytest.raises(RequestError, match="twice"):
            top_of(body)
