"""How many requests may be tried on a second instance: a share of all requests, so that an outage is not multiplied.

Which failures are worth it is `forward.py`'s to say. A resend on a fresh connection of the same instance is no retry.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

#: Retries there may be per request of the last seconds, and how many there may be however few requests there were. The
#: latter is more than the failures in a row that eject an instance, so that a quiet router loses no request until then.
SHARE = 0.2
LEAST = 10
WINDOW_S = 10


class RetryBudget:
    """Counts requests and retries by the second.

    Requests of the last seconds are those that came then, and those that were under way already: an instance that dies
    takes with it what came long before. What it had burdens nobody any more, so all of that may be tried again: of two
    instances one has half of what is under way.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way = 0
        #: By second modulo the window: which second, requests that came, retries, requests under way when it began.
        self._seconds = [[-WINDOW_S, 0, 0, 0] for _ in range(WINDOW_S)]
        #: The one there is now, and when it ends.
        self._second = self._seconds[0]
        self._ends_at = -inf

    def arrived(self) -> None:
        """A request came."""
        self._now()[1] += 1
        self._under_way += 1

    def ended(self) -> None:
        """A request has ended."""
        self._under_way -= 1

    def take(self, *, has_died: bool = False) -> bool:
        """Whether there may be another retry; it then counts as one.

        Args:
            has_died: the connection to the instance ended under the request, or it takes none.
        """
        now = self._now()
        recent = [second for second in self._seconds if second[0] > now[0] - WINDOW_S]
        requests, retries = min(recent)[3] + sum(second[1] for second in recent), sum(second[2] for second in recent)
        if retries + 1 > max(LEAST, SHARE * requests, self._under_way if has_died else 0):
            return False
        now[2] += 1
        return True

    def _now(self) -> list[int]:
        now = self._clock()
        if now >= self._ends_at:
            number = int(now)
            self._ends_at = number + 1.0
            self._second = self._seconds[number % WINDOW_S]
            self._second[:] = number, 0, 0, self._under_way
        return self._second
