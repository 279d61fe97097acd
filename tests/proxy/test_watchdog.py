from __future__ import annotations

import asyncio
import socket
import time

import pytest

from smetric.http import watchdog as module
from smetric.http.watchdog import Timer, Watchdog


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


async def test_many_share_one_timer_and_each_passes_its_own_deadline() -> None:
    timer = Timer()
    passed: list[str] = []

    async def wait(seconds: float, what: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        watchdog = Watchdog(task, timer)
        watchdog.arm(seconds, what)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert watchdog.expired is not None
            passed.append(watchdog.expired)
            watchdog.resume()
        finally:
            watchdog.close()

    async with asyncio.timeout(5):
        await asyncio.gather(*(wait(seconds, what) for seconds, what in ((0.06, "c"), (0.03, "b"), (0.01, "a"))))
    assert passed == ["a", "b", "c"]
    assert not timer.watchdogs


def test_a_timer_serves_the_loop_after_the_one_it_served_first() -> None:
    timer = Timer()

    async def overdue(seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        watchdog = Watchdog(task, timer)
        watchdog.arm(seconds, "body")
        try:
            await asyncio.sleep(0.05)
        finally:
            watchdog.close()

    asyncio.run(overdue(0.06))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(overdue(0.02))


async def read(sock: socket.socket) -> bytes:
    """What comes within 20 ms; nothing if none does."""
    task = asyncio.current_task()
    assert task is not None
    reader, writer = await asyncio.open_connection(sock=sock)
    watchdog = Watchdog(task)
    watchdog.arm(0.02, "idle")
    try:
        return await reader.read(1)
    except asyncio.CancelledError:
        watchdog.resume()
        return b""
    finally:
        watchdog.close()
        writer.close()


@pytest.mark.parametrize("comes", [b"x", b""])
async def test_what_came_while_the_process_was_suspended_came_in_time(
    comes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LATE_S", 0.05)
    monkeypatch.setattr(module, "RESUMED_S", 0.05)
    ours, theirs = socket.socketpair()
    with theirs:
        reading = asyncio.create_task(read(ours))
        await asyncio.sleep(0.005)
        theirs.send(comes)
        asyncio.get_running_loop().call_soon(time.sleep, 0.1)
        async with asyncio.timeout(5):
            assert await reading == comes
