"""Memory of earlier bodies: what was screened, and the hashes of messages that later bodies carry again.

Most of an agent's body is its previous body. Findings are kept by a hash of all bytes up to them, so only the new
bytes are looked at. No text is kept.
"""

from __future__ import annotations

import codecs
import os
import re
from array import array
from collections.abc import Sequence
from operator import attrgetter

import msgspec
import xxhash
from cachetools import LRUCache
from msgspec import Raw, Struct, field

from smetric.errors import UNREADABLE, RequestError
from smetric.request.conversation import CHOSEN_ESCAPE, Continuation, Conversation, Position, Preamble
from smetric.request.prompt import BLOCK_BYTES, MARK_SUFFIXES, KnownPrefix, Parts, Piece

#: Bytes between two places in a body up to which findings are kept, and most places kept, about 200 bytes each.
STRIDE = 16 * 1024
MOST_PLACES = 16384
#: Bodies up to this size cannot hold enough values to stall the loop, so these are not counted.
UNCOUNTED_BYTES = 128 * 1024
#: Most strings, objects and lists in a larger body.
MAX_VALUES = 65536
#: Memory of a `PrefixMemo`; the least recently used body goes first.
MOST_BYTES = 32 * 1024 * 1024
#: Bodies below this size are read as fast as their messages are found again.
LEAST_BYTES = 64 * 1024
#: Ends of messages that are kept of a body, the last ones. Claude Code moves marks in its last two messages.
MOST_ENDS = 3
#: Bytes searched backwards for the beginning of a message or a text at its end, and most attempts; and most bytes
#: between such a text and the end of its message.
LOOKED_THROUGH = 16 * 1024
MOST_TRIED = 16
FURTHEST = 1024 * 1024
_BYTES_PER_END = 1200
_BYTES_PER_BLOCK = 8
_BYTES_PER_PART = 29
_ALL_BUT_MARKS = bytes(byte for byte in range(256) if byte not in b'"{[')
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")  # gzip, Zstandard
_ENCODINGS = (
    (b"\xef\xbb\xbf", "a byte order mark"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
    (b"{\x00", "UTF-16 or UTF-32"),
    (b"\x00", "UTF-16 or UTF-32"),
)
#: Secret, so that clients cannot construct bodies that share a hash.
_SEED = int.from_bytes(os.urandom(8))
_END = attrgetter("end")
_OBJECT = msgspec.json.Decoder(dict[str, Raw])
#: Beginning of a message, and the separator after one.
_OPENING = re.compile(rb'[ \t\r\n]*(\{[ \t\r\n]*"[a-z_]{1,20}")')
_NEXT = re.compile(rb"[ \t\r\n]*(?:,[ \t\r\n]*(?=\{)|(?=\]))")


class ScreenedBody(Struct, frozen=True):
    """Body that may be parsed.

    Args:
        body: as received.
        is_plain: whether no escape in it is a matter of choice, so that equal texts in such bodies are equal bytes.
        places: a hash of all bytes up to each multiple of `STRIDE`.
    """

    body: bytes
    is_plain: bool
    places: list[int]


class BodyScreen:
    """Check of a body's bytes before they are parsed: they must be UTF-8 and not hold too many values."""

    def __init__(self) -> None:
        #: By the hash of all bytes up to a place: twice the quotes and brackets up to there, or -1 if they were not
        #: counted, plus 1 if all is plain.
        self._seen: LRUCache[int, int] = LRUCache(MOST_PLACES)

    def __call__(self, body: bytes) -> ScreenedBody:
        """Screen *body*.

        Raises:
            RequestError: it is not UTF-8, or holds too many values.
        """
        if len(body) < STRIDE:
            try:
                body.decode()
            except UnicodeDecodeError:
                _refuse_other_encodings(body, 0)
            return ScreenedBody(body, b"\\" not in body or CHOSEN_ESCAPE.search(body) is None, [])
        places, is_counted = _places(body), len(body) > UNCOUNTED_BYTES
        known, found = self._deepest(places)
        start, marks, is_plain = known * STRIDE, found >> 1, bool(found & 1)
        if not body.isascii():
            _refuse_other_encodings(body, start)
        if not is_counted:
            marks = -1
        elif marks < 0:
            marks = sum(_marks(body[at : at + STRIDE]) for at in range(0, start, STRIDE))
            self._seen[places[known - 1]] = marks << 1 | is_plain
        found_new: list[int] = []
        for _ in places[known:]:
            end = start + STRIDE
            if is_counted:
                marks += _marks(body[start:end])
            is_plain = is_plain and _is_plain(body, start - 1 if start else 0, end)
            found_new.append(marks << 1 | is_plain)
            start = end
        is_plain = is_plain and _is_plain(body, start - 1, len(body))
        if is_counted and marks + _marks(body[start:]) > MAX_VALUES:
            _refuse_too_many_values(body)
        self._seen.update(zip(places[known:], found_new, strict=True))
        return ScreenedBody(body, is_plain, places)

    def _deepest(self, places: list[int]) -> tuple[int, int]:
        """Return the number of leading *places* up to the last one seen before, and the finding kept for it."""
        for number in range(len(places), 0, -1):
            found = self._seen.get(places[number - 1])
            if found is not None:
                return number, found
        return 0, 1


#: The screen of this process.
screen = BodyScreen()


def _places(body: bytes) -> list[int]:
    digest_of, view, last = xxhash.xxh3_64_intdigest, memoryview(body), _SEED
    places: list[int] = []
    for end in range(STRIDE, len(body) + 1, STRIDE):
        last = digest_of(view[end - STRIDE : end], last)
        places.append(last)
    return places


def _marks(piece: bytes) -> int:
    """Return the number of quotes and opening brackets, at least one per value; those inside strings count as well."""
    return len(piece.translate(None, _ALL_BUT_MARKS))


def _is_plain(body: bytes, start: int, end: int) -> bool:
    at = body.find(b"\\", start, end)  # faster than the pattern alone
    return at < 0 or CHOSEN_ESCAPE.search(body, at, end) is None


def _refuse_other_encodings(body: bytes, start: int) -> None:
    """Refuse *body* unless it is UTF-8. It is known to be up to *start*, which may be inside a character."""
    at = start - 3 if start > 3 else 0
    while at < start and body[at] & 0xC0 == 0x80:
        at += 1
    view = memoryview(body)
    try:
        while at < len(body):
            at += codecs.utf_8_decode(view[at : at + STRIDE], "strict", at + STRIDE >= len(body))[1]
    except UnicodeDecodeError:
        raise RequestError(encoding_problem(body) or "the body is not valid UTF-8; send JSON in UTF-8") from None


def encoding_problem(body: bytes) -> str | None:
    """Return what is wrong with the encoding that *body* seems to have; None if it looks like UTF-8."""
    if body.startswith(_COMPRESSED):
        return "the body is compressed, which is not taken here; send JSON as it is, without Content-Encoding"
    for mark, name in _ENCODINGS:
        if body.startswith(mark):
            return f"the body starts like {name}; send JSON in UTF-8 without a byte order mark"
    return None


def _refuse_too_many_values(body: bytes) -> None:
    """Refuse *body* if it holds more than `MAX_VALUES` values, without the marks inside its strings."""
    # Without escapes, every second run of marks is inside a string.
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _ALL_BUT_MARKS)
    values = marks.count(b'"') // 2
    if values <= MAX_VALUES:
        values += sum(map(len, marks.split(b'"')[::2]))
    if values > MAX_VALUES:
        raise RequestError(
            f"the body holds more than {MAX_VALUES} strings, objects and lists; send fewer or larger ones"
        )


