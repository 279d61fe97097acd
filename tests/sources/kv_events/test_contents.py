"""Decoding of KV events, and the index of blocks they build."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections import Counter
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from smetric.request.prompt import ROOT, BlockKeys
from smetric.sources.kv_events.contents import (
    BYTES_PER_BLOCK,
    BYTES_PER_HOLDING,
    PIECE_BLOCKS,
    TIERS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheContents,
    KvIndex,
    MessageError,
    TierContents,
    decode,
    pieces,
)
from tests.sources.kv_events.kv_engine import BLOCK, CAPTURES, CLEARED, captured, names_of, removed, stored


def encoded(*events: Any, rank: int | None = None) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events)] + ([] if rank is None else [rank]))


@pytest.mark.parametrize("name", ["kv_int_hash.jsonl", "kv_bytes_hash.jsonl", "kv_dp2.jsonl"])
def test_decode_reads_captured_messages_whole(name: str) -> None:
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


def test_decode_reads_captured_frames() -> None:
    lines = (CAPTURES / "kv_raw_hex.jsonl").read_text().splitlines()
    messages = [decode(bytes.fromhex(msgspec.json.decode(line)[2])) for line in lines]
    assert len(messages) == 12
    assert all(list(message.events()) for message in messages)


def test_decode_reads_event_arrays_of_engines_before_0_23() -> None:
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


def test_decode_ignores_unknown_events_and_fields() -> None:
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


def test_batch_decodes_events_one_by_one() -> None:
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
def test_decode_refuses_malformed_payload_without_quoting_it(payload: bytes) -> None:
    with pytest.raises(MessageError) as raised:
        list(decode(payload).events())
    assert str(raised.value).isalpha()


@given(st.binary(max_size=64))
def test_decode_raises_only_message_errors(payload: bytes) -> None:
    with contextlib.suppress(MessageError):
        list(decode(payload).events())


@pytest.mark.parametrize("count", [0, 1, PIECE_BLOCKS, PIECE_BLOCKS + 1, 3 * PIECE_BLOCKS])
@pytest.mark.parametrize("extra", [None, ["salt"]])
def test_pieces_have_the_effect_of_the_event(count: int, extra: list[str] | None) -> None:
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
def test_pieces_keep_inconsistent_event_whole(event: AllBlocksCleared | BlockStored) -> None:
    assert list(pieces(event)) == [event]


ROOM = 1 << 30
PROMPT = list(range(100, 100 + 5 * BLOCK))


def apply(contents: CacheContents, *events: dict[str, Any]) -> None:
    for event in decode(msgspec.msgpack.encode([1.0, list(events), 0])).events():
        contents.apply(event)


def fresh(index: KvIndex) -> CacheContents:
    contents = CacheContents(index)
    contents.begin()
    return contents


def hits(
    index: KvIndex, tokens: list[int], *asked: CacheContents | TierContents, salt: str = "", adapter: str = ""
) -> list[int]:
    """Blocks of each, whatever is certain."""
    return index.depths(
        BlockKeys(tokens, BLOCK, adapter, salt), len(tokens) // BLOCK, [contents.bit for contents in asked]
    )


def test_contents_chain_block_to_its_parent() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored(PROMPT[: 2 * BLOCK]), stored(PROMPT, skip=2))
    assert hits(index, PROMPT, contents) == [5]


def test_contents_hold_block_until_last_copy_is_removed() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    names = names_of(PROMPT)
    apply(contents, stored(PROMPT), stored(PROMPT), stored(PROMPT))
    for left in (5, 5):
        apply(contents, removed(*reversed(names)))
        assert hits(index, PROMPT, contents) == [left]
    apply(contents, removed(names[4], names[3]))
    assert hits(index, PROMPT, contents) == [3]
    apply(contents, removed(*names[:3]))
    assert hits(index, PROMPT, contents) == [0]
    assert (index.blocks, index.memory_bytes, contents.is_complete) == (0, 0, True)


def test_contents_count_block_with_two_names_once() -> None:
    index = KvIndex(ROOM)
    contents, other = fresh(index), fresh(index)
    apply(contents, stored(PROMPT, seed="a"), stored(PROMPT, seed="b"))
    apply(other, stored(PROMPT))
    apply(contents, removed(*names_of(PROMPT, "a")), removed(*names_of(PROMPT, "b")))
    assert hits(index, PROMPT, contents, other) == [0, 5]
    apply(other, CLEARED)
    assert index.memory_bytes == 0


def test_contents_clear_only_their_own_cache() -> None:
    index = KvIndex(ROOM)
    one, other = fresh(index), fresh(index)
    apply(one, stored(PROMPT))
    apply(other, stored(PROMPT))
    apply(one, CLEARED)
    assert hits(index, PROMPT, one, other) == [0, 5]
    assert one.is_complete


def test_contents_separate_salts_and_adapters() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored(PROMPT, salt="tenant-a"), stored(PROMPT[: 3 * BLOCK], lora="fr", seed="x"))
    assert hits(index, PROMPT, contents) == [0]
    assert hits(index, PROMPT, contents, salt="tenant-a") == [5]
    assert hits(index, PROMPT, contents, salt="tenant-b") == [0]
    assert hits(index, PROMPT, contents, adapter="fr") == [3]
    assert hits(index, PROMPT, contents, adapter="fr", salt="tenant-a") == [0]


def test_contents_separate_images_from_their_block_on() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    picture = stored(PROMPT) | {"extra_keys": [None, [["0123abcd", 3]], None, None, None]}
    apply(contents, picture)
    assert hits(index, PROMPT, contents) == [1]


def test_contents_refuse_adapter_without_name() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored(PROMPT) | {"lora_id": 1, "lora_name": None, "extra_keys": None})
    assert hits(index, PROMPT, contents) == [0]
    assert not contents.is_complete
    apply(contents, stored(PROMPT, seed="y") | {"lora_id": 1, "lora_name": "fr", "extra_keys": None})
    assert hits(index, PROMPT, contents, adapter="fr") == [5]


def test_contents_ignore_remote_tiers() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored(PROMPT) | {"locality": "REMOTE"})
    assert hits(index, PROMPT, contents) == [0]
    apply(contents, stored(PROMPT), removed(*names_of(PROMPT)) | {"locality": "REMOTE"})
    assert hits(index, PROMPT, contents) == [5]
    assert contents.is_complete


def copied(*names: int, medium: str = "CPU", size: int = BLOCK) -> dict[str, Any]:
    """The event of vLLM's OffloadingConnector, which names blocks only."""
    event = stored(PROMPT) | {"block_hashes": list(names), "parent_block_hash": None, "token_ids": []}
    return event | {"block_size": size, "medium": medium, "extra_keys": None}


