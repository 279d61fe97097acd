"""A policy named on the command line: a shipped one by name, a file by path, or `-` for standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smetric.errors import ConfigError
from smetric.policy import Reader, Source
from smetric.policy.library import no_libraries
from smetric.policy.parser import read
from smetric.policy_folder import further_tests, libraries_beside, policy_of
from smetric.resources import MAX_BYTES, policy_path, read_bytes, shipped_policies

_STDIN = "<stdin>"


@dataclass(frozen=True, slots=True)
class PolicySource:
    """The text of a policy and where it came from."""

    path: str
    text: str

    @property
    def is_library(self) -> bool:
        """Whether it is a library, which decides nothing.

        Raises:
            PolicyError: it is too long to look at.
        """
        file, _ = read(self.text, self.path)
        return file.kind == "library"

    @property
    def libraries(self) -> Reader:
        """Finds the libraries it uses, beside its file; beside standard input there are none."""
        return no_libraries if self.path == _STDIN else libraries_beside(Path(self.path))

    @property
    def tests(self) -> Source | None:
        """The file with more of its tests, `NAME.test.policy` beside it, where there is one.

        Raises:
            ConfigError: it cannot be read.
        """
        return None if self.path == _STDIN else further_tests(Path(self.path))


def read_all(arguments: tuple[str, ...]) -> list[PolicySource]:
    """The policies and libraries that *arguments* name, each once; all shipped policies when there are none.

    A folder stands for all policy files in it and below it.

    Raises:
        ConfigError: there is no such policy, it cannot be read, or a folder holds none.
    """
    found: dict[str, PolicySource] = {}
    for argument in arguments or shipped_policies():
        if argument not in shipped_policies() and os.path.isdir(argument):
            files = {policy_of(path) for path in policies_below(Path(argument))}
            if not files:
                raise ConfigError(f"policy {argument}: no policy files in this folder")
            sources = [read_file(path) for path in sorted(files)]
        else:
            sources = [read_one(argument)]
        found |= {source.path: source for source in sources}
    return list(found.values())


def policies_below(folder: Path) -> Iterator[Path]:
    """All policy files in *folder* and those below it that are not hidden."""
    for path, below, files in os.walk(folder):
        below[:] = sorted(name for name in below if not name.startswith("."))
        yield from (Path(path, name) for name in sorted(files) if name.endswith(".policy"))


def read_one(argument: str) -> PolicySource:
    """The policy that *argument* names; a file of tests stands for the policy beside it.

    Raises:
        ConfigError: there is no such policy, or it cannot be read.
    """
    return read_standard_input() if argument == "-" else read_file(policy_of(policy_path(argument)))


def read_standard_input() -> PolicySource:
    """What comes on standard input."""
    return PolicySource(_STDIN, _decoded(sys.stdin.buffer.read(MAX_BYTES + 1)))


def read_file(path: Path) -> PolicySource:
    """What is in this very file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return PolicySource(_shown(path), _decoded(read_bytes(path)))
    except OSError as error:
        raise ConfigError(f"policy {path}: cannot be read: {error.strerror}") from error


def _decoded(raw: bytes) -> str:
    """The text, with lone surrogates for what is no UTF-8: the language reports their place as it does other errors."""
    return raw.decode("utf-8", "surrogateescape")


def _shown(path: Path) -> str:
    """The shorter of the absolute path and the one from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
