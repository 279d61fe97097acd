"""Conversations as vLLM makes them of each API's body."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

# What an engine tokenises for a request: a conversation as its chat template is given it, or a text as it stands.
#
# Read here from chat and completions bodies; the other APIs are converted in `messages.py` and `responses.py`. Follows
# vLLM 0.32 (`entrypoints/openai/*/protocol.py`). Rendering and encoding are not here.


class NotTokenised(Exception):
    """A prompt whose ids stay unknown; `result` is what it is counted as, and no text of the prompt is in it."""

    result = "unsupported"


class Unsupported(NotTokenised):
    """Its ids cannot be foretold with certainty: media, truncation by the engine, a history only the engine has."""


class Refused(NotTokenised):
    """The engine or the chat template refuses it."""

    result = "refused"


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt of the completions API."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation.

    Args:
        messages: in the shape of the chat API.
        tools: in the shape of the chat API; None for none.
        template_kwargs: what the request passes to the chat template by name.
        add_generation_prompt: whether the rendering ends with the opening of an answer.
        continue_final_message: whether the last message is left open to be continued.
        add_special_tokens: whether the tokenizer adds its own besides those of the template.
        chat_template: a template that came with the request; None for the model's.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None


#: Parts that carry text only; their text is in the field named here.
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}


def chat_of_chat(body: Mapping[str, Any]) -> Chat:
    """The conversation of a chat body.

    Raises:
        NotTokenised: its ids cannot be known.
    """
    _refuse_truncation(body)
    messages = [_with_reasoning(message) for message in checked(body.get("messages"))]
    documents = body.get("documents")
    return Chat(
        messages,
        body.get("tools"),
        template_kwargs(body, body.get("reasoning_effort"), {"documents": documents} if documents is not None else {}),
        add_generation_prompt=flag(body, "add_generation_prompt", True),
        continue_final_message=flag(body, "continue_final_message", False),
        add_special_tokens=flag(body, "add_special_tokens", False),
        chat_template=body.get("chat_template"),
    )


def prompt_of_completion(body: Mapping[str, Any]) -> Text | array[int]:
    """The first prompt of a completions body: a text, or the ids it came as, which are an array in *body*.

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
        return Text(prompt, flag(body, "add_special_tokens", True))
    raise Refused


def template_kwargs(body: Mapping[str, Any], effort: Any, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the template is given by name: the request's own, its reasoning effort, and *more*."""
    own = body.get("chat_template_kwargs")
    if not isinstance(own, dict | None):
        raise Refused
    kwargs = {**(own or {}), **(more or {})}
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        # The engine turns thinking on or off with the effort, unless the request says which.
        kwargs.setdefault("enable_thinking", effort != "none")
    return kwargs


def checked(messages: Any) -> list[dict[str, Any]]:
    """*messages*, if they are objects with roles and contents of text.

    Raises:
        NotTokenised: they are not, or hold media, whose placeholders only the engine knows.
    """
    if not isinstance(messages, list) or not messages:
        raise Refused
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused
        content = message.get("content")
        if isinstance(content, list):
            _refuse_media(content)
        elif content is not None and not isinstance(content, str):
            raise Refused
    return messages


def _refuse_media(parts: Iterable[Any]) -> None:
    """Raise `Unsupported` unless all *parts* are text."""
    for part in parts:
        if isinstance(part, str):
            continue
        if not isinstance(part, dict):
            raise Refused
        name = TEXT_PARTS.get(str(part.get("type")))
        if name is None or "uuid" in part or not isinstance(part.get(name), str | None):
            raise Unsupported


def string(value: Any) -> str:
    """*value*, if it is a string; an engine refuses anything else where one is wanted."""
    if not isinstance(value, str):
        raise Refused
    return value


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """The boolean *name*; *default* where it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Unsupported
    return value


def _refuse_truncation(body: Mapping[str, Any]) -> None:
    if body.get("truncate_prompt_tokens") is not None:
        raise Unsupported


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """*message* with `reasoning_content` under its new name, as chat requests get it and `/tokenize` does not."""
    if "reasoning_content" not in message:
        return message
    message = dict(message)
    reasoning = message.pop("reasoning_content")
    if reasoning is not None and message.get("reasoning") is None:
        message["reasoning"] = reasoning
    return message


# The protocol behind which the ways to tokenise stand.


class Unavailable(NotTokenised):
    """Nobody could tokenise it now; that says nothing of the prompt."""

    result = "unavailable"


class Encoder(Protocol):
    """Tokenises as a model's engine does."""

    async def start(self) -> None:
        """Open what encoding needs."""

    async def stop(self) -> None:
        """Close it."""

    async def encode(self, model: str, prompt: Text | Chat, size: int) -> array[int]:
        """The ids of *prompt*, 32-bit unsigned.

        Args:
            model: as the engines know it.
            prompt: what is to be encoded.
            size: bytes of the body it came in, which tell a long prompt from a short one.

        Raises:
            NotTokenised: they cannot be had.
        """


# Anthropic Messages bodies, as the conversation that vLLM makes of them.
#
# Follows `entrypoints/anthropic/serving.py` of vLLM 0.32: system blocks are joined, Claude Code's billing header and
# `cache_control` marks are dropped, tool results become messages of their own. Which of two ways a conversion takes
# depends on the chat template in places; `traits.py` finds that out.

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


# Responses bodies, as the conversation that vLLM makes of them.
#
# Follows `construct_input_messages` and `construct_tool_dicts` of vLLM 0.32: instructions become the system message,
# reasoning, text and calls that follow each other become one assistant message. Responses that continue one stored on
# an engine are not here: nobody else knows their history.

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
        _responses_tools(body.get("tools")),
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
    for name in ("content", "summary"):
        parts = item.get(name)
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


def _responses_tools(tools: Any) -> list[dict[str, Any]] | None:
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
