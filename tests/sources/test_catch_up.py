"""Who starts, or missed something, learns from the others what is where."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from structlog.testing import capture_logs

from smetric.sources.shared import peers
from smetric.sources.shared import peers as catch_up
from smetric.sources.shared.peers import ASKED_AT_A_TIME, encode_batch
from tests.fakes import Call, FakeEngine, until
from tests.sources.sidecars import Sidecar, running


async def test_one_that_starts_learns_what_is_where() -> None:
    old = Sidecar()
    old.serve("a", "x")
    async with running(old) as urls:
        new = Sidecar(*urls, seen_empty=False)
        await new.peers.start()
        assert new.hits("x") == [2, None]
        await new.peers.stop()


async def test_who_missed_something_asks_the_peers_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "EVERY_S", 0.0)
    old = Sidecar()
    async with running(old) as urls:
        new = Sidecar(*urls, seen_empty=False)
        await new.peers.start()
        old.serve("b", "x")
        await new.peers.receive(encode_batch("s", 7, []))
        await until(lambda: new.hits("x") == [None, 2])
        await new.peers.stop()


async def test_what_is_missed_after_a_peer_has_said_what_it_knows_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catch_up, "EVERY_S", 0.0)
    old, has_said, may_arrive = Sidecar(), asyncio.Event(), asyncio.Event()

    async def give(call: Call) -> None:
        image = await old.peers.image()
        has_said.set()
        await may_arrive.wait()
        await call.answer(200, image)

    peer = FakeEngine(give)
    await peer.start()
    new = Sidecar(peer.url, seen_empty=False)
    starting = asyncio.create_task(new.peers.start())
    await has_said.wait()
    old.serve("b", "x")
    await new.peers.receive(encode_batch("s", 7, []))
    may_arrive.set()
    await starting
    assert len(peer.calls) == 1  # for which the start does not wait again
    await until(lambda: new.hits("x") == [None, 2])
    await new.peers.stop()
    await peer.stop()


async def test_a_crowd_of_peers_is_asked_a_few_at_a_time_and_the_start_waits_for_them_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "START_S", 0.05)
    old, asked_now, most = Sidecar(), 0, 0
    old.serve("b", "x")
    image = await old.peers.image()

    async def give(call: Call) -> None:
        nonlocal asked_now, most
        if call.method == b"GET":
            asked_now += 1
            most = max(most, asked_now)
            await asyncio.sleep(0.1)
            asked_now -= 1
        await call.answer(200, image)

    async with AsyncExitStack() as stack:
        crowd = [FakeEngine(give) for _ in range(10)]
        for peer in crowd:
            await peer.start()
            stack.push_async_callback(peer.stop)
        new = Sidecar(*[peer.url for peer in crowd], seen_empty=False)
        await new.peers.start()
        assert any(not peer.calls for peer in crowd)
        await until(lambda: new.hits("x") == [None, 2])
        await until(lambda: all(peer.calls for peer in crowd))
        await new.peers.stop()
    assert most == ASKED_AT_A_TIME


async def test_a_fault_while_they_are_asked_is_told_and_they_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up, "EVERY_S", 0.0)
    old = Sidecar()
    old.serve("b", "x")
    async with running(old) as urls:
        new = Sidecar(*urls, seen_empty=False)
        with monkeypatch.context() as broken, capture_logs() as logs:
            broken.setattr(new.index, "restore", lambda image: 1 / 0)
            await new.peers.start()
        assert [line["task"] for line in logs if line["event"] == "smetric.peer.failed"] == ["catch-up"]
        await new.peers.receive(encode_batch("s", 7, []))
        await until(lambda: new.hits("x") == [None, 2])
        await new.peers.stop()
