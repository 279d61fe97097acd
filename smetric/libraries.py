"""Where the libraries of a policy lie: beside its file, each under its own name.

What they may hold, and how they are checked, is the language's business.
"""

from __future__ import annotations

from pathlib import Path

from smetric.errors import ConfigError
from smetric.policy import Reader, Source
from smetric.resources import read_policy


def libraries_beside(policy: Path) -> Reader:
    """Reads `NAME.policy` in the folder of *policy*."""

    def library(name: str) -> Source | None:
        path = policy.parent / f"{name}.policy"
        try:
            return Source(read_policy(path), str(path))
        except FileNotFoundError:
            return None
        except ConfigError as error:
            raise ValueError(str(error)) from error

    return library
