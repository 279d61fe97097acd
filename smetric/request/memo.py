"""Memo of messages carried over from an earlier request."""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter

import msgspec
import xxhash
from msgspec import Struct, field

from smetric.errors import UNREADABLE
from smetric.request.body import STRIDE, Screened, Text
from smetric.request.parts import ENDINGS, Parts

#: Bytes that all of it may take; what was used longest ago goes first.
MOST_BYTES = 32 * 1024 * 1024
#: Smaller bodies are read as soon as their messages are found again.
LEAST_BYTES = 64 * 1024
#: Ends of messages that are remembered of a body, the last ones. Claude Code moves marks in the last two messages.
MOST_ENDS = 3
#: Bytes looked through from behind for the beginning of one of these messages, or for a text that ends it, and places
#: tried; and how far before its end a text may stand, with what is not rendered between.
LOOKED_THROUGH = 16 * 1024
FURTHEST = 1024 * 1024
MOST_TRIED = 16

_BYTES_PER_END = 1200
_BYTES_PER_BLOCK = 8
_BYTES_PER_PART = 29
_END = attrgetter("end")
_hash = xxhash.xxh3_64_intdigest
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
#: What a message begins with, and what follows one.
_OPENING = re.compile(rb'[ \t\r\n]*(\{[ \t\r\n]*"[a-z_]{1,20}")')
_NEXT = re.compile(rb"[ \t\r\n]*(?:,[ \t\r\n]*(?=\{)|(?=\]))")
_SPACE = b" \t\r\n"


class Unfit(Exception):
    """What is remembered of a body's beginning does not do for the whole; read all of it."""


class Mark(Struct, frozen=True):
    """A place between two messages of a rendered conversation, by what comes before it.

    Args:
        pieces: so many of the text.
        messages: how many.
        size: rendered bytes.
        turns: how many of these messages are.
        previous: what the last of them was: assistant, item, result or other.
    """

    pieces: int
    messages: int
    size: int
    turns: int
    previous: str


class Lead(Struct, frozen=True):
    """What is rendered before the messages: its length, and a hash of it and of what else tells prompts apart."""

    size: int
    digest: int


class Family(Struct, eq=False):
    """What is remembered of one body: by place, see `Memory`; and the bytes it takes."""

    ends: list[tuple[int, Carried]] = field(default_factory=list)
    size: int = 0


class Carried(Struct, frozen=True, eq=False):
    """What the messages up to some place in a body come to.

    Args:
        begin: where the list of messages begins in the body.
        end: where the last of these messages ends.
        digest: hash of the body from the last multiple of `STRIDE` up to there.
        lead: what is rendered before them.
        mark: the place in the rendered conversation.
        blocks: hashes of the prompt's blocks, those that are full there first.
        parts: those of the prompt, those that end there first.
        rest: the rendered text that fills no block: where it stands in the body, or a mark, which stands in none.
        family: what is remembered of the same body.
    """

    begin: int
    end: int
    digest: int
    lead: Lead
    mark: Mark
    blocks: array[int]
    parts: Parts
    rest: Sequence[slice | bytes]
    family: Family

    def shortened(self, body: bytes) -> bytes:
        """*body* without these messages."""
        after = _NEXT.match(body, self.end)
        assert after is not None, "it was found by that"
        return body[: self.begin] + body[after.end() :]

    def text_of_rest(self, body: bytes) -> list[Text]:
        """The rendered text that fills no block."""
        view = memoryview(body)
        return [piece if isinstance(piece, bytes) else view[piece] for piece in self.rest]


