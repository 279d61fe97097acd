from __future__ import annotations

import json
import string
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from smetric.request.conversation import render
from smetric.request.parts import Change, Parts, divergence, parts_of

CANARY = "canary-text"


def parts(messages: list[Any], **more: Any) -> Parts:
    raws = {name: Raw(json.dumps(value).encode()) for name, value in more.items()}
    conversation = render(
        "messages", Raw(json.dumps(messages).encode()), tools=raws.get("tools"), system=raws.get("system")
    )
    made = parts_of(conversation.pieces, conversation.outline)
    assert made.size == sum(map(len, conversation.pieces))
    return made


def user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def result(text: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": text}


def places(made: Parts) -> list[str]:
    return [made.place(at) for at in range(len(made.hashes))]


def test_each_tool_system_block_message_and_tool_result_is_a_part() -> None:
    made = parts(
        [user("one"), {"role": "assistant", "content": "two"}, {"role": "user", "content": [result("r"), result("s")]}],
        tools=[{"name": "a"}, {"name": "b"}],
        system=[{"type": "text", "text": "rules"}, {"type": "text", "text": "more"}],
    )
    assert places(made) == [
        *("tools", "tools", "system[0]", "system[1]", "messages[0]", "messages[1]", "messages[2]", "messages[2]"),
    ]
    assert list(made.ends) == sorted(made.ends)
    assert made.ends[-1] == made.size


def test_text_beside_tool_results_is_a_part_of_its_own() -> None:
    made = parts([{"role": "user", "content": [result("r"), {"type": "text", "text": "go on"}, result("s")]}])
    assert [made.kinds[at] for at in range(3)] == [4, 2, 4]
    other = parts([{"role": "user", "content": [result("r"), {"type": "text", "text": "stop"}, result("s")]}])
    found = divergence(made, other)
    assert found is not None
    assert (found.part, found.place, found.change) == ("user", "messages[0]", Change.CHANGED)


def test_roles_of_chat_messages_and_of_responses_items_say_what_they_are() -> None:
    chat = parts(
        [
            {"role": "system", "content": "rules"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
            {"role": "tool", "tool_call_id": "t", "content": "r"},
        ]
    )
    assert list(chat.kinds) == [1, 2, 3, 4]
    assert places(chat) == [f"messages[{number}]" for number in range(4)]
    items = parts([{"type": "function_call", "name": "f", "arguments": "{}"}, {"type": "function_call_output"}])
    assert list(items.kinds) == [3, 4]


def test_messages_of_unknown_shape_and_tools_that_are_no_list_are_parts_too() -> None:
    messages = [{"role": "user", "content": {"unknown": 1}}, {"role": "user", "content": "x"}]
    for tools in ({"odd": 1}, [1, 2], [{"name": "a"}, None]):
        assert places(parts(messages, tools=tools)) == ["tools", "messages[0]", "messages[1]"]


def test_an_empty_conversation_has_no_parts() -> None:
    made = parts([])
    assert (list(made.hashes), made.size, made.messages_from) == ([], 0, 0)
    assert divergence(made, parts([user("x")])) is None


def test_no_text_is_kept() -> None:
    made = parts([user(CANARY)], tools=[{"name": CANARY}], system=CANARY)
    assert CANARY not in repr(made)
    assert CANARY.encode() not in made.hashes.tobytes()


def test_tools_say_what_became_of_them() -> None:
    a, b, c = ({"name": name} for name in "abc")
    for tools, change in (
        ([b, a], Change.REORDERED),
        ([a, b, c], Change.ADDED),
        ([c, a, b], Change.ADDED),
        ([a], Change.REMOVED),
        ([a, c], Change.CHANGED),
    ):
        found = divergence(parts([user("x")], tools=[a, b]), parts([user("x")], tools=tools))
        assert found is not None
        assert (found.part, found.place, found.change) == ("tools", "tools", change)


def test_a_message_that_comes_up_again_by_chance_is_not_taken_for_the_rest() -> None:
    before = parts([user("one"), user("two"), user("ok"), user("three")])
    after = parts([user("one"), user("ok"), user("four"), user("five")])
    found = divergence(before, after)
    assert found is not None
    assert (found.place, found.change) == ("messages[1]", Change.CHANGED)


TEXTS = st.lists(st.text(string.ascii_lowercase, min_size=1, max_size=3), min_size=1, max_size=12)


@given(TEXTS, TEXTS)
def test_going_on_is_no_divergence_and_neither_is_going_back(texts: list[str], more: list[str]) -> None:
    short, long = parts([user(text) for text in texts]), parts([user(text) for text in texts + more])
    assert divergence(short, long) is None
    assert divergence(long, short) is None
    assert short.shared_with(long) == len(texts)


@given(st.lists(st.text(string.ascii_lowercase, max_size=3), min_size=1, max_size=12, unique=True), st.data())
def test_the_first_edited_message_is_named_and_ends_within_reach(texts: list[str], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(texts) - 1))
    edited = [*texts[:at], texts[at] + "!", *texts[at + 1 :]]
    before, after = parts([user(text) for text in texts]), parts([user(text) for text in edited])
    found = divergence(before, after)
    assert found is not None
    assert (found.part, found.place) == ("user", f"messages[{at}]")
    assert found.change is Change.CHANGED
    assert found.reach_bytes == after.ends[at]