@pytest.mark.parametrize(("medium", "feature"), TIERS.items())
def test_contents_of_a_tier_outlive_those_of_the_gpu(medium: str, feature: str) -> None:
    index, names = KvIndex(ROOM), names_of(PROMPT)
    contents = fresh(index)
    apply(contents, stored(PROMPT), copied(*names[:3], medium=medium), removed(*names))
    tier = contents.tiers[feature]
    assert hits(index, PROMPT, contents, tier) == [0, 3]
    was_complete = tier.is_complete
    apply(contents, removed(names[2]) | {"medium": medium})
    assert hits(index, PROMPT, contents, tier) == [0, 2]
    apply(contents, copied(names[4], medium=medium))
    assert (was_complete, tier.is_complete) == (True, False), (
        "a block that the GPU no longer holds has an unknown place"
    )
    contents.mark_incomplete()
    assert hits(index, PROMPT, contents, tier) == [0, 0]
    contents.close()
    assert index.blocks == 0


def test_contents_of_a_tier_are_unknown_after_a_clear_and_complete_from_the_first_event() -> None:
    """The engine may have kept the tier's blocks, or cleared them without an event."""
    index, names = KvIndex(ROOM), names_of(PROMPT)
    contents = fresh(index)
    apply(contents, CLEARED, stored(PROMPT), copied(*names[:3]), CLEARED)
    tier = contents.tiers["host_hit_len"]
    apply(contents, stored(PROMPT), copied(names[0]))
    assert (hits(index, PROMPT, contents, tier), contents.is_complete, tier.is_complete) == ([5, 1], True, False)
    contents.begin()
    assert contents.tiers == {}
    apply(contents, stored(PROMPT), copied(names[0]))
    again = contents.tiers["host_hit_len"]
    assert (hits(index, PROMPT, contents, again), again.is_complete) == ([5, 1], True)
    assert again.bit == tier.bit, "bits are given back"


