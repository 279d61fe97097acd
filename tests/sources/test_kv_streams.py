"""The ranks behind one address: which there are, whose restart is seen, and what is told of them."""

from __future__ import annotations

import msgspec
from structlog.testing import capture_logs

from smetric.fleet.instance import Instance
from smetric.log_limit import CHANGES_TOLD
from smetric.sources.kv_events.contents import KvIndex
from smetric.sources.kv_events.message import Message, decode
from smetric.sources.kv_events.stream import MOST_RANKS, Place, State, Streams
from tests.sources.kv_engine import CLEARED


def streams() -> Streams:
    return Streams(Instance("one", "http://127.0.0.1:1"), KvIndex(1 << 20))


def message(at: float, *events: object, rank: int = 0) -> Message:
    return decode(msgspec.msgpack.encode([at, events, rank]))


async def heard(told: Streams, *ranks: int) -> None:
    """The first message of each rank, as they come where nothing was missed."""
    told.be_behind(False)
    for rank in ranks:
        stream = told.of(rank)
        assert stream is not None
        assert told.place(stream, 0, message(1.0, CLEARED, rank=rank)) is Place.NEXT
        await told.take(stream, 0, message(1.0, CLEARED, rank=rank), "ok")
        told.be_current(rank, stream, 1.0)


async def test_each_rank_has_a_stream_and_what_cannot_be_a_rank_has_none() -> None:
    told = streams()
    await heard(told, 0, MOST_RANKS - 1)
    assert (told.of(-1), told.of(MOST_RANKS)) == (None, None)
    assert [*told.by_rank] == [0, MOST_RANKS - 1]
    assert told.messages == {"ok": 2, "malformed": 2}
    assert [stream.state for stream in told.by_rank.values()] == [State.KNOWN] * 2


async def test_what_is_lost_or_may_be_missing_is_so_for_all_ranks_and_told_once() -> None:
    told = streams()
    with capture_logs() as logs:
        await heard(told, 0, 1)
        for _ in range(2):
            told.be_behind(True)
        for _ in range(2):
            told.lose(State.OTHER_TOPIC)
    assert [(line["rank"], line["state"]) for line in logs] == [
        (rank, state) for state in ("known", "behind", "other_topic") for rank in (0, 1)
    ]
    late = told.of(2)
    assert late is not None
    assert late.is_behind


async def test_a_restart_that_the_events_showed_is_not_done_again_when_the_metrics_show_it() -> None:
    told = streams()
    await heard(told, 0)
    stream = told.by_rank[0]
    assert told.place(stream, 0, message(2.0, CLEARED)) is Place.NEXT
    await told.take(stream, 0, message(2.0, CLEARED), "ok")
    assert not told.forget()
    assert (stream.next, stream.restarts) == (1, 1)
    assert told.forget()
    assert (stream.next, stream.state) == (None, State.JOINED_LATE)


async def test_two_engines_at_one_address_do_not_fill_the_log() -> None:
    told = streams()
    with capture_logs() as logs:
        await heard(told, 0)
        for at in range(2, 100):
            told.place(told.by_rank[0], 0, message(float(at), CLEARED))
            await told.take(told.by_rank[0], 0, message(float(at), CLEARED), "ok")
    assert len([line for line in logs if line["event"] == "smetric.kv_events.restarted"]) == CHANGES_TOLD
