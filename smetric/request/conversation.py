"""Conversation in a body, rendered in the engine's order: tools, system, messages; with its turns and its history.

Rendering approximates a chat template: text as it is, with a mark for each role. Two things are left out because
engines do not render them: Claude Code's billing header, which changes with every request, and `cache_control` marks,
which move. Text stays escaped as in JSON, but in one form only. Most bodies have that form already, so their texts are
slices of the body: nothing is decoded or copied.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

import msgspec
import xxhash
from msgspec import Raw, Struct

from smetric.errors import UNREADABLE, RequestError
from smetric.request.prompt import Outline, PartKind, Piece, image, mark_of

#: An escape of a character that may be written in another way. (An escaped one looks the same.)
CHOSEN_ESCAPE = re.compile(rb"\\[u/]")
#: Smaller bodies are decoded twice in the same time.
LEAST_BYTES = 24 * 1024
#: Bytes of a text that is worth leaving out of an excerpt, and how many of them are searched for.
LONG, HEAD = 1024, 64
#: Most positions that share the first `LONG` bytes of a text without all of it; each may cost its whole length.
MOST_ALIKE = 16
#: Bytes of a text up to which copying and reading it takes less time than through a view.
SHORT = 448
#: Most levels of nested content that are taken apart; tool results hold text and images.
MOST_NESTED = 2
_BILLING = b"x-anthropic-billing-header"
_CACHE_CONTROL = re.compile(
    rb',\s*"cache_control"\s*:\s*(?:\{[^{}]*\}|null)|"cache_control"\s*:\s*(?:\{[^{}]*\}|null)\s*,'
)
_QUOTE, _LIST = ord('"'), ord("[")
_INSIDE_QUOTES = slice(1, -1)
_NULL = Raw(b"null")
_STRING = msgspec.json.Decoder(str)
_ENCODE = msgspec.json.Encoder().encode


def is_null(value: Raw) -> bool:
    """Return whether *value* is JSON's null."""
    return value == _NULL


def text_of(value: Raw, is_plain: bool) -> Piece:
    """Return the text of a JSON string without its quotes; any other value as it stands.

    Args:
        value: JSON text.
        is_plain: whether *value* has no escape that is a matter of choice (`ScreenedBody`).
    """
    text = memoryview(value)
    if text[0] != _QUOTE:
        return text
    if is_plain or CHOSEN_ESCAPE.search(text) is None:
        return text[_INSIDE_QUOTES]
    return _escaped(_STRING.decode(value))


def _escaped(text: str) -> bytes:
    """Return *text* as between the quotes of a JSON string, with only the necessary escapes."""
    return _ENCODE(text)[_INSIDE_QUOTES]


class ContentPart(Struct, gc=False):
    """Part of a message's content, of any API; fields that its type does not have are empty."""

    type: str | None = None
    text: Raw = Raw()
    thinking: Raw = Raw()
    refusal: Raw = Raw()
    name: Raw = Raw()
    input: Raw = Raw()
    content: Raw = Raw()
    source: Raw = Raw()
    image_url: Raw = Raw()
    input_audio: Raw = Raw()
    audio_url: Raw = Raw()
    video_url: Raw = Raw()
    file: Raw = Raw()


class Message(Struct, gc=False):
    """Message of the chat or Messages API, or item of a Responses `input`."""

    role: str | None = None
    content: Raw = Raw()
    reasoning: Raw = Raw()
    reasoning_content: Raw = Raw()
    tool_calls: Raw = Raw()
    type: str | None = None
    name: Raw = Raw()
    arguments: Raw = Raw()
    input: Raw = Raw()
    output: Raw = Raw()
    summary: Raw = Raw()


_CONTENT = msgspec.json.Decoder(list[ContentPart | str])
_MESSAGES = msgspec.json.Decoder(list[Message])


class Preamble(Struct, frozen=True):
    """Length of the text before the messages, and a hash of it and of everything else that tells prompts apart."""

    size: int
    digest: int


#: Preamble of a conversation that is not remembered.
_NO_PREAMBLE = Preamble(0, 0)


class Position(Struct, frozen=True):
    """Position between two messages of a rendered conversation.

    Args:
        pieces: number of pieces of text before it.
        messages: number of messages before it.
        size: rendered bytes before it.
        turns: number of turns among these messages.
        previous: kind of the last of them: assistant, item, result or other.
    """

    pieces: int
    messages: int
    size: int
    turns: int
    previous: str


_START = Position(0, 0, 0, 0, "")


