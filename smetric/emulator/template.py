"""The emulated chat template: tools, then messages in their order, each between markers, in packed tokens.

What follows another text always starts on a token of its own, so that a prompt stays a prefix of the next turn's
prompt, the generated reply included. Names and ids of messages and calls are left out, as common templates do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from xxhash import xxh3_64_digest

from smetric.emulator import tokenizer
from smetric.emulator.error import InvalidBodyError, bad_request
from smetric.emulator.tokenizer import END, START

#: Tokens an image takes.
IMAGE_TOKENS = 1024

_NEWLINE = tokenizer.encode("\n")
_REPLY = START + tokenizer.encode("assistant\n")


def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), reply: bool = True) -> bytes:
    """The prompt of a conversation in Chat Completions form, as packed tokens.

    Args:
        messages: at least one message, each with `role` and `content` (a string, parts, or null).
        tools: the tools on offer, as they came.
        reply: end with the head of the reply that is asked for.

    Raises:
        EngineError: there is no message.
        InvalidBodyError: a message has no role or its content has another form.
    """
    if not messages:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    out = bytearray()
    if tools:
        out += START + tokenizer.encode("tools\n") + tokenizer.encode(orjson.dumps(tools).decode()) + END + _NEWLINE
    for index, message in enumerate(messages):
        at = f"body.messages.{index}"
        role = message.get("role")
        if not isinstance(role, str):
            raise InvalidBodyError("missing", f"{at}.role", "Field required", message)
        out += START + tokenizer.encode(role + "\n")
        _content(out, message.get("content"), f"{at}.content")
        for call in message.get("tool_calls") or ():
            out += tokenizer.encode(f"\n<tool_call>{_call_text(call)}</tool_call>")
        out += END + _NEWLINE
    if reply:
        out += _REPLY
    return bytes(out)


def _content(out: bytearray, content: Any, at: str) -> None:
    if content is None:
        return
    if isinstance(content, str):
        out += tokenizer.encode(content)
        return
    if not isinstance(content, list):
        raise InvalidBodyError("string_type", at, "Input should be a valid string", content)
    text: list[str] = []
    for part in content:
        if isinstance(part, str):
            text.append(part)
        elif not isinstance(part, dict):
            raise InvalidBodyError("model_attributes_type", at, "Input should be a valid dictionary", part)
        elif isinstance(part.get("text"), str):
            text.append(part["text"])
        else:
            # Anything that is no text takes an image's room, named by what it holds.
            if text:
                out += tokenizer.encode("\n".join(text))
                text.clear()
            named = {key: value for key, value in part.items() if key != "cache_control"}
            out += xxh3_64_digest(orjson.dumps(named)) * (IMAGE_TOKENS // 2)
    if text:
        out += tokenizer.encode("\n".join(text))


def _call_text(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    return orjson.dumps(function).decode()
