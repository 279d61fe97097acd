"""A secret in use: from the configuration, or from a file that is read again when it changes. Never shown.

What such a secret opens is its holder's business.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from smetric.errors import ConfigError
from smetric.files import read_regular, state_of

log = structlog.get_logger("smetric.credential")

#: Seconds between two looks at a file.
LOOK_EVERY_S = 1.0
_MOST_BYTES = 4096
_TEXT = re.compile(r"[\x21-\x7e]{1,4096}")


class Credential:
    """One secret.

    Args:
        name: the setting it belongs to, for errors.
        text: the secret itself; used where *path* is empty.
        path: a file that holds it and nothing else, but white space around it.
        least: fewest characters it may have.
        clock: seconds, for looking again.

    Raises:
        ConfigError: the file cannot be read, or what it holds cannot be a secret; its text is not shown.
    """

    def __init__(
        self, name: str, text: str, path: str, *, least: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._path = path
        self._least = least
        self._clock = clock
        self._looked_at = clock()
        self._seen: tuple[int, ...] = ()
        self._text = self._read() if path else text

    def __repr__(self) -> str:
        return f"<Credential {self._name}>"

    @property
    def text(self) -> str:
        """The secret; after its file has changed, the new one within a second. While that cannot be read, the old."""
        if self._path and self._clock() - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = self._clock()
            try:
                if state_of(Path(self._path)) != self._seen:
                    self._text = self._read()
            except (ConfigError, OSError):
                log.warning("smetric.credential.kept", setting=self._name)
        return self._text

    def _read(self) -> str:
        try:
            self._seen = state_of(Path(self._path))
            data = read_regular(Path(self._path), _MOST_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{self._name}: cannot read {self._path}: {error.strerror}") from error
        text = data.decode("ascii", "replace").strip()
        if not _TEXT.fullmatch(text) or len(text) < self._least:
            raise ConfigError(
                f"{self._name}: expected {self._least} to {_MOST_BYTES} printable ASCII characters without spaces in "
                f"{self._path}, got something else, which is not shown"
            )
        return text


def credential(name: str, text: str, path: str, *, least: int = 1) -> Credential | None:
    """The secret of the setting *name*, or None if neither it nor its file is set."""
    return Credential(name, text, path, least=least) if text or path else None
