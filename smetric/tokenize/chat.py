"""What an engine tokenises for a request: a conversation as its chat template is given it, or a text as it stands.

Read here from chat and completions bodies; the other APIs are converted in `messages.py` and `responses.py`. Follows
vLLM 0.32 (`entrypoints/openai/*/protocol.py`). Rendering and encoding are not here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


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