class Continuation(Struct, frozen=True):
    """Earlier part of a conversation whose rendering is known.

    Args:
        preamble: the preamble it was rendered with.
        position: where it ends.
        rest: its text after the last full block.
    """

    preamble: Preamble
    position: Position
    rest: list[Piece]


class MemoMismatch(Exception):
    """Mismatch of the known part of a conversation and the rest, after which all of it has to be rendered."""


class Conversation(Struct, frozen=True):
    """Conversation as text.

    Args:
        pieces: rendered text in order; of a known part only its rest.
        size: length of all of it.
        turn: number of assistant turns.
        history_bytes: length up to the end of the last of these turns; 0 without one.
        question_bytes: length up to its beginning.
        outline: the parts of the pieces.
        preamble: the text before the messages; hashed only if positions are wanted.
        positions: the positions after the last messages.
    """

    pieces: list[Piece]
    size: int
    turn: int
    history_bytes: int
    question_bytes: int
    outline: Outline
    preamble: Preamble
    positions: list[Position]


def render(
    field: str,
    messages: Raw | list[Message],
    *,
    tools: Raw | None = None,
    system: Raw | None = None,
    is_plain: bool = False,
    seed: int = 0,
    ends: int = 0,
    known: Continuation | None = None,
) -> Conversation:
    """Render *messages*, a list of messages or of Responses items, after *tools* and *system*.

    An assistant message is a turn, and so is a run of Responses output items. Tool results belong to the call before
    them; results without one are a turn of their own. A trailing assistant message (a prefill) belongs to the new
    turn. The history ends with the last turn.

    Args:
        field: name of the list, for errors.
        messages: the list or its JSON text, without the messages of the *known* part.
        tools: JSON text of the tools.
        system: JSON text of the system prompt or instructions, a string or a list of text parts.
        is_plain: whether none of them has an escape that is a matter of choice (`ScreenedBody`).
        seed: hash of everything that tells this prompt from one with the same text.
        ends: number of last messages whose positions are wanted.
        known: the part before these messages.

    Raises:
        RequestError: *messages* is not a list of objects with string roles.
        MemoMismatch: *known* does not fit.
    """
    if not isinstance(messages, list):
        try:
            messages = _MESSAGES.decode(messages)
        except msgspec.DecodeError:
            raise RequestError(
                f"`{field}` must be a list of objects, each with its role as a string", param=field
            ) from None
    before = known.position if known is not None else _START
    size = before.size
    text = _Rendering(is_plain, before.previous)
    pieces, parts, turns = text.pieces, text.parts, text.turns
    if tools is not None:
        text.add_tools(tools)
    if system is not None:
        text.add_system(system)
    preamble = _NO_PREAMBLE
    if ends:
        digest = xxhash.xxh3_64_intdigest(field.encode(), seed)
        for piece in pieces:
            digest = xxhash.xxh3_64_intdigest(piece, digest)
        preamble = Preamble(sum(map(len, pieces)), digest)
    messages_from = len(parts)
    if known is not None:
        if known.preamble != preamble:
            raise MemoMismatch
        parts.clear()
        pieces[:] = known.rest
        messages_from, size = 0, size - sum(map(len, known.rest))
    first, last = (messages[:-ends], messages[-ends:]) if ends else (messages, [])
    text.add_messages(first, before.messages)
    size += sum(map(len, pieces))
    positions: list[Position] = []
    for number, message in enumerate(last, before.messages + len(first)):
        begin = len(pieces)
        text.add_messages((message,), number)
        size += sum(map(len, pieces[begin:]))
        positions.append(Position(len(pieces), number + 1, size, before.turns + len(turns), text.previous))
    is_prefill = text.previous in ("assistant", "item")
    if known is not None and (not messages or is_prefill or (before.turns and not turns)):
        raise MemoMismatch  # the last turn, or the last message, is in the known part
    if is_prefill:
        turns.pop()
    question_bytes = history_bytes = 0
    if turns:
        begin, end = turns[-1]  # counted from the end, which is near
        history_bytes = size - sum(map(len, pieces[end:]))
        question_bytes = history_bytes - sum(map(len, pieces[begin:end]))
    return Conversation(
        pieces,
        size,
        before.turns + len(turns),
        history_bytes,
        question_bytes,
        Outline(field, parts, messages_from),
        preamble,
        positions,
    )


