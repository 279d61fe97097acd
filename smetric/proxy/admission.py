"""Admission: waiting room, places, body bytes."""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter

from smetric import names
from smetric.config import Settings
from smetric.errors import Overloaded
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.proxy.overload import Level, Overload, Thresholds
from smetric.request.request import InferenceRequest
from smetric.routing.router import Router, Routing
from smetric.telemetry.gauges import OverloadFigures
from smetric.telemetry.metrics import Metrics

# The one queue: requests that a policy's `hold` keeps back, and those for which `overload.in_flight` leaves no place.
#
# Bounded in number and in bytes. Who waits is decided again by whoever holds the place; that, and the limit of requests
# under way, are in `admission.py`.

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


# The places for requests under way, where their number is limited: who finds none waits, if that is worth it.
#
# The queue itself is in `queue.py`; how the refused are answered in `admission.py`.

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


# One request that was let in: what its body counts with, its place among those under way, its time in the queue.
#
# Who is let in is decided in `admission.py`.

#: A body counts from the start with what is announced of it but no more than this, and grows in steps of as much.
STEP_BYTES = 256 * 1024
#: Times that a rule may hold a request for which the queue has no room, each for longer than the one before.
MOST_HOLDS = 16


class Permit:
    """What a request takes of the router; `end` gives it back, once, whoever calls it.

    Args:
        admission: who let it in.
        size: bytes that its body counts with.
    """

    __slots__ = ("_admission", "_has_ended", "_has_slot", "held", "size", "waited_s")

    def __init__(self, admission: Admission, size: int) -> None:
        admission.under_way += 1
        admission.bytes += size
        self._admission = admission
        self._has_slot = False
        self._has_ended = False
        #: Bytes that the body counts with.
        self.size = size
        #: Of the last call of `route`: seconds in the queue, and how a rule last held it there; None if none did.
        self.waited_s = 0.0
        self.held: Routing | None = None

    def grow(self, received: int) -> None:
        """*received* bytes of the body have come.

        Raises:
            Overloaded: it has become more than there is room for.
        """
        if received > self.size:
            step = max(STEP_BYTES, received - self.size)
            if self._admission.bytes + step > self._admission.most_bytes:
                raise self._admission.refusal("bytes")
            self.settle(self.size + step)

    def settle(self, size: int) -> None:
        """The body is known to take *size* bytes, or 0 as it is let go."""
        if not self._has_ended:
            self._admission.bytes += size - self.size
            self.size = size

    def end(self) -> None:
        """The request has ended, however it ended."""
        if not self._has_ended:
            self._has_ended = True
            self._admission.bytes -= self.size
            self._admission.under_way -= 1
            self._give_up_slot()

    async def route(
        self, router: Router, request: InferenceRequest, *, exclude: Collection[Instance], leased: bool
    ) -> Routing:
        """Route *request*, after some time in the queue where no place is free for it or a rule of the policy holds it.

        Args:
            router: decides.
            request: what is to be routed.
            exclude: instances that have failed it.
            leased: it counts as load, and needs a place.

        Raises:
            Overloaded: no place came free in time, or rules went on to hold it though the queue is full.
        """
        self.waited_s = 0.0
        self.held = None
        if leased and self._needs_slot():
            with self._timed():
                await self._wait_for_slot(request)
        routing = await router.route(request, exclude=exclude, leased=leased)
        if routing.outcome == names.HELD:
            with self._timed():
                routing = await self._hold(router, request, exclude, routing)
        return routing

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """What is done within is waiting."""
        began = perf_counter()  # uvloop's own time is in whole milliseconds
        try:
            yield
        finally:
            seconds = perf_counter() - began
            self.waited_s += seconds
            self._admission.on_waited(seconds)

    async def _hold(
        self, router: Router, request: InferenceRequest, exclude: Collection[Instance], routing: Routing
    ) -> Routing:
        """Wait, and decide again, until the decision is another one.

        A rule whose time is up, or for which the queue has no room, counts as failed: `req.held` is then what it asks
        for, whatever the time.
        """
        clock, queue = asyncio.get_running_loop().time, self._admission.queue
        since = clock() - request.held
        place = None
        times_full = 0
        try:
            while routing.outcome == names.HELD:
                assert routing.decision is not None
                patience_s = routing.decision.wait_s
                self._give_up_slot()
                place = place or queue.enter(request.model, request.priority, self.size)
                if place is None:
                    times_full += 1
                    if times_full > MOST_HOLDS:
                        raise self._admission.refusal("queue")
                    request.held = max(request.held, patience_s)
                else:
                    self.held = routing
                    is_woken = await place.turn(since + patience_s)
                    request.held = max(request.held, clock() - since if is_woken else patience_s)
                if self._needs_slot():
                    await self._wait_for_slot(request, again=place is not None)
                routing = await router.route(request, exclude=exclude)
            return routing
        finally:
            if place is not None:
                queue.leave(place)

    def _needs_slot(self) -> bool:
        """Whether it has to wait for a place under way; takes one that is free."""
        slots = self._admission.slots
        if slots is None or self._has_slot:
            return False
        self._has_slot = slots.take_free()
        return not self._has_slot

    async def _wait_for_slot(self, request: InferenceRequest, *, again: bool = False) -> None:
        slots = self._admission.slots
        assert slots is not None
        self._has_slot = await slots.take(self.size, request.priority, again=again)
        if not self._has_slot:
            raise self._admission.refusal("in_flight")

    def _give_up_slot(self) -> None:
        slots = self._admission.slots
        if slots is not None and self._has_slot:
            self._has_slot = False
            slots.give_up()


