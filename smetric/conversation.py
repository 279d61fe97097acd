"""The conversation in a body, rendered in the engine's order: tools, system, messages; with its turns and its history.

Rendering approximates a chat template: text as it is, a mark for each role. What engines do not render is left out:
Claude Code's billing header, which changes with every request, and `cache_control` marks, which move. Lengths and
hashes are in `smetric.prompt`; which API has which fields is in `smetric.request`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
from msgspec import Raw, Struct

from smetric.body import is_null, is_utf8
from smetric.errors import RequestError
from smetric.parts import Kind, Outline
from smetric.prompt import image


class Part(Struct, gc=False):
    """One part of a message's content, of any API; fields that a type does not have are absent."""

    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    name: str | None = None
    input: Raw = Raw()
    content: str | list[Part | str] | None = None
    source: Raw = Raw()
    image_url: Raw = Raw()
    input_audio: Raw = Raw()
    audio_url: Raw = Raw()
    video_url: Raw = Raw()
    file: Raw = Raw()


Content = str | list[Part | str] | None


class Message(Struct, gc=False):
    """A message of chat or messages, or an item of a Responses `input`."""

    role: str | None = None
    content: Content = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Raw = Raw()
    type: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content = None
    summary: Content = None


class _Shape(Struct, gc=False):
    """What is read of a message whose other fields have shapes unknown here."""

    role: str | None = None
    type: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation as text.

    Args:
        pieces: rendered, in order.
        turn: the number of assistant turns among them.
        history_bytes: length up to the end of the last of these turns; 0 without one.
        question_bytes: length up to its beginning.
        outline: which pieces are which part.
    """

    pieces: list[bytes]
    turn: int
    history_bytes: int
    question_bytes: int
    outline: Outline


_MESSAGES = msgspec.json.Decoder(list[Message])
_SHAPES = msgspec.json.Decoder(list[_Shape])
_RAWS = msgspec.json.Decoder(list[Raw])
_CONTENT = msgspec.json.Decoder(Content)
_BILLING = b"x-anthropic-billing-header"
_CACHE_CONTROL = re.compile(
    rb',\s*"cache_control"\s*:\s*(?:\{[^{}]*\}|null)|"cache_control"\s*:\s*(?:\{[^{}]*\}|null)\s*,'
)
_MARKS = {role: b"<|%b|>" % role.encode() for role in ("system", "developer", "user", "assistant", "tool", "function")}
_TOOL_ROLES = ("tool", "function")
#: What the messages of each kind are as parts; those of `other` are the system's or a user's.
_KINDS = {"assistant": Kind.ASSISTANT, "result": Kind.TOOL_RESULT}
_SYSTEM_ROLES = ("system", "developer")


def render(field: str, messages: Raw, *, tools: Raw | None = None, system: Raw | None = None) -> Conversation:
    """Render *messages*, a list of messages or of Responses items, after *tools* and *system*.

    An assistant message is a turn, and so is a run of Responses output items; tool results belong to the call before
    them, and are a turn of their own where there is none. A trailing assistant message (a prefill) belongs to the new
    turn. The history ends with the last turn.

    Args:
        field: name of the list, for errors.
        messages: JSON text of the list.
        tools: JSON text of the tools.
        system: JSON text of the system prompt or instructions, a string or a list of text parts.

    Raises:
        RequestError: *messages* is not a list of objects with string roles, or not valid UTF-8.
    """
    pieces: list[bytes] = []
    parts: list[tuple[int, Kind, int]] = []
    if tools is not None and not is_null(tools):
        parts.append((0, Kind.TOOLS, 0))
        pieces.append(_without_cache_marks(tools))
    if system is not None:
        _render_system(system, pieces, parts)
    messages_from = len(parts)
    # Where the last turn begins and ends, in pieces; `before` is the same without the turn that came last.
    turn, begins_at, ends_at = before = 0, 0, 0
    previous = ""
    for number, (message, raw) in enumerate(_decode(field, messages)):
        kind = _kind(message)
        at = len(pieces)
        part = _KINDS.get(kind) or (Kind.SYSTEM if message.role in _SYSTEM_ROLES else Kind.USER)
        parts.append((at, part, number))
        if isinstance(message, Message):
            results: list[int] = []
            _render_message(message, pieces, results)
            for index, boundary in enumerate(results):
                parts.append((boundary, part if index % 2 else Kind.TOOL_RESULT, number))
        else:
            pieces.append(raw)
        if kind == "assistant":
            if previous != "item" or message.type is None:
                before = turn, begins_at, ends_at
                turn, begins_at = turn + 1, at
            ends_at = len(pieces)
            previous = "item" if message.type is not None else "assistant"
        elif kind == "result":
            if previous in ("", "other"):
                turn, begins_at, ends_at = turn + 1, at, len(pieces)
            previous = "result"
        else:
            previous = "other"
    if previous in ("assistant", "item"):
        turn, begins_at, ends_at = before
    question_bytes = sum(map(len, pieces[:begins_at]))
    history_bytes = question_bytes + sum(map(len, pieces[begins_at:ends_at]))
    return Conversation(pieces, turn, history_bytes, question_bytes, Outline(field, parts, messages_from))


def _decode(field: str, messages: Raw) -> list[tuple[Message | _Shape, bytes]]:
    """The messages, each with its JSON text in place of a rendering where one has a shape unknown here."""
    try:
        return [(message, b"") for message in _MESSAGES.decode(messages)]
    except (msgspec.DecodeError, UnicodeDecodeError):
        if not is_utf8(memoryview(messages)):
            raise RequestError(f"`{field}` is not valid UTF-8; send JSON in UTF-8", param=field) from None
    try:
        shapes = _SHAPES.decode(messages)
        return [(shape, bytes(raw)) for shape, raw in zip(shapes, _RAWS.decode(messages), strict=True)]
    except msgspec.DecodeError:
        raise RequestError(
            f"`{field}` must be a list of objects, each with its role as a string", param=field
        ) from None


def _kind(message: Message | _Shape) -> str:
    """assistant, result or other. Responses items without a role say by their type which they are."""
    role, type_ = message.role, message.type
    if role == "assistant":
        return "assistant"
    if role in _TOOL_ROLES:
        return "result"
    if role is None and type_ is not None:
        if type_.endswith("_output"):
            return "result"
        if type_ == "reasoning" or type_.endswith("_call"):
            return "assistant"
    return "other"


def _render_system(system: Raw, pieces: list[bytes], parts: list[tuple[int, Kind, int]]) -> None:
    try:
        content = _CONTENT.decode(system)
    except (msgspec.DecodeError, UnicodeDecodeError):
        parts.append((len(pieces), Kind.SYSTEM, 0))
        pieces.append(bytes(system))
        return
    is_first = True
    for number, block in enumerate(content if isinstance(content, list) else [content]):
        text: list[bytes] = []
        _render_content([block] if block is not None else None, text, [])
        text = [piece for piece in text if not piece.startswith(_BILLING)]
        if text:
            parts.append((len(pieces), Kind.SYSTEM, number))
            if is_first:
                pieces.append(_MARKS["system"])
                is_first = False
            pieces += text


def _render_message(message: Message, pieces: list[bytes], results: list[int]) -> None:
    """Append the message's pieces, and to *results* where in them each tool result begins and ends."""
    role = message.role if message.role is not None else message.type or "user"
    pieces.append(_MARKS.get(role) or b"<|%b|>" % role.encode())
    if message.reasoning is not None:
        pieces.append(message.reasoning.encode())
    elif message.reasoning_content is not None:
        pieces.append(message.reasoning_content.encode())
    content = message.content
    if type(content) is str:
        pieces.append(content.encode())
    elif content:
        _render_content(content, pieces, results)
    if message.tool_calls:
        pieces.append(bytes(message.tool_calls))
    if message.type is not None:
        if message.summary:
            _render_content(message.summary, pieces, [])
        if message.name is not None:
            pieces.append(message.name.encode())
        if message.arguments is not None:
            pieces.append(message.arguments.encode())
        if message.output:
            _render_content(message.output, pieces, [])


