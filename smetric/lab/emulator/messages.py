"""Anthropic Messages: /v1/messages and /v1/messages/count_tokens, converted to chat form as vLLM does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from smetric.lab.emulator.call import (
    EmulatedCall,
    EngineLimits,
    Fields,
    check_model,
    not_an_object,
    parse_call,
    tool_call,
)
from smetric.lab.emulator.instance import Choice, EmulatedAnswer, named_event
from smetric.lab.emulator.prompt import BILLING, count, function_tool, render

#: Kinds of blocks that the prompt leaves out.
_SILENT_BLOCKS = ("thinking", "redacted_thinking", "tool_reference")
_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


def chat_of(fields: Fields) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the messages and tools of a Messages request in the form of the chat API.

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
    """Join the texts of a system prompt, without the billing header of Claude Code."""
    parts = system if isinstance(system, list) else [{"text": system}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type", "text") == "text"]
    return "".join(text for text in texts if isinstance(text, str) and not text.startswith(BILLING))


def _from_blocks(role: Any, blocks: list[Any], at: str) -> list[dict[str, Any]]:
    """Convert a message of *blocks*: its tool results come first."""
    made: list[dict[str, Any]] = []
    parts: list[Any] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if not isinstance(block, dict):
            raise not_an_object(f"{at}.{index}", block)
        kind = block.get("type")
        if kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            calls.append({"function": {"name": block.get("name") or "", "arguments": arguments}})
        elif kind == "tool_result" and role == "user":
            made += _results(block.get("content"))
        elif kind == "tool_result":
            parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
        elif kind not in _SILENT_BLOCKS and not (kind == "text" and not block.get("text")):
            parts.append(block)
    if parts or role == "assistant":
        made.append({"role": role, "content": parts or None, "tool_calls": calls})
    return made


def _results(content: Any) -> list[dict[str, Any]]:
    """Return the message of a tool result, and a further one for the tools that it refers to."""
    if not isinstance(content, list):
        return [{"role": "tool", "content": content or ""}]
    references = [item for item in content if isinstance(item, dict) and item.get("type") == "tool_reference"]
    made = [{"role": "tool", "content": [item for item in content if item not in references]}]
    return [*made, {"role": "tool", "content": references}] if references else made


def _in_effect(fields: Fields) -> list[dict[str, Any]]:
    """Return the tools at the end of the conversation: the given ones, as changed by system messages."""
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
    return function_tool(tool, tool.get("name"), schema)


def parse_message(fields: Fields, limits: EngineLimits) -> EmulatedCall:
    """Read a Messages request.

    Raises:
        EngineError: it cannot be served.
    """
    fields.required("messages")
    fields.required("max_tokens")
    messages, tools = chat_of(fields)
    prompt = render(messages, tools)
    check_model(fields, limits)
    call = parse_call(fields, limits, [prompt], fields.integer("max_tokens"))
    call.tool = tool_call(tools, fields.values.get("tool_choice"), "toolu_")
    return call


def count_tokens(fields: Fields, limits: EngineLimits) -> dict[str, Any]:
    """Count the tokens of a Messages request.

    Raises:
        EngineError: it could not be served.
    """
    fields.required("messages")
    check_model(fields, limits)
    tokens = count(render(*chat_of(fields)))
    return {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}


class MessageAnswer(EmulatedAnswer):
    """Message, whole or in events."""

    def body(self) -> dict[str, Any]:
        """Return a `message`."""
        text, tool = self._generation.choices[0].produced, self._call.tool
        content = [{"type": "text", "text": text} if tool is None else self._use(json.loads(tool.arguments(text)))]
        head = {"id": self._call.id, "type": "message", "role": "assistant", "content": content}
        return {**head, "model": self._call.model, "stop_reason": self._stop_reason(), "usage": self._usage()}

    def opening(self) -> Iterator[bytes]:
        """Return the head of the message and of its only block."""
        message: dict[str, Any] = {
            "id": self._call.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._call.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._generation.prompt_tokens, "output_tokens": 0},
        }
        yield named_event({"type": "message_start", "message": message})
        block = {"type": "text", "text": ""} if self._call.tool is None else self._use({})
        yield named_event({"type": "content_block_start", "content_block": block, "index": 0})

    def news(self, choice: Choice) -> Iterator[bytes]:
        """Return new text."""
        tool, is_first, text = self._call.tool, choice.sent == 0, choice.take()
        delta = {"type": "text_delta", "text": text}
        if tool is not None:
            text = (
                (tool.before if is_first else "") + tool.escaped(text) + (tool.after if choice.sequence.ended else "")
            )
            delta = {"type": "input_json_delta", "partial_json": text}
        if text:
            yield named_event({"type": "content_block_delta", "delta": delta, "index": 0})

    def closing(self) -> Iterator[bytes]:
        """Return the end of the block, the stop reason with usage, and the end."""
        yield named_event({"type": "content_block_stop", "index": 0})
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        yield named_event({"type": "message_delta", "delta": delta, "usage": self._usage()})
        yield named_event({"type": "message_stop"})

    def _use(self, arguments: dict[str, Any]) -> dict[str, Any]:
        tool = self._call.tool
        assert tool is not None
        return {"type": "tool_use", "id": tool.id, "name": tool.name, "input": arguments}

    def _stop_reason(self) -> str | None:
        reason = self._generation.choices[0].finish_reason or ""
        return "tool_use" if self._call.tool is not None and reason == "stop" else _STOP_REASONS.get(reason)

    def _usage(self) -> dict[str, int]:
        generation = self._generation
        cached, created = generation.cached_tokens, generation.created_tokens
        return {
            "input_tokens": generation.prompt_tokens - cached - created,
            "output_tokens": generation.output_tokens,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
        }
