"""Fields of one request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest

from smetric.lab.emulator.call import EngineError, EngineLimits, Fields, InvalidBodyError, UnreadableBodyError
from smetric.lab.emulator.instance import EmulatedGeneration
from smetric.lab.emulator.messages import count_tokens
from smetric.lab.emulator.responses import ResponseStore
from smetric.lab.emulator.server import detokenize, generators, tokenize

LIMITS = EngineLimits(("tiny",), 4096)
TEXT = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:"}}]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ADDITION = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "g"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "r"},
        ],
        "tools": [FUNCTION],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "max_tokens": 2,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.1,
        "seed": 1,
        "cache_salt": "s",
        "priority": 1,
    },
    "/v1/completions": {"prompt": ["a", [1, 2]], "max_tokens": 2, "echo": True, "min_tokens": 1, "ignore_eos": True},
    "/v1/messages": {
        "max_tokens": 3,
        "system": TEXT,
        "messages": [
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": TEXT}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]},
            {"role": "system", "content": [ADDITION]},
        ],
        "tools": [{"name": "f", "input_schema": {}}],
        "tool_choice": {"type": "any"},
    },
    "/v1/responses": {
        "instructions": "i",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "z"}], "status": "incomplete"},
        ],
        "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}]}],
        "tool_choice": {"type": "function", "name": "n__g"},
        "max_output_tokens": 3,
        "store": True,
        "background": True,
    },
    "/v1/embeddings": {"input": ["a", [1, 2]], "dimensions": 3, "encoding_format": "base64"},
    "/v1/audio/transcriptions": {"file": "hash", "prompt": "p", "stream": "false"},
    "/tokenize": {"messages": [{"role": "user", "content": "h"}], "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "h"}]},
}
QUERIES = {"/tokenize": tokenize, "/detokenize": detokenize, "/v1/messages/count_tokens": count_tokens}
JUNK: list[Any] = [
    *(None, True, 0, -1, 1.5, 10**30, 2**32, float("inf"), float("nan")),
    *("", "x", "ü", "\ud800", [], [None], [1], ["x"], [[]], {}, {"a": 1}, {"type": []}, {"type": "text", "text": 5}),
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*at, key))


def changed(body: dict[str, Any], at: tuple[Any, ...], junk: Any) -> Any:
    if not at:
        return junk
    body = deepcopy(body)
    parent: Any = body
    for key in at[:-1]:
        parent = parent[key]
    parent[at[-1]] = junk
    return body


def generated(path: str) -> Callable[[Fields, EngineLimits], EmulatedGeneration]:
    return lambda fields, limits: EmulatedGeneration(
        generators(ResponseStore())[path].parse(fields, limits), limits, 16
    )


def status(answer: Callable[[Fields, EngineLimits], object], body: bytes) -> int:
    try:
        answer(Fields.of_body(body), LIMITS)
    except EngineError as error:
        return error.status
    return 200


@pytest.mark.parametrize("path", BODIES)
def test_fields_any_value_anywhere_is_served_or_rejected(path: str) -> None:
    answer: Callable[[Fields, EngineLimits], object] = QUERIES.get(path) or generated(path)
    answer(Fields(deepcopy(BODIES[path])), LIMITS)
    for at in places(BODIES[path]):
        for junk in JUNK:
            body = json.dumps(changed(BODIES[path], at, junk)).encode()
            assert status(answer, body) < 500, (at, junk)


@pytest.mark.parametrize("body", [b'{"a":"\xff"}', b"[" * 200_000, b'{"a":' + b"1" * 5000 + b"}"])
def test_fields_report_unparsable_body_as_unreadable(body: bytes) -> None:
    with pytest.raises(UnreadableBodyError):
        Fields.of_body(body)


def test_fields_reject_half_a_surrogate_pair() -> None:
    with pytest.raises(InvalidBodyError, match="valid string"):
        Fields.of_body(b'{"a": ["\\ud800"]}')
