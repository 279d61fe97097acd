"""Embeddings, forms, tool calls and stored responses of an emulated engine, beyond what the official clients read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smetric.lab.emulator.call import EngineError, InvalidBodyError, ToolCall, tool_call
from smetric.lab.emulator.embeddings import form_of

FORM = (
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\0\xff\r\n--b--\r\n'
)


def test_form_has_texts_and_hashes_of_files() -> None:
    fields = form_of(b"multipart/form-data; boundary=b", FORM)
    assert fields.string("model") == "m"
    assert len(fields.string("file") or "") == 16


@pytest.mark.parametrize(("kind", "body"), [(b"application/json", b"{}"), (b"", b""), (b"multipart/form-data", FORM)])
def test_form_without_a_file_is_invalid(kind: bytes, body: bytes) -> None:
    with pytest.raises(InvalidBodyError, match="Field required"):
        form_of(kind, body)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"function": {"name": name, "parameters": {"properties": properties, "required": list(properties)}}}


TOOLS = [
    tool("first", mode={"type": "string", "enum": ["fast", "slow"]}, text={"type": "string"}, deep={"type": "object"}),
    tool("second", on={"type": "boolean"}),
]


@pytest.mark.parametrize(
    ("choice", "name", "arguments"),
    [
        ("required", "first", {"mode": "fast", "deep": {}, "text": 'a "b"'}),
        ({"type": "any"}, "first", {"mode": "fast", "deep": {}, "text": 'a "b"'}),
        ({"type": "tool", "name": "second"}, "second", {"on": False, "input": 'a "b"'}),
        ({"function": {"name": "second"}}, "second", {"on": False, "input": 'a "b"'}),
    ],
)
def test_tool_call_fits_its_schema(choice: Any, name: str, arguments: dict[str, Any]) -> None:
    made = tool_call(TOOLS, choice, "call_")
    assert isinstance(made, ToolCall)
    assert (made.name, json.loads(made.arguments('a "b"'))) == (name, arguments)
    assert made.id.startswith("call_")


@pytest.mark.parametrize("choice", [None, "auto", "none", {"type": "auto"}])
def test_tool_call_is_none_where_the_model_may_choose(choice: Any) -> None:
    assert tool_call(TOOLS, choice, "call_") is None


def test_tool_call_of_an_unknown_function_is_refused() -> None:
    for tools, choice in ((TOOLS, {"name": "third"}), ([], "required")):
        with pytest.raises(EngineError, match="not in tools"):
            tool_call(tools, choice, "call_")
