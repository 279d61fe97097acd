"""One deadline at a time for one task, moved for the price of a clock reading.

`asyncio.timeout` costs a timer per use; a stream needs a deadline per chunk.
"""

from __future__ import annotations

import asyncio
from typing import Any


class Watchdog:
    """Cancels *task* when the armed deadline passes; `expired` then says which one it was."""

    __slots__ = ("_at", "_handle", "_loop", "_task", "_what", "expired")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self._loop = task.get_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._at = 0.0
        self._what = ""
        #: What the deadline was for, once it has passed.
        self.expired: str | None = None

    def arm(self, seconds: float, what: str) -> None:
        """Expect progress within *seconds*; replaces the deadline before."""
        self._at = at = self._loop.time() + seconds
        self._what = what
        handle = self._handle
        if handle is None:
            self._handle = self._loop.call_at(at, self._check)
        elif handle.when() > at:
            handle.cancel()
            self._handle = self._loop.call_at(at, self._check)

    def disarm(self) -> None:
        """No deadline until armed again."""
        self._what = ""

    def _check(self) -> None:
        self._handle = None
        if not self._what:
            return
        if self._loop.time() < self._at:
            self._handle = self._loop.call_at(self._at, self._check)
            return
        self.expired = self._what
        self._task.cancel()

    def resume(self) -> None:
        """The deadline has passed and the task was cancelled for it: let the task go on."""
        self.expired = None
        self._task.uncancel()

    def close(self) -> None:
        """Forget the deadline and the timer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