# Who is let in, before a body is kept: by the bytes of the bodies there are, by free places, by how the router is.
#
# What is watched of the router is in `overload.py`; what a request that was let in takes, and its waits, in
# `permit.py`.

#: What the clients of OpenAI and Anthropic call a request that they send again, with how many times they have.
RETRY_COUNT = b"x-stainless-retry-count"
#: Where a request says before its body how urgent it is: the lower the number the more, as for the engines.
PRIORITY = b"x-vllm-priority"
LENGTH = b"content-length"
_READ = frozenset({LENGTH, RETRY_COUNT, PRIORITY})


class Admission:
    """Lets requests in.

    Args:
        most_bytes: bytes of bodies that may be kept at once.
        queue: where requests wait.
        overload: how the router itself is.
        slots: places for requests under way; None: as many as come.
        on_refused: told the reason of each refusal (`names.REFUSALS`).
        on_retry: told of each request that a client sends again, and whether it was let in.
        on_waited: told the seconds of each wait in the queue that has ended.
        rng: spreads the times at which refused clients come back.
    """

    def __init__(
        self,
        *,
        most_bytes: int,
        queue: Queue,
        overload: Overload,
        slots: Slots | None = None,
        on_refused: Callable[[str], object] = lambda _: None,
        on_retry: Callable[[bool], object] = lambda _: None,
        on_waited: Callable[[float], object] = lambda _: None,
        rng: random.Random | None = None,
    ) -> None:
        self.most_bytes = most_bytes
        self.queue = queue
        self.overload = overload
        self.slots = slots
        self._on_refused = on_refused
        self._on_retry = on_retry
        self.on_waited = on_waited
        self._rng = rng or random.Random()
        #: Requests let in and not ended, and bytes of their bodies.
        self.under_way = 0
        self.bytes = 0
        #: The overload for which `_most` holds: as many as were under way when it began.
        self._time = 0
        self._most = 0

    def admit(self, headers: Iterable[tuple[bytes, bytes]], *, leased: bool = True) -> Permit:
        """Let a request in.

        Args:
            headers: its head's.
            leased: it will count as load, and need a place.

        Raises:
            Overloaded: there is no room for it.
        """
        length, retry, priority = 0, False, 0.0
        for name, value in headers:
            if name in _READ:
                if name == LENGTH:
                    length = int(value)
                elif name == RETRY_COUNT:
                    retry = value.strip() not in (b"", b"0")
                else:
                    priority = _priority(value)
        try:
            if self.overload.level:
                self._spare(retry=retry)
            if self.bytes + length > self.most_bytes:
                raise self.refusal("bytes")
            if leased and self.slots is not None and not self.slots.is_worth_waiting(length, priority):
                raise self.refusal("in_flight")
        except Overloaded:
            if retry:
                self._on_retry(False)
            raise
        if retry:
            self._on_retry(True)
        return Permit(self, length if length < STEP_BYTES else STEP_BYTES)

    def _spare(self, *, retry: bool) -> None:
        """Refuse what the router's own state forbids. Where nothing is under way one is let in, come what may."""
        overload = self.overload
        if self._time != overload.times:
            self._time, self._most = overload.times, self.under_way
        most = 1 if overload.level is Level.HARD else max(1, self._most)
        if self.under_way >= most or (retry and self.under_way):
            raise self.refusal(overload.resource)

    def refusal(self, reason: str) -> Overloaded:
        """The answer to a request that is refused for *reason*, one of `names.REFUSALS`; it is counted."""
        self._on_refused(reason)
        wait_s = self.slots.expected_wait_s() if self.slots is not None else 0.0
        # Not all at the same time again.
        retry_after_s = (1.0 + wait_s) * self._rng.uniform(1.0, 3.0)
        return Overloaded(_TOLD[reason], reason=reason, retry_after_s=retry_after_s)


