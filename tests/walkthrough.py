"""Walkthrough of a manual page: write its files and run its commands.

A block that begins as a policy, a library or a file of tests is written to the file of its name; a YAML block to
smetric.yaml, a JSON block to snapshot.json. In a console block, what follows `$ smetric …` is what it prints.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from smetric.cli import main

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_NAMED = re.compile(r"\A(?:#[^\n]*\n|\s)*(?:policy|library) (\w+)")
_FILES = {"yaml": "smetric.yaml", "json": "snapshot.json"}


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a page.

    Args:
        line: as typed, from `smetric` on.
        expected: what the page says that it prints.
    """

    line: str
    expected: str

    def run(self) -> str:
        """Return its output in the current folder."""
        result = CliRunner().invoke(main, shlex.split(self.line)[1:])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.output.strip("\n")


def steps(page: str, folder: Path) -> Iterator[Command | Path]:
    """The steps of *page* in order: files, which are written to *folder* now, and commands to run there."""
    for kind, text in _FENCE.findall(page):
        if kind == "console":
            for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
                line, _, printed = part.partition("\n")
                yield Command(line, printed.strip("\n"))
        elif kind in _FILES or (kind == "text" and _NAMED.match(text)):
            named = _NAMED.match(text)
            path = folder / (_FILES[kind] if kind in _FILES else f"{named[1]}.policy" if named else "")
            path.write_text(text)
            yield path
