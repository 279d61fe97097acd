"""Admission: lets requests in, refuses them, and makes them wait.

A request that was let in waits for one of two reasons: a rule of the policy holds it, or none of the slots that
`overload.in_flight` allows is free. The load of the router itself is measured in `overload.py`.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import chain
from operator import attrgetter
from time import perf_counter

from smetric import names
from smetric.config import Settings
from smetric.errors import Overloaded
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.http.limits import TOO_SLOW
from smetric.http.transaction import Watchdog
from smetric.proxy.overload import Level, Overload, Thresholds
from smetric.request.request import InferenceRequest
from smetric.routing.router import Router, Routing
from smetric.telemetry.gauges import OverloadFigures
from smetric.telemetry.metrics import Metrics

#: Shortest time between two wake-ups of the head of a lane, seconds.
WAKE_INTERVAL_S = 0.01
#: A request waits for a slot if its expected wait is at most this share of the longest wait. The expectation is a mean,
#: and few requests should time out.
MAX_WAIT_FRACTION = 0.5
#: While the rate at which slots come free is unknown, as many requests may wait as there are slots, and at least these.
LEAST_QUEUED = 4
#: Number of handovers of slots that the rate is computed from: this many for each slot, as many requests may end at
#: once, within these bounds.
HANDOVERS_PER_SLOT = 4
LEAST_HANDOVERS, MOST_HANDOVERS = 16, 1024
#: A body counts from the start with its announced length but no more than this, and grows in steps of this size.
STEP_BYTES = 256 * 1024
#: One part in so many of the bytes for bodies is kept for bodies of at most one step, unless a single body needs it.
SMALL_PART = 8
#: Seconds in which a step of a body must arrive; a body that takes longer may be ended to make room for others. After a
#: search in vain, the next for as many bytes is this much later.
SLOW_STEP_S = 2.0
SEARCH_EVERY_S = 0.1
#: Number of times that rules may hold a request while the waiting room is full, each for longer than the one before.
MOST_HOLDS = 16

#: The retry count that the clients of OpenAI and Anthropic send.
RETRY_COUNT = b"x-stainless-retry-count"
#: Priority of a request before its body is read. A lower number is more urgent, as for the engines.
PRIORITY = b"x-vllm-priority"
LENGTH = b"content-length"
_READ = frozenset({LENGTH, RETRY_COUNT, PRIORITY})

_REFUSAL_TEXTS = {
    "in_flight": "no slot is free (setting overload.in_flight), and the wait for one is too long",
    "queue": "too many requests wait (settings overload.queue, overload.queue_bytes)",
    "bytes": "the bodies of the requests under way take all the memory for them (setting overload.bodies)",
    "lag": "the router is overloaded",
    "memory": "the router is short of memory",
    "files": "the router is short of file descriptors",
}

#: Position in a lane or in the queue for slots: higher priority first, then arrival.
Rank = tuple[float, float]
_rank_of = attrgetter("rank")


class PermitState(Enum):
    """State of an admitted request. The waiting room counts by it.

    Args:
        has_slot: it counts against `overload.in_flight`.
        needs_slot: it is in the queue for slots.
        is_held: it is in the lane of its model, since a rule of the policy held it.
        has_ended: it counts nowhere.
    """

    #: Its body is read, or it needs no slot: it is no load, or their number is not limited.
    ADMITTED = (False, False, False, False)
    #: It has a slot and is decided or served.
    SERVED = (True, False, False, False)
    #: It waits for a slot.
    QUEUED = (False, True, False, False)
    #: It waits until its rule holds it no longer.
    HELD = (False, False, True, False)
    #: It was held, and waits for a slot to be decided again.
    REQUEUED = (False, True, True, False)
    #: It was held, and is decided again. It keeps its place in the waiting room in case it is held once more.
    REDECIDED = (True, False, True, False)
    ENDED = (False, False, False, True)

    def __init__(self, has_slot: bool, needs_slot: bool, is_held: bool, has_ended: bool) -> None:
        self.has_slot = has_slot
        self.needs_slot = needs_slot
        self.is_held = is_held
        self.has_ended = has_ended
        #: It is in the waiting room.
        self.is_waiting = needs_slot or is_held


class WaitingRoom:
    """Waiting room: one entry for each request, which waits for its rule, for a slot, or for one after the other.

    Requests that a rule holds have a lane for each model, so that none waits behind one that needs other instances.
    Requests without a slot have one queue. A slot that comes free goes to the head of the queue at once: a newcomer
    cannot overtake it, and no slot stays free while a request waits.

    Args:
        slots: most requests that have a slot at a time; 0 for no limit.
        wait_s: longest wait for a slot, seconds.
        most: most requests in the room.
        most_bytes: most bytes of their bodies.
    """

    def __init__(self, *, slots: int, wait_s: float, most: int, most_bytes: int) -> None:
        self.slots = slots or math.inf
        self.has_slots = slots > 0
        self._wait_s = wait_s
        self._most = most
        self._most_bytes = most_bytes
        self._lanes: dict[str, list[Permit]] = {}
        self._queue: list[Permit] = []
        self._arrivals = 0
        self._woken_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None
        #: No wait is longer than until this time of the loop's clock.
        self._end = math.inf
        #: Times at which slots were handed over since the queue was last empty.
        handovers = min(max(LEAST_HANDOVERS, HANDOVERS_PER_SLOT * slots), MOST_HANDOVERS)
        self._handovers: deque[float] = deque(maxlen=handovers)
        self._freed_at = -math.inf
        #: A request has waited for the longest time, and no slot has come free since its arrival.
        self._is_stalled = False
        #: Requests in the room, bytes of their bodies, and slots taken, 0 without a limit. `_move` alone changes them.
        self.size = 0
        self.bytes = 0
        self.slots_taken = 0

    @property
    def queued(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._queue)

    def has_room(self, size: int) -> bool:
        """Return whether a request of *size* bytes may wait too."""
        return self.size < self._most and self.bytes + size <= self._most_bytes

    def expected_wait_s(self, rank: Rank = (0.0, math.inf)) -> float:
        """Estimate the seconds until a request of *rank* gets a slot, from the latest handovers; 0 while unknown."""
        handovers = self._handovers
        if self.slots_taken < self.slots or len(handovers) < 2:
            return 0.0
        interval_s = (asyncio.get_running_loop().time() - handovers[0]) / len(handovers)
        return self._ahead(rank) * interval_s

    def may_enter(self, size: int, priority: float = 0.0) -> bool:
        """Return whether a new request of *size* bytes would get a slot, now or after a wait."""
        if self.slots_taken < self.slots:
            return True
        return self.has_room(size) and self._is_worth_waiting((-priority, math.inf))

    def _is_worth_waiting(self, rank: Rank) -> bool:
        """Return whether a request of *rank* is likely to get a slot in time."""
        if self._is_stalled:
            return False
        if len(self._handovers) < 2:
            return self._ahead(rank) < max(LEAST_QUEUED, self.slots)
        return self.expected_wait_s(rank) <= MAX_WAIT_FRACTION * self._wait_s

    def _ahead(self, rank: Rank) -> int:
        return bisect_left(self._queue, rank, key=_rank_of)

    def arrive(self, priority: float) -> Rank:
        """Return the rank of a request that is about to wait for the first time."""
        self._arrivals += 1
        return (-priority, self._arrivals)

    def take_slot(self, permit: Permit) -> bool:
        """Give *permit* a slot if it has one already or one is free; return whether it has one."""
        if not permit.state.has_slot:
            if self.slots_taken >= self.slots:
                return False
            self._grant_slot(permit)
        return True

    def _grant_slot(self, permit: Permit) -> None:
        permit.is_outdated = False  # its decision starts now
        self._move(permit, PermitState.REDECIDED if permit.state.is_held else PermitState.SERVED)

    async def wait_for_slot(self, permit: Permit) -> bool:
        """Wait for a slot if one is likely in time and the room has space; return whether *permit* has a slot."""
        has_room = permit.state.is_waiting or self.has_room(permit.size)
        if not has_room or not self._is_worth_waiting(permit.rank):
            return False
        self._move(permit, PermitState.REQUEUED if permit.state.is_held else PermitState.QUEUED)
        since = asyncio.get_running_loop().time()
        await permit.wait(since + self._wait_s, self._end)
        has_slot = permit.state.has_slot  # also if its time was up in the tick of the handover
        self._is_stalled = not has_slot and self._freed_at < since
        return has_slot

    def hold(self, permit: Permit) -> bool:
        """Put *permit* into the lane of its model; return False if the room is full. Its slot comes free either way."""
        if not permit.state.is_held:
            # A queued request may take the slot, and then leaves room for this one.
            self._move(permit, PermitState.ADMITTED)
            if not self.has_room(permit.size):
                return False
        self._move(permit, PermitState.HELD)
        return True

    async def wait_for_change(self, permit: Permit, deadline: float) -> bool:
        """Wait until *permit* is to be decided again; return False if *deadline* on the loop's clock came first."""
        if permit.is_outdated:
            return True
        return await permit.wait(deadline, self._end)

    def leave(self, permit: Permit) -> None:
        """Take *permit* out of the room; it keeps a slot that it has."""
        self._move(permit, PermitState.SERVED if permit.state.has_slot else PermitState.ADMITTED)

    def end(self, permit: Permit) -> None:
        """Stop counting *permit*."""
        self._move(permit, PermitState.ENDED)

    def load_changed(self) -> None:
        """Wake the head of each lane after a change of load, now or as soon as it may be woken again."""
        if not self._lanes or self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        due = self._woken_at + WAKE_INTERVAL_S
        if loop.time() >= due:
            self._wake_heads()
        else:
            self._timer = loop.call_at(due, self._wake_heads)

    def _wake_heads(self) -> None:
        self._timer = None
        self._woken_at = asyncio.get_running_loop().time()
        for lane in self._lanes.values():
            lane[0].decide_again()

    def policy_changed(self) -> None:
        """Have all held requests decided again by another policy. Their deadlines stay."""
        for permit in chain.from_iterable(self._lanes.values()):
            permit.decide_again()

    def end_by(self, at: float) -> None:
        """Let no request wait beyond *at* on the loop's clock, as the router stops."""
        self._end = at
        for permit in chain(self._queue, *self._lanes.values()):
            permit.shorten(at)

    def _move(self, permit: Permit, to: PermitState) -> None:
        """Change the state of *permit*. All counts, lanes and the queue follow from states, here and nowhere else."""
        before, permit.state = permit.state, to
        if to.is_waiting or before.is_waiting:
            self._move_within(permit, before, to)
        if self.has_slots and to.has_slot is not before.has_slot:
            self.slots_taken += 1 if to.has_slot else -1
            if not to.has_slot:
                self._hand_over()

    def _move_within(self, permit: Permit, before: PermitState, to: PermitState) -> None:
        """Move *permit* into the room, out of it, or between its lane and the queue."""
        if to.is_waiting is not before.is_waiting:
            sign = 1 if to.is_waiting else -1
            self.size += sign
            self.bytes += sign * permit.size
        if to.needs_slot is not before.needs_slot:
            _put(permit, self._queue, is_in=to.needs_slot)
        if to.is_held is not before.is_held:
            lane = self._lanes.setdefault(permit.model, [])
            _put(permit, lane, is_in=to.is_held)
            if not lane:
                del self._lanes[permit.model]
            if not to.is_held:
                self.load_changed()  # the next one may be luckier

    def _hand_over(self) -> None:
        """Give the slot that has come free to the head of the queue."""
        self._freed_at, self._is_stalled = asyncio.get_running_loop().time(), False
        if self._queue:
            head = self._queue[0]
            self._handovers.append(self._freed_at)
            self._grant_slot(head)
            head.wake()
        else:
            self._handovers.clear()


