"""Lays the environment over the file and the flags over both; every value keeps the place it came from.

Which settings exist is handed in; typing them is the settings' own business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smetric.config.raw import Items, Raw, Scalar, Table, lay_over, says_nothing
from smetric.config.section import ListOf, MapOf, Section
from smetric.config.yaml_file import read, read_value
from smetric.errors import ConfigError
from smetric.suggestion import closest

PREFIX = "SMETRIC_"
#: What Kubernetes sets in every pod of a namespace for each service called `smetric` or `smetric-…`; none of it is a
#: setting. Neither is `SMETRIC_ADMIN_PORT=9464`, but that was meant as one: a port of Kubernetes' is an address.
_KUBERNETES = re.compile(
    r"SMETRIC_([A-Z0-9]+_)*(SERVICE_HOST=|SERVICE_PORT(_\w+)?=|PORT=(tcp|udp|sctp)://|PORT_[0-9]+_(TCP|UDP|SCTP)(_\w+)?=)"
)


@dataclass(frozen=True, slots=True)
class Flagged:
    """A setting given on the command line.

    Args:
        option: as typed, for errors: `--port`.
        name: dotted name of the setting.
        value: its text, or a tuple for an option that may be repeated.
    """

    option: str
    name: str
    value: str | tuple[str, ...]


def stack(path: Path | None, env: Mapping[str, str], flags: Sequence[Flagged], root: Section[Any]) -> Table:
    """One table of all three sources; flags win over the environment, and that over the file."""
    table = Table({}, "flags")
    if path is not None:
        table = _with(table, (), read(path, env), root)
    for name, raw in _environment(env, root):
        table = _with(table, name, raw, root)
    for flag in flags:
        table = _with(table, flag.name.split("."), _flagged(flag), root)
    return table


def place_of(table: Table, path: Sequence[str | int]) -> str:
    """Where the setting at *path* (keys, and numbers for items of lists) was set, or `default`."""
    raw: Raw | None = table
    for part in path:
        if isinstance(raw, Table) and isinstance(part, str):
            raw = raw.entries.get(part)
        elif isinstance(raw, Items) and isinstance(part, int) and part < len(raw.items):
            raw = raw.items[part]
        else:
            break  # written in one word: the place of the whole
    return "default" if raw is None or says_nothing(raw) else raw.place


def _flagged(flag: Flagged) -> Raw:
    if isinstance(flag.value, str):
        return Scalar(text=flag.value, place=flag.option)
    return Items(tuple(Scalar(text=text, place=flag.option) for text in flag.value), flag.option)


def _with(table: Table, name: Sequence[str], raw: Raw, root: Section[Any]) -> Table:
    for key in reversed(name):
        raw = Table({key: raw}, raw.place)
    over = root.spelled_out(raw)  # or a word would replace a table, and a table a word
    assert isinstance(over, Table)  # as is all of a file, and what has a name
    return lay_over(table, over)


def _environment(env: Mapping[str, str], root: Section[Any]) -> Iterable[tuple[list[str], Raw]]:
    """The settings in *env*, outer ones first. An empty variable counts as not set."""
    found = []
    for variable in sorted(env):
        text = env[variable]
        if not variable.startswith(PREFIX) or not text.strip() or _KUBERNETES.match(f"{variable}={text}"):
            continue
        name, kind = _find(variable, root)
        if isinstance(kind, Section | ListOf | MapOf) and text.lstrip()[0] in "[{":
            found.append((name, read_value(text, variable)))
        else:
            found.append((name, Scalar(text=text, place=variable)))
    return sorted(found, key=lambda pair: len(pair[0]))


def _find(variable: str, root: Section[Any]) -> tuple[list[str], Any]:
    """Dotted name and kind of the setting that *variable* names."""
    kind: Any = root
    name: list[str] = []
    words = variable.removeprefix(PREFIX).split("__")
    for i, word in enumerate(words):
        if isinstance(kind, Section) and word.lower() in kind.settings:
            name.append(word.lower())
            kind = kind.settings[word.lower()].kind
        elif isinstance(kind, MapOf) and word:
            return [*name, "__".join(words[i:])], kind.value  # free names keep their case
        else:
            known = {setting.upper().replace(".", "__"): setting for setting in root.names()}
            close = closest(variable.removeprefix(PREFIX), known)
            way_out = f"did you mean {PREFIX}{close}?" if close else "`smetric config schema` lists the settings"
            raise ConfigError(f"{variable}: no such setting; {way_out}")
    return name, kind
