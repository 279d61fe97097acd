"""Responses bodies, as the conversation that vLLM makes of them.

Follows `construct_input_messages` and `construct_tool_dicts` of vLLM 0.32: instructions become the system message,
reasoning, text and calls that follow each other become one assistant message. Responses that continue one stored on
an engine are not here: nobody else knows their history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smetric.tokenize.chat import Chat, Refused, Unsupported, checked, string, template_kwargs

_SEPARATOR = "__"
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
_OPEN = ("in_progress", "incomplete")


def chat_of_responses(body: Mapping[str, Any]) -> Chat:
    """The conversation of a Responses body.

    Raises:
        NotTokenised: its ids cannot be known.
    """
    if body.get("truncation") not in (None, "disabled"):
        raise Unsupported
    if body.get("previous_response_id") is not None or body.get("conversation") is not None:
        raise Unsupported
    messages: list[dict[str, Any]] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    items: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    if not isinstance(items, list):
        raise Refused
    for item in items:
        if not isinstance(item, dict):
            raise Refused
        _add(item, messages)
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    is_open = bool(items) and items[-1].get("type", "message") in ("message", "reasoning")
    is_open = is_open and items[-1].get("status") in _OPEN
    return Chat(
        checked(messages),
        _tools(body.get("tools")),
        template_kwargs(body, effort),
        add_generation_prompt=not is_open,
        continue_final_message=is_open,
        # Responses leave this at the engine's default, which chat requests do not.
        add_special_tokens=True,
    )


def _add(item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    """Append what *item* becomes, or put it into the assistant message before it."""
    kind = item.get("type")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind in ("function_call", "custom_tool_call"):
        call = _call(item)
        if last is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            last.setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        content = _plain(item.get("output"))
        messages.append({"role": "tool", "content": content, "tool_call_id": item.get("call_id")})
    elif kind == "reasoning":
        _put("reasoning", _reasoning(item), last, messages)
    elif item.get("role") == "assistant" and (text := _assistant_text(item.get("content"))) is not None:
        _put("content", text, last, messages)
    elif isinstance(item.get("role"), str) and kind in (None, "message"):
        messages.append({"role": item["role"], "content": _plain(item.get("content"))})
    else:
        raise Unsupported


def _put(name: str, text: str, last: dict[str, Any] | None, messages: list[dict[str, Any]]) -> None:
    if last is not None and last.get(name) is None:
        last[name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    name = string(item.get("name"))
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    else:
        arguments = string(item.get("arguments"))
        if item.get("namespace"):
            name = f"{item['namespace']}{_SEPARATOR}{name}"
    function = {"name": name, "arguments": arguments}
    return {"id": string(item.get("call_id")), "type": "function", "function": function}


def _reasoning(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise Refused
    for field in ("content", "summary"):
        parts = item.get(field)
        if isinstance(parts, list) and parts:
            return string(parts[0].get("text") if isinstance(parts[0], dict) else None)
    return ""


def _assistant_text(content: Any) -> str | None:
    """Text of an assistant message: engines take the first part only."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and isinstance(content[0], dict):
        text = content[0].get("text")
        return text if isinstance(text, str) else None
    return None


def _plain(content: Any) -> Any:
    """*content* with the parts' types as the chat API spells them."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": "text"}
        if isinstance(part, dict) and part.get("type") in ("input_text", "output_text")
        else part
        for part in content
    ]


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """Functions, those of namespaces, and custom tools as functions of one string; others are not shown to models."""
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Refused
    made: list[dict[str, Any]] = []
    for tool in tools:
        if not isinstance(tool, dict):
            raise Refused
        kind = tool.get("type")
        if kind == "function":
            made.append(_function(tool, string(tool.get("name"))))
        elif kind == "custom":
            made.append(_function({**tool, "parameters": _CUSTOM_PARAMETERS}, string(tool.get("name"))))
        elif kind == "namespace":
            inner = tool.get("tools")
            made += [
                _function(one, f"{tool.get('name')}{_SEPARATOR}{one.get('name')}")
                for one in (inner if isinstance(inner, list) else [])
                if isinstance(one, dict) and one.get("type") == "function"
            ]
    return made


def _function(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    function = {"name": name, "description": tool.get("description"), "parameters": tool.get("parameters")}
    for option in ("strict", "defer_loading"):
        if tool.get(option) is not None:
            function[option] = tool[option]
    return {"type": "function", "function": function}
