"""The text of a policy file: read once, from regular files only, never more than the language allows.

Which file that is `resources` says; what the text means is the language's business.
"""

from __future__ import annotations

from pathlib import Path

from smetric.errors import ConfigError
from smetric.file_bytes import read_regular
from smetric.policy.parser import MAX_BYTES


def read_policy(path: Path) -> str:
    """The text of a policy file.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ConfigError: it is too large, or not UTF-8.
    """
    raw = read_regular(path, MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"policy {path}: larger than {MAX_BYTES} bytes; put what it shares into a library")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"policy {path}: not UTF-8 at byte {error.start}") from error


def read_whatever(path: Path) -> str:
    """The same of a file that may be too large or not UTF-8, which the language reports as it does other errors.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    return decoded(read_regular(path, MAX_BYTES + 1))


def decoded(raw: bytes) -> str:
    """The text, with lone surrogates for what is no UTF-8, so that its place can be told."""
    return raw.decode("utf-8", "surrogateescape")
