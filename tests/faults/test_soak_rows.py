"""Rows I: after very many requests of all kinds, and beside very many streams, nothing is left or has grown."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.fakes import FakeEngine, fetch
from tests.faults.mixed_load import Mix, obedient
from tests.faults.process import Process, process

MIB = 1024 * 1024
ENGINES = 4
#: Seconds until everything must be as it was: connections that nobody uses live for five.
LEAK_PROBE_S = 15.0
#: What fills up is small, so that it is full before anything is measured.
SMALL = {"SMETRIC_PREFIX_INDEX__MAX_BYTES": "1MiB", "SMETRIC_HEALTH__MAX_EJECTED_PERCENT": "0"}


async def probe(router: Process) -> dict[str, Any]:
    """What the router holds now."""
    with await asyncio.to_thread(router.log.open, "rb") as log:
        log.seek(0, os.SEEK_END)
        router.process.send_signal(signal.SIGUSR1)
        said = b""
        deadline = time.monotonic() + 5.0
        while not (told := re.search(rb'^\{"event":"probe".*\}$', said, re.M)):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
            said += log.read()
    found: dict[str, Any] = orjson.loads(told[0])
    return found


def held(probed: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """What must be back exactly: file descriptors, connections among them, and tasks."""
    return probed["fds"], probed["tasks"]


async def loads(router: Process) -> list[tuple[int, int]]:
    """What the ledger counts on each instance."""
    page = orjson.loads((await fetch(router.admin, "GET", "/admin/instances")).body)
    return [(one["own"], one["unprefilled"]) for one in page["instances"]]


@asynccontextmanager
async def probed(tmp_path: Path, engines: list[FakeEngine], **environ: str) -> AsyncIterator[Process]:
    async with AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        arguments = [word for engine in engines for word in ("--instance", engine.url)]
        started = process(
            tmp_path / "log",
            *arguments,
            environ={**SMALL, **environ},
            module="tests.faults.probed",
            policy="smetric",
        )
        yield await stack.enter_async_context(started)


async def mixed(tmp_path: Path, warm_up: int, count: int) -> tuple[Mix, dict[str, Any], dict[str, Any]]:
    """Send *count* requests after *warm_up* that do not count; what the router held before and after."""
    engines = [FakeEngine(obedient) for _ in range(ENGINES)]
    async with probed(tmp_path, engines) as router:
        mix = Mix(router.data, seed=1)

        async def send(number: int) -> None:
            for first in range(0, number, 1_000):
                await mix.send(min(1_000, number - first))
                for engine in engines:
                    engine.calls.clear()

        async def settled(wanted: dict[str, Any] | None = None) -> dict[str, Any]:
            """What it holds once that is what is *wanted*, or without that once it does not change any more."""
            deadline = time.monotonic() + LEAK_PROBE_S
            last: dict[str, Any] | None = None
            while True:
                for engine in engines:
                    engine.drop_idle()
                await asyncio.sleep(0.5)
                now = await probe(router)
                known = wanted or last
                if (known is not None and held(now) == held(known)) or time.monotonic() > deadline:
                    return now
                last = now

        await send(warm_up)
        before = await settled()
        await send(count)
        after = await settled(before)
        assert await loads(router) == [(0, 0)] * ENGINES
        assert (await fetch(router.data, "GET", "/healthz")).status == 200
    return mix, before, after


def check(mix: Mix, before: dict[str, Any], after: dict[str, Any]) -> None:
    assert held(after) == held(before)
    served = {end: n for end, n in mix.ends.items() if end.startswith("served")}
    assert served.keys() == {"served 200"}, mix.ends
    assert not any(end.endswith((" 500", " 501")) for end in mix.ends if not end.startswith("broken")), mix.ends
    for fault in ("cut", "torn"):
        assert {end for end in mix.ends if end.startswith(fault)} == {f"{fault} 200 broken off"}, mix.ends


@pytest.mark.slow
async def test_i1_two_thousand_mixed_requests_leave_nothing_behind(tmp_path: Path) -> None:
    mix, before, after = await mixed(tmp_path, 500, 2_000)
    check(mix, before, after)


@pytest.mark.soak
async def test_i1_a_hundred_thousand_mixed_requests_leave_nothing_behind(tmp_path: Path) -> None:
    mix, before, after = await mixed(tmp_path, 10_000, 100_000)
    check(mix, before, after)
    assert after["rss"] - before["rss"] <= 2 * MIB
