"""Rate limit of repeated log lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from cachetools import FIFOCache

#: Seconds that the lines of a key are counted for.
EVERY_S = 60.0
#: Lines in that time about a key whose state comes and goes, where each line says something new.
CHANGE_LINES = 10
#: Keys kept, more than a fleet has instances; the oldest is forgotten.
MAX_KEYS = 2048


class LogLimit:
    """Limit of the lines about each key.

    Args:
        clock: monotonic seconds.
        lines: lines a minute about one key.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, lines: int = 1) -> None:
        self._clock = clock
        self._lines = lines
        #: By key: when its minute began, lines written since, and lines suppressed since the last one.
        self._seen: FIFOCache[Hashable, tuple[float, int, int]] = FIFOCache(MAX_KEYS)

    def passes(self, key: Hashable) -> int | None:
        """Return how many lines about *key* were suppressed since the last one; None suppresses this one too."""
        now = self._clock()
        at, written, kept_back = self._seen.get(key, (now - EVERY_S, 0, 0))
        if now - at >= EVERY_S:
            self._seen[key] = (now, 1, 0)
            return kept_back
        if written < self._lines:
            self._seen[key] = (at, written + 1, 0)
            return 0
        self._seen[key] = (at, written, kept_back + 1)
        return None
