"""One request that was let in: what its body counts with, its place among those under way, its time in the queue.

Who is let in is decided in `admission.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from smetric.fleet.instance import Instance
from smetric.request import InferenceRequest
from smetric.router import Router, Routing
from smetric.telemetry import names

if TYPE_CHECKING:
    from smetric.proxy.admission import Admission

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
