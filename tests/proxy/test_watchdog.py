from __future__ import annotations

import asyncio

import pytest

from smetric.proxy.watchdog import Watchdog


async def sleeping(watchdog_of: list[Watchdog], *deadlines: tuple[float, str]) -> None:
    task = asyncio.current_task()
    assert task is not None
    watchdog = Watchdog(task)
    watchdog_of.append(watchdog)
    try:
        for seconds, what in deadlines:
            watchdog.arm(seconds, what)
        await asyncio.Event().wait()
    finally:
        watchdog.close()


@pytest.mark.parametrize(
    "deadlines", [[(0.01, "idle")], [(60.0, "send"), (0.01, "idle")], [(0.01, "send"), (0.02, "idle")]]
)
async def test_the_last_deadline_armed_is_the_one_that_cancels(deadlines: list[tuple[float, str]]) -> None:
    made: list[Watchdog] = []
    task = asyncio.create_task(sleeping(made, *deadlines))
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert made[0].expired == "idle"


async def test_a_disarmed_or_closed_watchdog_cancels_nothing() -> None:
    task = asyncio.current_task()
    assert task is not None
    for end in (Watchdog.disarm, Watchdog.close):
        watchdog = Watchdog(task)
        watchdog.arm(0.01, "idle")
        end(watchdog)
        await asyncio.sleep(0.03)
        assert watchdog.expired is None
