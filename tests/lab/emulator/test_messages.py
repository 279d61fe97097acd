"""Messages requests in chat form."""

from __future__ import annotations

from typing import Any

from smetric.lab.emulator.call import EngineLimits, Fields
from smetric.lab.emulator.messages import count_tokens, parse_message
from smetric.lab.emulator.prompt import render

LIMITS = EngineLimits(("tiny",), 4096)


def prompt(**body: Any) -> bytes:
    return parse_message(Fields({"max_tokens": 4, **body}), LIMITS).prompts[0]


def test_messages_billing_header_does_not_change_prompt() -> None:
    def with_header(value: str) -> bytes:
        blocks = [
            {"type": "text", "text": f"x-anthropic-billing-header: {value}"},
            {"type": "text", "text": "You are a coding agent."},
        ]
        return prompt(system=blocks, messages=[{"role": "user", "content": "hi"}])

    assert with_header("a") == with_header("b")
    plain = prompt(system="You are a coding agent.", messages=[{"role": "user", "content": "hi"}])
    assert with_header("a") == plain


def test_messages_tool_use_and_results_become_calls_and_tool_messages() -> None:
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "let me see"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "and tomorrow?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    call = {"function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
    assert prompt(messages=messages) == render(
        [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            {"role": "tool", "content": "sunny"},
            {"role": "user", "content": "and tomorrow?"},
        ]
    )


def test_messages_count_tokens_equals_prompt_length() -> None:
    body = {"messages": [{"role": "user", "content": "hello world"}], "tools": [{"name": "f", "input_schema": {}}]}
    count = len(prompt(**body)) // 4
    answer = count_tokens(Fields(body), LIMITS)
    assert answer == {"input_tokens": count, "context_management": {"original_input_tokens": count}}
