"""Top-level fields of a body, read as the types that APIs give them; an error names the field and quotes nothing."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Raw

from smetric.errors import RequestError

#: Longest JSON text of a number that is looked at, and of a name, an id or a salt: those are kept after the request.
_MAX_NUMBER = 32
MAX_STRING = 16 * 1024

T = TypeVar("T")

_NUMBER = msgspec.json.Decoder(float, strict=False)
_STRING = msgspec.json.Decoder(str | None)


def string(found: dict[str, Raw], name: str) -> str:
    """A top-level string, of bounded length; empty when absent or null."""
    value = found.get(name)
    return "" if value is None else decode(name, _STRING, bounded(name, value)) or ""


def bounded(name: str, value: Raw) -> Raw:
    """*value* of the field *name*, which must not be longer than what may be kept."""
    if len(value) > MAX_STRING:
        raise RequestError(f"`{name}` takes more than {MAX_STRING} bytes; no name, id or salt is that long", param=name)
    return value


def decode(name: str, decoder: msgspec.json.Decoder[T], value: Raw) -> T:
    """*value* of the field *name* as *decoder* takes it."""
    try:
        return decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError(f"`{name}` does not have the type this API gives it", param=name) from None


def number(name: str, value: Raw | bytes) -> float:
    """A number, or a string that holds one, as engines take either."""
    text = bytes(value)
    if len(text) <= _MAX_NUMBER:
        try:
            read = _NUMBER.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        else:
            if abs(read) <= 1e15:
                return read
    raise RequestError(f"`{name}` must be a number, at most 1e15 in size", param=name)
