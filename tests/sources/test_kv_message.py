import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.sources.kv_events.message import (
    PIECE_BLOCKS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    MessageError,
    decode,
    pieces,
)
from tests.sources.kv_engine import CAPTURES, captured


def encoded(*events: Any, rank: int | None = None) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events)] + ([] if rank is None else [rank]))


@pytest.mark.parametrize("name", ["kv_int_hash.jsonl", "kv_bytes_hash.jsonl", "kv_dp2.jsonl"])
def test_every_captured_message_is_read_whole(name: str) -> None:
    for payload in captured(name):
        message = decode(msgspec.msgpack.encode(payload))
        assert (message.at, message.rank) == (payload[0], payload[2])
        events = list(message.events())
        assert [type(event).__name__ for event in events] == [event["type"] for event in payload[1]]
        for event, raw in zip(events, payload[1], strict=True):
            if isinstance(event, BlockStored):
                assert event.block_hashes == raw["block_hashes"]
                assert event.parent_block_hash == raw["parent_block_hash"]
                assert event.token_ids == raw["token_ids"]
                assert event.extra_keys == raw["extra_keys"]
                assert (event.block_size, event.medium, event.group_idx) == (raw["block_size"], "GPU", 0)
            elif isinstance(event, BlockRemoved):
                assert event.block_hashes == raw["block_hashes"]


def test_frames_as_they_were_on_the_wire_are_read() -> None:
    lines = (CAPTURES / "kv_raw_hex.jsonl").read_text().splitlines()
    messages = [decode(bytes.fromhex(msgspec.json.decode(line)[2])) for line in lines]
    assert len(messages) == 12
    assert all(list(message.events()) for message in messages)


def test_events_are_arrays_in_engines_before_0_23() -> None:
    message = decode(
        encoded(
            ["BlockStored", [7, b"\x01" * 32], None, [1, 2, 3, 4], 2, None],
            ["BlockStored", [8], 7, [5, 6], 2, 3, "GPU", "fr-adapter"],
            ["BlockRemoved", [7], "GPU"],
            ["BlockRemoved", [8]],
            ["AllBlocksCleared"],
        )
    )
    first, second, gone, gone_too, cleared = message.events()
    assert isinstance(first, BlockStored)
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == ([7, b"\x01" * 32], None, [1, 2, 3, 4])
    assert isinstance(second, BlockStored)
    assert (second.parent_block_hash, second.lora_id, second.lora_name) == (7, 3, "fr-adapter")
    assert isinstance(gone, BlockRemoved)
    assert isinstance(gone_too, BlockRemoved)
    assert (gone.medium, gone_too.medium) == ("GPU", None)
    assert isinstance(cleared, AllBlocksCleared)
    assert message.rank == 0


def test_unknown_events_are_left_out_and_unknown_fields_ignored() -> None:
    message = decode(
        encoded(
            {"type": "BlockMoved", "block_hashes": [1]},
            ["BlockMoved", 1, 2],
            {"type": "BlockRemoved", "block_hashes": [1], "colour": "red"},
            ["BlockRemoved", [2], "GPU", 0, None, "one", "more"],
            rank=3,
        )
    )
    assert [event.block_hashes for event in message.events() if isinstance(event, BlockRemoved)] == [[1], [2]]
    assert (len(list(message.events())), message.rank) == (2, 3)


def test_events_are_decoded_one_after_the_other() -> None:
    """All at once held up every stream where they were many."""
    events = decode(encoded(["BlockRemoved", [1]], ["BlockRemoved"])).events()
    first = next(events)
    assert isinstance(first, BlockRemoved)
    assert first.block_hashes == [1]
    with pytest.raises(MessageError):
        next(events)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode([1.0, "events", 0]),
        encoded("event"),
        encoded([]),
        encoded({}),
        encoded({"type": "BlockRemoved"}),
        encoded({"type": "BlockStored", "block_hashes": ["x"], "parent_block_hash": None, "token_ids": []}),
        encoded(["BlockStored", [1], None, "tokens", 2, None]),
        encoded({"type": "BlockRemoved", "block_hashes": [1]})[:-2],
    ],
)
def test_what_is_no_message_is_one_error_that_quotes_nothing(payload: bytes) -> None:
    with pytest.raises(MessageError) as raised:
        list(decode(payload).events())
    assert str(raised.value).isalpha()


@given(st.binary(max_size=64))
def test_no_payload_raises_anything_else(payload: bytes) -> None:
    with contextlib.suppress(MessageError):
        list(decode(payload).events())


@pytest.mark.parametrize("count", [0, 1, PIECE_BLOCKS, PIECE_BLOCKS + 1, 3 * PIECE_BLOCKS])
@pytest.mark.parametrize("extra", [None, ["salt"]])
def test_pieces_of_an_event_say_together_what_it_says(count: int, extra: list[str] | None) -> None:
    names: list[int | bytes] = list(range(1, count + 1))
    extra_keys: list[list[Any] | None] | None = None if extra is None else [[*extra, name] for name in names]
    whole = BlockStored(names, 7, list(range(2 * count)), 2, extra_keys=extra_keys, lora_name="a")
    parent: int | bytes | None = 7
    cut = list(pieces(whole))
    for piece in cut:
        assert isinstance(piece, BlockStored)
        assert len(piece.block_hashes) <= PIECE_BLOCKS
        assert (piece.parent_block_hash, piece.block_size, piece.lora_name) == (parent, 2, "a")
        parent = piece.block_hashes[-1] if piece.block_hashes else None
    assert [name for piece in cut for name in piece.block_hashes] == names  # type: ignore[union-attr]
    assert [token for piece in cut for token in piece.token_ids] == whole.token_ids  # type: ignore[union-attr]
    assert [key for piece in cut for key in piece.extra_keys or ()] == (extra_keys or [])  # type: ignore[union-attr]
    gone = list(pieces(BlockRemoved(names, medium="CPU")))
    assert [(name, piece.medium) for piece in gone for name in piece.block_hashes] == [(name, "CPU") for name in names]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "event",
    [
        AllBlocksCleared(),
        BlockStored([1] * 1000, None, [1] * 999, 1),
        BlockStored([1] * 1000, None, [1] * 1000, 1, extra_keys=[None]),
    ],
)
def test_an_event_that_cannot_be_cut_is_whole(event: AllBlocksCleared | BlockStored) -> None:
    assert list(pieces(event)) == [event]