@pytest.mark.parametrize("loss", [[], [removed(1)], [stored(PROMPT, skip=2)]], ids=["gap", "removal", "parent"])
def test_contents_of_a_tier_named_after_a_loss_are_incomplete(loss: list[dict[str, Any]]) -> None:
    contents = fresh(KvIndex(ROOM))
    if loss:
        apply(contents, *loss)
    else:
        contents.mark_incomplete()
    apply(contents, CLEARED, stored(PROMPT), copied(*names_of(PROMPT)))
    assert (contents.is_complete, contents.tiers["host_hit_len"].is_complete) == (True, False)


@pytest.mark.parametrize(("size", "expected", "is_complete"), [(2 * BLOCK, 4, True), (0, 0, False), (3, 0, False)])
def test_contents_of_a_tier_know_blocks_of_several(size: int, expected: int, is_complete: bool) -> None:
    index, names = KvIndex(ROOM), names_of(PROMPT)
    contents = fresh(index)
    apply(contents, stored(PROMPT), copied(names[1], names[3], size=size))
    tier = contents.tiers["host_hit_len"]
    assert hits(index, PROMPT, tier) == [expected]
    assert tier.is_complete is is_complete
    apply(contents, removed(names[3]) | {"medium": "CPU"})
    assert hits(index, PROMPT, tier) == [expected // 2]


@pytest.mark.parametrize(
    "odd",
    [
        {"group_idx": 1},
        {"kv_cache_spec_kind": "sliding_window"},
        {"kv_cache_spec_kind": "mamba"},
        {"token_ids": PROMPT[:-1]},
        {"block_size": 0},
        {"block_size": 2 * BLOCK},
    ],
)
def test_contents_are_unsupported_when_blocks_do_not_determine_hits(odd: dict[str, Any]) -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored([1, *PROMPT]), stored(PROMPT) | odd)
    assert contents.unsupported
    assert not contents.is_complete
    assert index.blocks == 0
    apply(contents, stored(PROMPT))
    assert index.blocks == 0


@pytest.mark.parametrize("token", [-1, 2**32, 2**63])
def test_contents_become_incomplete_on_absurd_token_ids(token: int) -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored([token, *PROMPT[1:]]))
    assert (hits(index, PROMPT, contents), contents.is_complete, contents.orphans) == ([0], False, 5)


def test_index_finds_blocks_of_any_size() -> None:
    index = KvIndex(ROOM)
    small, large = fresh(index), fresh(index)
    apply(small, stored(PROMPT))
    apply(large, stored(PROMPT[: 4 * BLOCK], block_size=2 * BLOCK, block_hashes=[1, 2], extra_keys=None))
    assert (small.block_size, large.block_size) == (BLOCK, 2 * BLOCK)
    assert index.depths(BlockKeys(PROMPT, 2 * BLOCK), 2, [large.bit]) == [2]
    assert hits(index, PROMPT, small) == [5]


def test_contents_become_incomplete_on_unknown_parent() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored(PROMPT, skip=2))
    assert (contents.is_complete, contents.orphans, len(contents)) == (False, 3, 0)


def test_contents_become_incomplete_on_removal_of_unknown_block() -> None:
    contents = fresh(KvIndex(ROOM))
    apply(contents, removed(1))
    assert not contents.is_complete