#: By role: kind of message for the count of turns, kind of part, and mark.
_ROLES: dict[str | None, tuple[str, PartKind, bytes]] = {
    role: (turn, part, mark_of(role))
    for role, turn, part in (
        ("system", "other", PartKind.SYSTEM),
        ("developer", "other", PartKind.SYSTEM),
        ("user", "other", PartKind.USER),
        ("assistant", "assistant", PartKind.ASSISTANT),
        ("tool", "result", PartKind.TOOL_RESULT),
        ("function", "result", PartKind.TOOL_RESULT),
    )
}
_SYSTEM_MARK = _ROLES["system"][2]


def _other_role(message: Message) -> tuple[str, PartKind, bytes]:
    """Return the same for other roles, and for Responses items, whose type says what they are."""
    role, type_ = message.role, message.type
    mark = mark_of(role if role is not None else type_ or "user")
    if role is None and type_ is not None:
        if type_.endswith("_output"):
            return "result", PartKind.TOOL_RESULT, mark
        if type_ == "reasoning" or type_.endswith("_call"):
            return "assistant", PartKind.ASSISTANT, mark
    return "other", PartKind.USER, mark


class _Rendering:
    """Rendered text, piece by piece, with its parts and turns.

    Args:
        is_plain: whether nothing that is added has an escape that is a matter of choice.
        previous: kind of the message before the first.
    """

    __slots__ = ("_is_plain", "parts", "pieces", "previous", "turns")

    def __init__(self, is_plain: bool, previous: str) -> None:
        self._is_plain = is_plain
        self.pieces: list[Piece] = []
        #: As in an `Outline`.
        self.parts: list[tuple[int, PartKind, int]] = []
        #: First piece, and the piece after the last one, of each turn.
        self.turns: list[tuple[int, int]] = []
        #: Kind of the last message: assistant, item, result, other; empty without one.
        self.previous = previous

    def add_tools(self, tools: Raw) -> None:
        if not is_null(tools):
            self.parts.append((len(self.pieces), PartKind.TOOLS, 0))
            text = bytes(tools)
            self.pieces.append(_CACHE_CONTROL.sub(b"", text) if b'"cache_control"' in text else text)

    def add_system(self, system: Raw) -> None:
        """Add the system prompt, with each of its blocks as a part."""
        blocks: Sequence[ContentPart | str | Raw] = [system]
        if memoryview(system)[0] == _LIST:
            with contextlib.suppress(msgspec.DecodeError):
                blocks = _CONTENT.decode(system)
        has_mark = False
        for number, block in enumerate(blocks):
            at = len(self.pieces)
            if isinstance(block, Raw):
                self._add_value(block)
            else:
                self._add_part(block, [], 0)
            text = [piece for piece in self.pieces[at:] if piece[: len(_BILLING)] != _BILLING]
            del self.pieces[at:]
            if text:
                self.parts.append((at, PartKind.SYSTEM, number))
                if not has_mark:
                    self.pieces.append(_SYSTEM_MARK)
                    has_mark = True
                self.pieces += text

    def add_messages(self, messages: Sequence[Message], first: int) -> None:
        """Add *messages*, the first of which has the index *first*, with their tool results as parts."""
        pieces, parts, is_plain, previous = self.pieces, self.parts, self._is_plain, self.previous
        for number, message in enumerate(messages, first):
            turn, part, mark = _ROLES.get(message.role) or _other_role(message)
            begin = len(pieces)
            parts.append((begin, part, number))
            pieces.append(mark)
            content = message.content
            if (
                is_plain
                and content
                and (text := bytes(content) if len(content) <= SHORT else memoryview(content))[0] == _QUOTE
                and not message.reasoning
                and not message.reasoning_content
            ):
                pieces.append(text[_INSIDE_QUOTES])  # most messages
            else:
                if not (message.reasoning and self._add_value(message.reasoning)) and message.reasoning_content:
                    self._add_value(message.reasoning_content)
                if content:
                    results: list[int] = []  # first piece of each result, and the piece after it
                    self._add_content(content, results, 0)
                    for index, boundary in enumerate(results):
                        parts.append((boundary, part if index % 2 else PartKind.TOOL_RESULT, number))
            if message.tool_calls:
                pieces.append(memoryview(message.tool_calls))
            if message.type is not None:
                if turn == "assistant":
                    turn = "item"
                for field in (message.summary, message.name, message.arguments, message.input, message.output):
                    if field:
                        self._add_content(field, [], 0)
            if turn == "item" and previous == "item":
                if self.turns:
                    self.turns[-1] = self.turns[-1][0], len(pieces)
            elif turn != "other" and (turn != "result" or previous in ("", "other")):
                self.turns.append((begin, len(pieces)))
            previous = turn
        self.previous = previous

    def _add_value(self, value: Raw) -> bool:
        """Add a string, or any other value except null as it stands; returns whether it was added."""
        if is_null(value):
            return False
        self.pieces.append(text_of(value, self._is_plain))
        return True

    def _add_content(self, content: Raw, results: list[int], depth: int) -> None:
        """Add a string or a list of parts; any other value as it stands."""
        text = memoryview(content)
        if text[0] == _QUOTE:
            self.pieces.append(text[_INSIDE_QUOTES] if self._is_plain else text_of(content, False))
            return
        if text[0] == _LIST and depth <= MOST_NESTED:
            try:
                parts = _CONTENT.decode(content)
            except msgspec.DecodeError:
                pass
            else:
                for part in parts:
                    self._add_part(part, results, depth)
                return
        self._add_value(content)

    def _add_part(self, part: ContentPart | str, results: list[int], depth: int) -> None:
        if isinstance(part, str):
            self.pieces.append(_escaped(part))
            return
        for text in (part.text, part.thinking, part.refusal):
            if text and self._add_value(text):
                return
        is_result = part.type == "tool_result"
        if is_result:
            results.append(len(self.pieces))
        if part.type is not None:
            self.pieces.append(mark_of(part.type))
        if part.name:
            self._add_value(part.name)
        if part.input:
            self.pieces.append(memoryview(part.input))
        if part.content:
            self._add_content(part.content, [], depth + 1)
        for medium in (part.source, part.image_url, part.input_audio, part.audio_url, part.video_url, part.file):
            if medium:
                self.pieces += image(memoryview(medium))
        if is_result:
            results.append(len(self.pieces))


