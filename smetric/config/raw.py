"""A configuration before it is typed: scalars, lists and tables, each with the place it came from.

No setting is known here; `kind.py` types these values and `layers.py` lays one source over another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from smetric.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """One word of configuration.

    Args:
        text: as written, `${…}` already replaced.
        place: `smetric.yaml:12`, `SMETRIC_LISTEN__PORT` or `--port`.
        quoted: it stood in quotes, so it is text and nothing else.
        typed: it comes from a file, where a bare `no` is a boolean; in the environment and in flags all is text.
        folder: what relative paths start from; None for the working directory.
    """

    text: str
    place: str
    quoted: bool = False
    typed: bool = False
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    items: tuple[Raw, ...]
    place: str


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping; a value under a key has the key's place."""

    entries: Mapping[str, Raw]
    place: str


Raw = Scalar | Items | Table


def lay_over(base: Table, over: Table) -> Table:
    """Both tables in one: tables are merged key by key, anything else of *over* replaces what *base* holds."""
    entries = dict(base.entries)
    for key, value in over.entries.items():
        below = entries.get(key)
        entries[key] = lay_over(below, value) if isinstance(below, Table) and isinstance(value, Table) else value
    return Table(entries, over.place)


def says_nothing(raw: Raw) -> bool:
    """Whether *raw* is a key without a value, such as a heading whose lines are all commented out."""
    return isinstance(raw, Scalar) and not raw.text and not raw.quoted


def wrong(raw: Raw, name: str, expected: str, *, got: str | None = None) -> ConfigError:
    """The error for *raw* as the value of the setting *name*.

    Args:
        raw: the value.
        name: dotted name of the setting.
        expected: the rule, with an example where that helps.
        got: how to name the value when its text must not be shown.
    """
    if got is None:
        if isinstance(raw, Scalar):
            got = f'"{raw.text[:80]}"' if raw.text else "nothing"
        else:
            got = "a list" if isinstance(raw, Items) else "a table"
    return ConfigError(f"{raw.place}: {name}: expected {expected}, got {got}")
