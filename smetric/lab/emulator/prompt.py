"""Prompts of an emulated engine: the tokenizer, and the chat template that every API's messages go through.

Every four bytes of text are one token, so that tokenizing is cheap and reversible. A token id is its four bytes, read
as an unsigned integer; a text whose length is not a multiple of four ends in a padded token. Markers of the template
contain 0xFF, which never occurs in UTF-8. Packed tokens are their bytes, one after the other.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_64_digest

from smetric.lab.emulator.call import Fields, InvalidBodyError, bad_request, not_an_object
from smetric.lab.store import TOKEN_BYTES

#: Every id is below this.
VOCABULARY = 1 << 32
MARKERS = {b"\xff\xff\xff\x01": "<|im_start|>", b"\xff\xff\xff\x02": "<|im_end|>"}
START, END = MARKERS
_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")


def encode(text: str) -> bytes:
    """Return the packed tokens of *text*, which always starts on a token of its own."""
    data = text.encode()
    return data + _PADDING[len(data) % TOKEN_BYTES]


def count(tokens: bytes) -> int:
    """Return the number of packed *tokens*."""
    return len(tokens) // TOKEN_BYTES


def to_ids(tokens: bytes) -> list[int]:
    """Return the ids of packed *tokens*."""
    return array("I", tokens).tolist()


def from_ids(ids: Sequence[int]) -> bytes:
    """Return the packed tokens of *ids*, each below `VOCABULARY`."""
    return array("I", ids).tobytes()


def strings(tokens: bytes) -> list[str]:
    """Return the text of each token; bytes that are not a text are shown as U+FFFD."""
    return [_text(tokens[at : at + TOKEN_BYTES]) for at in range(0, len(tokens), TOKEN_BYTES)]


def decode(tokens: bytes) -> str:
    """Return the text of packed *tokens*, with markers written out."""
    return "".join(_text(piece) for piece in re.split(b"(\xff\xff\xff[\x01\x02])", tokens))


def _text(piece: bytes) -> str:
    marker = MARKERS.get(piece)
    return marker if marker is not None else piece.replace(b"\0", b"").decode(errors="replace")


#: Tokens of an image.
IMAGE_TOKENS = 1024
#: Start of the part of Claude Code's system prompt that changes with each request; vLLM drops it.
BILLING = "x-anthropic-billing-header"

_NEWLINE = encode("\n")
_REPLY = START + encode("assistant\n")
#: Kinds of text parts, and the field of the text.
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
#: Kinds of parts that the template leaves out.
_SILENT_PARTS = ("tool_reference",)

#: A message: its role, its content as texts and packed tokens of media, and its tool calls.
_Prepared = tuple[str, list[str | bytes], list[str]]


def render(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    reply: bool = True,
    is_open: bool = False,
) -> bytes:
    """Return the prompt of a conversation in Chat Completions form, as packed tokens.

    This is the plain ChatML template of the recorded prompts, after vLLM's own preparation: contents are joined,
    arguments of tool calls are decoded, developer messages become system messages. A prompt with its reply is a prefix
    of the next turn's prompt. As in common templates, ids of messages and tool calls, and reasoning, are left out.

    Args:
        messages: at least one message, each with `role` and `content` (a string, parts, or null).
        tools: tool definitions, as the client sent them.
        reply: end with the head of the reply.
        is_open: leave the last message open, to be continued.

    Raises:
        EngineError: *messages* is empty.
        InvalidBodyError: a message has no role or its content has another form, or a tool has no name.
    """
    if not messages:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    out = bytearray()
    if tools:
        out += START + encode("system\n# Tools\n")
        for index, tool in enumerate(tools):
            out += encode(_json(_tool(tool, f"body.tools.{index}")) + "\n")
        out += END + _NEWLINE
    for role, content, calls in _system_first([_prepared(message, at) for at, message in enumerate(messages)]):
        out += START + encode(role + "\n")
        for piece in content:
            out += encode(piece) if isinstance(piece, str) else piece
        for call in calls:
            out += encode(f"<tool_call>\n{call}\n</tool_call>")
        out += END + _NEWLINE
    if is_open:
        del out[-len(END + _NEWLINE) :]
    elif reply:
        out += _REPLY
    return bytes(out)


def _prepared(message: dict[str, Any], index: int) -> _Prepared:
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidBodyError("missing", f"body.messages.{index}.role", "Field required", message)
    content = _content(message.get("content"), role, f"body.messages.{index}.content")
    calls = Fields(message, f"body.messages.{index}").objects("tool_calls") if role == "assistant" else []
    return role, content, [_tool_call(call) for call in calls]


def _content(content: Any, role: str, at: str) -> list[str | bytes]:
    """Join neighbouring texts; other parts become packed tokens."""
    if content is None:
        return []
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list):
        raise InvalidBodyError("string_type", at, "Input should be a valid string", content)
    between = "\n" if role == "tool" else ""
    pieces: list[str | bytes] = []
    for part in content:
        piece = _piece(part, at)
        if role == "system" and isinstance(piece, str) and piece.startswith(BILLING):
            piece = piece.partition("\n")[2] or None
        if piece is None:
            continue
        if pieces and isinstance(piece, str) and isinstance(last := pieces[-1], str):
            pieces[-1] = last + between + piece
        else:
            pieces.append(piece)
    return pieces


def _piece(part: Any, at: str) -> str | bytes | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise not_an_object(at, part)
    kind = part.get("type", "text")
    if not isinstance(kind, str):
        raise InvalidBodyError("string_type", at, "Input should be a valid string", kind)
    if kind in _SILENT_PARTS:
        return None
    if kind in _TEXT_PARTS:
        text = part.get(_TEXT_PARTS[kind])
        return text if isinstance(text, str) else None
    # Every other part takes the tokens of an image, which depend on its content.
    named = {key: value for key, value in part.items() if key != "cache_control"}
    return xxh3_64_digest(_json(named).encode()) * (IMAGE_TOKENS // 2)


def _tool_call(call: dict[str, Any]) -> str:
    """Return name and arguments; arguments of another type become an empty object."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise bad_request("A tool call has no function.", "tool_calls")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    return _json({"name": function.get("name"), "arguments": arguments if isinstance(arguments, dict) else {}})


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    """Return a tool with vLLM's fields in vLLM's order."""
    given = tool.get("function")
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise InvalidBodyError("missing", f"{at}.function.name", "Field required", tool)
    function = {name: given.get(name) for name in ("name", "description", "parameters")}
    deferred = tool.get("defer_loading")
    if given.get("strict") is not None:
        function["strict"] = given["strict"]
    if (loading := given.get("defer_loading")) is not None or (loading := deferred) is not None:
        function["defer_loading"] = loading
    made = {"type": "function", "function": function}
    return made if deferred is None else {**made, "defer_loading": deferred}


def function_tool(tool: dict[str, Any], name: Any, parameters: Any) -> dict[str, Any]:
    """Return a tool of another API in Chat Completions form."""
    function = {"name": name, "description": tool.get("description"), "parameters": parameters}
    options = {option: tool[option] for option in ("strict", "defer_loading") if tool.get(option) is not None}
    return {"type": "function", "function": {**function, **options}}


def _system_first(messages: list[_Prepared]) -> list[_Prepared]:
    """Turn developer messages into system messages; if there are any, join all system messages at the beginning."""
    if not any(role == "developer" for role, _, _ in messages):
        return messages
    system = [content for role, content, _ in messages if role in ("developer", "system")]
    if len(system) == 1 and messages[0][0] == "developer":
        return [("system", *messages[0][1:]), *messages[1:]]
    text = "\n\n".join(text for content in system if (text := "\n".join(p for p in content if isinstance(p, str))))
    return [("system", [text], []), *(message for message in messages if message[0] not in ("developer", "system"))]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
