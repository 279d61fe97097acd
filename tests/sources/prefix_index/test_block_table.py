"""Block table: order of eviction, and what it reports of holders."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.sources.prefix_index.block_table import BlockTable, HolderBlocks
from tests.sources.prefix_index.lettered import ENTRY

#: A path in a tree of prefixes: its blocks stand for themselves and all before them.
PATH = st.text("ab", min_size=1, max_size=6)
#: A block that stands alone.
LEAF = 1 << 40


def blocks(path: str) -> list[int]:
    return [int("1" + path[: i + 1].replace("a", "0").replace("b", "1"), 2) for i in range(len(path))]


def parent(block: int) -> int:
    return block >> 1


def is_closed(held: HolderBlocks) -> bool:
    """Return whether all blocks before each held block are held too."""
    blocks = set(held.image()[0])
    return len(blocks) == len(held) and all(
        parent(block) in blocks or parent(block) == 1 for block in blocks if block < LEAF
    )


ENTER = st.tuples(st.just("enter"), st.integers(0, 1), PATH)
STEPS = st.lists(
    st.one_of(ENTER, st.tuples(st.sampled_from(["merge", "touch", "drop"]), st.integers(0, 1), PATH)), max_size=30
)


@given(STEPS, st.integers(1, 12), st.integers(2, 24))
def test_table_holds_no_block_without_those_before_it(
    steps: list[tuple[str, int, str]], room: int, memory: int
) -> None:
    table, other = BlockTable(memory * ENTRY), BlockTable(2**30)
    helds = [table.open(), table.open()]
    elsewhere = other.open()
    entered: list[list[tuple[int, str]]] = [[], []]
    leaves = [LEAF, 2 * LEAF]
    for what, which, path in steps:
        if what == "enter":
            table.enter(helds[which], blocks(path), room)
            entered[which].append((table.tick, path))
        elif what == "touch":
            for tick, known in entered[which][-4:-1]:
                table.touch(helds[which], blocks(known), tick)
        elif what == "drop":
            leaf, is_held = leaves[which], bool(helds[which].depth([leaves[which]]))
            leaves[which] += 1
            assert table.rename(helds[which], leaf, leaves[which]) is is_held
            table.drop(helds[which], leaf)
            table.enter(helds[which], [leaves[which]], room)
        else:
            other.enter(elsewhere, blocks(path), 1000)
            table.merge(helds[which], *elsewhere.image(), room)
        assert all(map(is_closed, helds))
        assert all(len(held) <= room for held in helds)
        assert table.memory_bytes <= memory * ENTRY
        ticks = [[tick for tick, _ in held.image()[1]] for held in helds]
        assert ticks == [sorted(each) for each in ticks]


def test_table_eviction_of_one_holder_keeps_the_blocks_of_others() -> None:
    shared = list(range(1, 1001))
    all_of_it = BlockTable(2**30)
    for held in [all_of_it.open() for _ in range(20)]:
        all_of_it.enter(held, shared, 10_000)
    table = BlockTable(all_of_it.memory_bytes)
    helds = [table.open() for _ in range(20)]
    for held in helds:
        table.enter(held, shared, 10_000)
    assert table.evictions == 0
    table.enter(helds[-1], [*shared, 1001], 10_000)
    assert [held.depth(shared) for held in helds] == [0] + 19 * [1000]


class LeastRecent:
    """Naive holder: each block with the tick of its last entry and its depth."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int, int]] = {}

    def runs(self, path: list[int]) -> list[tuple[int, int]]:
        depth = self.depth(path)
        ticks = [self.held[block][0] for block in path[:depth]]
        return [(at, tick) for at, tick in enumerate(ticks) if not at or ticks[at - 1] != tick] + [(depth, 0)]

    def depth(self, path: list[int]) -> int:
        return next((at for at, block in enumerate(path) if block not in self.held), len(path))

    def enter(self, path: list[int], tick: int, room: int) -> None:
        self.held.update({block: (tick, -depth) for depth, block in enumerate(path[:room])})
        while len(self.held) > room:
            del self.held[min(self.held, key=lambda block: self.held[block])]

    def touch(self, path: list[int], at: int, tick: int) -> bool:
        """Enter *path* again as far as it is held, if some of it was last entered at *at*."""
        held = path[: self.depth(path)]
        if all(self.held[block][0] != at for block in held) or max(t for t, _ in self.held.values()) == at:
            return False
        last = max(depth for depth, block in enumerate(held) if self.held[block][0] == at)
        self.held.update({block: (tick, -depth) for depth, block in enumerate(held[: last + 1])})
        return True

    def forget_until(self, tick: int) -> int:
        old = [block for block, (at, _) in self.held.items() if at <= tick]
        for block in old:
            del self.held[block]
        return len(old)


