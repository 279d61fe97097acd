from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from smetric import names
from smetric.admin.feed import MOST_WAITING, DecisionFilter, Viewer, row, sample
from smetric.fleet.record import DecisionRecord, Migration
from tests.telemetry import samples

ORDINARY = [samples.record() for _ in range(200)]
REJECTED = [samples.record(names.REJECTED) for _ in range(40)]


async def told(viewer: Viewer) -> list[tuple[str, Any]]:
    """What waits for the viewer, who then leaves."""
    viewer.leave("test")
    found = []
    async for message in viewer.messages():
        name, data = message.decode().removesuffix("\n\n").split("\n")
        found.append((name.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))))
    assert found.pop() == ("over", {"why": "test"})
    return found


@given(st.lists(st.sampled_from(ORDINARY[:20] + REJECTED[:5]), unique_by=id, max_size=25), st.integers(0, 30))
def test_a_sample_is_at_most_as_large_as_asked_in_order_and_without_doubles(
    records: Sequence[DecisionRecord], most: int
) -> None:
    taken = sample(records, most)
    assert len(taken) == min(most, len(records))
    places = [records.index(record) for record in taken]
    assert places == sorted(set(places))


def test_what_is_out_of_the_ordinary_is_taken_first_then_what_migrated_then_some_of_all() -> None:
    moved = samples.record()
    moved.migration = Migration("gpu-0", "not_overloaded", 100)
    records = [*ORDINARY[:100], *REJECTED[:2], *ORDINARY[100:], moved]
    taken = sample(records, 5)
    assert taken[1:3] == REJECTED[:2] or taken[2:4] == REJECTED[:2]
    assert taken[-1] is moved
    assert sample([*ORDINARY, *REJECTED], 5) == [REJECTED[at] for at in (0, 8, 16, 24, 32)]


async def test_a_viewer_is_told_how_many_fitted_and_shown_some() -> None:
    viewer = Viewer(DecisionFilter.from_query({"outcome": "odd"}))
    viewer.show([*ORDINARY, *REJECTED], (), 5, row)
    ((event, data),) = await told(viewer)
    assert (event, data["matched"], len(data["rows"])) == ("decisions", 40, 5)
    assert {one["outcome"] for one in data["rows"]} == {"rejected"}


async def test_nothing_is_sent_where_nothing_fits() -> None:
    viewer = Viewer(DecisionFilter.from_query({"rule": "nothing"}))
    viewer.show(ORDINARY, ORDINARY, 5, row)
    assert await told(viewer) == []


async def test_only_ends_of_what_was_shown_are_told_and_once() -> None:
    record, other = samples.record(), samples.record()
    viewer = Viewer(DecisionFilter())
    viewer.show([record], (), 5, row)
    record.status, record.duration_s, record.ttft_s = 200, 1.5, 0.2
    for _ in range(2):
        viewer.show((), [other, record], 5, row)
    (_, ended) = await told(viewer)
    assert ended[0] == "ended"
    assert [(end["id"], end["status"], end["ttft_s"]) for end in ended[1]] == [(record.id, 200, 0.2)]


async def test_a_decision_that_another_one_follows_has_its_end_with_it() -> None:
    shown, late = samples.record(), samples.record()
    viewer = Viewer(DecisionFilter())
    viewer.show([shown], (), 5, row)
    shown.followed_by = late.followed_by = "next"
    viewer.show([late], [shown], 5, row)
    viewer.show((), [late], 5, row)
    _, (_, rows), (_, ends) = await told(viewer)
    assert (rows["rows"][0]["followed_by"], ends[0]["followed_by"], ends[0]["status"]) == ("next", "next", None)


async def test_who_does_not_read_is_sent_away_and_told_why() -> None:
    viewer = Viewer(DecisionFilter())
    for i in range(MOST_WAITING + 5):
        viewer.send("state", {"i": i})
    messages = [message async for message in viewer.messages()]
    assert messages == [b'event: over\ndata: {"why":"slow"}\n\n']


async def test_a_viewer_waits_for_what_comes() -> None:
    viewer = Viewer(DecisionFilter())

    async def first() -> bytes:
        return await anext(viewer.messages())

    reading = asyncio.create_task(first())
    await asyncio.sleep(0)
    assert not reading.done()
    viewer.send("state", 1)
    assert await reading == b"event: state\ndata: 1\n\n"
