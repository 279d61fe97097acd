"""The emulated tokenizer: every four bytes of text are one token, so that it is cheap and can be undone.

Token ids are the four bytes themselves, read as an unsigned integer; a text whose length is no multiple of four ends in
a padded token. The markers of the chat template are tokens no text can produce, since 0xFF never occurs in UTF-8.
Packed tokens are their bytes, one after the other.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

from smetric.sim.blocks import TOKEN_BYTES

#: Ids are below this.
VOCABULARY = 1 << 32

MARKERS = {
    b"\xff\xff\xff\x01": "<|im_start|>",
    b"\xff\xff\xff\x02": "<|im_end|>",
}
START, END = MARKERS

_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")


def encode(text: str) -> bytes:
    """Packed tokens of *text*, which starts on a token of its own wherever it stands in a prompt."""
    data = text.encode()
    return data + _PADDING[len(data) % TOKEN_BYTES]


def count(tokens: bytes) -> int:
    """How many tokens are packed here."""
    return len(tokens) // TOKEN_BYTES


def to_ids(tokens: bytes) -> list[int]:
    """The ids of packed tokens."""
    return array("I", tokens).tolist()


def from_ids(ids: Sequence[int]) -> bytes:
    """Packed tokens of *ids*, each below `VOCABULARY`."""
    return array("I", ids).tobytes()


def strings(tokens: bytes) -> list[str]:
    """The text of each token; bytes that are no text of their own are shown as U+FFFD."""
    return [_text(tokens[at : at + TOKEN_BYTES]) for at in range(0, len(tokens), TOKEN_BYTES)]


def decode(tokens: bytes) -> str:
    """The text packed tokens stand for, markers written out."""
    pieces = re.split(b"(\xff\xff\xff[\x01\x02])", tokens)
    return "".join(_text(piece) for piece in pieces)


def _text(piece: bytes) -> str:
    marker = MARKERS.get(piece)
    return marker if marker is not None else piece.replace(b"\0", b"").decode(errors="replace")
