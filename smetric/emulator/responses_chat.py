"""Responses requests in chat form, as vLLM converts them before it renders them."""

from __future__ import annotations

import json
from typing import Any

from smetric.emulator.error import InvalidBodyError
from smetric.emulator.fields import Fields

#: States of a last item that is to be continued.
_OPEN = ("in_progress", "incomplete")
#: What a custom tool takes.
_FREEFORM = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


def chat_of(fields: Fields) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
    """Messages and tools of a Responses request, as the chat API has them, and whether the last message is left open.

    Raises:
        InvalidBodyError: an item has another form.
    """
    chat: list[dict[str, Any]] = []
    if instructions := fields.string("instructions"):
        chat.append({"role": "system", "content": instructions})
    items = fields.required("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise InvalidBodyError("string_type", "body.input", "Input should be a valid string", items)
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            message = "Input should be a valid dictionary"
            raise InvalidBodyError("model_attributes_type", f"body.input.{index}", message, item)
        _add(item, chat)
    is_open = bool(items) and items[-1].get("type", "message") in ("message", "reasoning")
    return chat, _tools(fields.objects("tools")), is_open and items[-1].get("status") in _OPEN


def _add(item: dict[str, Any], chat: list[dict[str, Any]]) -> None:
    """Append what *item* becomes, or put it into the assistant's message before it."""
    kind = item.get("type")
    last = chat[-1] if chat and chat[-1]["role"] == "assistant" else None
    if kind in ("function_call", "custom_tool_call"):
        if last is None:
            last = {"role": "assistant"}
            chat.append(last)
        last.setdefault("tool_calls", []).append(_call(item))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        chat.append({"role": "tool", "content": item.get("output")})
    elif kind == "reasoning":
        # The template does not show it, but it begins a message.
        _put("reasoning", "", last, chat)
    elif item.get("role") == "assistant" and (text := _first_text(item.get("content"))) is not None:
        _put("content", text, last, chat)
    else:
        chat.append({"role": item.get("role"), "content": item.get("content")})


def _put(name: str, text: str, last: dict[str, Any] | None, chat: list[dict[str, Any]]) -> None:
    if last is not None and last.get(name) is None:
        last[name] = text
    else:
        chat.append({"role": "assistant", name: text})


def _call(item: dict[str, Any]) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    elif item.get("namespace"):
        name = f"{item['namespace']}__{name}"
    return {"function": {"name": name, "arguments": arguments}}


def _first_text(content: Any) -> str | None:
    """Text of an assistant's message: vLLM takes the first part only."""
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0].get("text")
    return content if isinstance(content, str) else None


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Functions, those of namespaces, and custom tools as functions of one text; models are shown no others."""
    made: list[dict[str, Any]] = []
    for tool in tools:
        kind = tool.get("type")
        if kind == "function":
            made.append(_function(tool, tool.get("name")))
        elif kind == "custom":
            made.append(_function({**tool, "parameters": _FREEFORM}, tool.get("name")))
        elif kind == "namespace":
            inner = [one for one in Fields(tool, "body.tools").objects("tools") if one.get("type") == "function"]
            made += [_function(one, f"{tool.get('name')}__{one.get('name')}") for one in inner]
    return made


def _function(tool: dict[str, Any], name: Any) -> dict[str, Any]:
    function = {"name": name, "description": tool.get("description"), "parameters": tool.get("parameters")}
    options = {option: tool[option] for option in ("strict", "defer_loading") if tool.get(option) is not None}
    return {"type": "function", "function": {**function, **options}}
