"""Reads records: the lines of one or several files, with the policy that each decision was made by.

A file that is being written, or was when its writer died, may end in the middle of a line or of a frame; what is whole
is read. How lines are evaluated again is in `situation.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from smetric.errors import ConfigError
from smetric.records.compression import whole_lines
from smetric.records.line import VERSION, DecisionLine, Header, Line, PolicyLine
from smetric.unreadable import UNREADABLE

_EXPECTED = "expected a file that the setting `record` made"
_DECODE = msgspec.json.Decoder(Line).decode


@dataclass(frozen=True, slots=True)
class Recorded:
    """A decision, and the policy that made it."""

    line: DecisionLine
    policy: PolicyLine


@dataclass(slots=True)
class Reading:
    """Reads files in turn.

    Iterating raises a ConfigError where a file cannot be read or is no record, and where none holds a decision.

    Args:
        paths: the files, oldest first.
        progressed: told of bytes read from disk.
    """

    paths: Sequence[Path]
    progressed: Callable[[int], None] = lambda _: None
    #: Files that end in the middle of a line or of a frame.
    cut_short: list[Path] = field(default_factory=list)

    def __iter__(self) -> Iterator[Recorded]:
        is_empty = True
        for path in self.paths:
            # A single file may be empty: that is what a full disk leaves.
            for recorded in self._file(path):
                is_empty = False
                yield recorded
        if is_empty:
            raise ConfigError(f"{', '.join(map(str, self.paths))}: no decision in it; {_EXPECTED}")

    @property
    def size(self) -> int:
        """Bytes of the files on disk."""
        return sum(path.stat().st_size for path in self.paths)

    def _file(self, path: Path) -> Iterator[Recorded]:
        policies: dict[int, PolicyLine] = {}
        is_headed = False
        for number, text in enumerate(whole_lines(path, self.progressed, self.cut_short.append), 1):
            try:
                line = _DECODE(text)
            except UNREADABLE as error:
                raise _bad(path, number, f"no line of a record ({error})") from error
            if isinstance(line, DecisionLine):
                policy = policies.get(line.generation)
                if policy is None or not is_headed:
                    raise _bad(path, number, f"generation {line.generation} of the policy is not in the file")
                if not _is_whole(line):
                    raise _bad(path, number, f"decision {line.id} has columns that do not fit its candidates")
                yield Recorded(line, policy)
            elif isinstance(line, Header):
                _check_version(line, f"{path}:{number}")
                policies.clear()
                is_headed = True
            else:
                policies[line.generation] = line


class _Alone(msgspec.Struct):
    """A decision that is no file's."""

    header: Header
    policy: PolicyLine
    decision: DecisionLine


def read_alone(document: Any, place: str) -> Recorded:
    """The decision in *document*, the JSON values that the router at *place* made of it.

    Raises:
        ValueError: it is none.
        ConfigError: it is of a version that is not known here.
    """
    alone = msgspec.convert(document, _Alone)
    _check_version(alone.header, place)
    return Recorded(alone.decision, alone.policy)


def find(paths: Iterable[Path], id: str) -> Recorded | None:
    """The decision called *id*, or None.

    Raises:
        ConfigError: a file cannot be read, or is no record, or none holds a decision.
    """
    for recorded in Reading(list(paths)):
        if recorded.line.id == id:
            return recorded
    return None


def _check_version(header: Header, place: str) -> None:
    if header.version > VERSION:
        raise ConfigError(f"{place}: version {header.version}; this SMetric reads {VERSION}: use a newer one")


def _is_whole(line: DecisionLine) -> bool:
    """Whether each column has one value for each candidate."""
    count = len(line.ids)
    for column in line.columns.values():
        age, origin = column.age, column.origin
        if (
            len(column.values) != count
            or (age is not None and len(age) != count)
            or (origin.__class__ is list and len(origin) != count)
            or (column.unknown and not 0 <= min(column.unknown) <= max(column.unknown) < count)
        ):
            return False
    return True


def _bad(path: Path, number: int, why: str) -> ConfigError:
    return ConfigError(f"{path}:{number}: {why}; {_EXPECTED}")
