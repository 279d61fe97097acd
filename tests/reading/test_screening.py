"""What a look through a body finds, and that what was seen before is found as well."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.errors import RequestError
from smetric.request.body import MAX_VALUES, MOST_PLACES, STRIDE, UNCOUNTED_BYTES, Screen

PIECE = st.sampled_from(
    [
        b"a",
        "ü".encode(),
        "模".encode(),
        "🙂".encode(),
        b"\\\\",
        b"\\n",
        b"\\u00fc",
        b"\\/",
        b"/",
        b"u",
        b"\xff",
        b"\xc3",
        b"\xa9",
    ]
)


def found(screen: Screen, body: bytes) -> bool | str:
    """Whether all is plain, or why it is refused."""
    try:
        return screen(body).is_plain
    except RequestError as error:
        return str(error)


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(PIECE, max_size=6)), min_size=1, max_size=6))
def test_what_was_seen_before_makes_no_difference_to_what_is_found(bodies: list[tuple[int, list[bytes]]]) -> None:
    one = Screen()
    for distance, pieces in bodies:
        # All begin alike, and part around the places up to which findings are remembered.
        tail = b"".join(pieces)
        for length in (STRIDE - distance, 2 * STRIDE - distance):
            body = b"x" * length + tail + b"y" * (length % 7) * 100
            assert found(one, body) == found(Screen(), body)
            assert found(one, body + b"z" * STRIDE) == found(Screen(), body + b"z" * STRIDE)


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ('plain: ü 模 🙂 \\n \\t \\" \\\\ / u', True),
        ("\\u00fc", False),
        ("\\u001b", False),
        ("\\/", False),
        ("\\\\users", False),
    ],
)
@pytest.mark.parametrize("before", [0, STRIDE - 1, STRIDE, 3 * STRIDE - 1])
def test_a_body_is_plain_without_escapes_that_are_a_matter_of_choice(text: str, is_plain: bool, before: int) -> None:
    body = b"x" * before + text.encode()
    assert Screen()(body).is_plain is is_plain


@pytest.mark.parametrize("before", ["", "x" * (STRIDE - 1), "x" * (STRIDE - 2) + "ü", "模" * STRIDE])
@pytest.mark.parametrize("wrong", [b"\xff", b"\xc3", b"\xe6\xa8", b"\xed\xa0\x80", b"\xc0\xaf"])
def test_what_is_not_utf8_is_refused(before: str, wrong: bytes) -> None:
    screen = Screen()
    assert screen(before.encode() + b'"').is_plain
    with pytest.raises(RequestError, match="UTF-8"):
        screen(before.encode() + wrong + b'"')


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"[]," * 3_300_000 + b"1]}",
        b'{"messages":[' + b"{}," * 200_000 + b"{}]}",
        b"{" + b",".join(b'"k%d":1' % i for i in range(900_000)) + b"}",
        b'{"a":[' + b'"\\\\",' * 200_000 + b"1]}",
    ],
    ids=["lists", "objects", "members", "strings"],
)
def test_a_body_of_too_many_values_is_refused_each_time(body: bytes) -> None:
    screen = Screen()
    for more in (b"", b"", b" " * STRIDE):
        with pytest.raises(RequestError, match=str(MAX_VALUES)) as caught:
            screen(body + more)
        assert caught.value.status == 400


def test_values_are_counted_over_all_bodies_that_grow_into_one() -> None:
    screen = Screen()
    body = b'{"a":['
    while len(body) < 8 * MAX_VALUES:
        body += b"{}," * 4000
        is_refused = isinstance(found(screen, body), str)
        assert is_refused is (len(body) > UNCOUNTED_BYTES and body.count(b"{") + 1 > MAX_VALUES)


def test_brackets_and_quotes_inside_strings_do_not_count_as_values() -> None:
    code = json.dumps({"a": '{"[' * MAX_VALUES + "\\" + '"'}).encode()
    assert len(code) > UNCOUNTED_BYTES / 2
    body = code[:-1] + b',"b":"' + b"x" * UNCOUNTED_BYTES + b'"}'
    assert Screen()(body).is_plain


def test_what_is_remembered_is_bounded_and_no_text() -> None:
    screen = Screen()
    for number in range(MOST_PLACES // 1000 + 2):
        screen(b"%03d" % number + b"x" * 1000 * STRIDE)
    assert len(screen._seen) == MOST_PLACES
    assert all(type(each) is int for item in screen._seen.items() for each in item)
