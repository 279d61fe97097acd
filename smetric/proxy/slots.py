"""The places for requests under way, where their number is limited: who finds none waits, if that is worth it.

The queue itself is in `queue.py`; how the refused are answered in `admission.py`.
"""

from __future__ import annotations

import asyncio

from smetric.proxy.queue import Queue

#: Weight of the last interval in the mean of those between two places that were handed on.
_WEIGHT = 0.1


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
        self._handed_at: float | None = None
        #: Mean of the seconds between two places that were handed on; 0 while unknown.
        self._interval_s = 0.0
        self.taken = 0

    def expected_wait_s(self, priority: float = 0.0) -> float:
        """Seconds that a newcomer of *priority* would have to wait behind others, as places came free lately."""
        if self.taken < self.most:
            return 0.0
        return self._queue.ahead(None, priority) * self._interval_s

    def is_worth_waiting(self, size: int, priority: float = 0.0) -> bool:
        """Whether a newcomer of *size* bytes may hope for a place."""
        if self.taken < self.most:
            return True
        return self._queue.has_room(size) and self.expected_wait_s(priority) <= self._wait_s

    def take_free(self) -> bool:
        """Take a place if one is free."""
        is_free = self.taken < self.most
        self.taken += is_free
        return is_free

    async def take(self, size: int, priority: float) -> bool:
        """Take a place for a request of *size* bytes, perhaps after a wait; whether there was one in time."""
        if self.take_free():
            return True
        place = self._queue.enter(None, priority, size) if self.is_worth_waiting(size, priority) else None
        if place is None:
            return False
        with place:
            try:
                return await place.turn(asyncio.get_running_loop().time() + self._wait_s)
            except asyncio.CancelledError:
                if not place.is_in:  # its client left while it was handed a place
                    self.give_up()
                raise

    def give_up(self) -> None:
        """A request that had a place has ended."""
        while (first := self._queue.first(None)) is not None:
            self._queue.leave(first)
            if first.wake():
                self._note_pace()
                return
        self._handed_at = None
        self.taken -= 1

    def _note_pace(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._handed_at is not None:
            interval_s = now - self._handed_at
            self._interval_s += _WEIGHT * (interval_s - self._interval_s) if self._interval_s else interval_s
        self._handed_at = now
