from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from smetric.request.prompt import BlockKeys
from smetric.sources.kv_events.contents import Contents, KvIndex
from smetric.sources.kv_events.message import decode
from tests.sources.kv_engine import BLOCK, CLEARED, captured, names_of, removed, stored

ROOM = 1 << 30
PROMPT = list(range(100, 100 + 5 * BLOCK))


def apply(contents: Contents, *events: dict[str, Any]) -> None:
    for event in decode(msgspec.msgpack.encode([1.0, list(events), 0])).events():
        contents.apply(event)


def fresh(index: KvIndex) -> Contents:
    contents = Contents(index)
    contents.begin()
    return contents


def hits(index: KvIndex, tokens: list[int], *asked: Contents, salt: str = "", adapter: str = "") -> list[int]:
    """Blocks of each, whatever is certain."""
    return index.depths(
        BlockKeys(tokens, BLOCK, adapter, salt), len(tokens) // BLOCK, [contents.bit for contents in asked]
    )


def test_a_block_extends_the_one_it_names_as_its_parent() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored(PROMPT[: 2 * BLOCK]), stored(PROMPT, skip=2))
    assert hits(index, PROMPT, contents) == [5]


def test_a_block_is_held_until_its_last_copy_is_removed() -> None:
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


def test_a_block_that_an_engine_gives_two_names_is_one_holding() -> None:
    index = KvIndex(ROOM)
    contents, other = fresh(index), fresh(index)
    apply(contents, stored(PROMPT, seed="a"), stored(PROMPT, seed="b"))
    apply(other, stored(PROMPT))
    apply(contents, removed(*names_of(PROMPT, "a")), removed(*names_of(PROMPT, "b")))
    assert hits(index, PROMPT, contents, other) == [0, 5]
    apply(other, CLEARED)
    assert index.memory_bytes == 0


def test_clearing_empties_one_cache_alone() -> None:
    index = KvIndex(ROOM)
    one, other = fresh(index), fresh(index)
    apply(one, stored(PROMPT))
    apply(other, stored(PROMPT))
    apply(one, CLEARED)
    assert hits(index, PROMPT, one, other) == [0, 5]
    assert one.is_complete


def test_salt_and_adapter_are_part_of_the_identity() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored(PROMPT, salt="tenant-a"), stored(PROMPT[: 3 * BLOCK], lora="fr", seed="x"))
    assert hits(index, PROMPT, contents) == [0]
    assert hits(index, PROMPT, contents, salt="tenant-a") == [5]
    assert hits(index, PROMPT, contents, salt="tenant-b") == [0]
    assert hits(index, PROMPT, contents, adapter="fr") == [3]
    assert hits(index, PROMPT, contents, adapter="fr", salt="tenant-a") == [0]


def test_an_image_is_part_of_the_identity_from_its_block_on() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    picture = stored(PROMPT) | {"extra_keys": [None, [["0123abcd", 3]], None, None, None]}
    apply(contents, picture)
    assert hits(index, PROMPT, contents) == [1]


def test_an_adapter_known_by_number_alone_is_not_taken_for_the_base_model() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored(PROMPT) | {"lora_id": 1, "lora_name": None, "extra_keys": None})
    assert hits(index, PROMPT, contents) == [0]
    assert not contents.is_complete
    apply(contents, stored(PROMPT, seed="y") | {"lora_id": 1, "lora_name": "fr", "extra_keys": None})
    assert hits(index, PROMPT, contents, adapter="fr") == [5]


@pytest.mark.parametrize("tier", [{"medium": "CPU"}, {"medium": "STORAGE"}, {"locality": "REMOTE"}])
def test_other_tiers_are_not_this_cache(tier: dict[str, str]) -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored(PROMPT) | tier)
    assert hits(index, PROMPT, contents) == [0]
    apply(contents, stored(PROMPT), removed(*names_of(PROMPT)) | tier)
    assert hits(index, PROMPT, contents) == [5]
    assert contents.is_complete


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
def test_a_cache_whose_blocks_do_not_tell_its_hits_is_not_known(odd: dict[str, Any]) -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored([1, *PROMPT]), stored(PROMPT) | odd)
    assert contents.unsupported
    assert not contents.is_complete
    assert index.blocks == 0
    apply(contents, stored(PROMPT))
    assert index.blocks == 0


