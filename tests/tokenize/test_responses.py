"""Responses bodies become the conversations that vLLM makes of them. (Whole bodies with their ids: `test_local.py`.)"""

from __future__ import annotations

from typing import Any

import pytest

from smetric.sources.tokens.chat import Refused, Unsupported, chat_of_responses
from tests.tokenize.recorded import recorded

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
MADE = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def message(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def test_reasoning_text_and_calls_in_a_row_are_one_message() -> None:
    items = [reasoning("r"), message("assistant", "a"), CALL, {**CALL, "call_id": "d"}]
    (made,) = chat_of_responses({"input": items}).messages
    assert made == {"role": "assistant", "reasoning": "r", "content": "a", "tool_calls": [MADE, {**MADE, "id": "d"}]}


def test_a_second_text_begins_a_new_message() -> None:
    made = chat_of_responses({"input": [message("assistant", "a"), message("assistant", "b")]}).messages
    assert made == [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_instructions_come_first_and_a_text_is_the_users() -> None:
    assert chat_of_responses({"input": "q", "instructions": "i"}).messages == [
        {"role": "system", "content": "i"},
        {"role": "user", "content": "q"},
    ]


def test_functions_of_namespaces_and_custom_tools_are_functions() -> None:
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
def test_an_unfinished_last_message_is_continued(last: dict[str, Any], is_open: bool) -> None:
    chat = chat_of_responses({"input": [message("user", "q"), last]})
    assert chat.continue_final_message is is_open
    assert chat.add_generation_prompt is not is_open


def test_the_tokenizers_own_special_tokens_are_added() -> None:
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
def test_what_only_the_engine_knows_is_unsupported(more: dict[str, Any]) -> None:
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
def test_what_engines_refuse_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        chat_of_responses(body)


def test_converting_leaves_the_body_as_it_was() -> None:
    for row in recorded("plain"):
        if row.api.value == "responses":
            before = repr(row.body)
            chat_of_responses(row.body)
            assert repr(row.body) == before
