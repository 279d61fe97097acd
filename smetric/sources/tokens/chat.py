"""Prompts as vLLM 0.32 builds them from request bodies, before rendering and encoding."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

#: First words of the billing header that Claude Code puts into the system prompt; vLLM drops it.
BILLING = "x-anthropic-billing-header"
#: Content parts that are text, and the field that holds it.
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}
#: Separates namespace and name of a function in the Responses API.
_SEPARATOR = "__"
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


class NotTokenised(Exception):
    """Prompt whose token ids stay unknown; `result` is counted. The exception holds no text of the prompt."""

    result = "unsupported"


class Unsupported(NotTokenised):
    """Prompt whose ids cannot be predicted: it has media, is truncated by the engine, or continues its history."""


class Refused(NotTokenised):
    """Prompt that the engine or the chat template refuses."""

    result = "refused"


class Unavailable(NotTokenised):
    """Prompt that no encoder can tokenise now, for reasons other than the prompt."""

    result = "unavailable"


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Prompt of the completions API."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Conversation as the chat template gets it.

    Args:
        messages: in the shape of the chat API.
        tools: in the shape of the chat API; None for none.
        template_kwargs: named arguments of the chat template from the request.
        add_generation_prompt: whether the rendering ends with the opening of an answer.
        continue_final_message: whether the last message stays open.
        add_special_tokens: whether the tokenizer adds its own besides those of the template.
        chat_template: template of the request; None for the model's.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None


class Encoder(Protocol):
    """Tokeniser that gives the ids a model's engine would."""

    async def start(self) -> None:
        """Open the resources it needs."""

    async def stop(self) -> None:
        """Close them."""

    async def encode(self, model: str, prompt: TextPrompt | ChatPrompt, size: int) -> array[int]:
        """Return the ids of *prompt*, 32-bit unsigned.

        Args:
            model: as the engines know it.
            prompt: the prompt.
            size: bytes of the body it came in, which tells a long prompt from a short one.

        Raises:
            NotTokenised: they cannot be had.
        """


def chat_of_chat(body: Mapping[str, Any]) -> ChatPrompt:
    """Return the conversation of a chat body (`entrypoints/openai/*/protocol.py`).

    Raises:
        NotTokenised: its ids cannot be known.
    """
    _refuse_truncation(body)
    documents = body.get("documents")
    return ChatPrompt(
        [_with_reasoning(message) for message in _checked(body.get("messages"))],
        body.get("tools"),
        _template_kwargs(body, body.get("reasoning_effort"), {"documents": documents} if documents is not None else {}),
        add_generation_prompt=_flag(body, "add_generation_prompt", True),
        continue_final_message=_flag(body, "continue_final_message", False),
        add_special_tokens=_flag(body, "add_special_tokens", False),
        chat_template=body.get("chat_template"),
    )


def prompt_of_completion(body: Mapping[str, Any]) -> TextPrompt | array[int]:
    """Return the first prompt of a completions body: a text, or token ids, which are an array in *body*.

    Raises:
        NotTokenised: there is none, or its ids cannot be known.
    """
    _refuse_truncation(body)
    prompt = body.get("prompt")
    if body.get("prompt_embeds") is not None:
        raise Unsupported
    if isinstance(prompt, array) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    if isinstance(prompt, str):
        return TextPrompt(prompt, _flag(body, "add_special_tokens", True))
    raise Refused


def _refuse_truncation(body: Mapping[str, Any]) -> None:
    if body.get("truncate_prompt_tokens") is not None:
        raise Unsupported


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Rename `reasoning_content` as chat requests do and `/tokenize` does not."""
    if "reasoning_content" not in message:
        return message
    message = dict(message)
    reasoning = message.pop("reasoning_content")
    if reasoning is not None and message.get("reasoning") is None:
        message["reasoning"] = reasoning
    return message


def _template_kwargs(body: Mapping[str, Any], effort: Any, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the named arguments of the template: the request's own, its reasoning effort, and *more*."""
    own = body.get("chat_template_kwargs")
    if not isinstance(own, dict | None):
        raise Refused
    kwargs = {**(own or {}), **(more or {})}
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        # The effort turns thinking on or off, unless the request does so itself.
        kwargs.setdefault("enable_thinking", effort != "none")
    return kwargs


def _checked(messages: Any) -> list[dict[str, Any]]:
    """Return *messages* if they are objects with roles and text; only the engine knows the placeholders of media."""
    if not isinstance(messages, list) or not messages:
        raise Refused
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if isinstance(part, str):
                    continue
                if not isinstance(part, dict):
                    raise Refused
                name = TEXT_PARTS.get(str(part.get("type")))
                if name is None or "uuid" in part or not isinstance(part.get(name), str | None):
                    raise Unsupported
        elif content is not None and not isinstance(content, str):
            raise Refused
    return messages


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise Refused
    return value


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Unsupported
    return value


