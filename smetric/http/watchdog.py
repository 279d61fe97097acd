"""One deadline at a time for one task."""

from __future__ import annotations

import asyncio
from math import inf
from typing import Any

#: Deadlines are looked at no more often, in seconds: many that pass one after the other cost no more than a few.
GRAIN_S = 0.01
#: Seconds after a deadline from which this process must have been suspended, or busy, when it passed; and how long is
#: waited from then on. What was waited for may have come all the while, and is read only now.
LATE_S, RESUMED_S = 1.0, 1.0


class Timer:
    """The timer of many watchdogs: it fires at the earliest of their deadlines, or before."""

    __slots__ = ("_handle", "at", "loop", "watchdogs")

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._handle: asyncio.TimerHandle | None = None
        #: When it fires, on the clock of `loop`.
        self.at = inf
        #: Those that have a deadline.
        self.watchdogs: set[Watchdog] = set()

    def set(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        """Fire at *at* in *loop*, and no later."""
        if self._handle is not None:
            self._handle.cancel()
        self.loop = loop
        self.at = at
        self._handle = loop.call_at(at, self._fire)

    def _fire(self) -> None:
        assert self.loop is not None
        self._handle, self.at = None, inf
        now, earliest = self.loop.time(), inf
        for watchdog in list(self.watchdogs):
            if now - watchdog.at > LATE_S:
                watchdog.at = now + RESUMED_S
            if watchdog.at <= now:
                watchdog.expire()
            elif watchdog.at < earliest:
                earliest = watchdog.at
        if earliest < self.at:
            self.set(self.loop, max(earliest, now + GRAIN_S))


class Watchdog:
    """Cancels *task* when the armed deadline passes; `expired` then says which one it was.

    Args:
        task: what is watched.
        timer: shared with others of the task's loop; None for one of its own.
    """

    __slots__ = ("_loop", "_task", "_timer", "_what", "at", "expired")

    def __init__(self, task: asyncio.Task[Any], timer: Timer | None = None) -> None:
        self._task = task
        self._loop = task.get_loop()
        self._timer = timer or Timer()
        self._what = ""
        #: The deadline, on the loop's clock.
        self.at = inf
        #: What the deadline was for, once it has passed.
        self.expired: str | None = None

    def arm(self, seconds: float, what: str) -> None:
        """Expect progress within *seconds*; replaces the deadline before."""
        self.at = at = self._loop.time() + seconds
        self._what = what
        timer = self._timer
        timer.watchdogs.add(self)
        if at < timer.at or timer.loop is not self._loop:
            timer.set(self._loop, at)

    def disarm(self) -> None:
        """No deadline until armed again."""
        self.at = inf

    def expire(self) -> None:
        """The deadline has passed."""
        self.at = inf
        self.expired = self._what
        self._task.cancel()

    def resume(self) -> None:
        """The deadline has passed and the task was cancelled for it: let the task go on."""
        self.expired = None
        self._task.uncancel()

    def close(self) -> None:
        """Forget the deadline."""
        self.at = inf
        self._timer.watchdogs.discard(self)
