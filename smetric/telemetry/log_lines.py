"""Where log lines end up: a text stream, written at once for most lines, a few times a second for those that can wait.

A log that cannot be written, as its terminal is gone or its disk full, costs its lines and nothing else. What a line
says is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import threading
from typing import ClassVar, TextIO

#: Longest that a line waits, seconds, and most lines that do. One write of the kernel costs more than making a line.
WAIT_S = 0.05
MOST_WAITING = 256


class LogLines:
    """A stream for loggers. Lines come out in the order they went in, those that can wait before what makes them.

    Args:
        out: where they are written.
    """

    #: Lines that could not be written, of all streams of this process.
    lost: ClassVar[int] = 0

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._waiting: list[str] = []
        self._is_due = False
        self._lock = threading.Lock()

    def write(self, text: str) -> None:
        """Take *text*; `flush` writes it. Any thread may call these two."""
        self._waiting.append(text)

    def flush(self) -> None:
        """Write all that waits."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            if waiting:
                try:
                    self._out.write("".join(waiting))
                    self._out.flush()
                except OSError:
                    LogLines.lost += len(waiting)

    def write_soon(self, text: str) -> None:
        """Write *text* within `WAIT_S`, together with others; at once where no event loop runs."""
        self._waiting.append(text)
        if self._is_due and len(self._waiting) < MOST_WAITING:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
            return
        if self._is_due:
            self.flush()
        else:
            self._is_due = True
            loop.call_later(WAIT_S, self._flush_due)

    def _flush_due(self) -> None:
        self._is_due = False
        self.flush()
