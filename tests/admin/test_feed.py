"""Feed of the live page."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric import names
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
    margin_of,
    row,
    sample,
)
from smetric.admin.figures import Figures
from smetric.fleet.record import DecisionRecord, Migration
from smetric.telemetry.decisions import Activity, DecisionLog
from tests.fakes import exchange_of, until
from tests.telemetry import samples


def test_empty_filter_fits_everything() -> None:
    assert DecisionFilter.from_query({}).fits(samples.record())
    assert DecisionFilter.from_query({"text": "", "outcome": "", "migrated": "0"}).fits(samples.record(names.ERROR))


@pytest.mark.parametrize(
    ("query", "fits"),
    [
        ({"outcome": "routed"}, True),
        ({"outcome": "rejected"}, False),
        ({"outcome": "odd"}, False),
        ({"rule": "stick"}, True),
        ({"rule": "balance"}, False),
        ({"instance": "gpu-1"}, True),
        ({"instance": "gpu-2"}, False),
        ({"text": "STICK"}, True),
        ({"text": "gpu-1"}, True),
        ({"text": "gpu-2"}, False),
        ({"rule": "stick", "instance": "gpu-2"}, False),
        ({"migrated": "1"}, False),
        ({"margin": "0.05"}, False),
        ({"margin": "1"}, True),
    ],
)
def test_filter_fits_by_each_criterion(query: dict[str, str], fits: bool) -> None:
    assert DecisionFilter.from_query(query).fits(samples.record(hits=(0, 880, 0), loads=(2, 3, 1))) is fits


def test_filter_text_finds_ids_models_and_failed_guards() -> None:
    record = samples.record(hits=(0, 880, 0), loads=(0, 30, 1), model="Qwen3")
    record.trace_id = "0af7651916cd43dd8448eb211c80319c"
    for text in (record.id[4:12], "0af7", "qwen", "not_overloaded"):
        assert DecisionFilter.from_query({"text": text}).fits(record), text


def test_filter_odd_excludes_routed_and_pinned() -> None:
    odd = DecisionFilter.from_query({"outcome": "odd"})
    assert [odd.fits(samples.record(outcome)) for outcome in names.OUTCOMES] == [False, False, True, True, True, True]


def test_filter_migrated_fits_recorded_migrations() -> None:
    record = samples.record()
    record.migration = Migration("gpu-0", "not_overloaded", 100)
    assert DecisionFilter.from_query({"migrated": "1"}).fits(record)


def test_margin_is_a_share_of_the_larger_score() -> None:
    assert margin_of(samples.record(hits=(0, 880, 440))) == 0.5
    assert margin_of(samples.record(hits=(0, 0, 0))) == 0.0
    assert margin_of(samples.record(hits=(880,), loads=(1,))) is None
    assert margin_of(samples.record(names.PINNED)) is None


ENDING = b'event: over\ndata: {"why":"ending"}\n\n'
ORDINARY = [samples.record() for _ in range(200)]
REJECTED = [samples.record(names.REJECTED) for _ in range(40)]


async def messages_of(viewer: Viewer) -> list[tuple[str, Any]]:
    """Return the messages queued for *viewer*, and end it."""
    viewer.leave("test")
    found = []
    async for message in viewer.messages():
        name, data = message.decode().removesuffix("\n\n").split("\n")
        found.append((name.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))))
    assert found.pop() == ("over", {"why": "test"})
    return found


@given(st.lists(st.sampled_from(ORDINARY[:20] + REJECTED[:5]), unique_by=id, max_size=25), st.integers(0, 30))
def test_sample_is_bounded_ordered_and_unique(records: Sequence[DecisionRecord], most: int) -> None:
    taken = sample(records, most)
    assert len(taken) == min(most, len(records))
    places = [records.index(record) for record in taken]
    assert places == sorted(set(places))


def test_sample_prefers_odd_then_migrated_decisions() -> None:
    moved = samples.record()
    moved.migration = Migration("gpu-0", "not_overloaded", 100)
    records = [*ORDINARY[:100], *REJECTED[:2], *ORDINARY[100:], moved]
    taken = sample(records, 5)
    assert taken[1:3] == REJECTED[:2] or taken[2:4] == REJECTED[:2]
    assert taken[-1] is moved
    assert sample([*ORDINARY, *REJECTED], 5) == [REJECTED[at] for at in (0, 8, 16, 24, 32)]


async def test_viewer_gets_a_sample_and_the_number_matched() -> None:
    viewer = Viewer(DecisionFilter.from_query({"outcome": "odd"}))
    viewer.show([*ORDINARY, *REJECTED], (), 5, row)
    ((event, data),) = await messages_of(viewer)
    assert (event, data["matched"], len(data["rows"])) == ("decisions", 40, 5)
    assert {one["outcome"] for one in data["rows"]} == {"rejected"}


async def test_viewer_gets_nothing_if_nothing_matches() -> None:
    viewer = Viewer(DecisionFilter.from_query({"rule": "nothing"}))
    viewer.show(ORDINARY, ORDINARY, 5, row)
    assert await messages_of(viewer) == []


async def test_viewer_gets_each_end_once_for_rows_shown() -> None:
    record, other = samples.record(), samples.record()
    viewer = Viewer(DecisionFilter())
    viewer.show([record], (), 5, row)
    record.status, record.duration_s, record.ttft_s = 200, 1.5, 0.2
    for _ in range(2):
        viewer.show((), [other, record], 5, row)
    (_, ended) = await messages_of(viewer)
    assert ended[0] == "ended"
    assert [(end["id"], end["status"], end["ttft_s"]) for end in ended[1]] == [(record.id, 200, 0.2)]


async def test_row_of_a_retried_decision_has_its_end() -> None:
    shown, late = samples.record(), samples.record()
    viewer = Viewer(DecisionFilter())
    viewer.show([shown], (), 5, row)
    shown.followed_by = late.followed_by = "next"
    viewer.show([late], [shown], 5, row)
    viewer.show((), [late], 5, row)
    _, (_, rows), (_, ends) = await messages_of(viewer)
    assert (rows["rows"][0]["followed_by"], ends[0]["followed_by"], ends[0]["status"]) == ("next", "next", None)


async def test_viewer_that_does_not_read_is_disconnected_with_reason() -> None:
    viewer = Viewer(DecisionFilter())
    for i in range(MOST_WAITING + 5):
        viewer.send("state", {"i": i})
    assert [message async for message in viewer.messages()] == [b'event: over\ndata: {"why":"slow"}\n\n']


async def test_viewer_waits_for_the_next_message() -> None:
    viewer = Viewer(DecisionFilter())

    async def first() -> bytes:
        return await anext(viewer.messages())

    reading = asyncio.create_task(first())
    await asyncio.sleep(0)
    assert not reading.done()
    viewer.send("state", 1)
    assert await reading == b"event: state\ndata: 1\n\n"


class Desk:
    """Feed with a manual clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.activity = Activity()
        self.decisions = DecisionLog()
        figures = Figures(lambda: samples.fleet(2), lambda: self.now, lambda: int(self.now * 1000))
        self.feed = Feed(self.activity, figures, self.decisions, lambda: {"version": "1"}, clock=lambda: self.now)

    def join(self, *, history: bool = False) -> Viewer:
        return self.feed.join(DecisionFilter(), history=history)

    def decide(self, count: int) -> list[DecisionRecord]:
        records = [samples.record() for _ in range(count)]
        for record in records:
            self.decisions.decided(exchange_of(record), record)
            self.activity.decided(exchange_of(record), record)
        return records

    def look(self) -> None:
        self.now += 1.0 / LOOKS
        self.feed.look()


