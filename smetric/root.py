"""The root of a conversation: what stays the same from its first request to its last, as a hash.

It settles which of two policies decides for a conversation (`smetric.routes`); it is neither logged nor recorded. The
same in every process, so that a conversation stays where it is over a restart and between routers.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Raw

from smetric.request import Api, InferenceRequest
from smetric.unreadable import UNREADABLE


class _Block(msgspec.Struct):
    """A content block; the mark for caching is left out, as it moves on while a conversation grows."""

    text: str = ""
    source: Raw = Raw()
    image_url: Raw = Raw()


class _Message(msgspec.Struct):
    role: str | None = None
    content: Raw = Raw(b"null")  # decoded where it counts: of what comes later, any shape will do


class _Body(msgspec.Struct):
    messages: list[_Message] = []
    input: str | list[_Message] = []


_decode = msgspec.json.Decoder(_Body).decode
_content = msgspec.json.Decoder(str | list[_Block | str] | None).decode


def root_of(request: InferenceRequest) -> int | None:
    """64 bits that stand for the conversation *request* belongs to; None where that cannot be known.

    The session that its client names, else the text of its first user message. A completion's prompt does not say where
    the first turn of it ended. To be asked while the body is there.
    """
    if request.session:
        return _hash(b"session", request.session)
    if request.body is None or request.api in (Api.COMPLETIONS, Api.OTHER):
        return None
    try:
        body = _decode(request.body)
        if isinstance(body.input, str):
            return _hash(b"text", body.input) if body.input else None
        for message in body.messages or body.input:
            if message.role == "user" and (content := _content(message.content)):
                return _hash(b"text", *([content] if isinstance(content, str) else map(_text, content)))
    except UNREADABLE:
        pass  # whether it is a fault is the engine's business
    return None


def _text(block: _Block | str) -> str:
    if isinstance(block, str):
        return block
    return block.text or bytes(block.source or block.image_url).decode(errors="replace")


def _hash(kind: bytes, *texts: str) -> int:
    digest = hashlib.blake2b(digest_size=8, key=kind)
    for text in texts:
        digest.update(text.encode(errors="replace"))
        digest.update(b"\0")
    return int.from_bytes(digest.digest())
