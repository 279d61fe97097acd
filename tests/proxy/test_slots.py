from __future__ import annotations

import asyncio

from smetric.proxy.admission import Queue, Slots
from tests.fakes import until


async def test_a_place_that_is_given_up_is_handed_to_the_most_urgent_who_waits() -> None:
    queue = Queue(10, 100)
    slots = Slots(1, 60.0, queue)
    assert await slots.take(1, 0.0)
    got: list[str] = []

    async def want(name: str, priority: float) -> None:
        assert await slots.take(1, priority)
        got.append(name)

    waiting = [asyncio.create_task(want(*one)) for one in (("first", 0.0), ("second", 0.0), ("urgent", 1.0))]
    await until(lambda: queue.size == 3)
    for number in range(1, 4):
        slots.give_up()
        assert not slots.take_free(), "a newcomer is not quicker than who waits"
        await until(lambda number=number: len(got) == number)  # type: ignore[misc]
    assert got == ["urgent", "first", "second"]
    await asyncio.gather(*waiting)
    slots.give_up()
    assert (slots.taken, queue.size) == (0, 0)


async def test_who_leaves_while_a_place_is_handed_over_gives_it_on() -> None:
    queue = Queue(10, 100)
    slots = Slots(1, 60.0, queue)
    assert slots.take_free()
    leaver, other = asyncio.create_task(slots.take(1, 0.0)), asyncio.create_task(slots.take(1, 0.0))
    await until(lambda: queue.size == 2)
    slots.give_up()  # it is the leaver's now
    leaver.cancel()
    assert await other
    await asyncio.gather(leaver, return_exceptions=True)
    assert leaver.cancelled()
    assert slots.taken == 1


async def test_who_leaves_as_its_time_is_up_gives_on_no_place_that_it_never_had() -> None:
    queue = Queue(10, 100)
    slots = Slots(1, 60.0, queue)
    assert slots.take_free()
    leaver = asyncio.create_task(slots.take(1, 0.0))
    await until(lambda: queue.size == 1)

    def end_and_leave() -> None:
        slots.give_up()
        leaver.cancel()

    queue.end_by(0.0)  # in one step of the loop its time is up, a place comes free, and its client leaves
    asyncio.get_running_loop().call_at(0.001, end_and_leave)
    await asyncio.gather(leaver, return_exceptions=True)
    assert leaver.cancelled()
    assert slots.taken == 0


async def test_who_has_waited_long_enough_gets_none_and_takes_none() -> None:
    queue = Queue(10, 100)
    slots = Slots(1, 0.02, queue)
    assert slots.take_free()
    assert not await slots.take(1, 0.0)
    assert (slots.taken, queue.size) == (1, 0)
    slots.give_up()
    assert slots.taken == 0


async def test_after_a_whole_wait_in_which_no_place_came_free_nobody_waits_till_one_does() -> None:
    queue = Queue(10, 100)
    slots = Slots(1, 0.02, queue)
    assert slots.take_free()
    assert not await slots.take(1, 0.0)
    assert not slots.is_worth_waiting(1)
    assert not slots.is_worth_waiting(1, priority=1.0)
    slots.give_up()
    assert slots.is_worth_waiting(1)
    assert slots.take_free()
    assert slots.is_worth_waiting(1), "places come free again"


async def test_who_waits_in_vain_because_others_are_more_urgent_keeps_nobody_from_waiting() -> None:
    queue = Queue(10, 100)
    slots = Slots(1, 0.1, queue)
    assert slots.take_free()
    patient = asyncio.create_task(slots.take(1, 0.0))
    urgent = asyncio.create_task(slots.take(1, 1.0))
    await until(lambda: queue.size == 2)
    slots.give_up()
    assert await urgent
    assert not await patient
    assert slots.is_worth_waiting(1)


async def test_a_wait_that_would_be_too_long_is_not_begun() -> None:
    queue = Queue(10, 100)
    slots = Slots(1, 0.5, queue)
    assert slots.take_free()
    waiting = [asyncio.create_task(slots.take(1, 0.0)) for _ in range(4)]
    await until(lambda: queue.size == 4)
    for _ in range(2):
        await asyncio.sleep(0.15)  # so often a place becomes free
        slots.give_up()
    behind = [asyncio.create_task(slots.take(1, 0.0)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not slots.is_worth_waiting(1)
    assert slots.is_worth_waiting(1, priority=1.0), "who is urgent waits behind nobody"
    assert not await slots.take(1, 0.0)
    for task in (*waiting, *behind):
        task.cancel()
    await asyncio.gather(*waiting, *behind, return_exceptions=True)


async def test_a_full_queue_is_worth_no_wait() -> None:
    slots = Slots(1, 60.0, Queue(0, 0))
    assert slots.is_worth_waiting(1)
    assert slots.take_free()
    assert not slots.is_worth_waiting(1)
    assert not await slots.take(1, 0.0)


async def test_while_nobody_knows_how_long_places_are_taken_as_many_may_wait_as_there_are() -> None:
    queue = Queue(100, 100)
    slots = Slots(6, 60.0, queue)
    assert all(slots.take_free() for _ in range(6))
    for _ in range(6):
        assert slots.is_worth_waiting(1)
        assert queue.enter(None, 0.0, 1) is not None
    assert not slots.is_worth_waiting(1)
    assert slots.is_worth_waiting(1, priority=1.0)
