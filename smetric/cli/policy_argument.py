"""A policy named on the command line: a shipped one by name, a file by path, or `-` for standard input."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from smetric.errors import ConfigError
from smetric.resources import MAX_BYTES, policy_path, read_policy, shipped_policies


@dataclass(frozen=True, slots=True)
class PolicySource:
    """The text of a policy and where it came from."""

    path: str
    text: str


def read_all(arguments: tuple[str, ...]) -> list[PolicySource]:
    """The policies that *arguments* name; all shipped ones when there are none."""
    return [read_one(argument) for argument in arguments or shipped_policies()]


def read_one(argument: str) -> PolicySource:
    """The policy that *argument* names.

    Raises:
        ConfigError: there is no such policy, or it cannot be read.
    """
    if argument == "-":
        raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        try:
            return PolicySource("<stdin>", raw.decode())
        except UnicodeDecodeError as error:
            raise ConfigError(f"<stdin>: not UTF-8 at byte {error.start}") from error
    path = policy_path(argument)
    try:
        return PolicySource(_shown(path), read_policy(path))
    except OSError as error:
        raise ConfigError(f"policy {path}: cannot be read: {error.strerror}") from error


def _shown(path: Path) -> str:
    """The shorter of the absolute path and the one from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
