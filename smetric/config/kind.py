"""The plain kinds of value a setting may hold: each reads a raw value, shows it again, describes itself as JSON Schema.

Times and sizes are in `quantity.py`, URLs and networks in `address.py`, lists, maps and sections in `section.py`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from smetric.config.raw import Raw, Scalar, wrong
from smetric.suggestion import did_you_mean

T = TypeVar("T")

_TRUE = frozenset({"true", "yes", "on"})
_FALSE = frozenset({"false", "no", "off"})
_NOT_TEXT = re.compile(r"(?i:true|false|yes|no|on|off|null|~|[-+]?(?:[0-9][0-9_]*)?\.?[0-9_]+(?:e[-+]?[0-9]+)?)\Z")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\Z")


class Kind(ABC, Generic[T]):
    """What sort of value a setting holds."""

    @abstractmethod
    def parse(self, raw: Raw, name: str) -> T:
        """The typed value of the setting *name*; raises ConfigError with its place and the rule."""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """It as JSON Schema, draft 2020-12."""

    def show(self, value: T) -> Any:
        """*value* as it would be written in a file: numbers, booleans, strings, lists and dicts."""
        return value


def interpolated(schema: dict[str, Any]) -> dict[str, Any]:
    """*schema*, or a text with `${VAR}` in it."""
    return {"anyOf": [schema, {"type": "string", "pattern": r"\$\{"}]}


def scalar_of(raw: Raw, name: str, expected: str) -> Scalar:
    """*raw* if it is a scalar that says something; else the error that *expected* was wanted."""
    if not isinstance(raw, Scalar) or not (raw.text or raw.quoted):
        raise wrong(raw, name, expected)
    return raw


class Text(Kind[str]):
    """A text that *pattern* matches from end to end; *rule* says the pattern in words."""

    def __init__(self, pattern: str, rule: str, *, empty: bool = False) -> None:
        self._pattern = pattern
        self._rule = rule
        self._empty = empty

    def parse(self, raw: Raw, name: str) -> str:
        """The text; a bare number or boolean in a file must be quoted to be one."""
        if self._empty and isinstance(raw, Scalar) and not raw.text:
            return ""
        scalar = scalar_of(raw, name, self._rule)
        if scalar.typed and not scalar.quoted and _NOT_TEXT.match(scalar.text):
            raise wrong(raw, name, f'{self._rule} (put it in quotes: "{scalar.text}")')
        if not re.fullmatch(self._pattern, scalar.text):
            raise wrong(raw, name, self._rule)
        return scalar.text

    def schema(self) -> dict[str, Any]:
        """A string."""
        return interpolated({"type": "string", "pattern": f"^(?:{self._pattern}){'?' if self._empty else ''}$"})


class Secret(Kind[str]):
    """A text of *least* printable characters and more that no error and no listing shows; may be empty."""

    def __init__(self, least: int = 16) -> None:
        self._pattern = f"[\\x21-\\x7e]{{{least},256}}"
        self._rule = f"{least} to 256 printable ASCII characters without spaces"

    def parse(self, raw: Raw, name: str) -> str:
        """The text."""
        if not isinstance(raw, Scalar) or (raw.text and not re.fullmatch(self._pattern, raw.text)):
            raise wrong(raw, name, self._rule, got="something else, which is not shown")
        return raw.text

    def schema(self) -> dict[str, Any]:
        """A string."""
        return interpolated({"type": "string", "pattern": f"^(?:{self._pattern})?$"})

    def show(self, value: str) -> str:
        """As many asterisks for any text."""
        return "*" * 16 if value else ""


class Choice(Kind[str]):
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def parse(self, raw: Raw, name: str) -> str:
        """The word."""
        expected = "one of " + ", ".join(self._words)
        scalar = scalar_of(raw, name, expected)
        if scalar.text not in self._words:
            raise wrong(raw, name, expected + did_you_mean(scalar.text, self._words))
        return scalar.text

    def schema(self) -> dict[str, Any]:
        """An enumeration."""
        return interpolated({"enum": list(self._words)})


class Flag(Kind[bool]):
    """True or false."""

    def parse(self, raw: Raw, name: str) -> bool:
        """The boolean; YAML's yes, no, on and off are taken too."""
        scalar = scalar_of(raw, name, "true or false")
        word = scalar.text.lower()
        if scalar.quoted or word not in _TRUE | _FALSE:
            raise wrong(raw, name, "true or false")
        return word in _TRUE

    def schema(self) -> dict[str, Any]:
        """A boolean."""
        return interpolated({"type": "boolean"})


class Integer(Kind[int]):
    """A whole number from *low* to *high*."""

    def __init__(self, low: int, high: int) -> None:
        self._low = low
        self._high = high

    def parse(self, raw: Raw, name: str) -> int:
        """The number."""
        expected = f"a whole number from {self._low} to {self._high}"
        scalar = scalar_of(raw, name, expected)
        if scalar.quoted:
            raise wrong(raw, name, expected + " without quotes")
        if not re.fullmatch(r"-?[0-9]{1,18}", scalar.text) or not self._low <= int(scalar.text) <= self._high:
            raise wrong(raw, name, expected)
        return int(scalar.text)

    def schema(self) -> dict[str, Any]:
        """An integer with its range."""
        return interpolated({"type": "integer", "minimum": self._low, "maximum": self._high})


class Number(Kind[float]):
    """A number from *low* to *high*."""

    def __init__(self, low: float, high: float) -> None:
        self._low = low
        self._high = high

    def parse(self, raw: Raw, name: str) -> float:
        """The number."""
        expected = f"a number from {self._low:g} to {self._high:g}"
        scalar = scalar_of(raw, name, expected)
        if scalar.quoted:
            raise wrong(raw, name, expected + " without quotes")
        if not _NUMBER.match(scalar.text) or not self._low <= float(scalar.text) <= self._high:
            raise wrong(raw, name, expected)
        return float(scalar.text)

    def schema(self) -> dict[str, Any]:
        """A number with its range."""
        return interpolated({"type": "number", "minimum": self._low, "maximum": self._high})


class ParamValue(Kind["float | str | bool"]):
    """The value of a policy's parameter, whose own declaration says what fits: a number, a boolean or a word."""

    def parse(self, raw: Raw, name: str) -> float | str | bool:
        """A number or boolean if it reads like one and is not quoted, else text."""
        scalar = scalar_of(raw, name, "a number, true, false or a word")
        if not scalar.quoted:
            if _NUMBER.match(scalar.text):
                return float(scalar.text)
            if scalar.text in ("true", "false"):
                return scalar.text == "true"
        return scalar.text

    def schema(self) -> dict[str, Any]:
        """A number, boolean or string."""
        return {"type": ["number", "boolean", "string"]}