class Excerpt(Struct, frozen=True):
    """Body without its long texts.

    Args:
        body: the body, with empty strings for some of the texts in its list of messages.
        messages: the whole list.
        begin: position of the list, after its bracket.
    """

    body: bytes
    messages: list[Message]
    begin: int


class _Chat(Struct, gc=False):
    listed: list[Message] = msgspec.field(name="messages")


class _Responses(Struct, gc=False):
    listed: list[Message] = msgspec.field(name="input")


_DECODERS: dict[str, msgspec.json.Decoder[_Chat] | msgspec.json.Decoder[_Responses]] = {
    "messages": msgspec.json.Decoder(_Chat),
    "input": msgspec.json.Decoder(_Responses),
}
#: Possessive, because there may be megabytes of it.
_SPACE = rb"[ \t\r\n]*+"
#: Beginning of a body with only short strings and numbers before the list.
_OPENINGS = {
    field: re.compile(
        rb'%b\{(?:%b"\w{1,40}"%b:%b(?:"[^"\\]{0,200}"|[-+.\w]{1,40})%b,){0,40}%b"%b"%b:%b\['
        % (*(_SPACE,) * 6, field.encode(), *(_SPACE,) * 2)
    )
    for field in _DECODERS
}


def excerpt(body: bytes, field: str) -> Excerpt | None:
    """Return *body* without the long texts of the list *field*; None if it has to be read whole.

    The top level needs a pass of its own, since no name may be given twice, and most of a large body is text that was
    decoded before. The texts are searched for one after the other from the beginning of the list, so none is found
    after its own position. A JSON string occurs in JSON as a string, as the end of a string, or from the end of a
    string on. Left out, the first two leave strings. The last leaves two strings in a row, which is no JSON.
    """
    opening = _OPENINGS[field].match(body)
    if opening is None:
        return None
    try:
        messages = _DECODERS[field].decode(body).listed
    except UNREADABLE:
        return None  # reading the whole body names the error
    kept: list[bytes] = []
    start, at = 0, opening.end()
    for message in messages:
        text = message.content or message.output
        if len(text) < LONG or memoryview(text)[0] != _QUOTE:
            continue
        at = _find(body, text, at)
        if at < 0:
            return None
        kept += body[start:at], b'""'
        start = at = at + len(text)
    kept.append(body[start:])
    return Excerpt(b"".join(kept), messages, opening.end())


def _find(body: bytes, text: Raw, at: int) -> int:
    """Return the position of *text* in *body* from *at* on; -1 if it is missing or too many similar ones precede."""
    begins = bytes(memoryview(text)[:LONG])
    head, alike = begins[:HEAD], 0
    at = body.find(head, at)
    while at >= 0 and not body.startswith(text, at):
        alike += body.startswith(begins, at)
        at = -1 if alike == MOST_ALIKE else body.find(head, at + 1)
    return at
