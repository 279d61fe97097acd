"""A body that is read in short comes out as if all of it had been read, and is refused for the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smetric.errors import RequestError
from smetric.request import conversation, reader
from smetric.request.body import members
from smetric.request.conversation import HEAD, LONG, MOST_ALIKE
from smetric.request.request import Api
from tests.reading.outcome import outcome


def same(monkeypatch: pytest.MonkeyPatch, api: Api, body: bytes, long: int = 3, head: int = 2) -> None:
    """*body* comes out the same in short, with texts of *long* bytes left out, as whole."""
    with monkeypatch.context() as patched:
        patched.setattr(reader, "LEAST_BYTES", len(body) + 1)
        whole = outcome(api, body)
        patched.setattr(reader, "LEAST_BYTES", 0)
        patched.setattr(conversation, "LONG", long)
        patched.setattr(conversation, "HEAD", head)
        assert outcome(api, body) == whole


TEXT = st.text(st.sampled_from('a:,"\\{}[]\n'), max_size=6)
VALUE = st.recursive(
    st.one_of(TEXT, st.integers(0, 1), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=2)),
    max_leaves=4,
)
MESSAGE = st.dictionaries(
    st.sampled_from(["role", "content", "content", "output", "type", "x", "tool_calls"]),
    st.one_of(TEXT, VALUE),
    max_size=4,
)
MEMBER = st.one_of(
    st.tuples(st.sampled_from(["messages", "input"]), st.lists(MESSAGE, max_size=4)),
    st.tuples(st.sampled_from(["messages", "input"]), st.lists(MESSAGE, max_size=4)),
    st.tuples(st.sampled_from(["model", "cache_salt", "user"]), TEXT),
    st.tuples(st.sampled_from(["tools", "metadata", "system", "n", "messages"]), VALUE),
    st.tuples(TEXT, VALUE),
)


@pytest.mark.slow
@settings(max_examples=400)
@given(
    st.lists(MEMBER, min_size=1, max_size=5),
    st.sampled_from([Api.CHAT, Api.MESSAGES, Api.RESPONSES]),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]),
    st.sampled_from(["", "}", ",", '"']),
)
@example([("messages", [{"content": 'aaa"'}, {"content": "aaa"}])], Api.CHAT, (",", ":"), "")
@example([("messages", [{"x": "a:", "content": ",1,", "y": "b"}])], Api.CHAT, (",", ":"), "")
@example([("user", "aaa"), ("messages", [{"content": "aaa"}]), ("user", "aaa")], Api.CHAT, (",", ":"), "")
@example([("messages", [{"content": "aaa"}]), ("tools", ["aaa"]), ("messages", [])], Api.CHAT, (",", ":"), "")
def test_in_short_a_body_is_read_as_it_is_whole(
    members: list[tuple[str, Any]], api: Api, marks: tuple[str, str], after: str
) -> None:
    between, colon = marks
    texts = [f"{json.dumps(name)}{colon}{json.dumps(value, separators=marks)}" for name, value in members]
    with pytest.MonkeyPatch.context() as monkeypatch:
        same(monkeypatch, api, f"{{{between.join(texts)}}}{after}".encode())


def test_a_string_found_from_the_end_of_another_one_on_leaves_the_body_to_be_read_whole() -> None:
    numbers = ",1" * LONG + ","
    body = f'{{"messages":[{{"content":[":"{numbers}"x"]}},{{"content":"{numbers}"}}]}}'.encode()
    json.loads(body)
    brief = conversation.excerpt(body, "messages")
    assert brief is not None
    assert b'":"","x"' not in brief.body
    with pytest.raises(RequestError):
        members(brief.body)
    with pytest.MonkeyPatch.context() as monkeypatch:
        same(monkeypatch, Api.CHAT, body, LONG, 64)


def test_long_texts_are_left_out_of_what_is_read_for_names() -> None:
    long = 'a tale \n of a "tub" ' * LONG
    messages = [
        {"role": "system", "content": long},
        {"role": "user", "content": "hi"},
        {"role": "user", "content": long},
    ]
    body = json.dumps({"model": "m", "messages": messages, "n": 1}).encode()
    brief = conversation.excerpt(body, "messages")
    assert brief is not None
    assert len(brief.body) < 200
    assert [bytes(message.content) for message in brief.messages] == [
        json.dumps(one["content"]).encode() for one in messages
    ]
    assert body[brief.begin - 1 :].startswith(b'[{"role": "system"')


@pytest.mark.parametrize(("before", "is_tried"), [(MOST_ALIKE - 1, True), (MOST_ALIKE, False)])
def test_a_text_that_much_before_it_begins_like_is_not_left_out(
    monkeypatch: pytest.MonkeyPatch, before: int, is_tried: bool
) -> None:
    """Each of them may cost as much as the text is long: a body of them alone would take minutes."""
    text = b"x" * HEAD + b'\\"'
    body = b'{"messages":[{"role":"user","more":"%b","content":"%b"}]}' % (
        (text * (LONG // len(text) + before)),
        text * (LONG // len(text) + before) + b"end",
    )
    assert (conversation.excerpt(body, "messages") is not None) is is_tried
    same(monkeypatch, Api.CHAT, body, LONG, HEAD)


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"content":"%b"}],"model":"m","model":"n"}',
        b'{"messages":[{"content":"%b"}],"messages":[]}',
        b'{"messages":[{"content":"%b"}],"user":"%b","user":"x"}',
        b'{"messages":[{"content":"%b"}],"kv_transfer_params":{}}',
        b'{"messages":[{"content":"%b"}]',
        b'{"messages":[{"content":"%b"},5]}',
    ],
)
def test_what_is_refused_of_a_large_body_is_refused_for_the_same(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    same(monkeypatch, Api.CHAT, body.replace(b"%b", b"tale " * LONG), LONG, 64)
