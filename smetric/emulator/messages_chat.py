"""Messages requests in chat form, as vLLM converts them before it renders them."""

from __future__ import annotations

import json
from typing import Any

from smetric.emulator.error import InvalidBodyError
from smetric.emulator.fields import Fields
from smetric.emulator.template import BILLING

#: Blocks of which nothing is rendered again.
_UNSEEN = ("thinking", "redacted_thinking", "tool_reference")


def chat_of(fields: Fields) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools of a Messages request, as the chat API has them.

    Raises:
        InvalidBodyError: a message or block has another form.
    """
    chat: list[dict[str, Any]] = []
    if text := _system(fields.values.get("system")):
        chat.append({"role": "system", "content": text})
    for index, message in enumerate(fields.objects("messages")):
        content = message.get("content")
        if message.get("role") == "system":
            chat += [{"role": "system", "content": text}] if (text := _system(content)) else []
        elif isinstance(content, list):
            chat += _from_blocks(message.get("role"), content, f"body.messages.{index}.content")
        else:
            chat.append({"role": message.get("role"), "content": content})
    return chat, [_tool(tool) for tool in _in_effect(fields)]


def _system(system: Any) -> str:
    """Its texts joined, without the billing header that Claude Code sends."""
    parts = system if isinstance(system, list) else [{"text": system}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type", "text") == "text"]
    return "".join(text for text in texts if isinstance(text, str) and not text.startswith(BILLING))


def _from_blocks(role: Any, blocks: list[Any], at: str) -> list[dict[str, Any]]:
    """What a message of *blocks* becomes: its tool results first, then itself."""
    made: list[dict[str, Any]] = []
    parts: list[Any] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if not isinstance(block, dict):
            message = "Input should be a valid dictionary"
            raise InvalidBodyError("model_attributes_type", f"{at}.{index}", message, block)
        kind = block.get("type")
        if kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            calls.append({"function": {"name": block.get("name") or "", "arguments": arguments}})
        elif kind == "tool_result" and role == "user":
            made += _results(block.get("content"))
        elif kind == "tool_result":
            parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
        elif kind not in _UNSEEN and not (kind == "text" and not block.get("text")):
            parts.append(block)
    if parts or role == "assistant":
        made.append({"role": role, "content": parts or None, "tool_calls": calls})
    return made


def _results(content: Any) -> list[dict[str, Any]]:
    """The message of a tool's result, and one more of the tools it refers to."""
    if not isinstance(content, list):
        return [{"role": "tool", "content": content or ""}]
    references = [item for item in content if isinstance(item, dict) and item.get("type") == "tool_reference"]
    made = [{"role": "tool", "content": [item for item in content if item not in references]}]
    return [*made, {"role": "tool", "content": references}] if references else made


def _in_effect(fields: Fields) -> list[dict[str, Any]]:
    """The tools at the end of the conversation: those given, and what its system messages change."""
    by_name = {_name(tool, f"body.tools.{index}"): tool for index, tool in enumerate(fields.objects("tools"))}
    for index, message in enumerate(fields.objects("messages")):
        content, at = message.get("content"), f"body.messages.{index}.content"
        for block in content if message.get("role") == "system" and isinstance(content, list) else ():
            change = block.get("tool") if isinstance(block, dict) else None
            if not isinstance(change, dict):
                continue
            tool = Fields(change, at).nested("definition").values if change.get("type") == "tool_definition" else None
            name = _name(tool or change, at)
            if block.get("type") == "tool_removal":
                by_name.pop(name, None)
            elif block.get("type") == "tool_addition":
                by_name[name] = tool or {**by_name.get(name, {"name": name}), "defer_loading": None}
    return list(by_name.values())


def _name(tool: dict[str, Any], at: str) -> str | None:
    return Fields(tool, at).string("name")


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if isinstance(schema, dict) and "type" not in schema:
        schema = {**schema, "type": "object"}
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    options = {name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, **options}}