class Memory:
    """Remembers what messages came to, and finds it again.

    Args:
        block_bytes: rendered bytes of a block.
        most_bytes: bound on the memory it takes.
        least_bytes: size of the bodies that are worth it, at least `STRIDE`.
    """

    def __init__(self, block_bytes: int, most_bytes: int = MOST_BYTES, least_bytes: int = LEAST_BYTES) -> None:
        self.least_bytes = least_bytes
        self._block_bytes = block_bytes
        self._most_bytes = most_bytes
        #: By the hash of a body up to the last multiple of `STRIDE` before each end.
        self._by_place: dict[int, list[Carried]] = {}
        self._families: OrderedDict[Family, None] = OrderedDict()
        #: What it takes now.
        self.bytes = 0

    def find(self, screened: Screened) -> Carried | None:
        """What is known of the first messages of a body, as many as possible."""
        body, places = screened.body, screened.places
        for number in range(len(places), 0, -1):
            known = self._by_place.get(places[number - 1], ())
            view, start = memoryview(body), number * STRIDE
            for carried in sorted(known, key=_END, reverse=True):
                end = carried.end
                if end <= len(body) and _hash(view[start:end]) == carried.digest and _NEXT.match(body, end):
                    self._families.move_to_end(carried.family)
                    return carried
        return None

    def remember(self, carrying: Carrying, pieces: Sequence[Text], blocks: array[int], parts: Parts) -> None:
        """Remember what the messages of a body came to, and forget the body that it went on from.

        Args:
            carrying: the body.
            pieces: its rendered text, but what was carried over.
            blocks: hashes of its blocks.
            parts: its parts.
        """
        if carrying.carried is not None:
            self._forget(carrying.carried.family)
        screened, family = carrying.screened, Family()
        body, places = screened.body, screened.places
        rest: list[slice | bytes] | None = None
        known = 0  # bytes up to where the rest ends so far
        for mark, end in reversed(list(zip(reversed(carrying.marks), _ends(body, *carrying.span), strict=False))):
            full = mark.size // self._block_bytes * self._block_bytes
            if rest is None or known < full:
                rest = _located(body, end, pieces[: mark.pieces], mark.size - full)
            else:
                more = _located(body, end, pieces[: mark.pieces], mark.size - known)
                rest = None if more is None else rest + more
            known = mark.size
            place = end // STRIDE
            if place and rest is not None:
                digest = _hash(memoryview(body)[place * STRIDE : end])
                carried = Carried(carrying.span[0], end, digest, carrying.lead, mark, blocks, parts, rest, family)
                family.ends.append((places[place - 1], carried))
        if not family.ends:
            return
        for key, carried in family.ends:
            self._by_place.setdefault(key, []).append(carried)
        taken = _BYTES_PER_BLOCK * len(blocks) + _BYTES_PER_PART * len(parts.hashes)
        family.size = taken + _BYTES_PER_END * len(family.ends)
        self._families[family] = None
        self.bytes += family.size
        while self.bytes > self._most_bytes:
            self._forget(next(iter(self._families)))

    def _forget(self, family: Family) -> None:
        if family not in self._families:
            return  # another body has gone on from there before
        del self._families[family]
        self.bytes -= family.size
        for key, carried in family.ends:
            known = self._by_place[key]
            known.remove(carried)
            if not known:
                del self._by_place[key]
        family.ends.clear()  # its members hold it


class Carrying(Struct, frozen=True):
    """A body whose messages are remembered once they are answered.

    Args:
        memory: where.
        screened: the body.
        span: where its list of messages begins, behind the bracket, and ends.
        lead: what is rendered before them.
        marks: the places behind its last messages, the last one last.
        carried: what of it was known.
    """

    memory: Memory
    screened: Screened
    span: tuple[int, int]
    lead: Lead
    marks: Sequence[Mark]
    carried: Carried | None


def _located(body: bytes, end: int, pieces: Sequence[Text], size: int) -> list[slice | bytes] | None:
    """Where the last *size* bytes of *pieces* stand in *body* before *end*, marks as they are; None if one does not."""
    found: list[slice | bytes] = []
    for piece in reversed(pieces):
        if not size:
            break
        text = bytes(piece[-size:])
        size -= len(text)
        if text in ENDINGS:
            found.append(text)
        else:
            # Far from the end by the way that is sure to take no more steps than there are bytes.
            at = body.rfind(text, max(0, end - LOOKED_THROUGH), end)
            at = body.find(text, max(0, end - FURTHEST), end) if at < 0 else at
            if at < 0:
                return None
            found.append(slice(at, at + len(text)))
    return None if size else found[::-1]


def _ends(body: bytes, begin: int, end: int) -> list[int]:
    """Where the last messages end in the list between *begin* and *end*, the last first, as far as is easily found."""
    opening = _OPENING.match(body, begin)
    found: list[int] = []
    while opening is not None:
        end = _stripped(body, end)
        if end <= begin:
            break
        found.append(end)
        if len(found) == MOST_ENDS:
            break
        start = _beginning(body, max(begin, end - LOOKED_THROUGH), end, opening[1])
        if start is None:
            break
        end = max(begin, _stripped(body, start) - 1)  # the comma
    return found


def _beginning(body: bytes, least: int, end: int, opening: bytes) -> int | None:
    """Where the message begins that ends at *end*. What is an object up to there can only be the whole of it."""
    at = end
    for _ in range(MOST_TRIED):
        at = body.rfind(opening, least, at)
        if at < 0:
            break
        try:
            _OBJECT.decode(memoryview(body)[at:end])
        except UNREADABLE:
            continue
        return at
    return None


def _stripped(body: bytes, end: int) -> int:
    """*end* without the white space before it; 0 where there is more of that than is looked through."""
    start = max(0, end - LOOKED_THROUGH)
    text = body[start:end].rstrip(_SPACE)
    return start + len(text) if text else 0
