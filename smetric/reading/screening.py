"""One look through a body's bytes before anything is parsed: that they are UTF-8, and do not hold too many values.

Most of an agent's body is the body before it. What was found up to every `STRIDE` bytes is remembered under a hash of
all bytes up to there, and only what comes behind is looked through. No text is kept. Parsing is in `body.py`.
"""

from __future__ import annotations

import codecs
import os
from collections import OrderedDict

import xxhash
from msgspec import Struct

from smetric.errors import RequestError
from smetric.reading.json_text import CHOSEN_ESCAPE

#: Bytes between two places up to which findings are remembered, and how many places are, at some 200 bytes each.
STRIDE = 16 * 1024
MOST_PLACES = 16384
#: Up to this size a body cannot hold enough values to stall the loop, so they are not counted.
UNCOUNTED_BYTES = 128 * 1024
#: Most strings, objects and lists a larger body may hold.
MAX_VALUES = 65536

_ALL_BUT_MARKS = bytes(byte for byte in range(256) if byte not in b'"{[')
_BACKSLASH = ord("\\")
#: How gzip and Zstandard begin.
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
_ENCODINGS = (
    (b"\xef\xbb\xbf", "a byte order mark"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
    (b"{\x00", "UTF-16 or UTF-32"),
    (b"\x00", "UTF-16 or UTF-32"),
)
#: Nobody outside can tell which bodies share a hash.
_SEED = int.from_bytes(os.urandom(8))


class Screened(Struct, frozen=True):
    """A body that may be parsed.

    Args:
        body: as received.
        places: a hash of all bytes up to each multiple of `STRIDE`.
        is_plain: no escape in it is a matter of choice: equal texts in such bodies are equal bytes.
    """

    body: bytes
    is_plain: bool
    places: list[int]


class Screen:
    """Looks through bodies and remembers by hash what it has seen."""

    def __init__(self) -> None:
        #: By the hash of all bytes up to a place: twice the marks of values up to there, or -1 where they were not
        #: counted, plus 1 if all is plain.
        self._seen: OrderedDict[int, int] = OrderedDict()

    def __call__(self, body: bytes) -> Screened:
        """Look through *body*.

        Raises:
            RequestError: it is not UTF-8, or holds too many values to be looked into.
        """
        if len(body) < STRIDE:
            try:
                body.decode()
            except UnicodeDecodeError:
                _refuse_other_encodings(body, 0)
            return Screened(body, _BACKSLASH not in body or CHOSEN_ESCAPE.search(body) is None, [])
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
        news: list[int] = []
        for _ in places[known:]:
            end = start + STRIDE
            if is_counted:
                marks += _marks(body[start:end])
            is_plain = is_plain and _is_plain(body, start - 1 if start else 0, end)
            news.append(marks << 1 | is_plain)
            start = end
        is_plain = is_plain and _is_plain(body, start - 1, len(body))
        if is_counted and marks + _marks(body[start:]) > MAX_VALUES:
            _refuse_bomb(body)
        self._seen.update(zip(places[known:], news, strict=True))
        while len(self._seen) > MOST_PLACES:
            self._seen.popitem(last=False)
        return Screened(body, is_plain, places)

    def _deepest(self, places: list[int]) -> tuple[int, int]:
        """How many of *places* lead up to what has been seen, and what was found up to there."""
        seen = self._seen
        for number in range(len(places), 0, -1):
            found = seen.get(places[number - 1])
            if found is not None:
                seen.move_to_end(places[number - 1])
                return number, found
        return 0, 1


#: What this process has seen.
screen = Screen()


def _places(body: bytes) -> list[int]:
    """The hash of all bytes up to each multiple of `STRIDE`."""
    hash_of, view, last = xxhash.xxh3_64_intdigest, memoryview(body), _SEED
    places: list[int] = []
    for end in range(STRIDE, len(body) + 1, STRIDE):
        last = hash_of(view[end - STRIDE : end], last)
        places.append(last)
    return places


def _marks(piece: bytes) -> int:
    """Quotes and opening brackets, of which each value has one at least; those inside strings are counted as well."""
    return len(piece.translate(None, _ALL_BUT_MARKS))


def _is_plain(body: bytes, start: int, end: int) -> bool:
    at = body.find(b"\\", start, end)  # sooner found than by the pattern
    return at < 0 or CHOSEN_ESCAPE.search(body, at, end) is None


def _refuse_other_encodings(body: bytes, start: int) -> None:
    """Refuse *body* unless it is UTF-8; up to *start* it is, where a character may be cut off there."""
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
    """What is wrong with the encoding that *body* seems to be in; None if it does not look like another one."""
    if body.startswith(_COMPRESSED):
        return "the body is compressed, which is not taken here; send JSON as it is, without Content-Encoding"
    for mark, name in _ENCODINGS:
        if body.startswith(mark):
            return f"the body starts like {name}; send JSON in UTF-8 without a byte order mark"
    return None


def _refuse_bomb(body: bytes) -> None:
    """Refuse *body* if it holds more values than `MAX_VALUES`, not counting marks inside its strings."""
    # Without escapes, every second run of marks is inside a string.
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _ALL_BUT_MARKS)
    values = marks.count(b'"') // 2
    if values <= MAX_VALUES:
        values += sum(map(len, marks.split(b'"')[::2]))
    if values > MAX_VALUES:
        raise RequestError(
            f"the body holds more than {MAX_VALUES} strings, objects and lists; send fewer or larger ones"
        )
