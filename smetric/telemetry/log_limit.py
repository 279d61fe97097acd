"""Keeps a failure that repeats from filling the log: one line a minute for each thing that fails, the rest counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

#: Seconds between two lines about the same.
EVERY_S = 60.0
#: Most things told apart.
MOST_KEYS = 256


class LogLimit:
    """Says which lines are written.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: By key, when a line was last written, and how many were kept back since.
        self._seen: dict[Hashable, tuple[float, int]] = {}

    def passes(self, key: Hashable) -> int | None:
        """How many lines about *key* were kept back since the last one; None if this one is to be kept back too."""
        now = self._clock()
        at, kept_back = self._seen.get(key, (now - EVERY_S, 0))
        if now - at < EVERY_S:
            self._seen[key] = (at, kept_back + 1)
            return None
        if len(self._seen) >= MOST_KEYS:
            self._seen.clear()
        self._seen[key] = (now, 0)
        return kept_back
