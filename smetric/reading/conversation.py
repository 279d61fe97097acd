"""The conversation in a body, rendered in the engine's order: tools, system, messages; with its turns and its history.

How a message is rendered is in `rendering.py`, lengths and hashes are in `prompt.py`, and which API has which
fields is in `reader.py`.
"""

from __future__ import annotations

import msgspec
import xxhash
from msgspec import Raw, Struct

from smetric.errors import RequestError
from smetric.reading.carried import Carried, Lead, Mark, Unfit
from smetric.reading.json_text import Text
from smetric.reading.parts import Outline
from smetric.reading.rendering import Message, Rendering


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
