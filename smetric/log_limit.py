"""Rate limit of repeated log lines: one a minute for each failure, the rest counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

#: Seconds between two lines about the same.
EVERY_S = 60.0
#: Lines in that time about what comes and goes, each of which says something new.
CHANGES_TOLD = 10
#: Most things told apart, more than a fleet has instances; of more, what was told longest ago is new again.
MOST_KEYS = 2048


class LogLimit:
    """Says which lines are written.

    Args:
        clock: monotonic seconds.
        lines: about the same within that time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, lines: int = 1) -> None:
        self._clock = clock
        self._lines = lines
        #: By key, in the order in which the first of the latest lines were written: when that was, how many were since,
        #: and how many were kept back.
        self._seen: dict[Hashable, tuple[float, int, int]] = {}

    def passes(self, key: Hashable) -> int | None:
        """How many lines about *key* were kept back since the last one; None if this one is to be kept back too."""
        now = self._clock()
        at, written, kept_back = self._seen.get(key, (now - EVERY_S, 0, 0))
        if now - at < EVERY_S:
            if written < self._lines:
                self._seen[key] = (at, written + 1, 0)
                return 0
            self._seen[key] = (at, written, kept_back + 1)
            return None
        self._seen.pop(key, None)
        if len(self._seen) >= MOST_KEYS:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = (now, 1, 0)
        return kept_back
