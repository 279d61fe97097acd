"""Conversion of request bodies to conversations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric.sources.tokens.chat import (
    ChatPrompt,
    NotTokenised,
    Refused,
    Unsupported,
    chat_of_chat,
    chat_of_messages,
    chat_of_responses,
    disables_thinking,
    has_inline_system,
    prompt_of_completion,
)
from smetric.sources.tokens.template import ChatTemplate
from tests.sources.tokens.recorded import DATA, recorded

READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "chat": chat_of_chat,
    "completions": prompt_of_completion,
    "messages": lambda body: chat_of_messages(body, merge_inline_system=True, disabled_effort="none"),
    "responses": chat_of_responses,
}
VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1.5, "", "user", "assistant", "system", "text", "x-anthropic-billing-header", -1]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "function", "name"]), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value within *value*."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*at, key))
    return found


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    key, *rest = at
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = replaced(value[key], tuple(rest), new)
    return copy


BODIES = [(row.api.value, row.body, places(row.body)) for row in recorded("plain")]
TEMPLATE = ChatTemplate((DATA / "thinking.jinja").read_text(), {})


@given(data=st.data())
@settings(max_examples=200)
def test_conversions_convert_or_refuse_any_body(data: st.DataObject) -> None:
    api, body, paths = data.draw(st.sampled_from(BODIES))
    broken = replaced(body, data.draw(st.sampled_from(paths)), data.draw(VALUES))
    try:
        prompt = READERS[api](broken)
        if api != "completions":
            assert isinstance(TEMPLATE.render(prompt), str)
    except NotTokenised:
        return


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": {}},
        {"messages": [5]},
        {"messages": [{"content": "q"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "user", "content": [5]}]},
        {"messages": [{"role": "user", "content": "q"}], "chat_template_kwargs": 5},
    ],
)
def test_chat_of_chat_refuses_what_engines_refuse(body: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        chat_of_chat(body)


def test_chat_of_chat_renames_reasoning_content() -> None:
    messages = [
        {"role": "assistant", "reasoning_content": "old"},
        {"role": "assistant", "reasoning_content": "old", "reasoning": "new"},
        {"role": "assistant", "reasoning_content": None},
    ]
    made = chat_of_chat({"messages": messages}).messages
    assert [message.get("reasoning") for message in made] == ["old", "new", None]
    assert all("reasoning_content" not in message for message in made)


def converted(body: dict[str, Any], *, merge: bool = False, effort: str = "none") -> ChatPrompt:
    return chat_of_messages(body, merge_inline_system=merge, disabled_effort=effort)


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


BILLING = text("x-anthropic-billing-header: cc_version=2; cch=1f;")
INLINE = {
    "system": "top",
    "messages": [{"role": "user", "content": "q"}, {"role": "system", "content": [BILLING, text("reminder")]}],
}


def test_chat_of_messages_joins_system_blocks_without_billing_header() -> None:
    chat = converted({"system": [BILLING, text("a"), text("b")], "messages": [{"role": "user", "content": "q"}]})
    assert chat.messages == [{"role": "system", "content": "ab"}, {"role": "user", "content": "q"}]


def test_chat_of_messages_keeps_or_merges_system_messages() -> None:
    assert has_inline_system(INLINE)
    assert [m["content"] for m in converted(INLINE).messages] == ["top", "q", "reminder"]
    assert [m["content"] for m in converted(INLINE, merge=True).messages] == ["topreminder", "q"]


def test_chat_of_messages_puts_tool_results_before_text() -> None:
    blocks = [text("look"), {"type": "tool_result", "tool_use_id": "t", "content": [text("a"), text("b")]}]
    assert converted({"messages": [{"role": "user", "content": blocks}]}).messages == [
        {"role": "tool", "tool_call_id": "t", "content": "a\nb"},
        {"role": "user", "content": "look"},
    ]


def test_chat_of_messages_leaves_no_empty_message_beside_result() -> None:
    blocks = [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]
    assert [m["role"] for m in converted({"messages": [{"role": "user", "content": blocks}]}).messages] == ["tool"]


def test_chat_of_messages_joins_parts_of_assistant() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        text("a"),
        {"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "é"}},
    ]
    assert converted({"messages": [{"role": "assistant", "content": blocks}]}).messages == [
        {
            "role": "assistant",
            "content": "a",
            "reasoning": "hm",
            "tool_calls": [
                {"id": "t", "type": "function", "function": {"name": "Bash", "arguments": '{"command": "\\u00e9"}'}}
            ],
        }
    ]


def test_chat_of_messages_drops_cache_control() -> None:
    marked = {**text("a"), "cache_control": {"type": "ephemeral"}}
    tool = {"name": "f", "input_schema": {"properties": {}}, "cache_control": {"type": "ephemeral"}}
    chat = converted({"system": [marked], "messages": [{"role": "user", "content": [marked, marked]}], "tools": [tool]})
    assert "cache_control" not in repr(chat)
    assert chat.tools == [
        {
            "type": "function",
            "function": {"name": "f", "description": None, "parameters": {"properties": {}, "type": "object"}},
        }
    ]


@pytest.mark.parametrize(
    ("more", "kwargs"),
    [
        ({}, {}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high", "enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
            {"reasoning_effort": "none", "enable_thinking": False},
        ),
        (
            {"output_config": {"effort": "low"}, "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
    ],
)
def test_chat_of_messages_passes_thinking_and_effort(more: dict[str, Any], kwargs: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "q"}], **more}
    assert converted(body).template_kwargs == kwargs
    assert disables_thinking(body) == (more.get("thinking") == {"type": "disabled"})


@pytest.mark.parametrize("where", ["block", "result"])
def test_chat_of_messages_does_not_support_images(where: str) -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "x"}}
    block = image if where == "block" else {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    with pytest.raises(Unsupported):
        converted({"messages": [{"role": "user", "content": [block]}]})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": "q"},
        {"messages": [1]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "novel"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}]},
        {"messages": [{"role": "user", "content": "q"}], "system": 5},
        {"messages": [{"role": "user", "content": "q"}], "tools": [{"name": "f"}]},
        {"messages": [{"role": "user", "content": "q"}], "output_config": {"effort": "huge"}},
        {"messages": [{"role": "user", "content": "q"}], "chat_template_kwargs": []},
        {"messages": [{"role": "user", "content": [{"type": "tool_addition", "tool": {"name": "f"}}]}]},
        {"messages": [{"role": "system", "content": [{"type": "tool_removal", "tool": {"name": "f"}}]}], "tools": []},
    ],
)
def test_chat_of_messages_refuses_what_engines_refuse(body: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        converted(body)


def test_chat_of_messages_leaves_body_unchanged() -> None:
    for row in recorded("plain"):
        if row.api.value == "messages":
            before = repr(row.body)
            converted(row.body)
            assert repr(row.body) == before


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
MADE = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def message(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def test_chat_of_responses_joins_consecutive_items_of_assistant() -> None:
    items = [reasoning("r"), message("assistant", "a"), CALL, {**CALL, "call_id": "d"}]
    (made,) = chat_of_responses({"input": items}).messages
    assert made == {"role": "assistant", "reasoning": "r", "content": "a", "tool_calls": [MADE, {**MADE, "id": "d"}]}


def test_chat_of_responses_starts_message_at_second_text() -> None:
    made = chat_of_responses({"input": [message("assistant", "a"), message("assistant", "b")]}).messages
    assert made == [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_chat_of_responses_puts_instructions_first() -> None:
    assert chat_of_responses({"input": "q", "instructions": "i"}).messages == [
        {"role": "system", "content": "i"},
        {"role": "user", "content": "q"},
    ]


def test_chat_of_responses_turns_tools_into_functions() -> None:
    tools = [
        {"type": "web_search"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}, {"type": "mcp"}]},
        {"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}},
    ]
    calls = [{**CALL, "namespace": "n"}, {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "é"}]
    chat = chat_of_responses({"input": calls, "tools": tools})
    assert chat.tools is not None
    assert [tool["function"]["name"] for tool in chat.tools] == ["n__f", "patch"]
    assert [call["function"] for call in chat.messages[0]["tool_calls"]] == [
        {"name": "n__f", "arguments": "{}"},
        {"name": "patch", "arguments": '{"input": "é"}'},
    ]


@pytest.mark.parametrize(
    ("last", "is_open"),
    [
        (message("assistant", "a"), False),
        ({**message("assistant", "a"), "status": "completed"}, False),
        ({**message("assistant", "a"), "status": "in_progress"}, True),
        ({**reasoning("r"), "status": "incomplete"}, True),
        ({**CALL, "status": "in_progress"}, False),
    ],
)
def test_chat_of_responses_continues_unfinished_message(last: dict[str, Any], is_open: bool) -> None:
    chat = chat_of_responses({"input": [message("user", "q"), last]})
    assert chat.continue_final_message is is_open
    assert chat.add_generation_prompt is not is_open


def test_chat_of_responses_adds_special_tokens() -> None:
    assert chat_of_responses({"input": "q"}).add_special_tokens


@pytest.mark.parametrize(
    "more",
    [
        {"truncation": "auto"},
        {"previous_response_id": "r"},
        {"conversation": "c"},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}]},
    ],
)
def test_chat_of_responses_does_not_support_what_only_engine_knows(more: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        chat_of_responses({"input": "q", **more})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": 5},
        {"input": []},
        {"input": ["q"]},
        {"input": "q", "instructions": 5},
        {"input": [{"type": "function_call", "name": "f"}]},
        {"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}]},
        {"input": [{"type": "reasoning", "content": ["x"], "summary": []}]},
        {"input": "q", "tools": 5},
        {"input": "q", "tools": [5]},
        {"input": "q", "tools": [{"type": "function"}]},
    ],
)
def test_chat_of_responses_refuses_what_engines_refuse(body: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        chat_of_responses(body)


def test_chat_of_responses_leaves_body_unchanged() -> None:
    for row in recorded("plain"):
        if row.api.value == "responses":
            before = repr(row.body)
            chat_of_responses(row.body)
            assert repr(row.body) == before