def test_contents_are_certain_up_to_blocks_stored_after_loss() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    other = [7] * 3 * BLOCK
    apply(contents, stored(PROMPT[: 4 * BLOCK]), stored(other))
    contents.mark_incomplete()
    assert not contents.is_complete
    keys = BlockKeys(PROMPT, BLOCK)
    assert contents.certain(keys.upto(5), *index.depths(keys, 5, [contents.bit])) == 0
    apply(contents, stored(PROMPT[: 3 * BLOCK] + [8] * BLOCK, skip=3))
    assert contents.certain(keys.upto(5), *index.depths(keys, 5, [contents.bit])) == 3
    assert hits(index, other, contents) == [3]
    assert contents.certain(BlockKeys(other, BLOCK).upto(3), 3) == 0


def test_contents_become_complete_after_full_turnover() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    contents.capacity = 20
    used, unused = PROMPT[: 2 * BLOCK], [7] * 3 * BLOCK
    apply(contents, stored(used), stored(unused))
    contents.mark_incomplete()
    apply(contents, stored(used + [8] * BLOCK, skip=2))
    states = []
    for token, blocks in ((50, 5), (51, 5), (52, 5), (53, 3), (54, 1)):
        apply(contents, stored([token] * blocks * BLOCK))
        if token == 50:
            apply(contents, removed(*names_of([50] * 5 * BLOCK)))
        states.append(contents.is_complete)
    assert states == [False, False, False, False, True]  # 20 blocks, the first one included
    assert hits(index, used, contents) == [2]
    assert hits(index, unused, contents) == [0]


def test_contents_become_incomplete_beyond_capacity() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    contents.capacity = 7
    apply(contents, stored(PROMPT))
    assert contents.is_complete
    apply(contents, stored([7] * 3 * BLOCK))
    assert (contents.is_complete, index.blocks) == (False, 0)


def test_index_refuses_blocks_when_full() -> None:
    index = KvIndex(2000)
    contents = fresh(index)
    apply(contents, stored(PROMPT), stored([7] * 5 * BLOCK))
    assert index.memory_bytes <= 2000
    assert index.blocks == 7
    assert not contents.is_complete
    assert index.refused == 1
    names = names_of(PROMPT)
    apply(contents, removed(*names), stored([8] * BLOCK))
    assert hits(index, [8] * BLOCK, contents) == [1]


def test_contents_close_removes_all_blocks() -> None:
    index = KvIndex(ROOM)
    one, other = fresh(index), fresh(index)
    apply(one, stored(PROMPT))
    apply(other, stored(PROMPT))
    one.close()
    again = fresh(index)
    assert hits(index, PROMPT, again, other) == [0, 5]
    other.close()
    assert index.memory_bytes == 0


def test_contents_follow_capture_with_64_bit_hashes() -> None:
    index = KvIndex(ROOM)
    contents = CacheContents(index)
    payloads = captured("kv_int_hash.jsonl")
    for payload in payloads[:-2]:
        apply(contents, *payload[1])
    series = payloads[0][1][1]["token_ids"]
    assert contents.is_complete
    assert (len(contents), contents.orphans) == (196, 0)
    assert index.depths(BlockKeys(series, 32), 3, [contents.bit]) == [3]
    assert index.depths(BlockKeys(series, 32, salt="tenant-A"), 3, [contents.bit]) == [3]
    assert index.depths(BlockKeys(series, 32, salt="tenant-B"), 3, [contents.bit]) == [0]
    apply(contents, *payloads[-2][1])
    assert len(contents) < 200
    assert index.depths(BlockKeys(series, 32), 3, [contents.bit]) == [0]
    apply(contents, *payloads[-1][1])
    assert index.blocks == 0


def test_contents_follow_capture_with_long_hashes() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    payloads = captured("kv_bytes_hash.jsonl")
    for payload in payloads[:5]:
        apply(contents, *payload[1])
    first, extension = payloads[2][1][0]["token_ids"], payloads[4][1][0]["token_ids"]
    assert index.depths(BlockKeys(first + extension, 128), 2, [contents.bit]) == [2]
    assert contents.is_complete
    apply(contents, *payloads[5][1])  # 30 messages later: its parent was never told
    assert not contents.is_complete


