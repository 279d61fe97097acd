"""Top level of a JSON body, found without decoding its values."""

from __future__ import annotations

import codecs
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import msgspec
import xxhash
from msgspec import Raw, Struct

from smetric.errors import RequestError

# The text of a JSON string as prompts are hashed and measured: escaped as in JSON, but each text in one way only.
#
# Most bodies are written that way already, so that a text is a slice of its body: nothing is decoded, nothing copied.
# Which texts a prompt is made of is in `conversation.py`.

#: A piece of rendered text.
Text = bytes | memoryview

#: An escape for what can be written without one, or with another. One that is itself escaped looks the same.
CHOSEN_ESCAPE = re.compile(rb"\\[u/]")

_QUOTE = ord('"')
_STRING = msgspec.json.Decoder(str)
_ENCODE = msgspec.json.Encoder().encode


def text_of(value: Raw, is_plain: bool) -> Text:
    """The text of *value*, without the quotes around it; a value that is no string stands for itself.

    Args:
        value: JSON text.
        is_plain: whether there is no choice of escapes in *value*, as `screening.py` says.
    """
    text = memoryview(value)
    if text[0] != _QUOTE:
        return text
    if is_plain or CHOSEN_ESCAPE.search(text) is None:
        return text[1:-1]
    return escaped(_STRING.decode(value))


def escaped(text: str) -> bytes:
    """*text* as it stands between the quotes of a JSON string, with no escape that could be left out."""
    return _ENCODE(text)[1:-1]


# One look through a body's bytes before anything is parsed: that they are UTF-8, and do not hold too many values.
#
# Most of an agent's body is the body before it. What was found up to every `STRIDE` bytes is remembered under a hash of
# all bytes up to there, and only what comes behind is looked through. No text is kept. Parsing is in `body.py`.

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


# The top level of a JSON body: its members, found without decoding their values, and where each one lies.
#
# What the values mean is in `reader.py`. The body itself is forwarded as it came; only `patch_model` and
# `patch_member` make a new one. Nothing a client sent is quoted in an error.

#: Most members the top level may have, and bytes that their names may take; the widest API has about a hundred, of some
#: fifteen bytes each.
MAX_MEMBERS = 1024
MAX_NAMES_BYTES = 16 * 1024
TOO_DEEP = "the body nests objects and lists too deeply; send a flatter one"

_DECODER = msgspec.json.Decoder(dict[str, Raw])
_NULL = Raw(b"null")
_OPEN = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*")
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_AFTER = re.compile(rb"[ \t\r\n]*([,}])[ \t\r\n]*")


def members(body: bytes) -> dict[str, Raw]:
    """The top-level members of *body*, which was screened, each value as its JSON text.

    Raises:
        RequestError: the body is not one JSON object, gives a member twice, nests too deeply, has too many members or
            names too long.
    """
    try:
        found = _DECODER.decode(body)
    except RecursionError:
        raise RequestError(TOO_DEEP) from None
    except msgspec.ValidationError:
        raise RequestError("the body must be a JSON object, such as {...}, at its top level") from None
    except msgspec.DecodeError as error:
        raise RequestError(_malformed(body, error)) from None
    if len(found) > MAX_MEMBERS:
        raise RequestError(f"the body has more than {MAX_MEMBERS} top-level fields; no API has that many")
    names = len("".join(found).encode())
    if names > MAX_NAMES_BYTES:
        raise RequestError(
            f"the names of the body's top-level fields take more than {MAX_NAMES_BYTES} bytes; no API has such names"
        )
    # Written without spaces, as most clients do, a body is as long as its members: no room for a second one of a name.
    if len(body) != 1 + 4 * len(found) + names + sum(map(len, found.values())):
        for _ in spans(body, found):
            pass
    return found


def spans(body: bytes, found: Mapping[str, Raw]) -> Iterator[tuple[str, int, int]]:
    """Name, start and end of each value of *found* in *body*, in order.

    A decoder keeps the last of equal names. Walking from value to value by their lengths shows that there were others:
    the walk meets a name twice, or does not arrive at a name.

    Raises:
        RequestError: a name is given twice.
    """
    match = _OPEN.match(body)
    at = match.end() if match else 0
    seen: set[str] = set()
    while len(seen) < len(found):
        key = _KEY.match(body, at)
        if key is None:
            raise RequestError(_TWICE)
        text = key[1]
        name = msgspec.json.decode(b'"%b"' % text, type=str) if b"\\" in text else text.decode()
        value = found.get(name)
        if value is None or name in seen:
            raise RequestError(_TWICE)
        seen.add(name)
        start = key.end()
        end = start + len(value)
        yield name, start, end
        after = _AFTER.match(body, end)
        if after is None:
            raise RequestError(_TWICE)
        at = after.end()
    if found and at != len(body):
        raise RequestError(_TWICE)


def beginning(body: bytes, found: Mapping[str, Raw], member: str) -> int | None:
    """Where the list that *member* holds begins in *body*, behind its bracket; None where it holds none."""
    value = found.get(member)
    if value is None or bytes(memoryview(value)[:1]) != b"[":
        return None
    return next(start for name, start, _ in spans(body, found) if name == member) + 1


_TWICE = "the body gives a top-level field twice, and readers differ in which one counts; send each field once"


def patch_member(body: bytes, member: str, text: str) -> bytes:
    """*body* with its top-level *member*, or a new one, holding the string *text*; all other bytes stay.

    *body* is one that `members` takes, and *member* needs no escapes.
    """
    found = _DECODER.decode(body)
    value = msgspec.json.encode(text)
    for name, start, end in spans(body, found):
        if name == member:
            return body[:start] + value + body[end:]
    match = _OPEN.match(body)
    assert match is not None, "the body is an object"
    comma = b"," if found else b""
    return body[: match.end()] + b'"%b":%b%b' % (member.encode(), value, comma) + body[match.end() :]


def patch_model(body: bytes, model: str) -> bytes:
    """*body* with its top-level `model` replaced by *model*; all other bytes stay.

    Raises:
        ValueError: there is no top-level `model`.
    """
    for name, start, end in spans(body, _DECODER.decode(body)):
        if name == "model":
            return body[:start] + msgspec.json.encode(model) + body[end:]
    raise ValueError("the body has no top-level `model` to replace")


def _malformed(body: bytes, error: Exception) -> str:
    if not body.strip():
        return "the body is empty; it must be a JSON object"
    encoding = encoding_problem(body)
    if encoding is not None:
        return encoding
    place = re.search(r"\(byte \d+\)", str(error))
    where = f" {place[0]}" if place else ""
    return f"the body is not valid JSON{where}; NaN, Infinity and halves of surrogate pairs are not taken"


def is_null(value: Raw) -> bool:
    """Whether *value* is JSON's null."""
    return value == _NULL
