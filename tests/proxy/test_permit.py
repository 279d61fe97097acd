"""What requests take of the router is what those have that are under way, however they come, wait, fail and leave."""

from __future__ import annotations

import asyncio
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric import names
from smetric.errors import Overloaded
from smetric.proxy.admission import Admission, Permit, Queue, Slots
from smetric.proxy.overload import Overload, Thresholds
from smetric.request.request import InferenceRequest
from tests.fakes import until

pytestmark = pytest.mark.slow


class Leaping(asyncio.SelectorEventLoop):
    """A loop in which nobody waits: once nothing else is to be done it is as late as the next timer says."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Decider:
    """Stands for a router: takes its time, holds some requests once or more, and fails at times."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    async def route(self, _: InferenceRequest, **__: object) -> Any:
        for _turn in range(self.rng.choice([0, 0, 1, 2])):
            await asyncio.sleep(0)
        await asyncio.sleep(self.rng.choice([0.0, 0.0, 0.0, 0.5]))
        match self.rng.randrange(30):
            case 0:
                raise ValueError("a source has failed")
            case number if number < 12:
                held = SimpleNamespace(wait_s=self.rng.choice([0.0, 0.5, 1.0, 2.0]))
                return SimpleNamespace(outcome=names.HELD, decision=held)
        return SimpleNamespace(outcome="routed")


class Door:
    """A router's admission, and clients that come by it.

    Args:
        most: requests that may be under way.
        most_waiting: in its queue.
        most_bytes: of bodies.
    """

    def __init__(self, rng: random.Random, most: int, most_waiting: int, most_bytes: int) -> None:
        self.rng = rng
        self.queue = Queue(most_waiting, 100)
        self.slots = Slots(most, 1.0, self.queue)
        calm = Thresholds(9.0, 9.0)
        self.admission = Admission(
            most_bytes=most_bytes, queue=self.queue, overload=Overload(calm, calm), slots=self.slots, rng=rng
        )
        self.router: Any = Decider(rng)
        self.permits: list[Permit] = []
        self.served = 0

    async def client(self) -> None:
        """One request, tried once or twice."""
        rng = self.rng
        size = rng.randint(0, 40)
        headers = [(b"content-length", b"%d" % size), (b"x-vllm-priority", b"%d" % rng.randint(0, 2))]
        try:
            permit = self.admission.admit(headers)
        except Overloaded:
            return
        self.permits.append(permit)
        try:
            permit.grow(rng.choice([size, 2 * size]))
            permit.settle(size)
            request = InferenceRequest(model=rng.choice("mn"), priority=rng.choice([0.0, 1.0]))
            for _ in range(rng.choice([1, 1, 2])):
                await permit.route(self.router, request, exclude=(), leased=True)
                self.served += 1
                assert self.served <= self.slots.most
                try:
                    await asyncio.sleep(rng.choice([0.0, 0.25, 0.5, 1.0, 2.0]))
                finally:
                    self.served -= 1
        except (Overloaded, ValueError):
            pass  # it is told so
        finally:
            permit.end()

    async def crowd(self, count: int) -> None:
        """*count* clients, some of whom leave before they are served."""
        rng, loop = self.rng, asyncio.get_running_loop()
        clients = []
        for _ in range(count):
            clients.append(asyncio.create_task(self.client()))
            await asyncio.sleep(rng.choice([0.0, 0.0, 0.25, 0.5, 1.0]))
            match rng.randrange(20):
                case number if number < 8:
                    loop.call_later(rng.choice([0.0, 0.25, 0.5, 1.0, 1.0, 2.0]), rng.choice(clients).cancel)
                case 8 | 9:
                    self.queue.changed()
                case 10:
                    self.queue.reloaded()
                case 11:
                    self.queue.end_by(loop.time() + rng.choice([0.0, 1.0]))
            self.check()
        _, waiting = await asyncio.wait(clients, timeout=1000.0)
        assert not waiting
        assert [one.exception() for one in clients if not one.cancelled() and one.exception()] == []
        self.check()
        assert (self.slots.taken, self.queue.size, self.queue.bytes) == (0, 0, 0)
        assert (self.admission.under_way, self.admission.bytes) == (0, 0)

    def check(self) -> None:
        assert 0 <= self.served <= self.slots.taken <= self.slots.most
        assert self.slots.taken == self.slots.most or self.queue.first(None) is None, "a place is empty, and one waits"
        open_ones = [permit for permit in self.permits if not permit._has_ended]
        assert self.admission.under_way == len(open_ones)
        assert self.admission.bytes == sum(permit.size for permit in open_ones)
        assert self.queue.size <= self.queue.most


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([3, 100]), st.sampled_from([600_000, 10**9]))
def test_whoever_comes_waits_and_leaves_what_is_taken_is_given_back(
    seed: int, most: int, most_waiting: int, most_bytes: int
) -> None:
    loop = Leaping()
    try:
        loop.run_until_complete(Door(random.Random(seed), most, most_waiting, most_bytes).crowd(15))
    finally:
        loop.close()


async def test_one_that_is_held_is_in_the_queue_already_when_it_has_to_wait_for_a_place() -> None:
    calm = Thresholds(1.0, 2.0)
    queue = Queue(1, 100)
    slots = Slots(1, 1.0, queue)
    admission = Admission(most_bytes=100, queue=queue, overload=Overload(calm, calm), slots=slots)
    decisions = iter(
        [SimpleNamespace(outcome=names.HELD, decision=SimpleNamespace(wait_s=30.0)), SimpleNamespace(outcome="routed")]
    )

    class Router:
        async def route(self, _: InferenceRequest, **__: object) -> Any:
            return next(decisions)

    permit = admission.admit([(b"content-length", b"100")])
    router: Any = Router()
    routed = asyncio.create_task(permit.route(router, InferenceRequest(), exclude=(), leased=True))
    await until(lambda: queue.size == 1)
    assert slots.take_free()
    queue.reloaded()
    await until(lambda: queue.first(None) is not None or routed.done())
    assert (queue.size, queue.bytes) == (1, 100)
    slots.give_up()
    assert (await routed).outcome == "routed"
    permit.end()
    assert (slots.taken, queue.size, queue.bytes) == (0, 0, 0)


def test_no_wait_is_measured_longer_than_it_lasted() -> None:
    async def waits() -> list[tuple[float, float]]:
        result = []
        for _ in range(60):
            permit = Door(random.Random(1), 1, 3, 100).admission.admit([])
            began = time.perf_counter()
            with permit._timed():
                await asyncio.sleep(0.0013)
            result.append((permit.waited_s, time.perf_counter() - began))
        return result

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # its time is in whole milliseconds
        assert [one for one in runner.run(waits()) if one[0] > one[1]] == []
