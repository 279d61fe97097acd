"""The policy files: where those that ship lie, and how any of them is read.

In a checkout they are in `policies/` beside the package, in an installed wheel inside it. The parser finds the grammar
by itself, because `policy/` imports nothing of smetric.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from smetric.errors import ConfigError

#: A policy file is at most this large (bounds of the language); one byte more is read to tell.
MAX_BYTES = 64 * 1024

#: The first line of a library, below its comments (`*+`: a line of them is never read in a second way).
_LIBRARY = re.compile(r"\A(?:\s|#[^\n]*)*+library\b")
_PACKAGE = Path(__file__).parent
_INSTALLED = _PACKAGE / "_data" / "policies"


def shipped_policies() -> dict[str, Path]:
    """The policies that come with SMetric, by name; their libraries and the files of their tests are none."""
    files = [path for path in sorted(_shipped_folder().glob("*.policy")) if "." not in path.stem]
    return {path.stem: path for path in files if not _LIBRARY.search(path.read_text("utf-8"))}


def _shipped_folder() -> Path:
    return _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "policies"


def is_policy_path(reference: str) -> bool:
    """Whether *reference* is a path, not the name of a shipped policy."""
    return "/" in reference or reference.endswith(".policy")


def policy_path(policy: str) -> Path:
    """The file of a policy given as the setting `policy` is: a shipped name, or a path.

    A shipped library is found by its name, too: whether a library will do is for the language to say.

    Raises:
        ConfigError: it is no path, and nothing of that name is shipped.
    """
    if is_policy_path(policy):
        return Path(policy)
    path = _shipped_folder() / f"{policy}.policy"
    if "." not in policy and os.path.isfile(path):
        return path
    from smetric.config.kind import did_you_mean  # the settings take long to import, and most names are right

    shipped = shipped_policies()
    meant = did_you_mean(policy, shipped) or "; shipped: " + ", ".join(shipped)
    raise ConfigError(f"policy {policy}: no such shipped policy{meant} (a file's path has a / or ends in .policy)")


def read_policy(path: Path) -> str:
    """The text of a policy file: read once, regular files only, never more than the bound.

    Raises:
        OSError: it cannot be opened.
        ConfigError: it is no regular file, too large, or not UTF-8.
    """
    raw = _read(path)
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"policy {path}: larger than {MAX_BYTES} bytes; put what it shares into a library")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"policy {path}: not UTF-8 at byte {error.start}") from error


def read_whatever(path: Path) -> str:
    """The same of a file that may be too large or not UTF-8, which the language reports as it does other errors.

    Raises:
        OSError: it cannot be opened.
        ConfigError: it is no regular file.
    """
    return decoded(_read(path))


def decoded(raw: bytes) -> str:
    """The text, with lone surrogates for what is no UTF-8, so that its place can be told."""
    return raw.decode("utf-8", "surrogateescape")


def _read(path: Path) -> bytes:
    """What is in a regular file, one byte more than `MAX_BYTES` at most."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"policy {path}: not a regular file")
        return os.read(fd, MAX_BYTES + 1)
    finally:
        os.close(fd)
