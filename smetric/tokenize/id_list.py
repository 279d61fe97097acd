"""The token ids of a prompt that came as a list of them, read in pieces: a million at once would stop every stream.

A prompt that is a text is encoded (`encoder.py`).
"""

from __future__ import annotations

import asyncio
import re
from array import array
from typing import Any

import msgspec
from msgspec import Raw

from smetric.tokenize.chat import Refused
from smetric.unreadable import UNREADABLE

#: Bytes of the list's text that are read before others have their turn: about a millisecond.
PIECE_BYTES = 32 * 1024

_NESTED = re.compile(rb"\[[ \t\r\n]*\[")
_MEMBERS = msgspec.json.Decoder(dict[str, Raw])
_LISTS = msgspec.json.Decoder(list[Raw])
_IDS = msgspec.json.Decoder(list[int])


async def body_of_ids(body: bytes) -> dict[str, Any]:
    """What a completions body says whose `prompt` is token ids, or lists of them: its first list, as an array.

    Raises:
        Refused: what stands there are no ids of 32 bits.
    """
    try:
        found = _MEMBERS.decode(body)
        prompt = bytes(found.pop("prompt"))
        if _NESTED.match(prompt):
            prompt = bytes(_LISTS.decode(prompt)[0])
        return {name: msgspec.json.decode(value) for name, value in found.items()} | {"prompt": await _ids(prompt)}
    except (*UNREADABLE, OverflowError):
        raise Refused from None


async def _ids(text: bytes) -> array[int]:
    """The ids of a JSON list."""
    ids: array[int] = array("I")
    at, last = 1, len(text) - 1
    while at < last:
        comma = text.find(b",", at + PIECE_BYTES)
        end = comma if comma >= 0 else last
        ids.extend(_IDS.decode(b"[%b]" % text[at:end]))
        at = end + 1
        await asyncio.sleep(0)
    return ids