def _priority(text: bytes) -> float:
    """As the queue has it, higher first; what is no number is refused when the request is read."""
    try:
        return -float(text) if len(text) <= 32 else 0.0
    except ValueError:
        return 0.0


def admission_of(settings: Settings, fleet: Fleet, metrics: Metrics) -> Admission:
    """What the settings say; whoever is held is woken as the load of *fleet* changes."""
    most, wait_s = settings.overload.in_flight, settings.overload.wait
    queue = Queue(settings.overload.queue, settings.overload.queue_bytes)
    fleet.watch_load(queue.changed)
    overload = Overload(
        Thresholds(settings.overload.soft_lag, settings.overload.hard_lag),
        Thresholds(settings.overload.soft_percent / 100, settings.overload.hard_percent / 100),
        memory_bytes=settings.overload.memory or None,
        on_lag=metrics.lagged,
    )
    return Admission(
        most_bytes=settings.overload.bodies,
        queue=queue,
        overload=overload,
        slots=Slots(most, wait_s, queue) if most else None,
        on_refused=metrics.refused,
        on_retry=metrics.client_retried,
        on_waited=metrics.held,
    )


_TOLD = {
    "in_flight": "as many requests are under way as there may be (setting overload.in_flight), and too many wait",
    "queue": "too many requests wait (settings overload.queue, overload.queue_bytes)",
    "bytes": "the bodies of the requests under way take all the memory for them (setting overload.bodies)",
    "lag": "the router is overloaded",
    "memory": "the router is short of memory",
    "files": "the router is short of file descriptors",
}


# How full the instances and the router are, for autoscalers: 1 when full, more when more is asked for.


class Saturation:
    """Computes it when somebody asks.

    Args:
        fleet: the instances.
        admission: who is let in, and who waits.
        connections: of clients: how many there are, and how many there may be.
    """

    def __init__(self, fleet: Fleet, admission: Admission, connections: Callable[[], tuple[int, int]]) -> None:
        self._fleet = fleet
        self._admission = admission
        self._connections = connections

    def instances(self) -> float | None:
        """Of the instances: the largest of three; None where nobody knows, for who asks would take 0 for idle.

        - Mean share of KV blocks in use, plus requests waiting for each one running, over the instances that are not
          drained and have been scraped lately;
        - 1 + requests held by rules for each one under way, while there are any: what the policy calls full is full;
        - requests under way and waiting for a place, over `overload.in_flight` where that is set.
        """
        values: list[float] = []
        now, oldest = self._fleet.clock(), self._fleet.unknown_after_s
        serving = [one for one in self._fleet.instances if not one.draining]
        scrapes = [one.scrape for one in serving if one.scrape is not None and now - one.scrape.measured_at < oldest]
        if scrapes:
            usages = [scrape.kv_usage for scrape in scrapes if scrape.kv_usage is not None]
            running = sum(scrape.running for scrape in scrapes)
            waiting = sum(scrape.waiting for scrape in scrapes)
            values.append((sum(usages) / len(usages) if usages else 0.0) + waiting / max(1.0, running))
        queue, slots = self._admission.queue, self._admission.slots
        for_a_place = queue.ahead(None)
        by_rules = queue.size - for_a_place
        if by_rules:
            values.append(1.0 + by_rules / max(1, sum(one.own for one in self._fleet.instances)))
        if slots is not None:
            values.append((slots.taken + for_a_place) / slots.most)
        if not values:
            return None if serving else 0.0
        return max(values)

    def router(self) -> float:
        """Of the router: the largest share it has taken of a bound from which on it refuses."""
        admission, (connections, most) = self._admission, self._connections()
        shares = [*admission.overload.shares.values(), admission.bytes / admission.most_bytes]
        if most:
            shares.append(connections / most)
        return max(shares)

    def figures(self) -> OverloadFigures:
        """All there is to show."""
        admission, instances = self._admission, self.instances()
        known = {} if instances is None else {"instances": instances}
        return OverloadFigures(
            queue_requests=admission.queue.size,
            queue_bytes=admission.queue.bytes,
            body_bytes=admission.bytes,
            connections=self._connections()[0],
            levels={name: int(level) for name, level in admission.overload.levels.items()},
            saturation={**known, "router": self.router()},
        )
