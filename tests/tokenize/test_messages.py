"""Messages bodies become the conversations that vLLM makes of them. (Whole bodies with their ids: `test_local.py`.)"""

from __future__ import annotations

from typing import Any

import pytest

from smetric.sources.tokens.chat import (
    Chat,
    Refused,
    Unsupported,
    chat_of_messages,
    disables_thinking,
    has_inline_system,
)
from tests.tokenize.recorded import recorded


def converted(body: dict[str, Any], *, merge: bool = False, effort: str = "none") -> Chat:
    return chat_of_messages(body, merge_inline_system=merge, disabled_effort=effort)


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


BILLING = text("x-anthropic-billing-header: cc_version=2; cch=1f;")
INLINE = {
    "system": "top",
    "messages": [{"role": "user", "content": "q"}, {"role": "system", "content": [BILLING, text("reminder")]}],
}


def test_system_blocks_are_joined_without_the_billing_header() -> None:
    chat = converted({"system": [BILLING, text("a"), text("b")], "messages": [{"role": "user", "content": "q"}]})
    assert chat.messages == [{"role": "system", "content": "ab"}, {"role": "user", "content": "q"}]


def test_system_messages_stay_in_place_or_join_the_first() -> None:
    assert has_inline_system(INLINE)
    assert [m["content"] for m in converted(INLINE).messages] == ["top", "q", "reminder"]
    assert [m["content"] for m in converted(INLINE, merge=True).messages] == ["topreminder", "q"]


def test_tool_results_come_before_the_text_beside_them() -> None:
    blocks = [text("look"), {"type": "tool_result", "tool_use_id": "t", "content": [text("a"), text("b")]}]
    assert converted({"messages": [{"role": "user", "content": blocks}]}).messages == [
        {"role": "tool", "tool_call_id": "t", "content": "a\nb"},
        {"role": "user", "content": "look"},
    ]


def test_a_result_alone_leaves_no_empty_message() -> None:
    blocks = [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]
    assert [m["role"] for m in converted({"messages": [{"role": "user", "content": blocks}]}).messages] == ["tool"]


def test_calls_reasoning_and_text_of_an_assistant_are_one_message() -> None:
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


def test_cache_marks_reach_no_template() -> None:
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
def test_thinking_and_effort_become_arguments_of_the_template(more: dict[str, Any], kwargs: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "q"}], **more}
    assert converted(body).template_kwargs == kwargs
    assert disables_thinking(body) == (more.get("thinking") == {"type": "disabled"})


@pytest.mark.parametrize("where", ["block", "result"])
def test_images_are_unsupported(where: str) -> None:
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
def test_what_engines_refuse_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        converted(body)


def test_converting_leaves_the_body_as_it_was() -> None:
    for row in recorded("plain"):
        if row.api.value == "messages":
            before = repr(row.body)
            converted(row.body)
            assert repr(row.body) == before