def _put(permit: Permit, line: list[Permit], *, is_in: bool) -> None:
    """Insert *permit* into *line*, or remove it."""
    if is_in:
        insort(line, permit, key=_rank_of)
    else:
        del line[bisect_left(line, permit.rank, key=_rank_of)]


class Permit:
    """An admitted request: its entry in the waiting room, its slot and the bytes of its body.

    `end` gives all of it back, once, however often it is called.

    Args:
        admission: what let it in.
        size: bytes that its body counts with.
    """

    state = PermitState.ADMITTED
    model = ""
    rank: Rank = (0.0, math.inf)
    #: The load or the policy has changed since its decision began.
    is_outdated = False
    #: Of the last call of `route`: seconds in the waiting room, and the last decision that held it, if one did.
    waited_s = 0.0
    held: Routing | None = None
    #: Deadline of a body that is arriving; when its last step had come, and the bytes that had come by then.
    reading: Watchdog | None = None
    step_at = 0.0
    _step_end = 0
    _waiter: asyncio.Future[bool] | None = None
    _timer: asyncio.TimerHandle | None = None
    _deadline = math.inf

    def __init__(self, admission: Admission, size: int) -> None:
        load = admission.load
        load.under_way += 1
        load.admitted += 1
        admission.bytes += size
        self._admission = admission
        #: Bytes that the body counts with.
        self.size = size

    def grow(self, received: int) -> None:
        """Count a body of which *received* bytes have come, and more will.

        Raises:
            Overloaded: the bodies of all requests exceed their bound.
        """
        admission = self._admission
        if received - self._step_end >= STEP_BYTES:
            self.step_at, self._step_end = admission.clock(), received
            if self.reading is not None:
                admission.uploads.move_to_end(self)
        if received > self.size:
            step = max(STEP_BYTES, received - self.size)
            if not admission.make_room(self.size + step, step, self):
                raise admission.refusal("bytes")
            admission.bytes += step
            self.size += step

    def settle(self, size: int) -> None:
        """Count the body with *size* bytes: when it is complete, and with 0 when it is let go. Not called in a wait."""
        if size != self.size and not self.state.has_ended:
            self._admission.bytes += size - self.size
            self.size = size
        if self.reading is not None:
            self._stop_reading()

    def _stop_reading(self) -> None:
        self.reading = None
        del self._admission.uploads[self]

    def cut_off(self) -> None:
        """End a request whose body is arriving by a 408; the body counts no more."""
        reading = self.reading
        self.settle(0)
        if reading is not None:
            reading.arm(0.0, TOO_SLOW)

    def end(self) -> None:
        """The request has ended."""
        state, admission = self.state, self._admission
        if state.has_ended:
            return
        if state is PermitState.ADMITTED:
            self.state = PermitState.ENDED
        else:
            admission.room.end(self)
        admission.bytes -= self.size
        admission.load.under_way -= 1
        if self.reading is not None:
            self._stop_reading()

    async def route(
        self, router: Router, request: InferenceRequest, *, exclude: Collection[Instance], leased: bool
    ) -> Routing:
        """Route *request*. It waits while it has no slot, and while a rule of the policy holds it.

        Args:
            router: decides.
            request: the request.
            exclude: instances on which it has failed.
            leased: it counts as load, and needs a slot.

        Raises:
            Overloaded: no slot came free in time, or rules went on holding it although the waiting room is full.
        """
        room = self._admission.room
        self.waited_s = 0.0
        self.held = None
        try:
            if leased and room.has_slots and not room.take_slot(self):
                with self._timed(request):
                    await self._wait_for_slot()
            routing = await router.route(request, exclude=exclude, leased=leased)
            if routing.outcome == names.HELD:
                with self._timed(request):
                    routing = await self._hold(router, request, exclude, routing)
            return routing
        finally:
            if self.state.is_waiting:
                room.leave(self)

    @contextmanager
    def _timed(self, request: InferenceRequest) -> Iterator[None]:
        """Count the time within as waiting, in the lane and by the priority of *request*."""
        if self.rank[1] == math.inf:
            self.model, self.rank = request.model, self._admission.room.arrive(request.priority)
        began = perf_counter()  # the clock of uvloop counts whole milliseconds
        try:
            yield
        finally:
            seconds = perf_counter() - began
            self.waited_s += seconds
            self._admission.on_waited(seconds)

    async def _wait_for_slot(self) -> None:
        if not await self._admission.room.wait_for_slot(self):
            raise self._admission.refusal("in_flight")

    async def _hold(
        self, router: Router, request: InferenceRequest, exclude: Collection[Instance], routing: Routing
    ) -> Routing:
        """Wait and decide again until the decision is not to hold.

        A rule whose time is up, or for which the waiting room is full, counts as failed: `req.held` then has the value
        that the rule asks for.
        """
        clock, room = asyncio.get_running_loop().time, self._admission.room
        since = clock() - request.held
        times_full = 0
        while routing.outcome == names.HELD:
            assert routing.decision is not None
            patience_s = routing.decision.wait_s
            if room.hold(self):
                self.held = routing
                is_early = await room.wait_for_change(self, since + patience_s)
                request.held = max(request.held, clock() - since if is_early else patience_s)
            elif times_full < MOST_HOLDS:
                times_full += 1
                request.held = max(request.held, patience_s)
            else:
                raise self._admission.refusal("queue")
            if not room.take_slot(self):
                await self._wait_for_slot()
            routing = await router.route(request, exclude=exclude)
        return routing

    # Called by the waiting room.

    async def wait(self, deadline: float, end: float) -> bool:
        """Wait for `wake`, or until *deadline* or *end* on the loop's clock; return False if the time was up first."""
        loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._waiter = loop.create_future()
        self._timer = loop.call_at(min(deadline, end), self._resume, False)
        try:
            return await self._waiter
        finally:
            self._timer.cancel()
            self._waiter = self._timer = None

    def wake(self) -> None:
        """End its wait."""
        self._resume(True)

    def decide_again(self) -> None:
        """Have a held request decided again: now, or after its current decision if that holds it too."""
        if self.state is PermitState.HELD:
            self.wake()
        else:
            self.is_outdated = True

    def shorten(self, end: float) -> None:
        """Let its wait end at *end* on the loop's clock, or at its deadline if that comes first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_at(min(self._deadline, end), self._resume, False)

    def _resume(self, is_woken: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(is_woken)


class Admission:
    """Admission control: bounds on bodies, slots and the load of the router itself, before a body is read.

    Args:
        most_bytes: most bytes of bodies kept at once.
        room: where admitted requests wait.
        overload: load of the router.
        on_refused: called with the reason of each refusal (`names.REFUSALS`).
        on_retry: called for each request that a client sends again, with whether it was let in.
        on_waited: called with the seconds of each wait that has ended.
        rng: spreads the times at which refused clients come back.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        most_bytes: int,
        room: WaitingRoom,
        overload: Overload,
        on_refused: Callable[[str], object] = lambda _: None,
        on_retry: Callable[[bool], object] = lambda _: None,
        on_waited: Callable[[float], object] = lambda _: None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_bytes = most_bytes
        self.room = room
        self.overload = overload
        self._on_refused = on_refused
        self._on_retry = on_retry
        self.on_waited = on_waited
        self._rng = rng or random.Random()
        self.clock = clock
        #: Requests whose bodies are arriving, by the time of their last step.
        self.uploads: OrderedDict[Permit, None] = OrderedDict()
        #: After a search for slow ones in vain: the time of the next, and the bytes that all of them took.
        self._search_at = -math.inf
        self._slow_bytes = 0
        #: Requests let in and not ended, and bytes of their bodies.
        self.load = overload.load
        self.bytes = 0

    def admit(
        self, headers: Iterable[tuple[bytes, bytes]], *, leased: bool = True, reading: Watchdog | None = None
    ) -> Permit:
        """Let a request in.

        Args:
            headers: its header fields.
            leased: it will count as load, and need a slot.
            reading: deadline of a body that has not arrived whole.

        Raises:
            Overloaded: a bound is reached.
        """
        length, is_retry, priority = 0, False, 0.0
        for name, value in headers:
            if name in _READ:
                if name == LENGTH:
                    length = int(value)
                elif name == RETRY_COUNT:
                    is_retry = value.strip() not in (b"", b"0")
                else:
                    priority = _priority(value)
        try:
            if self.overload.level:
                self._check_overload(is_retry=is_retry)
            if leased and self.room.has_slots and not self.room.may_enter(length, priority):
                raise self.refusal("in_flight")
            is_large = length > STEP_BYTES  # what follows may cut off others, so it comes last
            if (is_large or self.bytes + length > self.most_bytes) and not self.make_room(length, length):
                raise self.refusal("bytes")
        except Overloaded:
            if is_retry:
                self._on_retry(False)
            raise
        if is_retry:
            self._on_retry(True)
        permit = Permit(self, STEP_BYTES if is_large else length)
        if reading is not None:
            permit.reading, permit.step_at = reading, self.clock()
            self.uploads[permit] = None
        return permit

    def make_room(self, size: int, more: int, asking: Permit | None = None) -> bool:
        """Return whether a body may take *more* bytes, *size* in all.

        The slowest bodies but *asking*'s are cut off for it if that makes enough room, and none otherwise.
        """
        if self._has_room(self.bytes, size, more):
            return True
        now = self.clock()
        if now < self._search_at and not self._has_room(self.bytes - self._slow_bytes, size, more):
            return False
        left, slow = self.bytes, list[Permit]()
        for permit in self.uploads:
            if now - permit.step_at < SLOW_STEP_S:
                break
            if permit.size and permit is not asking:
                left -= permit.size
                slow.append(permit)
                if self._has_room(left, size, more):
                    for each in slow:
                        each.cut_off()
                    return True
        self._search_at, self._slow_bytes = now + SEARCH_EVERY_S, self.bytes - left
        return False

    def _has_room(self, taken: int, size: int, more: int) -> bool:
        """Return whether a body may take *more* bytes, *size* in all, while all bodies take *taken*."""
        most = self.most_bytes
        if size > STEP_BYTES and taken > size - more:
            most -= most // SMALL_PART
        return taken + more <= most

    def _check_overload(self, *, is_retry: bool) -> None:
        """Refuse what the router's own load forbids; if no request is under way, a first one is let in."""
        overload, load = self.overload, self.load
        is_closed = is_retry or overload.level is Level.HARD
        for resource in overload.resources:
            is_full = not load.has_pace if resource == "lag" else load.under_way >= load.most_under_way
            if load.under_way and (is_closed or is_full):
                raise self.refusal(resource)

    @property
    def under_way(self) -> int:
        """Number of requests let in and not ended."""
        return self.load.under_way

    def refusal(self, reason: str) -> Overloaded:
        """Count a refusal for *reason*, one of `names.REFUSALS`, and return its error."""
        self._on_refused(reason)
        # Refused clients must not all come back at the same time.
        retry_after_s = (1.0 + self.room.expected_wait_s()) * self._rng.uniform(1.0, 3.0)
        return Overloaded(_REFUSAL_TEXTS[reason], reason=reason, retry_after_s=retry_after_s)


