"""The conversation in a body, rendered in the engine's order: tools, system, messages; with its turns and its history.

How a message is rendered is in `smetric.rendering`, lengths and hashes are in `smetric.prompt`, and which API has which
fields is in `smetric.reading`.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import msgspec
import xxhash
from msgspec import Raw

from smetric.carried import Carried, Lead, Mark, Turns, Unfit
from smetric.errors import RequestError
from smetric.json_text import Text
from smetric.parts import Outline
from smetric.rendering import Message, Rendering


class Conversation(NamedTuple):
    """A conversation as text.

    Args:
        pieces: rendered, in order.
        turn: the number of assistant turns among them.
        history_bytes: length up to the end of the last of these turns; 0 without one.
        question_bytes: length up to its beginning.
        outline: which pieces are which part.
        lead: what comes before the messages; hashed where places are marked.
        marks: the places behind the last messages.
    """

    pieces: list[Text]
    turn: int
    history_bytes: int
    question_bytes: int
    outline: Outline
    lead: Lead
    marks: list[Mark]


#: Of a conversation of which nothing is to be remembered; and before its first message.
_NO_LEAD, _NO_TURNS = Lead(0, 0), Turns()

_MESSAGES = msgspec.json.Decoder(list[Message])


def render(
    field: str,
    messages: Raw,
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
        messages: JSON text of the list, without those that are *carried*.
        tools: JSON text of the tools.
        system: JSON text of the system prompt or instructions, a string or a list of text parts.
        is_plain: whether there is no choice of escapes in any of them, as `smetric.screening` says.
        seed: hash of what tells this prompt from one with the same text.
        ends: of so many of the last messages their place is marked.
        carried: what the messages before these come to, and the text of them that fills no block.

    Raises:
        RequestError: *messages* is not a list of objects with string roles.
        Unfit: these messages do not go on from what is carried.
    """
    try:
        decoded = _MESSAGES.decode(messages)
    except msgspec.DecodeError:
        raise RequestError(
            f"`{field}` must be a list of objects, each with its role as a string", param=field
        ) from None
    text = Rendering(is_plain)
    pieces, parts = text.pieces, text.parts
    if tools is not None:
        text.add_tools(tools)
    if system is not None:
        text.add_system(system)
    lead = _lead(field, pieces, seed) if ends else _NO_LEAD
    messages_from, known, turns, before_pieces = len(parts), 0, _NO_TURNS, 0
    if carried is not None:
        of_before, rest = carried
        if of_before.lead != lead:
            raise Unfit
        parts.clear()
        pieces[:] = rest
        mark = of_before.mark
        messages_from, known, turns, before_pieces = 0, mark.messages, mark.turns, mark.size - sum(map(len, rest))
    last, before, previous = turns.last, turns.before, turns.previous
    kinds, begins = text.add_messages(decoded, known)
    begins.append(len(pieces))
    #: Rendered bytes before each piece.
    size = list(accumulate(map(len, pieces), initial=before_pieces))
    least = size[begins[0]]
    marks: list[Mark] = []
    marked_from = len(decoded) - ends
    for at, kind in enumerate(kinds):
        if kind != "other":
            end = size[begins[at + 1]]
            if kind == "item" and previous == "item":
                last = last[0], last[1], end
            elif kind != "result":
                before, last = last, (last[0] + 1, size[begins[at]], end)
            elif previous in ("", "other"):
                last = last[0] + 1, size[begins[at]], end
        previous = kind
        if at >= marked_from:
            place = begins[at + 1]
            marks.append(Mark(known + at + 1, place, size[place], Turns(last, before, previous)))
    turn, question_bytes, history_bytes = before if previous in ("assistant", "item") else last
    if carried is not None and (not decoded or previous in ("assistant", "item") or (turn and question_bytes < least)):
        raise Unfit  # the last turn, or the last message, is not among these
    return Conversation(pieces, turn, history_bytes, question_bytes, Outline(field, parts, messages_from), lead, marks)


def _lead(field: str, pieces: list[Text], seed: int) -> Lead:
    digest = xxhash.xxh3_64_intdigest(field.encode(), seed)
    for piece in pieces:
        digest = xxhash.xxh3_64_intdigest(piece, digest)
    return Lead(sum(map(len, pieces)), digest)
