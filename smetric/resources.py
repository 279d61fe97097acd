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

#: The first line of a library, below its comments.
_LIBRARY = re.compile(r"\A(?:\s|#[^\n]*)*library\b")
_PACKAGE = Path(__file__).parent
_INSTALLED = _PACKAGE / "_data" / "policies"


def shipped_policies() -> dict[str, Path]:
    """The policies that come with SMetric, by name; their libraries and the files of their tests are none."""
    folder = _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "policies"
    files = [path for path in sorted(folder.glob("*.policy")) if "." not in path.stem]
    return {path.stem: path for path in files if not _LIBRARY.search(path.read_text("utf-8"))}


def is_policy_path(reference: str) -> bool:
    """Whether *reference* is a path, not the name of a shipped policy."""
    return "/" in reference or reference.endswith(".policy")


def policy_path(policy: str) -> Path:
    """The file of a policy given as the setting `policy` is: a shipped name, or a path.

    Raises:
        ConfigError: it is no path, and no policy of that name is shipped.
    """
    shipped = shipped_policies()
    if policy in shipped:
        return shipped[policy]
    if not is_policy_path(policy):
        from smetric.config.kind import did_you_mean  # the settings take long to import, and most names are right

        meant = did_you_mean(policy, shipped) or "; shipped: " + ", ".join(shipped)
        raise ConfigError(f"policy {policy}: no such shipped policy{meant} (a file's path has a / or ends in .policy)")
    return Path(policy)


def read_policy(path: Path) -> str:
    """The text of a policy file: read once, regular files only, never more than the bound.

    Raises:
        OSError: it cannot be opened.
        ConfigError: it is no regular file, too large, or not UTF-8.
    """
    raw = read_bytes(path)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"policy {path}: not UTF-8 at byte {error.start}") from error


def read_bytes(path: Path) -> bytes:
    """What is in a policy file, whatever its encoding.

    Raises:
        OSError: it cannot be opened.
        ConfigError: it is no regular file, or too large.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"policy {path}: not a regular file")
        raw = os.read(fd, MAX_BYTES + 1)
    finally:
        os.close(fd)
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"policy {path}: larger than {MAX_BYTES} bytes; put what it shares into a library")
    return raw
