"""The messages of a large body, and the body without their long texts, from one pass over it.

The top level has to be read with care: no name may be given twice. That takes a pass of its own over all there is, and
most of it are the texts of messages, which were passed before. What is done with either is in `reader.py`.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

from smetric.reading.rendering import Message
from smetric.unreadable import UNREADABLE

#: Smaller bodies are read twice as soon.
LEAST_BYTES = 24 * 1024
#: Bytes of a text that is worth leaving out, and how many of them it is looked for by.
LONG, HEAD = 1024, 64
#: Most places at which that many bytes of a text stand, but not all of it: each may cost its whole length.
MOST_ALIKE = 16
_QUOTE = ord('"')


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
        if len(text) < LONG or memoryview(text)[0] != _QUOTE:
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
