"""Conversation in a body, rendered in the engine's order."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

import msgspec
import xxhash
from msgspec import Raw, Struct

from smetric.errors import UNREADABLE, RequestError
from smetric.request.body import Text, escaped, is_null, text_of
from smetric.request.memo import Carried, Lead, Mark, Unfit
from smetric.request.parts import Kind, Outline, mark_of
from smetric.request.prompt import image

# Messages as the text an engine renders, piece by piece; which part of a prompt each piece is of.
#
# Rendering approximates a chat template: text as it is, a mark for each role. What engines do not render is left out:
# Claude Code's billing header, which changes with every request, and `cache_control` marks, which move. What counts as
# a turn is said in `conversation.py`.


class Part(Struct, gc=False):
    """One part of a message's content, of any API; fields that a type does not have are empty."""

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
    """A message of chat or messages, or an item of a Responses `input`."""

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


_PARTS = msgspec.json.Decoder(list[Part | str])
_BILLING = b"x-anthropic-billing-header"
_CACHE_CONTROL = re.compile(
    rb',\s*"cache_control"\s*:\s*(?:\{[^{}]*\}|null)|"cache_control"\s*:\s*(?:\{[^{}]*\}|null)\s*,'
)
#: Of each role: what a message of it is among the turns, what it is as a part, and its mark.
_ROLES: dict[str | None, tuple[str, Kind, bytes]] = {
    role: (turn, part, mark_of(role))
    for role, turn, part in (
        ("system", "other", Kind.SYSTEM),
        ("developer", "other", Kind.SYSTEM),
        ("user", "other", Kind.USER),
        ("assistant", "assistant", Kind.ASSISTANT),
        ("tool", "result", Kind.TOOL_RESULT),
        ("function", "result", Kind.TOOL_RESULT),
    )
}
_SYSTEM_MARK = _ROLES["system"][2]
_QUOTE, _LIST = ord('"'), ord("[")
#: Of a string, what is between the quotes.
_INSIDE = slice(1, -1)
#: Bytes of a text up to which a copy of it is sooner made, and read, than a view of it.
SHORT = 448
#: Contents in contents that are taken apart; tool results hold text and images, and nothing nests deeper.
MOST_NESTED = 2


def _role(message: Message) -> tuple[str, Kind, bytes]:
    """The same for a message without one of these roles: items of the Responses API say by their type what they are."""
    role, type_ = message.role, message.type
    mark = mark_of(role if role is not None else type_ or "user")
    if role is None and type_ is not None:
        if type_.endswith("_output"):
            return "result", Kind.TOOL_RESULT, mark
        if type_ == "reasoning" or type_.endswith("_call"):
            return "assistant", Kind.ASSISTANT, mark
    return "other", Kind.USER, mark


class Rendering:
    """Text as it is rendered, piece by piece; which part each piece is of, and which turn.

    Args:
        is_plain: whether there is no choice of escapes in what is added.
        previous: what the message before the first was.
    """

    __slots__ = ("_is_plain", "parts", "pieces", "previous", "turns")

    def __init__(self, is_plain: bool, previous: str = "") -> None:
        self._is_plain = is_plain
        self.pieces: list[Text] = []
        #: As in an `Outline`.
        self.parts: list[tuple[int, Kind, int]] = []
        #: Of each turn the index of its first piece, and of the one behind it.
        self.turns: list[tuple[int, int]] = []
        #: What the last message was: assistant, item, result, other, or empty without one.
        self.previous = previous

    def add_tools(self, tools: Raw) -> None:
        """Add the tools, as one part."""
        if not is_null(tools):
            self.parts.append((len(self.pieces), Kind.TOOLS, 0))
            self.pieces.append(_without_cache_marks(tools))

    def add_system(self, system: Raw) -> None:
        """Add the system prompt, each of its blocks a part."""
        blocks: list[Part | str] | None = None
        if _first(system) == _LIST:
            with contextlib.suppress(msgspec.DecodeError):
                blocks = _PARTS.decode(system)
        has_mark = False
        for number, block in enumerate([system] if blocks is None else blocks):
            at = len(self.pieces)
            if isinstance(block, Raw):
                self._add_value(block)
            else:
                self._add_part(block, [], 0)
            text = [piece for piece in self.pieces[at:] if piece[: len(_BILLING)] != _BILLING]
            del self.pieces[at:]
            if text:
                self.parts.append((at, Kind.SYSTEM, number))
                if not has_mark:
                    self.pieces.append(_SYSTEM_MARK)
                    has_mark = True
                self.pieces += text

    def add_messages(self, messages: Sequence[Message], first: int) -> None:
        """Add *messages*, the first of which has the number *first*, and their tool results as parts of their own."""
        pieces, parts, is_plain, previous = self.pieces, self.parts, self._is_plain, self.previous
        for number, message in enumerate(messages, first):
            turn, part, mark = _ROLES.get(message.role) or _role(message)
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
                pieces.append(text[_INSIDE])  # as most messages are
            else:
                self._add_said(message, part, number)
            if message.tool_calls:
                pieces.append(memoryview(message.tool_calls))
            if message.type is not None:
                if turn == "assistant":
                    turn = "item"
                for field in (message.summary, message.name, message.arguments, message.input, message.output):
                    if field:
                        self._add_content(field, [], 0)
            if turn != "other":
                self._count(turn, begin, previous)
            previous = turn
        self.previous = previous

    def _add_said(self, message: Message, part: Kind, number: int) -> None:
        """Add what a *message* of the kind *part* thinks and says; tool results in it are parts."""
        if not (message.reasoning and self._add_value(message.reasoning)) and message.reasoning_content:
            self._add_value(message.reasoning_content)
        if message.content:
            results: list[int] = []  # where each begins and ends
            self._add_content(message.content, results, 0)
            for index, boundary in enumerate(results):
                self.parts.append((boundary, part if index % 2 else Kind.TOOL_RESULT, number))

    def _count(self, turn: str, begin: int, previous: str) -> None:
        """Count what was added from the piece *begin* on among the turns."""
        turns, end = self.turns, len(self.pieces)
        if turn == "item" and previous == "item":
            if turns:
                turns[-1] = turns[-1][0], end
        elif turn != "result" or previous in ("", "other"):
            turns.append((begin, end))

    def _add_value(self, value: Raw) -> bool:
        """Add a string, or any other value but null as it stands; returns whether it was not null."""
        if is_null(value):
            return False
        self.pieces.append(text_of(value, self._is_plain))
        return True

    def _add_content(self, content: Raw, results: list[int], depth: int) -> None:
        """Add a string or a list of parts; where it is neither, as it stands."""
        text = memoryview(content)
        if text[0] == _QUOTE:
            self.pieces.append(text[_INSIDE] if self._is_plain else text_of(content, False))
            return
        if text[0] != _LIST or depth > MOST_NESTED:
            self._add_value(content)
            return
        try:
            parts = _PARTS.decode(content)
        except msgspec.DecodeError:
            self._add_value(content)
            return
        for part in parts:
            self._add_part(part, results, depth)

    def _add_part(self, part: Part | str, results: list[int], depth: int) -> None:
        if isinstance(part, str):
            self.pieces.append(escaped(part))
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
        media = (part.source, part.image_url, part.input_audio, part.audio_url, part.video_url, part.file)
        for medium in media:
            if medium:
                self.pieces += image(memoryview(medium))
        if is_result:
            results.append(len(self.pieces))


