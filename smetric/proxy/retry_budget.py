"""How many requests may be tried on a second instance: a share of all requests, so that an outage is not multiplied.

Which failures are worth it is `forward.py`'s to say. A resend on a fresh connection of the same instance is no retry.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

#: Retries there may be per request of the last seconds, and how many there may be however few requests came. The latter
#: is more than the failures in a row that eject an instance, so that a quiet router loses no request until then.
SHARE = 0.2
LEAST = 10
WINDOW_S = 10


class RetryBudget:
    """Counts requests and retries by the second.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: By second modulo the window: which second, requests, retries.
        self._seconds = [[-WINDOW_S, 0, 0] for _ in range(WINDOW_S)]
        #: The one there is now, and when it ends.
        self._second = self._seconds[0]
        self._ends_at = -inf

    def arrived(self) -> None:
        """A request came."""
        self._now()[1] += 1

    def take(self) -> bool:
        """Whether there may be another retry; it then counts as one."""
        now = self._now()
        recent = [second for second in self._seconds if second[0] > now[0] - WINDOW_S]
        requests, retries = sum(second[1] for second in recent), sum(second[2] for second in recent)
        if retries + 1 > max(LEAST, SHARE * requests):
            return False
        now[2] += 1
        return True

    def _now(self) -> list[int]:
        now = self._clock()
        if now >= self._ends_at:
            number = int(now)
            self._ends_at = number + 1.0
            self._second = self._seconds[number % WINDOW_S]
            self._second[:] = number, 0, 0
        return self._second
