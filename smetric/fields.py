"""Top-level fields of a body, read as the types that APIs give them; an error names the field and quotes nothing."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Raw

from smetric.errors import RequestError

#: Longest JSON text of a number that is looked at.
_MAX_NUMBER = 32

T = TypeVar("T")

_NUMBER = msgspec.json.Decoder(float, strict=False)
_STRING = msgspec.json.Decoder(str | None)


def string(found: dict[str, Raw], name: str) -> str:
    """A top-level string; empty when absent or null."""
    value = found.get(name)
    return "" if value is None else decode(name, _STRING, value) or ""


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
