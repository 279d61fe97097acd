"""The places for requests under way, where their number is limited: who finds none waits, if that is worth it.

The queue itself is in `queue.py`; how the refused are answered in `admission.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque

from smetric.proxy.queue import Queue

#: Share of the longest wait that a newcomer may expect to wait: what is expected is a mean, and few should be late.
_HOPE = 0.5
#: While it is not known how long a place is taken, so many may wait, or as many as there are places.
_FIRST = 4
#: Places handed on that are remembered, for each place there is: requests may end many at a time. And in all.
_ROUNDS = 4
_MOST_REMEMBERED = 1024


class Slots:
    """Hands out places.

    A place that is given up while somebody waits is handed to the first of them: nobody who comes in that moment is
    quicker, and none stays empty.

    Args:
        most: how many requests may be under way.
        wait_s: longest wait for a place.
        queue: where requests wait.
    """

    def __init__(self, most: int, wait_s: float, queue: Queue) -> None:
        self.most = most
        self._wait_s = wait_s
        self._queue = queue
        #: When the last places were handed on, on the loop's clock, while somebody waited without a break.
        self._handed: deque[float] = deque(maxlen=min(max(16, _ROUNDS * most), _MOST_REMEMBERED))
        self.taken = 0
        #: When a place was last given up; and whether somebody has since waited as long as one may, for none.
        self._given_up_at = 0.0
        self._is_vain = False

    def expected_wait_s(self, priority: float = 0.0) -> float:
        """Seconds that a newcomer of *priority* would have to wait behind others, as places came free lately."""
        if self.taken < self.most:
            return 0.0
        return self._queue.ahead(None, priority) * self._interval_s()

    def is_worth_waiting(self, size: int, priority: float = 0.0, *, again: bool = False) -> bool:
        """Whether a newcomer of *size* bytes may hope for a place; *again*: it is in the queue already."""
        if self.taken < self.most:
            return True
        if self._is_vain or not (again or self._queue.has_room(size)):
            return False
        if len(self._handed) < 2:
            return self._queue.ahead(None, priority) < max(_FIRST, self.most)
        return self.expected_wait_s(priority) <= _HOPE * self._wait_s

    def take_free(self) -> bool:
        """Take a place if one is free."""
        is_free = self.taken < self.most
        self.taken += is_free
        return is_free

    async def take(self, size: int, priority: float, *, again: bool = False) -> bool:
        """Take a place for a request of *size* bytes, perhaps after a wait; whether there was one in time.

        *again*: it is in the queue already.
        """
        if self.take_free():
            return True
        if not self.is_worth_waiting(size, priority, again=again):
            return False
        place = self._queue.enter(None, priority, size, again=again)
        assert place is not None, "there is room"
        loop = asyncio.get_running_loop()
        since = loop.time()
        try:
            is_mine = await place.turn(since + self._wait_s)
            self._is_vain = not is_mine and self._given_up_at < since
            return is_mine
        except asyncio.CancelledError:
            if place.is_woken:  # its client left while it was handed a place
                self.give_up()
            raise
        finally:
            self._queue.leave(place)

    def give_up(self) -> None:
        """A request that had a place has ended."""
        self._given_up_at, self._is_vain = asyncio.get_running_loop().time(), False
        while (first := self._queue.first(None)) is not None:
            self._queue.leave(first)
            if first.wake():
                self._handed.append(asyncio.get_running_loop().time())
                return
        self._handed.clear()
        self.taken -= 1

    def _interval_s(self) -> float:
        """Mean of the seconds between two places that were handed on lately; 0 while unknown."""
        handed = self._handed
        if len(handed) < 2:
            return 0.0
        return (asyncio.get_running_loop().time() - handed[0]) / len(handed)