class AgainstNaive(RuleBasedStateMachine):
    """Two caches against lists of copies that are searched through; events in any order an engine could send."""

    def __init__(self) -> None:
        super().__init__()
        self.index = KvIndex(ROOM)
        self.caches = [fresh(self.index), fresh(self.index)]
        self.copies: list[Counter[tuple[int, ...]]] = [Counter(), Counter()]

    tokens = st.lists(st.integers(0, 1), min_size=0, max_size=3 * BLOCK)
    which = st.integers(0, 1)

    @rule(which=which, tokens=tokens)
    def store(self, which: int, tokens: list[int]) -> None:
        prefixes = [tuple(tokens[: (i + 1) * BLOCK]) for i in range(len(tokens) // BLOCK)]
        skip = 0
        while skip < len(prefixes) and self.copies[which][prefixes[skip]]:
            skip += 1
        apply(self.caches[which], stored(tokens, skip=skip, seed=str(which)))
        self.copies[which].update(prefixes[skip:])

    @rule(which=which, tokens=tokens)
    def store_all_again(self, which: int, tokens: list[int]) -> None:
        apply(self.caches[which], stored(tokens, seed=str(which)))
        self.copies[which].update(tuple(tokens[: (i + 1) * BLOCK]) for i in range(len(tokens) // BLOCK))

    @rule(which=which, data=st.data())
    def remove(self, which: int, data: st.DataObject) -> None:
        held = sorted(+self.copies[which])
        if held:
            prefix = data.draw(st.sampled_from(held))
            apply(self.caches[which], removed(names_of(prefix, str(which))[-1]))
            self.copies[which][prefix] -= 1

    @rule(which=which)
    def clear(self, which: int) -> None:
        apply(self.caches[which], CLEARED)
        self.copies[which].clear()

    @rule(tokens=tokens)
    def look_up(self, tokens: list[int]) -> None:
        expected = []
        for copies in self.copies:
            depth = 0
            while (depth + 1) * BLOCK <= len(tokens) and copies[tuple(tokens[: (depth + 1) * BLOCK])]:
                depth += 1
            expected.append(depth)
        assert hits(self.index, tokens, *self.caches) == expected

    @invariant()
    def nothing_is_left_over(self) -> None:
        assert self.index.blocks == len({p for copies in self.copies for p, n in copies.items() if n})


AgainstNaive.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
test_index_agrees_with_naive_index = AgainstNaive.TestCase


def test_index_shares_equal_prefixes_of_all_engines() -> None:
    index = KvIndex(ROOM)
    one, other, none = fresh(index), fresh(index), fresh(index)
    apply(one, stored(PROMPT, seed="one"))
    apply(other, stored(PROMPT[: 2 * BLOCK], seed="other"), stored([1, *PROMPT], seed="other"))
    assert hits(index, PROMPT, one, other, none) == [5, 2, 0]
    assert hits(index, PROMPT[: 3 * BLOCK] + [9] * BLOCK, one, other, none) == [3, 2, 0]
    assert index.blocks == 10


def test_index_hashes_no_further_than_longest_hit() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored(PROMPT))
    prompt = BlockKeys(PROMPT + [9] * 1000 * BLOCK, BLOCK)
    assert index.depths(prompt, 1005, [contents.bit]) == [5]
    assert len(prompt.keys) <= 16


def key_of(number: int) -> int:
    return xxhash.xxh3_64_intdigest(str(number).encode())


def test_index_bound_counts_at_least_real_memory() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for i in range(30_000):
            index.hold(key_of(i), ROOT, contents.bit)
            contents._keys[key_of(-i)] = key_of(i)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (taken - before) / 30_000 <= BYTES_PER_BLOCK + BYTES_PER_HOLDING
