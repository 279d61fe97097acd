from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from smetric.admin.feed import (
    BEFORE,
    LOOKS,
    MOST_A_SECOND,
    MOST_VIEWERS,
    MOST_WAITING,
    DecisionFilter,
    Feed,
    TooManyViewers,
    Viewer,
)
from smetric.admin.figures import Figures
from smetric.fleet.record import DecisionRecord
from smetric.telemetry.decisions import Activity, DecisionLog
from tests.fakes import exchange_of, until
from tests.telemetry import samples


class Desk:
    """A feed on a clock that is told what it is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.activity = Activity()
        self.decisions = DecisionLog()
        figures = Figures(lambda: samples.fleet(2), lambda: self.now, lambda: int(self.now * 1000))
        self.feed = Feed(self.activity, figures, self.decisions, lambda: {"version": "1"}, clock=lambda: self.now)

    def decide(self, count: int) -> list[DecisionRecord]:
        records = [samples.record() for _ in range(count)]
        for record in records:
            self.decisions.decided(exchange_of(record), record)
            self.activity.decided(exchange_of(record), record)
        return records

    def look(self) -> None:
        self.now += 1.0 / LOOKS
        self.feed.look()


async def told(viewer: Viewer) -> list[tuple[str, Any]]:
    """What the viewer has been told; he leaves."""
    viewer.leave("test")
    found = []
    async for message in viewer.messages():
        name, data = message.decode().removesuffix("\n\n").split("\n")
        found.append((name.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))))
    return found[:-1]


async def test_who_comes_is_shown_what_was_and_nothing_twice() -> None:
    desk = Desk()
    records = desk.decide(BEFORE + 5)
    viewer = desk.feed.join(DecisionFilter(), history=False)
    desk.look()
    (state, before) = await told(viewer)
    assert state[0] == "state"
    assert state[1]["version"] == "1"
    assert [row["id"] for row in before[1]["rows"]] == [record.id for record in records[5:]]


async def test_no_viewer_is_shown_more_than_so_many_decisions_a_second_and_the_state_once() -> None:
    desk = Desk()
    viewer = desk.feed.join(DecisionFilter(), history=False)
    for _ in range(2 * LOOKS):
        desk.decide(125)
        desk.look()
    messages = await told(viewer)
    rows = [row for name, data in messages if name == "decisions" for row in data["rows"]]
    assert len(rows) == 2 * MOST_A_SECOND
    assert sum(data["matched"] for name, data in messages if name == "decisions") == 250 * LOOKS
    assert [name for name, _ in messages].count("state") == 1 + 2


async def test_a_slow_viewer_makes_room_at_once_and_the_others_go_on() -> None:
    desk = Desk()
    slow, quick = desk.feed.join(DecisionFilter(), history=False), desk.feed.join(DecisionFilter(), history=False)
    reading = quick.messages()
    for _ in range(MOST_WAITING + 4):
        desk.decide(1)
        desk.look()
        async with asyncio.timeout(1):
            await anext(reading)
    assert slow.is_over
    assert not quick.is_over
    for _ in range(MOST_VIEWERS - 1):
        desk.feed.join(DecisionFilter(), history=False)
    with pytest.raises(TooManyViewers, match="16 watch already"):
        desk.feed.join(DecisionFilter(), history=False)


async def test_history_is_sent_to_who_wants_it() -> None:
    desk = Desk()
    for _ in range(3 * LOOKS):
        desk.look()
    viewer = desk.feed.join(DecisionFilter(), history=True)
    (history, state) = await told(viewer)
    assert history[0] == "history"
    assert history[1]["times_ms"] == [1000, 2000, 3000]
    assert state[0] == "state"


async def test_it_looks_by_itself_and_ends_with_its_viewers() -> None:
    desk = Desk()
    await desk.feed.start()
    viewer = desk.feed.join(DecisionFilter(), history=False)
    desk.decide(1)
    reading = viewer.messages()
    async with asyncio.timeout(5):
        kinds = [(await anext(reading)).split(b"\n")[0] for _ in range(2)]
    assert kinds == [b"event: state", b"event: decisions"]
    await desk.feed.stop()
    assert [message async for message in reading][-1] == b'event: over\ndata: {"why":"ending"}\n\n'


@pytest.mark.parametrize("rounds", range(5))
async def test_it_ends_however_close_behind_the_first_viewer(rounds: int) -> None:
    desk = Desk()
    await desk.feed.start()
    await asyncio.sleep(0.01)  # nobody watches
    reading = desk.feed.join(DecisionFilter(), history=False).messages()
    for _ in range(rounds):
        await asyncio.sleep(0)
    async with asyncio.timeout(2):
        await desk.feed.stop()
        assert [message async for message in reading][-1] == b'event: over\ndata: {"why":"ending"}\n\n'


async def test_who_comes_when_it_has_ended_is_told_so_at_once() -> None:
    desk = Desk()
    await desk.feed.start()
    await desk.feed.stop()
    messages = [message async for message in desk.feed.join(DecisionFilter(), history=False).messages()]
    assert messages[-1] == b'event: over\ndata: {"why":"ending"}\n\n'


@pytest.mark.slow
async def test_a_look_that_fails_is_logged_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    looks = 0

    def fail() -> None:
        nonlocal looks
        looks += 1
        raise ValueError("broken")

    monkeypatch.setattr(desk.feed, "look", fail)
    monkeypatch.setattr("smetric.admin.feed.LOOKS", 1000)
    await desk.feed.start()
    await until(lambda: looks > 1)
    await desk.feed.stop()