def _priority(text: bytes) -> float:
    """Return the priority as `InferenceRequest` has it, higher first. `parse` refuses text that is no number."""
    try:
        return -float(text) if len(text) <= 32 else 0.0
    except ValueError:
        return 0.0


def admission_of(settings: Settings, fleet: Fleet, metrics: Metrics) -> Admission:
    """Build the admission of *settings*; changes of the load of *fleet* wake held requests."""
    overload = settings.overload
    room = WaitingRoom(
        slots=overload.in_flight, wait_s=overload.wait, most=overload.queue, most_bytes=overload.queue_bytes
    )
    fleet.watch_load(room.load_changed)
    return Admission(
        most_bytes=overload.bodies,
        room=room,
        overload=Overload(
            Thresholds(overload.soft_lag, overload.hard_lag),
            Thresholds(overload.soft_percent / 100, overload.hard_percent / 100),
            memory_bytes=overload.memory or None,
            on_lag=metrics.lagged,
        ),
        on_refused=metrics.refused,
        on_retry=metrics.client_retried,
        on_waited=metrics.held,
    )


class Saturation:
    """Saturation of the instances and of the router, for autoscalers: 1 is full; above 1, demand exceeds capacity.

    Args:
        fleet: the instances.
        admission: requests that wait and bodies that are kept.
        connections: returns the number of client connections and the most there may be, 0 for no limit.
    """

    def __init__(self, fleet: Fleet, admission: Admission, connections: Callable[[], tuple[int, int]]) -> None:
        self._fleet = fleet
        self._admission = admission
        self._connections = connections

    def instances(self) -> float | None:
        """Return the saturation of the instances, the largest of these; None if all are unknown, as 0 would mean idle.

        - Mean share of KV blocks in use, plus waiting requests per running one, over the instances that are not
          draining and have a fresh scrape.
        - 1 + requests held by rules per request under way, if any is held: what the policy calls full is full.
        - Requests that have a slot or wait for one, over `overload.in_flight` where that is set.
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
        room = self._admission.room
        held = room.size - room.queued
        if held:
            values.append(1.0 + held / max(1, sum(one.own for one in self._fleet.instances)))
        if room.slots < math.inf:
            values.append((room.slots_taken + room.queued) / room.slots)
        if not values:
            return None if serving else 0.0
        return max(values)

    def router(self) -> float:
        """Return the saturation of the router: usage over limit, for the limit that is nearest to being reached."""
        admission, (connections, most) = self._admission, self._connections()
        shares = [*admission.overload.shares.values(), admission.bytes / admission.most_bytes]
        if most:
            shares.append(connections / most)
        return max(shares)

    def figures(self) -> OverloadFigures:
        """Return the figures of the gauges."""
        admission, instances = self._admission, self.instances()
        known = {} if instances is None else {"instances": instances}
        return OverloadFigures(
            queue_requests=admission.room.size,
            queue_bytes=admission.room.bytes,
            body_bytes=admission.bytes,
            connections=self._connections()[0],
            levels={name: int(level) for name, level in admission.overload.levels.items()},
            saturation={**known, "router": self.router()},
        )
