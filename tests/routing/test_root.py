"""What tells conversations apart: it stays the same from turn to turn, whatever clients change on the way."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.request.reader import Reading, parse
from smetric.request.request import Api, InferenceRequest, TokenRatio
from smetric.routing.routes import root_of

USER = {"role": "user", "content": "first"}
MORE = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "second"}]


def request(api: Api, *headers: tuple[bytes, bytes], **body: Any) -> InferenceRequest:
    return parse(api, orjson.dumps({"model": "m", **body}), headers, TokenRatio(), Reading())


def chat(*messages: Any, **more: Any) -> int | None:
    return root_of(request(Api.CHAT, messages=list(messages), **more))


def test_a_conversation_keeps_its_root_as_it_grows() -> None:
    root = chat({"role": "system", "content": "s"}, USER)
    assert root is not None
    assert chat({"role": "system", "content": "s, edited"}, USER, *MORE) == root
    assert chat(USER, *MORE, *MORE, tools=[{"type": "function"}]) == root
    assert chat({"role": "user", "content": "another"}, *MORE) != root


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text(min_size=1)), min_size=1))
def test_whatever_is_said_later_a_conversation_stays_the_same(turns: list[tuple[str, str]]) -> None:
    said = [{"role": "user", "content": "first"}, *({"role": role, "content": text} for role, text in turns)]
    roots = {root_of(InferenceRequest(api=Api.CHAT, body=body(said[:length]))) for length in range(1, len(said) + 1)}
    assert len(roots) == 1
    assert None not in roots


def body(said: list[dict[str, str]]) -> bytes:
    return orjson.dumps({"model": "m", "messages": said})


@pytest.mark.parametrize(
    "later",
    [
        {"role": "user", "content": ["one", {"type": "text", "text": "two"}]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": None, "content": {"shape": "nobody knows"}},
    ],
)
def test_whatever_shape_later_messages_have_a_conversation_stays_the_same(later: dict[str, Any]) -> None:
    assert chat(USER, later) == chat(USER) is not None


def test_marks_for_caching_and_the_form_of_text_change_no_root() -> None:
    marked = {"type": "text", "text": "first", "cache_control": {"type": "ephemeral"}}
    plain = {"type": "text", "text": "first"}
    roots = {
        root_of(request(Api.MESSAGES, messages=[{"role": "user", "content": content}, *MORE]))
        for content in ("first", ["first"], [marked], [plain])
    }
    assert len(roots) == 1


def test_two_pictures_are_two_conversations() -> None:
    first, second = (
        chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:{name}"}}]})
        for name in "ab"
    )
    assert None is not first != second is not None


def test_the_session_that_a_client_names_is_the_root_whatever_the_text() -> None:
    header = (b"x-claude-code-session-id", b"s-1")
    first = root_of(request(Api.CHAT, header, messages=[USER]))
    compacted = root_of(request(Api.CHAT, header, messages=[{"role": "user", "content": "summary"}]))
    assert first == compacted != root_of(request(Api.CHAT, messages=[USER]))


def test_responses_are_told_by_their_first_input() -> None:
    said = [
        {"role": "user", "content": [{"type": "input_text", "text": "first"}]},
        {"type": "reasoning", "summary": []},
    ]
    assert root_of(request(Api.RESPONSES, input=said)) == root_of(request(Api.RESPONSES, input=[USER, *MORE]))
    assert root_of(request(Api.RESPONSES, input="first")) is not None


def test_it_is_the_same_in_every_process_and_version() -> None:
    assert chat(USER) == 14217346735326365525


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.COMPLETIONS, {"prompt": "first"}),
        (Api.CHAT, {"messages": []}),
        (Api.CHAT, {"messages": [{"role": "system", "content": "s"}]}),
        (Api.CHAT, {"messages": [{"role": "user", "content": ""}]}),
        (Api.RESPONSES, {"input": ""}),
    ],
)
def test_where_no_conversation_can_be_told_there_is_no_root(api: Api, body: dict[str, Any]) -> None:
    assert root_of(request(api, **body)) is None


@pytest.mark.parametrize("body", [b"", b"[]", b'{"messages":7}', b'{"messages":[7]}', b'{"input":{}}', b"\xff{}"])
def test_odd_bodies_have_no_root_and_raise_nothing(body: bytes) -> None:
    assert root_of(InferenceRequest(api=Api.CHAT, body=body)) is None
    assert root_of(InferenceRequest(api=Api.CHAT)) is None
