"""Messages as the text an engine renders, piece by piece; which part of a prompt each piece is of.

Rendering approximates a chat template: text as it is, a mark for each role. What engines do not render is left out:
Claude Code's billing header, which changes with every request, and `cache_control` marks, which move. What counts as a
turn is said in `conversation.py`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

import msgspec
from msgspec import Raw, Struct

from smetric.reading.body import is_null
from smetric.reading.json_text import Text, escaped, text_of
from smetric.reading.marks import mark_of
from smetric.reading.parts import Kind
from smetric.reading.prompt import image


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