class _RememberedBody(Struct, eq=False):
    """Entries of one body with their places, and the memory they take."""

    entries: list[tuple[int, MemoEntry]] = field(default_factory=list)
    size: int = 0


class MemoEntry(Struct, frozen=True, eq=False):
    """Knowledge of the messages of a body up to the end of one of them.

    Args:
        begin: position of the list of messages in the body.
        end: position of the end of that message.
        digest: hash of the body from the last multiple of `STRIDE` up to there.
        preamble: what was rendered before the messages.
        position: the position in the rendered conversation.
        prefix: block and part hashes of the prompt.
        rest: the rendered text after the last full block: its slices of the body, and marks, which are not in the body.
        of: the body's other entries.
    """

    begin: int
    end: int
    digest: int
    preamble: Preamble
    position: Position
    prefix: KnownPrefix
    rest: Sequence[slice | bytes]
    of: _RememberedBody

    def shortened(self, body: bytes) -> bytes:
        """Return *body* without these messages."""
        after = _NEXT.match(body, self.end)
        assert after is not None, "find() matched it"
        return body[: self.begin] + body[after.end() :]

    def continuation(self, body: bytes) -> Continuation:
        """Return the known part of the conversation in *body*."""
        view = memoryview(body)
        rest = [piece if isinstance(piece, bytes) else view[piece] for piece in self.rest]
        return Continuation(self.preamble, self.position, rest)