def _first(value: Raw) -> int:
    return memoryview(value)[0]


def _without_cache_marks(tools: Raw) -> bytes:
    text = bytes(tools)
    return _CACHE_CONTROL.sub(b"", text) if b'"cache_control"' in text else text


# The messages of a large body, and the body without their long texts, from one pass over it.
#
# The top level has to be read with care: no name may be given twice. That takes a pass of its own over all there is,
# and most of it are the texts of messages, which were passed before. What is done with either is in `reader.py`.

#: Smaller bodies are read twice as soon.
LEAST_BYTES = 24 * 1024
#: Bytes of a text that is worth leaving out, and how many of them it is looked for by.
LONG, HEAD = 1024, 64
#: Most places at which that many bytes of a text stand, but not all of it: each may cost its whole length.
MOST_ALIKE = 16
_EXCERPT_QUOTE = ord('"')


class Excerpt(Struct, frozen=True):
    """A body in short.

    Args:
        body: it, with empty strings for some of the texts in its list of messages.
        messages: the list.
        begin: where the list begins, behind its bracket.
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
#: Never tried again with less of it: there may be megabytes.
_SPACE = rb"[ \t\r\n]*+"
#: How a body begins in which only short strings and numbers come before the list.
_OPENINGS = {
    field: re.compile(
        rb'%b\{(?:%b"\w{1,40}"%b:%b(?:"[^"\\]{0,200}"|[-+.\w]{1,40})%b,){0,40}%b"%b"%b:%b\['
        % (*(_SPACE,) * 6, field.encode(), *(_SPACE,) * 2)
    )
    for field in _DECODERS
}


def excerpt(body: bytes, field: str) -> Excerpt | None:
    """*body*, of whose list in *field* the long texts are left out; None where it is to be read as it is.

    The texts are looked for one after the other from where the list begins, so none is found behind its place. A JSON
    string is found in JSON only as a string, or as the end of one, or from the end of one on. Left out, the first two
    leave strings; the last leaves a string behind a string, which is no JSON.
    """
    opening = _OPENINGS[field].match(body)
    if opening is None:
        return None
    try:
        messages = _DECODERS[field].decode(body).listed
    except UNREADABLE:
        return None  # what is wrong is told by who reads all of it
    kept: list[bytes] = []
    start, at = 0, opening.end()
    for message in messages:
        text = message.content or message.output
        if len(text) < LONG or memoryview(text)[0] != _EXCERPT_QUOTE:
            continue
        at = _place(body, text, at)
        if at < 0:
            return None
        kept += body[start:at], b'""'
        start = at = at + len(text)
    kept.append(body[start:])
    return Excerpt(b"".join(kept), messages, opening.end())


def _place(body: bytes, text: msgspec.Raw, at: int) -> int:
    """Where *text* stands in *body* from *at* on; -1 where it does not, or others that begin like it are before it."""
    begins = bytes(memoryview(text)[:LONG])
    head, alike = begins[:HEAD], 0
    at = body.find(head, at)
    while at >= 0 and not body.startswith(text, at):
        alike += body.startswith(begins, at)
        at = -1 if alike == MOST_ALIKE else body.find(head, at + 1)
    return at


# The conversation in a body, rendered in the engine's order: tools, system, messages; with its turns and its history.
#
# How a message is rendered is in `rendering.py`, lengths and hashes are in `prompt.py`, and which API has which
# fields is in `reader.py`.


class Conversation(Struct, frozen=True):
    """A conversation as text.

    Args:
        pieces: rendered, in order.
        size: length, with what was carried.
        turn: the number of assistant turns among them.
        history_bytes: length up to the end of the last of these turns; 0 without one.
        question_bytes: length up to its beginning.
        outline: which pieces are which part.
        lead: what comes before the messages; hashed where places are marked.
        marks: the places behind the last messages.
    """

    pieces: list[Text]
    size: int
    turn: int
    history_bytes: int
    question_bytes: int
    outline: Outline
    lead: Lead
    marks: list[Mark]


#: Of a conversation of which nothing is to be remembered.
_NO_LEAD = Lead(0, 0)

_MESSAGES = msgspec.json.Decoder(list[Message])


def render(
    field: str,
    messages: Raw | list[Message],
    *,
    tools: Raw | None = None,
    system: Raw | None = None,
    is_plain: bool = False,
    seed: int = 0,
    ends: int = 0,
    carried: tuple[Carried, list[Text]] | None = None,
) -> Conversation:
    """Render *messages*, a list of messages or of Responses items, after *tools* and *system*.

    An assistant message is a turn, and so is a run of Responses output items; tool results belong to the call before
    them, and are a turn of their own where there is none. A trailing assistant message (a prefill) belongs to the new
    turn. The history ends with the last turn.

    Args:
        field: name of the list, for errors.
        messages: the list, or its JSON text, without those that are *carried*.
        tools: JSON text of the tools.
        system: JSON text of the system prompt or instructions, a string or a list of text parts.
        is_plain: whether there is no choice of escapes in any of them, as `screening.py` says.
        seed: hash of what tells this prompt from one with the same text.
        ends: of so many of the last messages their place is marked.
        carried: what the messages before these come to, and the text of them that fills no block.

    Raises:
        RequestError: *messages* is not a list of objects with string roles.
        Unfit: these messages do not go on from what is carried.
    """
    decoded = messages if isinstance(messages, list) else _decoded(field, messages)
    messages_before, turns_before, size, previous = 0, 0, 0, ""
    if carried is not None:
        mark = carried[0].mark
        messages_before, turns_before, size, previous = mark.messages, mark.turns, mark.size, mark.previous
    text = Rendering(is_plain, previous)
    pieces, parts, turns = text.pieces, text.parts, text.turns
    if tools is not None:
        text.add_tools(tools)
    if system is not None:
        text.add_system(system)
    lead = _lead(field, pieces, seed) if ends else _NO_LEAD
    messages_from = len(parts)
    if carried is not None:
        of_before, rest = carried
        if of_before.lead != lead:
            raise Unfit
        parts.clear()
        pieces[:] = rest
        messages_from, size = 0, size - sum(map(len, rest))
    marked_from = len(decoded) - ends if len(decoded) > ends else 0
    text.add_messages(decoded[:marked_from], messages_before)
    size += sum(map(len, pieces))
    marks: list[Mark] = []
    for number, message in enumerate(decoded[marked_from:], messages_before + marked_from):
        begin = len(pieces)
        text.add_messages((message,), number)
        size += sum(map(len, pieces[begin:]))
        marks.append(Mark(len(pieces), number + 1, size, turns_before + len(turns), text.previous))
    is_begun = text.previous in ("assistant", "item")
    if carried is not None and (not decoded or is_begun or (turns_before and not turns)):
        raise Unfit  # the last turn, or the last message, is not among these
    if is_begun:
        turns.pop()
    question_bytes = history_bytes = 0
    if turns:
        begin, end = turns[-1]  # from behind, where little has to be counted
        history_bytes = size - sum(map(len, pieces[end:]))
        question_bytes = history_bytes - sum(map(len, pieces[begin:end]))
    outline = Outline(field, parts, messages_from)
    return Conversation(pieces, size, turns_before + len(turns), history_bytes, question_bytes, outline, lead, marks)


def _decoded(field: str, messages: Raw) -> list[Message]:
    try:
        return _MESSAGES.decode(messages)
    except msgspec.DecodeError:
        raise RequestError(
            f"`{field}` must be a list of objects, each with its role as a string", param=field
        ) from None


def _lead(field: str, pieces: list[Text], seed: int) -> Lead:
    digest = xxhash.xxh3_64_intdigest(field.encode(), seed)
    for piece in pieces:
        digest = xxhash.xxh3_64_intdigest(piece, digest)
    return Lead(sum(map(len, pieces)), digest)