def _render_content(content: Content, pieces: list[bytes], results: list[int]) -> None:
    if content is None:
        return
    if isinstance(content, str):
        pieces.append(content.encode())
        return
    for part in content:
        if isinstance(part, str):
            pieces.append(part.encode())
        elif part.text is not None:
            pieces.append(part.text.encode())
        elif part.thinking is not None:
            pieces.append(part.thinking.encode())
        elif part.refusal is not None:
            pieces.append(part.refusal.encode())
        elif part.type == "tool_result":
            results.append(len(pieces))
            _render_other(part, pieces)
            results.append(len(pieces))
        else:
            _render_other(part, pieces)


def _render_other(part: Part, pieces: list[bytes]) -> None:
    if part.type is not None:
        pieces.append(b"<|%b|>" % part.type.encode())
    if part.name is not None:
        pieces.append(part.name.encode())
    if part.input:
        pieces.append(bytes(part.input))
    _render_content(part.content, pieces, [])
    media = (part.source, part.image_url, part.input_audio, part.audio_url, part.video_url, part.file)
    pieces.extend(image(memoryview(medium)) for medium in media if medium)


def _without_cache_marks(tools: Raw) -> bytes:
    text = bytes(tools)
    return _CACHE_CONTROL.sub(b"", text) if b'"cache_control"' in text else text