STEP = st.tuples(st.sampled_from(["enter", "enter", "enter", "touch", "forget", "leave"]), st.integers(0, 2), PATH)


@given(st.lists(STEP, max_size=30), st.sampled_from([2, 5, 100]), st.data())
def test_table_evicts_oldest_entries_first_and_their_end(
    steps: list[tuple[str, int, str]], room: int, data: st.DataObject
) -> None:
    table = BlockTable(2**20)
    helds, models = [table.open() for _ in range(3)], [LeastRecent() for _ in range(3)]
    #: The last two entries of each.
    entered: list[list[tuple[list[int], int]]] = [[([], 0)]] * 3
    for what, which, text in steps:
        held, model, path = helds[which], models[which], blocks(text)
        if what == "enter":
            runs = model.runs(path[:room])
            assert table.enter(held, path, room) == runs
            model.enter(path, table.tick, room)
            entered[which] = [*entered[which][-1:], (path[:room], table.tick)]
        elif what == "touch":
            path, tick = entered[which][0]
            before = table.tick
            is_touched = model.touch(path, tick, before + 1)
            table.touch(held, path, tick)
            assert table.tick == before + is_touched
        elif what == "forget":
            tick = data.draw(st.integers(0, table.tick))
            newer = sum(at > tick for at, _ in model.held.values())
            assert held.newer_than(tick, room) == min(newer, room)
            assert table.forget_until(held, tick) == model.forget_until(tick)
        else:
            table.close(held)
            helds[which], models[which], entered[which] = table.open(), LeastRecent(), [([], 0)]
        assert [set(one.image()[0]) for one in helds] == [set(one.held) for one in models]
        assert table.blocks == len({block for one in models for block in one.held})
        found = {bit: depth for bits, depth in table.depths(path) for bit in (1, 2, 4) if bits & bit}
        assert [found.get(one.bit, 0) for one in helds] == [one.depth(path) for one in models]
    for held in helds:
        table.close(held)
    assert (table.blocks, table.memory_bytes) == (0, 0)


def test_table_names_the_present_holders_of_a_block() -> None:
    table = BlockTable(2**20)
    one, other = table.open(), table.open()
    table.enter(one, [7], 9)
    table.enter(other, [7], 9)
    assert table.holders(7) == one.bit | other.bit
    table.close(one)
    assert (table.holders(7), table.holders(8)) == (other.bit, 0)
    table.enter(other, [], 9)
    assert len(other) == 1


@pytest.mark.parametrize("holders", [4, 400])
def test_table_evicts_in_as_many_steps_for_any_number_of_holders(holders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0

    def oldest_tick(held: HolderBlocks) -> int:
        nonlocal steps
        steps += 1
        return next(iter(held.ticks))

    monkeypatch.setattr(HolderBlocks, "oldest_tick", property(oldest_tick))
    table, rng = BlockTable(1000 * ENTRY), random.Random(1)
    helds = [table.open() for _ in range(holders)]
    for number in range(1, 6001):
        if number == 3001:
            assert table.evictions > 1500
            steps = 0
        table.enter(rng.choice(helds), [number], 1000)
    assert steps / 3000 < 6