def _objects(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Refused
    return value


def _function(tool: Mapping[str, Any], name: str, parameters: Any) -> dict[str, Any]:
    """Return *tool* as a function of the chat API."""
    function = {"name": name, "description": tool.get("description"), "parameters": parameters}
    for option in ("strict", "defer_loading"):
        if tool.get(option) is not None:
            function[option] = tool[option]
    return {"type": "function", "function": function}


def has_inline_system(body: Mapping[str, Any]) -> bool:
    """Return whether the messages of a Messages body include a system message."""
    return any(message.get("role") == "system" for message in _objects(body.get("messages")))


def disables_thinking(body: Mapping[str, Any]) -> bool:
    """Return whether a Messages body disables thinking, which engines express as an effort."""
    thinking = body.get("thinking")
    return isinstance(thinking, dict) and thinking.get("type") == "disabled"


def chat_of_messages(body: Mapping[str, Any], *, merge_inline_system: bool, disabled_effort: str) -> ChatPrompt:
    """Return the conversation of an Anthropic Messages body (`entrypoints/anthropic/serving.py`).

    System blocks are joined, the billing header and `cache_control` are dropped, and tool results become messages.

    Args:
        body: decoded.
        merge_inline_system: whether system messages join the leading one, because the template refuses them elsewhere.
        disabled_effort: the reasoning effort that stands for disabled thinking.

    Raises:
        NotTokenised: its ids cannot be known.
    """
    messages = _objects(body.get("messages"))
    if not messages:
        raise Refused
    chat: list[dict[str, Any]] = []
    given = body.get("system")
    system = [] if not given else [given] if isinstance(given, str) else _without_billing(given)
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
            _add_message(message, chat)
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
    return ChatPrompt(chat, _messages_tools(body, messages), _template_kwargs(body, effort))


def _without_billing(blocks: Any) -> list[str]:
    texts = [_string(block["text"]) for block in _objects(blocks) if block.get("type") == "text" and block.get("text")]
    return [text for text in texts if not text.startswith(BILLING)]


def _system_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return "" if content.startswith(BILLING) else content
    return "".join(_without_billing(content))


def _add_message(message: Mapping[str, Any], chat: list[dict[str, Any]]) -> None:
    """Append *message* of a Messages body to *chat*: its tool results first, then itself."""
    role, content = message["role"], message.get("content")
    made: dict[str, Any] = {"role": role}
    if isinstance(content, str):
        made["content"] = content
    else:
        parts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        reasoning: list[str] = []
        for block in _objects(content):
            kind = block.get("type")
            if kind == "text":
                if block.get("text"):
                    parts.append({"type": "text", "text": _string(block["text"])})
            elif kind == "thinking":
                if block.get("thinking") is not None:
                    reasoning.append(_string(block["thinking"]))
            elif kind == "tool_use":
                # Few templates read the id. Without one, the engine makes one of the time of day.
                function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": _string(block.get("id")), "type": "function", "function": function})
            elif kind == "tool_result":
                if role == "user":
                    _add_tool_result(block, chat)
                else:
                    result = block.get("content")
                    parts.append({"type": "text", "text": f"Tool result: {str(result) if result else ''}"})
            elif kind == "image":
                raise Unsupported
            elif kind not in ("redacted_thinking", "tool_reference"):
                raise Refused
        if reasoning:
            made["reasoning"] = "".join(reasoning)
        if calls:
            made["tool_calls"] = calls
        if parts:
            made["content"] = parts[0]["text"] if len(parts) == 1 else parts
    if role == "assistant" or "content" in made:
        chat.append(made)


def _add_tool_result(block: Mapping[str, Any], chat: list[dict[str, Any]]) -> None:
    content = block.get("content")
    texts: list[str] = []
    references: list[dict[str, Any]] = []
    if isinstance(content, str):
        texts.append(content)
    elif content is not None:
        for item in _objects(content):
            if item.get("type") == "text":
                texts.append(_string(item.get("text", "")))
            elif item.get("type") == "image":
                raise Unsupported
            elif item.get("type") == "tool_reference" and (name := item.get("tool_name") or item.get("name")):
                references.append({"type": "tool_reference", "name": _string(name)})
    id = block.get("tool_use_id") or ""
    chat.append({"role": "tool", "tool_call_id": id, "content": "\n".join(texts)})
    if references:
        chat.append({"role": "tool", "tool_call_id": id, "content": references})


def _messages_tools(body: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the tools in effect at the end of the conversation; blocks of messages may add and remove some."""
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
    made: list[dict[str, Any]] = []
    for tool in tools:
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise Refused
        parameters = schema if "type" in schema else {**schema, "type": "object"}
        made.append(_function(tool, _string(tool.get("name")), parameters))
    return made


def _changed(tools: list[dict[str, Any]], changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {_string(tool.get("name")): tool for tool in tools}
    removed: set[str] = set()
    for block in changes:
        change = block.get("tool")
        if not isinstance(change, dict):
            raise Refused
        if change.get("type") == "tool_definition" and isinstance(definition := change.get("definition"), dict):
            name = _string(definition.get("name"))
            by_name[name] = definition
        else:
            name = _string(change.get("name"))
            if name not in by_name:
                raise Refused
            if block["type"] == "tool_addition":
                by_name[name] = {**by_name[name], "defer_loading": None}
        if block["type"] == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return [tool for name, tool in by_name.items() if name not in removed]


def chat_of_responses(body: Mapping[str, Any]) -> ChatPrompt:
    """Return the conversation of a Responses body (`construct_input_messages` and `construct_tool_dicts`).

    Instructions become the system message. Consecutive reasoning, text and calls become one assistant message.

    Raises:
        NotTokenised: its ids cannot be known, e.g. because it continues a response stored on an engine.
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
    for item in _objects(items):
        _add_item(item, messages)
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    is_open = bool(items) and items[-1].get("type", "message") in ("message", "reasoning")
    is_open = is_open and items[-1].get("status") in ("in_progress", "incomplete")
    return ChatPrompt(
        _checked(messages),
        _responses_tools(body.get("tools")),
        _template_kwargs(body, effort),
        add_generation_prompt=not is_open,
        continue_final_message=is_open,
        add_special_tokens=True,  # the engine's default, which chat requests override and Responses do not
    )


def _add_item(item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    """Append *item* of a Responses body to *messages*, or to the assistant message at their end."""
    kind = item.get("type")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind in ("function_call", "custom_tool_call"):
        call = _call(item)
        if last is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            last.setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        content = _text_parts(item.get("output"))
        messages.append({"role": "tool", "content": content, "tool_call_id": item.get("call_id")})
    elif kind == "reasoning":
        _add_to_assistant("reasoning", _reasoning(item), last, messages)
    elif item.get("role") == "assistant" and (text := _assistant_text(item.get("content"))) is not None:
        _add_to_assistant("content", text, last, messages)
    elif isinstance(item.get("role"), str) and kind in (None, "message"):
        messages.append({"role": item["role"], "content": _text_parts(item.get("content"))})
    else:
        raise Unsupported


def _add_to_assistant(name: str, text: str, last: dict[str, Any] | None, messages: list[dict[str, Any]]) -> None:
    if last is not None and last.get(name) is None:
        last[name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    name = _string(item.get("name"))
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    else:
        arguments = _string(item.get("arguments"))
        if item.get("namespace"):
            name = f"{item['namespace']}{_SEPARATOR}{name}"
    function = {"name": name, "arguments": arguments}
    return {"id": _string(item.get("call_id")), "type": "function", "function": function}


def _reasoning(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise Refused
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list) and parts:
            return _string(parts[0].get("text") if isinstance(parts[0], dict) else None)
    return ""


def _assistant_text(content: Any) -> str | None:
    """Return the text of an assistant message: engines take the first part only."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and isinstance(content[0], dict):
        text = content[0].get("text")
        return text if isinstance(text, str) else None
    return None


def _text_parts(content: Any) -> Any:
    """Return *content* with the types of its parts as the chat API names them."""
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": "text"}
        if isinstance(part, dict) and part.get("type") in ("input_text", "output_text")
        else part
        for part in content
    ]


def _responses_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return functions, those of namespaces, and custom tools as functions of one string; models see no others."""
    if not tools:
        return None
    made: list[dict[str, Any]] = []
    for tool in _objects(tools):
        kind = tool.get("type")
        if kind == "function":
            made.append(_function(tool, _string(tool.get("name")), tool.get("parameters")))
        elif kind == "custom":
            made.append(_function(tool, _string(tool.get("name")), _CUSTOM_PARAMETERS))
        elif kind == "namespace":
            inner = tool.get("tools")
            made += [
                _function(one, f"{tool.get('name')}{_SEPARATOR}{one.get('name')}", one.get("parameters"))
                for one in (inner if isinstance(inner, list) else [])
                if isinstance(one, dict) and one.get("type") == "function"
            ]
    return made