@pytest.mark.parametrize("token", [-1, 2**32, 2**63])
def test_absurd_token_ids_are_a_loss_and_no_error(token: int) -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored([token, *PROMPT[1:]]))
    assert (hits(index, PROMPT, contents), contents.is_complete, contents.orphans) == ([0], False, 5)


def test_blocks_of_any_size_are_found_by_their_own_size() -> None:
    index = KvIndex(ROOM)
    small, large = fresh(index), fresh(index)
    apply(small, stored(PROMPT))
    apply(large, stored(PROMPT[: 4 * BLOCK], block_size=2 * BLOCK, block_hashes=[1, 2], extra_keys=None))
    assert (small.block_size, large.block_size) == (BLOCK, 2 * BLOCK)
    assert index.depths(BlockKeys(PROMPT, 2 * BLOCK), 2, [large.bit]) == [2]
    assert hits(index, PROMPT, small) == [5]


def test_a_block_whose_parent_is_unknown_makes_the_contents_incomplete() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored(PROMPT, skip=2))
    assert (contents.is_complete, contents.orphans, len(contents)) == (False, 3, 0)


def test_the_removal_of_a_block_nobody_told_of_makes_the_contents_incomplete() -> None:
    contents = fresh(KvIndex(ROOM))
    apply(contents, removed(1))
    assert not contents.is_complete


def test_after_a_loss_only_what_is_stored_again_is_certain_and_what_comes_before_it() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    other = [7] * 3 * BLOCK
    apply(contents, stored(PROMPT[: 4 * BLOCK]), stored(other))
    contents.lose()
    assert not contents.is_complete
    keys = BlockKeys(PROMPT, BLOCK)
    assert contents.certain(keys.upto(5), *index.depths(keys, 5, [contents.bit])) == 0
    apply(contents, stored(PROMPT[: 3 * BLOCK] + [8] * BLOCK, skip=3))
    assert contents.certain(keys.upto(5), *index.depths(keys, 5, [contents.bit])) == 3
    assert hits(index, other, contents) == [3]
    assert contents.certain(BlockKeys(other, BLOCK).upto(3), 3) == 0


def test_contents_are_complete_again_when_the_cache_has_turned_over() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    contents.capacity = 20
    used, unused = PROMPT[: 2 * BLOCK], [7] * 3 * BLOCK
    apply(contents, stored(used), stored(unused))
    contents.lose()
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


def test_more_than_a_cache_can_hold_means_that_removals_were_missed() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    contents.capacity = 7
    apply(contents, stored(PROMPT))
    assert contents.is_complete
    apply(contents, stored([7] * 3 * BLOCK))
    assert (contents.is_complete, index.blocks) == (False, 0)


def test_a_full_index_takes_nothing_more_and_does_not_call_it_a_miss() -> None:
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


def test_closing_a_cache_leaves_nothing_of_it() -> None:
    index = KvIndex(ROOM)
    one, other = fresh(index), fresh(index)
    apply(one, stored(PROMPT))
    apply(other, stored(PROMPT))
    one.close()
    again = fresh(index)
    assert hits(index, PROMPT, again, other) == [0, 5]
    other.close()
    assert index.memory_bytes == 0


def test_the_capture_with_64_bit_hashes_ends_as_the_engine_did() -> None:
    index = KvIndex(ROOM)
    contents = Contents(index)
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


def test_the_capture_with_long_hashes_chains_by_their_ends() -> None:
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
test_it_is_what_a_naive_index_would_say = AgainstNaive.TestCase
