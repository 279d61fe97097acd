"""Anthropic Messages bodies, as the conversation that vLLM makes of them.

Follows `entrypoints/anthropic/serving.py` of vLLM 0.32: system blocks are joined, Claude Code's billing header and
`cache_control` marks are dropped, tool results become messages of their own. Which of two ways a conversion takes
depends on the chat template in places; `traits.py` finds that out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smetric.tokenize.chat import Chat, Refused, Unsupported, string, template_kwargs

_BILLING = "x-anthropic-billing-header"
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def has_inline_system(body: Mapping[str, Any]) -> bool:
    """Whether a system message stands among the messages."""
    return any(message.get("role") == "system" for message in _objects(body.get("messages")))


def disables_thinking(body: Mapping[str, Any]) -> bool:
    """Whether thinking is switched off, which engines express as an effort."""
    thinking = body.get("thinking")
    return isinstance(thinking, dict) and thinking.get("type") == "disabled"


def chat_of_messages(body: Mapping[str, Any], *, merge_inline_system: bool, disabled_effort: str) -> Chat:
    """The conversation of a Messages body.

    Args:
        body: decoded.
        merge_inline_system: system messages join the leading one, because the template refuses them elsewhere.
        disabled_effort: the reasoning effort that stands for disabled thinking.

    Raises:
        NotTokenised: its ids cannot be known.
    """
    messages = _objects(body.get("messages"))
    if not messages:
        raise Refused
    chat: list[dict[str, Any]] = []
    system = _top_system(body.get("system"))
    if merge_inline_system:
        system += [text for one in messages if one.get("role") == "system" and (text := _system_text(one))]
    if system:
        chat.append({"role": "system", "content": "".join(system)})
    for message in messages:
        role = message.get("role")
        if role == "system":
            if not merge_inline_system and (text := _system_text(message)):
                chat.append({"role": "system", "content": text})
        elif role in ("user", "assistant"):
            _convert(message, chat)
        else:
            raise Refused
    effort = None
    output = body.get("output_config")
    if isinstance(output, dict) and output.get("effort") is not None:
        effort = output["effort"]
        if effort not in _EFFORTS:
            raise Refused
    if disables_thinking(body):
        effort = disabled_effort
    return Chat(chat, _tools(body, messages), template_kwargs(body, effort))


def _objects(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refused
    return value


def _top_system(system: Any) -> list[str]:
    if not system:
        return []
    return [system] if isinstance(system, str) else _unbilled(system)


def _unbilled(blocks: Any) -> list[str]:
    """Texts of the text blocks, without Claude Code's billing header."""
    texts = [string(block["text"]) for block in _objects(blocks) if block.get("type") == "text" and block.get("text")]
    return [text for text in texts if not text.startswith(_BILLING)]


def _system_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return "" if content.startswith(_BILLING) else content
    return "".join(_unbilled(content))


def _convert(message: Mapping[str, Any], chat: list[dict[str, Any]]) -> None:
    """Append what *message* becomes: its tool results first, then itself."""
    role, content = message["role"], message.get("content")
    made: dict[str, Any] = {"role": role}
    if isinstance(content, str):
        made["content"] = content
    else:
        parts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        reasoning: list[str] = []
        for block in _objects(content):
            _convert_block(block, role, parts, calls, reasoning, chat)
        if reasoning:
            made["reasoning"] = "".join(reasoning)
        if calls:
            made["tool_calls"] = calls
        if parts:
            made["content"] = parts[0]["text"] if len(parts) == 1 else parts
    if role == "assistant" or "content" in made:
        chat.append(made)


def _convert_block(
    block: Mapping[str, Any],
    role: str,
    parts: list[dict[str, Any]],
    calls: list[dict[str, Any]],
    reasoning: list[str],
    chat: list[dict[str, Any]],
) -> None:
    kind = block.get("type")
    if kind == "text":
        if block.get("text"):
            parts.append({"type": "text", "text": string(block["text"])})
    elif kind == "thinking":
        if block.get("thinking") is not None:
            reasoning.append(string(block["thinking"]))
    elif kind == "tool_use":
        # The id is of no template's interest but some; without one the engine makes one of the time of day.
        function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
        calls.append({"id": string(block.get("id")), "type": "function", "function": function})
    elif kind == "tool_result":
        if role == "user":
            _convert_result(block, chat)
        else:
            content = block.get("content")
            parts.append({"type": "text", "text": f"Tool result: {str(content) if content else ''}"})
    elif kind == "image":
        raise Unsupported
    elif kind not in ("redacted_thinking", "tool_reference"):
        raise Refused


def _convert_result(block: Mapping[str, Any], chat: list[dict[str, Any]]) -> None:
    content = block.get("content")
    texts: list[str] = []
    references: list[dict[str, Any]] = []
    if isinstance(content, str):
        texts.append(content)
    elif content is not None:
        for item in _objects(content):
            if item.get("type") == "text":
                texts.append(string(item.get("text", "")))
            elif item.get("type") == "image":
                raise Unsupported
            elif item.get("type") == "tool_reference" and (name := item.get("tool_name") or item.get("name")):
                references.append({"type": "tool_reference", "name": string(name)})
    id = block.get("tool_use_id") or ""
    chat.append({"role": "tool", "tool_call_id": id, "content": "\n".join(texts)})
    if references:
        chat.append({"role": "tool", "tool_call_id": id, "content": references})


def _tools(body: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The tools in effect at the end of the conversation, in the shape of the chat API; system messages change them."""
    given = body.get("tools")
    changes = [
        block
        for message in messages
        if isinstance(message.get("content"), list)
        for block in _objects(message["content"])
        if block.get("type") in ("tool_addition", "tool_removal")
    ]
    if given is None and not changes:
        return None
    tools = _objects(given or [])
    if changes:
        tools = _changed(tools, changes)
    return [_tool(tool) for tool in tools]


def _changed(tools: list[dict[str, Any]], changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {string(tool.get("name")): tool for tool in tools}
    removed: set[str] = set()
    for block in changes:
        change = block.get("tool")
        if not isinstance(change, dict):
            raise Refused
        if change.get("type") == "tool_definition" and isinstance(definition := change.get("definition"), dict):
            name = string(definition.get("name"))
            by_name[name] = definition
        else:
            name = string(change.get("name"))
            if name not in by_name:
                raise Refused
            if block["type"] == "tool_addition":
                by_name[name] = {**by_name[name], "defer_loading": None}
        if block["type"] == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return [tool for name, tool in by_name.items() if name not in removed]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise Refused
    function: dict[str, Any] = {
        "name": string(tool.get("name")),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
    }
    for option in ("strict", "defer_loading"):
        if tool.get(option) is not None:
            function[option] = tool[option]
    return {"type": "function", "function": function}
