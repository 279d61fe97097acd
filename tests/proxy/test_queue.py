from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.proxy.admission import SPACING_S, Place, Queue
from tests.fakes import until

FAR = 60.0


def entered(queue: Queue, lane: str | None = "tiny", priority: float = 0.0, size: int = 1) -> Place:
    place = queue.enter(lane, priority, size)
    assert place is not None
    return place


async def waits(place: Place, for_s: float = FAR) -> bool:
    return await place.turn(asyncio.get_running_loop().time() + for_s)


@given(st.lists(st.floats(-1e3, 1e3), max_size=30), st.data())
async def test_the_first_is_always_the_one_of_the_highest_priority_that_came_first(
    priorities: list[float], data: st.DataObject
) -> None:
    queue = Queue(100, 1000)
    inside: list[tuple[float, int, Place]] = []
    for number, priority in enumerate(priorities):
        assert queue.ahead("tiny", priority) == sum(-priority >= urgency for urgency, _, _ in inside)
        inside.append((-priority, number, entered(queue, priority=priority)))
        if data.draw(st.booleans()):
            gone = inside.pop(data.draw(st.integers(0, len(inside) - 1)))
            queue.leave(gone[2])
        first = queue.first("tiny")
        assert first is (min(inside, key=lambda one: one[:2])[2] if inside else None)
    assert (queue.size, queue.bytes) == (len(inside), len(inside))


async def test_there_is_room_for_so_many_requests_and_so_many_bytes() -> None:
    queue = Queue(3, 100)
    first = entered(queue, size=60)
    assert queue.enter("tiny", 0.0, 41) is None
    second, _ = entered(queue, size=40), entered(queue, lane="other", size=0)
    assert queue.enter("tiny", 9.0, 0) is None  # however urgent
    queue.leave(second)
    queue.leave(second)  # counts once
    assert (queue.size, queue.bytes) == (2, 60)
    queue.leave(first)
    assert queue.enter("tiny", 0.0, 100) is not None


async def test_a_change_of_load_wakes_the_first_of_each_lane_alone() -> None:
    queue = Queue(10, 100)
    places = [entered(queue, "a"), entered(queue, "a"), entered(queue, "b"), entered(queue, None)]
    waiting = [asyncio.create_task(waits(place)) for place in places]
    await asyncio.sleep(0)
    queue.changed()
    await until(lambda: waiting[0].done() and waiting[2].done())
    assert (waiting[0].result(), waiting[2].result()) == (True, True)
    assert not waiting[1].done()
    assert not waiting[3].done()
    queue.leave(places[0])  # its place is free: the next may be luckier
    await until(lambda: waiting[1].done())
    waiting[3].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_the_first_is_woken_at_most_a_hundred_times_a_second() -> None:
    queue = Queue(10, 100)
    place = entered(queue)
    loop = asyncio.get_running_loop()
    began, times = loop.time(), 0
    changes = asyncio.create_task(_often(queue.changed))
    for _ in range(20):
        assert await waits(place)
        times += 1
    changes.cancel()
    assert loop.time() - began >= (times - 1) * SPACING_S * 0.9


async def _often(call: Callable[[], None]) -> None:
    while True:
        call()
        await asyncio.sleep(0)


async def test_a_change_while_the_first_is_being_decided_is_not_missed() -> None:
    queue = Queue(10, 100)
    place = entered(queue)
    queue.changed()
    assert await waits(place)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waits(place), 0.05)


async def test_a_deadline_ends_the_wait_of_whoever_it_is_for() -> None:
    queue = Queue(10, 100)
    first, second = entered(queue), entered(queue)
    waiting = asyncio.create_task(waits(first))
    assert not await waits(second, 0.02)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_another_policy_wakes_all_whom_rules_hold() -> None:
    queue = Queue(10, 100)
    waiting = [asyncio.create_task(waits(entered(queue))) for _ in range(3)]
    for_a_place = asyncio.create_task(waits(entered(queue, None)))
    await asyncio.sleep(0)
    queue.reloaded()
    assert await asyncio.gather(*waiting) == [True] * 3
    assert not for_a_place.done()
    for_a_place.cancel()
    await asyncio.gather(for_a_place, return_exceptions=True)


async def test_when_the_router_ends_nobody_waits_longer_than_it_says() -> None:
    queue = Queue(10, 100)
    waiting = [asyncio.create_task(waits(entered(queue, lane))) for lane in ("a", "b", None)]
    await asyncio.sleep(0)
    queue.end_by(asyncio.get_running_loop().time() + 0.02)
    assert await asyncio.gather(*waiting) == [False] * 3
    assert not await waits(entered(queue), FAR)


async def test_nothing_is_left_of_those_who_left() -> None:
    queue = Queue(10, 100)
    place = entered(queue)
    task = asyncio.create_task(waits(place))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    queue.leave(place)
    assert (queue.size, queue.bytes, queue.first("tiny")) == (0, 0, None)
    queue.changed()
