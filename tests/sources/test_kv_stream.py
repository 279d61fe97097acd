import msgspec

from smetric.sources.kv_events.contents import KvIndex
from smetric.sources.kv_events.message import AllBlocksCleared, BlockStored, Event, Message, decode
from smetric.sources.kv_events.stream import Place, State, Stream


def saying(at: float, *events: Event) -> Message:
    return decode(msgspec.msgpack.encode([at, events, 0]))


def message(at: float, *tokens: int) -> Message:
    return saying(at, *[BlockStored([token], None, [token], 1) for token in tokens])


def told(stream: Stream, seq: int, said: Message) -> Place:
    """As a subscriber without a replay socket takes a message."""
    place = stream.place(seq, said)
    if place is Place.AFTER_GAP:
        stream.skip_to(seq)
    if place is not Place.REPEATED:
        for event in stream.take(seq, said):
            stream.contents.apply(event)
    return place


def test_a_cache_is_known_to_whom_listens_from_the_first_message_on() -> None:
    stream = Stream(KvIndex(1 << 20))
    assert (stream.state, stream.knows_nothing) == (State.JOINED_LATE, True)
    assert told(stream, 0, message(1.0, 5)) is Place.NEXT
    assert told(stream, 1, message(2.0, 6)) is Place.NEXT
    assert (stream.state, len(stream.contents), stream.missed) == (State.KNOWN, 2, 0)


def test_who_joins_late_has_missed_nothing_but_does_not_know() -> None:
    stream = Stream(KvIndex(1 << 20))
    assert told(stream, 7, message(1.0, 5)) is Place.AFTER_GAP
    assert told(stream, 8, message(2.0, 6)) is Place.NEXT
    assert (stream.state, len(stream.contents), stream.missed) == (State.JOINED_LATE, 2, 0)


def test_a_gap_is_a_loss_until_the_cache_is_cleared() -> None:
    stream = Stream(KvIndex(1 << 20))
    told(stream, 0, message(1.0, 5))
    assert told(stream, 3, message(2.0, 6)) is Place.AFTER_GAP
    assert (stream.state, stream.missed) == (State.GAP, 2)
    told(stream, 4, saying(3.0, AllBlocksCleared()))
    assert (stream.state, len(stream.contents)) == (State.KNOWN, 0)


def test_repetitions_are_left_and_a_restart_begins_anew() -> None:
    stream = Stream(KvIndex(1 << 20))
    for seq in range(5):
        told(stream, seq, message(10.0 + seq, seq))
    assert told(stream, 2, message(12.0, 2)) is Place.REPEATED
    assert (len(stream.contents), stream.restarts) == (5, 0)
    assert told(stream, 0, message(20.0, 9)) is Place.NEXT
    assert (stream.state, len(stream.contents), stream.restarts) == (State.KNOWN, 1, 1)


def test_a_restart_whose_first_messages_were_missed_is_not_known() -> None:
    stream = Stream(KvIndex(1 << 20))
    for seq in range(5):
        told(stream, seq, message(10.0 + seq, seq))
    assert told(stream, 2, message(20.0, 9)) is Place.AFTER_GAP
    assert (stream.state, len(stream.contents), stream.restarts) == (State.JOINED_LATE, 1, 1)


def test_what_took_the_completeness_is_named() -> None:
    stream = Stream(KvIndex(1 << 20))
    states = []
    for seq, event in enumerate(
        (
            BlockStored([1], None, [5], 1),
            BlockStored([2], 9, [5], 1),
            BlockStored([3], None, [5], 1, group_idx=3),
        )
    ):
        told(stream, seq, saying(float(seq), event))
        states.append(stream.state)
    stream.restart()
    states.append(stream.state)
    assert states == [State.KNOWN, State.UNKNOWN_BLOCK, State.UNSUPPORTED, State.JOINED_LATE]
    assert stream.orphans == 1