async def test_new_viewer_gets_recent_decisions_once() -> None:
    desk = Desk()
    records = desk.decide(BEFORE + 5)
    viewer = desk.join()
    desk.look()
    (state, before) = await messages_of(viewer)
    assert state[0] == "state"
    assert state[1]["version"] == "1"
    assert [row["id"] for row in before[1]["rows"]] == [record.id for record in records[5:]]


async def test_feed_bounds_rows_and_states_per_second() -> None:
    desk = Desk()
    viewer = desk.join()
    for _ in range(2 * LOOKS):
        desk.decide(125)
        desk.look()
    messages = await messages_of(viewer)
    rows = [row for name, data in messages if name == "decisions" for row in data["rows"]]
    assert len(rows) == 2 * MOST_A_SECOND
    assert sum(data["matched"] for name, data in messages if name == "decisions") == 250 * LOOKS
    assert [name for name, _ in messages].count("state") == 1 + 2


async def test_slow_viewer_frees_its_slot_and_others_go_on() -> None:
    desk = Desk()
    slow, quick = desk.join(), desk.join()
    reading = quick.messages()
    for _ in range(MOST_WAITING + 4):
        desk.decide(1)
        desk.look()
        async with asyncio.timeout(1):
            await anext(reading)
    assert slow.is_over
    assert not quick.is_over
    for _ in range(MOST_VIEWERS - 1):
        desk.join()
    with pytest.raises(TooManyViewers, match="16 viewers already"):
        desk.join()


async def test_history_is_sent_on_request() -> None:
    desk = Desk()
    for _ in range(3 * LOOKS):
        desk.look()
    viewer = desk.join(history=True)
    (history, state) = await messages_of(viewer)
    assert history[0] == "history"
    assert history[1]["times_ms"] == [1000, 2000, 3000]
    assert state[0] == "state"


async def test_feed_polls_and_ends_its_viewers() -> None:
    desk = Desk()
    await desk.feed.start()
    viewer = desk.join()
    desk.decide(1)
    reading = viewer.messages()
    async with asyncio.timeout(5):
        kinds = [(await anext(reading)).split(b"\n")[0] for _ in range(2)]
    assert kinds == [b"event: state", b"event: decisions"]
    await desk.feed.stop()
    assert [message async for message in reading][-1] == ENDING


@pytest.mark.parametrize("rounds", range(5))
async def test_feed_ends_shortly_after_its_first_viewer(rounds: int) -> None:
    desk = Desk()
    await desk.feed.start()
    await asyncio.sleep(0.01)  # without a viewer
    reading = desk.join().messages()
    for _ in range(rounds):
        await asyncio.sleep(0)
    async with asyncio.timeout(2):
        await desk.feed.stop()
        assert [message async for message in reading][-1] == ENDING


async def test_viewer_of_an_ended_feed_ends_at_once() -> None:
    desk = Desk()
    await desk.feed.start()
    await desk.feed.stop()
    assert [message async for message in desk.join().messages()][-1] == ENDING


@pytest.mark.slow
async def test_feed_continues_after_a_failed_look(monkeypatch: pytest.MonkeyPatch) -> None:
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
