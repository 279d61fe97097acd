"""The one queue: requests that a policy's `hold` keeps back, and those for which `overload.in_flight` leaves no place.

Bounded in number and in bytes. Who waits is decided again by whoever holds the place; that, and the limit of requests
under way, are in `admission.py`.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort

#: Least time between two times that the first of a lane is woken to be decided again, seconds.
SPACING_S = 0.01


#: A model's lane, or that of those who wait for a place, whatever they are for.
Lane = str | None


class Queue:
    """Lanes of waiting requests, each by priority, then by arrival.

    Requests for different models have lanes of their own, so that none waits behind one that needs other instances. The
    lane None is not woken by a change of load: whoever gives a place up hands it to the first there.

    Args:
        most: requests that may wait, in all lanes together.
        most_bytes: bytes of their bodies.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most = most
        self._most_bytes = most_bytes
        self._lanes: dict[Lane, list[Place]] = {}
        self._arrivals = 0
        self._woken_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        #: Nobody waits beyond this time of the loop's clock.
        self._end = math.inf
        #: How many wait, and the bytes of their bodies.
        self.size = 0
        self.bytes = 0

    def has_room(self, size: int) -> bool:
        """Whether a request of *size* bytes may wait too."""
        return self.size < self.most and self.bytes + size <= self._most_bytes

    def enter(self, lane: Lane, priority: float, size: int, *, again: bool = False) -> Place | None:
        """A place for a request of *size* bytes, behind those of its lane with its *priority* or more; None if full.

        One that is here *again*, as it has a place in another lane, counts once, and has room.
        """
        if again:
            size = 0
        elif not self.has_room(size):
            return None
        self._arrivals += 1
        place = Place(self, lane, -priority, self._arrivals, size, 0 if again else 1)
        insort(self._lanes.setdefault(lane, []), place)
        self.size += place.count
        self.bytes += size
        return place

    def ahead(self, lane: Lane, priority: float = -math.inf) -> int:
        """How many would be in front of a newcomer of *priority*, by default one of the least."""
        places = self._lanes.get(lane)
        return bisect_left(places, (-priority, math.inf), key=lambda place: place.rank) if places else 0

    def first(self, lane: Lane) -> Place | None:
        """Whose turn is next in *lane*."""
        places = self._lanes.get(lane)
        return places[0] if places else None

    def changed(self) -> None:
        """The load of an instance has changed: wake the first of each lane, now or when that may be again."""
        if not self._lanes or self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        due = self._woken_at + SPACING_S
        if loop.time() >= due:
            self._wake_first()
        else:
            self._timer = loop.call_at(due, self._wake_first)

    def reloaded(self) -> None:
        """Another policy acts: wake all. Each has waited as long as it has."""
        for lane, places in self._lanes.items():
            for place in places if lane is not None else ():
                place.wake()

    def end_by(self, at: float) -> None:
        """Let nobody wait beyond *at* on the loop's clock: the router ends."""
        self._end = at
        for places in self._lanes.values():
            for place in places:
                place.shorten()

    def until(self, at: float) -> float:
        """*at*, or the end of all waiting if that comes first."""
        return min(at, self._end)

    def leave(self, place: Place) -> None:
        """Take *place* out, if it has not been; the one behind it may be luckier."""
        if not place.is_in:
            return
        place.is_in = False
        places = self._lanes[place.lane]
        places.pop(bisect_left(places, place.rank, key=lambda other: other.rank))
        if not places:
            del self._lanes[place.lane]
        self.size -= place.count
        self.bytes -= place.size
        self.changed()

    def _wake_first(self) -> None:
        self._timer = None
        self._woken_at = asyncio.get_running_loop().time()
        for lane, places in self._lanes.items():
            if lane is not None:
                places[0].wake()


class Place:
    """One request's place.

    Args:
        queue: where it is.
        lane: which of its lanes.
        urgency: the lower the sooner.
        number: of its arrival.
        size: bytes of the body that waits with it.
        count: requests that it counts as.
    """

    __slots__ = ("_deadline", "_queue", "_timer", "_turn", "count", "is_in", "is_woken", "lane", "rank", "size")

    def __init__(self, queue: Queue, lane: Lane, urgency: float, number: int, size: int, count: int) -> None:
        self._queue = queue
        self._turn: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = math.inf
        self.lane = lane
        self.rank = (urgency, number)
        self.size = size
        self.count = count
        #: It has not been taken out.
        self.is_in = True
        #: Its turn has come, and it does not know yet.
        self.is_woken = False

    def __lt__(self, other: Place) -> bool:
        return self.rank < other.rank

    async def turn(self, deadline: float) -> bool:
        """Wait to be woken, or for *deadline* on the loop's clock; whether it was woken."""
        if not self.is_woken:  # while it was being decided
            loop = asyncio.get_running_loop()
            self._deadline = deadline
            self._turn = loop.create_future()
            self._timer = loop.call_at(self._queue.until(deadline), self._time_is_up)
            try:
                await self._turn
            finally:
                self._timer.cancel()
                self._turn = None
        is_woken, self.is_woken = self.is_woken, False
        return is_woken

    def wake(self) -> bool:
        """Its turn has come; whether that is news to it, for it may have given up in this very moment."""
        if self._turn is not None:
            if self._turn.done():
                return False
            self._turn.set_result(None)
        self.is_woken = True
        return True

    def shorten(self) -> None:
        """The queue's own end may come before its deadline."""
        if self._turn is not None and self._timer is not None:
            self._timer.cancel()
            at = self._queue.until(self._deadline)
            self._timer = asyncio.get_running_loop().call_at(at, self._time_is_up)

    def _time_is_up(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)
