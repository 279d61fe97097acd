"""Row I5: random faults in random order."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import orjson
import pytest

from smetric.http.listener import address_of, listen
from tests.fakes import FakeEngine, fetch
from tests.faults.chaos import FIRST_BYTE_S, IDLE_S, POLICIES, Chaos
from tests.faults.harness import Tell
from tests.faults.process import Process, process

CLIENTS = 8
#: Judges fast, and forgets fast.
ENVIRON = {
    "SMETRIC_FORWARD__FIRST_BYTE_TIMEOUT": f"{FIRST_BYTE_S}s",
    "SMETRIC_FORWARD__IDLE_TIMEOUT": f"{IDLE_S}s",
    "SMETRIC_SCRAPE__INTERVAL": "200ms",
    "SMETRIC_HEALTH__INTERVAL": "100ms",
    "SMETRIC_HEALTH__EJECTION": "300ms",
    "SMETRIC_HEALTH__LONGEST_EJECTION": "1s",
    "SMETRIC_HEALTH__SLOW_START": "1s",
}


async def survive(tmp_path: Path, seed: int, seconds: float) -> Chaos:
    """Chaos for *seconds*; the router is replaced by another process again and again, on the same sockets."""
    policy = tmp_path / "p.policy"
    policy.write_text(POLICIES[0])
    async with AsyncExitStack() as stack:
        engines = [FakeEngine() for _ in range(4)]
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        chaos = Chaos(engines, policy, seed)
        data, admin = stack.enter_context(listen("127.0.0.1", 0)), stack.enter_context(listen("127.0.0.1", 0))
        arguments = [word for engine in engines for word in ("--instance", engine.url)]
        begun = 0

        async def begin() -> Process:
            nonlocal begun
            begun += 1
            sockets = [("data", data), ("admin", admin)]
            router = process(
                tmp_path / f"log-{begun}", *arguments, sockets=sockets, environ=ENVIRON, policy=str(policy)
            )
            return await stack.enter_async_context(router)

        router = await begin()
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(chaos.rage())
            for _ in range(CLIENTS):
                group.create_task(chaos.ask(address_of(data)))
            while loop.time() < end:
                await asyncio.sleep(min(4.0, end - loop.time()))
                if loop.time() < end:
                    async with chaos.rewriting:
                        successor = await begin()
                    router.terminate()
                    assert await router.ended() in (0, 4)
                    chaos.faults["restart"] += 1
                    router = successor
            chaos.is_over = True
        page = orjson.loads((await fetch(router.admin, "GET", "/admin/instances")).body)
        assert [(one["own"], one["unprefilled"]) for one in page["instances"]] == [(0, 0)] * len(engines)
        assert router.lines("smetric.request.failed") == []
        router.terminate()
        assert await router.ended() == 0
    return chaos


def check(chaos: Chaos, tell: Tell) -> None:
    said = f"seed {chaos.seed}: {dict(chaos.ends)} of {dict(chaos.faults)}"
    assert chaos.lost == [], said
    assert chaos.ends["whole"] > 0.7 * chaos.ends.total(), said
    tell("F1", f"0 of {chaos.ends.total():,} requests, {chaos.faults.total()} faults of {len(chaos.faults)} kinds")


@pytest.mark.slow
async def test_i5_chaos_of_seconds_loses_no_request(tmp_path: Path, record_property: Tell) -> None:
    check(await survive(tmp_path, seed=5, seconds=6.0), record_property)


@pytest.mark.soak
async def test_i5_chaos_of_ten_minutes_loses_no_request(tmp_path: Path, record_property: Tell) -> None:
    check(await survive(tmp_path, seed=50, seconds=600.0), record_property)
