"""A policy named on the command line: a shipped one by name, a file by path, or `-` for standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import click

from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.file_bytes import read_once
from smetric.policy import Policy, PolicyError, Reader, Source, load
from smetric.policy.library import no_libraries
from smetric.policy.parser import MAX_BYTES, read
from smetric.policy_folder import further_tests, libraries_beside, policy_of
from smetric.policy_text import decoded
from smetric.resources import policy_path, shipped_policies

_NONE: Mapping[str, float | str | bool] = {}


@dataclass(frozen=True)
class PolicySource:
    """A policy, and where it comes from. Its text is read when it is first asked for, once.

    Args:
        file: where it lies; None for standard input.
        problem: why there is none to read; empty where there may be one.
    """

    file: Path | None
    problem: str = ""

    @cached_property
    def path(self) -> str:
        """What reports call it: the shorter of the absolute path and the one from here."""
        if self.file is None:
            return "<stdin>"
        here = Path.cwd()
        return str(self.file.relative_to(here) if self.file.is_relative_to(here) else self.file)

    @cached_property
    def text(self) -> str:
        """What it says. The language judges whether it is too long, or no UTF-8.

        Raises:
            ConfigError: it cannot be read.
        """
        if self.problem:
            raise ConfigError(self.problem)
        if self.file is None:
            return decoded(sys.stdin.buffer.read(MAX_BYTES + 1))
        try:
            return decoded(read_once(self.file, MAX_BYTES + 1))
        except OSError as error:
            raise ConfigError(f"policy {self.file}: cannot be read: {error.strerror}") from error

    @property
    def is_library(self) -> bool:
        """Whether it is a library, which decides nothing. What is too long to look at, or no UTF-8, is none.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            file, _ = read(self.text, self.path)
        except PolicyError:
            return False
        return file.kind == "library"

    @property
    def libraries(self) -> Reader:
        """Finds the libraries it uses, beside its file; beside standard input there are none."""
        return no_libraries if self.file is None else libraries_beside(Path(self.path))

    @property
    def tests(self) -> Source | None:
        """The file with more of its tests, `NAME.test.policy` beside it, where there is one.

        Raises:
            ConfigError: it cannot be read.
        """
        return None if self.file is None else further_tests(Path(self.path))

    def load(self, settings: Mapping[str, float | str | bool] = _NONE) -> Policy:
        """The policy, its parameters as `--set` sets them.

        Raises:
            ConfigError: it cannot be read.
            click.ClickException: it does not check.
        """
        try:
            return load(
                self.text, VOCABULARY, path=self.path, settings=settings, libraries=self.libraries, set_by="`--set`"
            )
        except PolicyError as error:
            raise click.ClickException(f"{self.path} does not check\n\n{error}") from error


def policies_named(arguments: tuple[str, ...]) -> list[PolicySource]:
    """The policies and libraries that *arguments* name, each once; all shipped policies when there are none.

    A folder stands for all policy files in it and below it. That there is none is said when it is read.
    """
    found: dict[str, PolicySource] = {}
    for argument in arguments or shipped_policies():
        try:
            if os.path.isdir(argument) and argument not in shipped_policies():
                paths = {policy_of(path) for path in policies_below(argument)}
                sources = [PolicySource(path) for path in sorted(paths)]
            else:
                sources = [policy_named(argument)]
        except ConfigError as error:
            sources = [PolicySource(Path(argument), str(error))]
        found |= {source.path: source for source in sources}
    return list(found.values())


def policies_below(folder: str) -> list[Path]:
    """All policy files in *folder* and those below it that are not hidden.

    Raises:
        ConfigError: there are none.
    """
    found: list[Path] = []
    for path, below, files in os.walk(folder):
        below[:] = sorted(name for name in below if not name.startswith("."))
        found += [Path(path, name) for name in sorted(files) if name.endswith(".policy")]
    if not found:
        raise ConfigError(f"policy {folder}: no policy files in this folder")
    return found


def policy_named(argument: str) -> PolicySource:
    """The policy that *argument* names; a file of tests stands for the policy beside it.

    Raises:
        ConfigError: nothing of that name is shipped.
    """
    return PolicySource(None if argument == "-" else policy_of(policy_path(argument)))
