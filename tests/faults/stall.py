"""Longest stall of the event loop in CPU time, which a busy machine does not increase."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

#: Seconds between two looks.
EVERY_S = 0.001


class Stall:
    """Looks at the running loop as long as its context lasts.

    The CPU time of all threads counts: while one of them holds the interpreter, the loop waits too.
    """

    def __init__(self) -> None:
        #: The longest so far.
        self.seconds = 0.0
        self._last = time.process_time()
        self._timer: asyncio.TimerHandle | None = None

    def _look(self) -> None:
        now = time.process_time()
        self.seconds = max(self.seconds, now - self._last)
        self._last = now
        self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._look)

    def __enter__(self) -> Stall:
        self._last = time.process_time()
        self._look()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._look()
        assert self._timer is not None
        self._timer.cancel()