class _RememberedBodies(LRUCache[_RememberedBody, _RememberedBody]):
    """Remembered bodies within a bound on their memory, and their entries by place."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(most_bytes, lambda body: body.size)
        #: Entries by the hash of a body up to the last multiple of `STRIDE` before each end.
        self.by_place: dict[int, list[MemoEntry]] = {}

    def add(self, body: _RememberedBody) -> None:
        if body.size > self.maxsize:
            return
        self[body] = body
        for place, entry in body.entries:
            self.by_place.setdefault(place, []).append(entry)

    def __delitem__(self, body: _RememberedBody) -> None:
        super().__delitem__(body)
        for place, entry in body.entries:
            entries = self.by_place[place]
            entries.remove(entry)
            if not entries:
                del self.by_place[place]
        body.entries.clear()  # each entry refers to the body


class PrefixMemo:
    """Memo of the messages of answered bodies, with which the next body of a session begins.

    Args:
        most_bytes: bound on its memory.
        least_bytes: size of the smallest body that is worth it, at least `STRIDE`.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, least_bytes: int = LEAST_BYTES) -> None:
        self.least_bytes = least_bytes
        self._bodies = _RememberedBodies(most_bytes)

    @property
    def bytes(self) -> int:
        """Memory in use."""
        return int(self._bodies.currsize)

    def find(self, screened: ScreenedBody) -> MemoEntry | None:
        """Return what is known of the first messages of a body, as many as possible."""
        body, places = screened.body, screened.places
        view = memoryview(body)
        for number in range(len(places), 0, -1):
            for entry in sorted(self._bodies.by_place.get(places[number - 1], ()), key=_END, reverse=True):
                end = entry.end
                if (
                    end <= len(body)
                    and xxhash.xxh3_64_intdigest(view[number * STRIDE : end]) == entry.digest
                    and _NEXT.match(body, end)
                ):
                    self._bodies.get(entry.of)  # now the most recently used
                    return entry
        return None

    def remember(
        self,
        screened: ScreenedBody,
        span: tuple[int, int],
        conversation: Conversation,
        entry: MemoEntry | None,
        blocks: array[int],
        parts: Parts,
    ) -> None:
        """Remember the messages of a body instead of those of the body that it continued.

        Args:
            screened: the body.
            span: positions of its list of messages, after the bracket, and of the list's end.
            conversation: its rendering, with the positions after its last messages.
            entry: what was known of it.
            blocks: its block hashes.
            parts: its parts.
        """
        if entry is not None:
            self._bodies.pop(entry.of, None)
        body, pieces, remembered = screened.body, conversation.pieces, _RememberedBody()
        rest: list[slice | bytes] | None = None
        known = 0  # rendered bytes at the end of `rest`
        for position, end in reversed(list(zip(reversed(conversation.positions), _ends(body, *span), strict=False))):
            full = position.size // BLOCK_BYTES * BLOCK_BYTES
            if rest is None or known < full:
                rest = _locate(body, end, pieces[: position.pieces], position.size - full)
            else:
                more = _locate(body, end, pieces[: position.pieces], position.size - known)
                rest = None if more is None else rest + more
            known = position.size
            place = end // STRIDE
            if place and rest is not None:
                digest = xxhash.xxh3_64_intdigest(memoryview(body)[place * STRIDE : end])
                prefix = KnownPrefix(position.size, blocks, parts)
                new = MemoEntry(span[0], end, digest, conversation.preamble, position, prefix, rest, remembered)
                remembered.entries.append((screened.places[place - 1], new))
        if remembered.entries:
            taken = _BYTES_PER_BLOCK * len(blocks) + _BYTES_PER_PART * len(parts.hashes)
            remembered.size = taken + _BYTES_PER_END * len(remembered.entries)
            self._bodies.add(remembered)


def _locate(body: bytes, end: int, pieces: Sequence[Piece], size: int) -> list[slice | bytes] | None:
    """Return the last *size* bytes of *pieces* as slices of *body* before *end*, and marks; None if one is missing."""
    found: list[slice | bytes] = []
    for piece in reversed(pieces):
        if not size:
            break
        text = bytes(piece[-size:])
        size -= len(text)
        if text in MARK_SUFFIXES:
            found.append(text)
        else:
            # Far from the end, `find` never takes more steps than there are bytes, which `rfind` may.
            at = body.rfind(text, max(0, end - LOOKED_THROUGH), end)
            at = body.find(text, max(0, end - FURTHEST), end) if at < 0 else at
            if at < 0:
                return None
            found.append(slice(at, at + len(text)))
    return None if size else found[::-1]


def _ends(body: bytes, begin: int, end: int) -> list[int]:
    """Return the ends of the last messages of the list from *begin* to *end*, last first, as far as easily found."""
    opening = _OPENING.match(body, begin)
    found: list[int] = []
    while opening is not None:
        end = _stripped(body, end)
        if end <= begin:
            break
        found.append(end)
        if len(found) == MOST_ENDS:
            break
        start = _message_begin(body, max(begin, end - LOOKED_THROUGH), end, opening[1])
        if start is None:
            break
        end = max(begin, _stripped(body, start) - 1)  # the comma
    return found


def _message_begin(body: bytes, least: int, end: int, opening: bytes) -> int | None:
    """Return the beginning of the message that ends at *end*: only the whole message is an object up to there."""
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
    """Return *end* without the white space before it; 0 if there is more than `LOOKED_THROUGH` of it."""
    start = max(0, end - LOOKED_THROUGH)
    text = body[start:end].rstrip(b" \t\r\n")
    return start + len(text) if text else 0
