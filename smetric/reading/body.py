"""The top level of a JSON body: its members, found without decoding their values, and where each one lies.

What the values mean is in `reader.py`. The body itself is forwarded as it came; only `patch_model` and
`patch_member` make a new one. Nothing a client sent is quoted in an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Raw

from smetric.errors import RequestError
from smetric.reading.screening import encoding_problem

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
