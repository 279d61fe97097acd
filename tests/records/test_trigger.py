"""Who sent a request, by its last message."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from smetric.records.traffic import Trigger, trigger_of
from smetric.request.reader import Reading, parse
from smetric.request.request import Api, TokenRatio

RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "files: a b"}
CALL = {"type": "tool_use", "id": "t1", "name": "ls", "input": {}}
SUMMARY = (
    "Your task is to create a detailed summary of the conversation so far, paying attention to the user's requests."
)


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def trigger(api: Api, messages: list[dict[str, Any]], **more: Any) -> Trigger:
    field = "input" if api is Api.RESPONSES else "messages"
    body = orjson.dumps({"model": "m", field: messages, **more})
    prompt = parse(api, body, [], TokenRatio(), Reading()).prompt
    assert prompt is not None
    return trigger_of(prompt.last_message())


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([said("user", "list the files")], Trigger.USER),
        ([said("user", "a"), said("assistant", [CALL]), said("user", [RESULT])], Trigger.AGENT),
        (
            [said("user", "a"), said("assistant", [CALL]), said("user", [RESULT, {"type": "text", "text": "note"}])],
            Trigger.AGENT,
        ),
        ([said("user", "a"), said("assistant", "b"), said("user", "c")], Trigger.USER),
        ([said("user", "a"), said("assistant", "b"), said("user", SUMMARY)], Trigger.COMPACTION),
        ([said("user", "a"), said("assistant", [CALL]), said("user", [RESULT, {"type": "text", "text": SUMMARY}])],
         Trigger.COMPACTION),
        ([said("user", "a"), said("assistant", "an answer begun")], Trigger.USER),
        ([said("user", SUMMARY), said("assistant", "b"), said("user", "c")], Trigger.USER),
    ],
)  # fmt: skip
def test_messages(messages: list[dict[str, Any]], wanted: Trigger) -> None:
    assert trigger(Api.MESSAGES, messages, system="be brief", tools=[{"name": "ls"}]) is wanted


def test_chat_brings_tools_results_in_messages_of_their_own() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    begun = [said("system", "s"), said("user", "a"), said("assistant", None, tool_calls=[call, call])]
    results = [said("tool", "files", tool_call_id="t1"), said("tool", "more", tool_call_id="t2")]
    assert trigger(Api.CHAT, begun + results) is Trigger.AGENT
    assert trigger(Api.CHAT, [*begun, *results, said("user", "go on")]) is Trigger.USER


def test_responses_bring_them_as_items() -> None:
    call = {"type": "function_call", "call_id": "t1", "name": "ls", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "t1", "output": "files"}
    assert trigger(Api.RESPONSES, [said("user", "a"), call, output]) is Trigger.AGENT
    assert trigger(Api.RESPONSES, [said("user", "You are performing a CONTEXT CHECKPOINT COMPACTION.")]) is (
        Trigger.COMPACTION
    )


def test_what_is_no_conversation_is_a_users() -> None:
    body = orjson.dumps({"model": "m", "prompt": SUMMARY})
    prompt = parse(Api.COMPLETIONS, body, [], TokenRatio(), Reading()).prompt
    assert prompt is not None
    assert prompt.last_message() == []
    assert trigger_of([]) is Trigger.USER


def test_of_a_long_message_only_the_beginning_is_seen() -> None:
    body = orjson.dumps({"model": "m", "messages": [said("user", "x" * 1_000_000)]})
    prompt = parse(Api.CHAT, body, [], TokenRatio(), Reading()).prompt
    assert prompt is not None
    assert sum(len(text) for _, text in prompt.last_message()) < 10_000
