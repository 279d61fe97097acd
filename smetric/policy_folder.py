"""What lies beside a policy's file: the libraries it uses, and a file with more of its tests.

What they may hold, and how they are checked, is the language's business.
"""

from __future__ import annotations

from pathlib import Path

from smetric.errors import ConfigError
from smetric.policy import Reader, Source
from smetric.policy_text import read_policy, read_whatever

#: What the names of files end with that hold more tests of the policy of that name.
_TESTS = ".test.policy"


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


def further_tests(policy: Path) -> Source | None:
    """`NAME.test.policy` beside *policy*, `NAME.policy`; None where there is none.

    The language judges whether it is too long, or no UTF-8.

    Raises:
        ConfigError: it cannot be read.
    """
    path = policy.with_suffix(_TESTS)
    try:
        return Source(read_whatever(path), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def policy_of(path: Path) -> Path:
    """The policy that *path* is, or whose tests it holds."""
    return path.with_name(path.name.removesuffix(_TESTS) + ".policy") if path.name.endswith(_TESTS) else path
