"""Which of many holders hold which blocks: a table bounded in bytes that forgets what was held longest ago.

Blocks are 64-bit hashes that cover all blocks before them (`smetric.prompt`). What holders are, and what follows from a
block that is missing, is in `smetric.sources.prefix_index`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

#: What a block costs in the table of holders, and what each holding of it costs in a holder's order: slots of a
#: dict at its emptiest, keys, nodes. Measured with CPython 3.11 to 3.13; see `test_the_bound_counts_real_bytes`.
BYTES_PER_BLOCK = 80
BYTES_PER_HOLDING = 170
#: Stamps of blocks merged in are shared by this many neighbours at least, so that they cost what others cost.
MERGED_RUN = 64


class Held:
    """The blocks of one holder, each with the tick it was last entered in, oldest first.

    A prompt's blocks are entered last to first, so the end of a prompt is always older than its beginning, and
    forgetting the oldest never leaves a block without those before it.
    """

    __slots__ = ("bit", "blocks", "entered", "pressed")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.blocks: OrderedDict[int, int] = OrderedDict()
        #: Blocks entered so far that were not held.
        self.entered = 0
        #: Blocks were forgotten for want of room here, not there, since somebody last took note.
        self.pressed = False

    def __len__(self) -> int:
        return len(self.blocks)

    def runs(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """How many of the leading *blocks* it holds, and when each was last entered: (place of the first, tick) runs.

        The last run is (number held, 0).
        """
        found: list[tuple[int, int]] = []
        held, tick, place = self.blocks, None, 0
        for block in blocks:
            at = held.get(block)
            if at is None:
                break
            if at != tick:
                found.append((place, at))
                tick = at
            place += 1
        found.append((place, 0))
        return found

    def newer_than(self, tick: int, most: int) -> int:
        """How many blocks were entered after *tick*; stops counting at *most*."""
        count = 0
        for at in reversed(self.blocks.values()):
            if at <= tick or count == most:
                break
            count += 1
        return count

    def image(self) -> tuple[array[int], list[tuple[int, int]]]:
        """All blocks, oldest first, and their ticks as (tick, number of blocks) runs."""
        runs: list[tuple[int, int]] = []
        tick, count = 0, 0
        for at in self.blocks.values():
            if at != tick and count:
                runs.append((tick, count))
                count = 0
            tick = at
            count += 1
        if count:
            runs.append((tick, count))
        return array("Q", self.blocks), runs


class Holdings:
    """The table.

    Args:
        max_bytes: bound on the memory it takes.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.tick = 0
        #: Holdings forgotten to stay within the bound or within a holder's room.
        self.evictions = 0
        #: Counts changes, so that who has copied the table knows whether to copy it again.
        self.changes = 0
        self._holders: dict[int, int] = {}
        self._held: list[Held] = []
        self._holdings = 0

    @property
    def blocks(self) -> int:
        """Blocks that at least one holder holds."""
        return len(self._holders)

    @property
    def memory_bytes(self) -> int:
        """Memory the table takes, by the costs above."""
        return len(self._holders) * BYTES_PER_BLOCK + self._holdings * BYTES_PER_HOLDING

    @property
    def most_blocks(self) -> int:
        """Blocks of a single holder for which there is memory."""
        return self.max_bytes // (BYTES_PER_BLOCK + BYTES_PER_HOLDING)

    def open(self) -> Held:
        """A new holder, of nothing."""
        taken = 0
        for held in self._held:
            taken |= held.bit
        held = Held(~taken & (taken + 1))
        self._held.append(held)
        return held

    def close(self, held: Held) -> None:
        """*held* is gone."""
        self._held.remove(held)
        while held.blocks:
            self._drop_oldest(held)
        self.changes += 1

    def holders(self, block: int) -> int:
        """The bits of those who hold *block*."""
        return self._holders.get(block, 0)

    def depths(self, blocks: Iterable[int], asked: Iterable[Held]) -> dict[int, int]:
        """How many leading *blocks* each one of *asked* holds, by its bit; one walk along the blocks for all."""
        following = 0
        for held in asked:
            following |= held.bit
        matched: dict[int, int] = {}
        depth = 0
        holders = self._holders
        for block in blocks:
            holding = holders.get(block, 0) & following
            if holding != following:
                _record(matched, following & ~holding, depth)
                following = holding
                if not holding:
                    break
            depth += 1
        _record(matched, following, depth)
        return matched

    def enter(self, held: Held, blocks: Sequence[int], room: int) -> None:
        """*held* has just come to hold *blocks*, in prompt order; it has room for *room* in all.

        What does not fit there, or in the memory allowed here, is forgotten, oldest first.
        """
        room = min(room, self.most_blocks)
        self.tick += 1
        self.changes += 1
        tick, bit, mine, holders = self.tick, held.bit, held.blocks, self._holders
        before = len(mine)
        for block in reversed(blocks[:room]):
            if block in mine:
                mine.move_to_end(block)
            else:
                holders[block] = holders[block] | bit if block in holders else bit
            mine[block] = tick
        held.entered += len(mine) - before
        self._holdings += len(mine) - before
        self._fit(held, room)

    def merge(self, held: Held, blocks: Sequence[int], runs: Sequence[tuple[int, int]], room: int) -> int:
        """*held* came to hold *blocks* before all that is known here of it; returns how many are new.

        Args:
            held: whose.
            blocks: oldest first, as of `Held.image`.
            runs: their ticks in the table they come from.
            room: what *held* has room for in all.
        """
        bit, mine, holders = held.bit, held.blocks, self._holders
        newest = min(0, _oldest_tick(held)) if mine else 0
        older: OrderedDict[int, int] = OrderedDict()
        for block, tick in zip(blocks, _aged(runs, newest), strict=True):
            if block not in mine:
                older[block] = tick
                holders[block] = holders.get(block, 0) | bit
        older.update(mine)
        new = len(older) - len(mine)
        held.blocks = older
        self._holdings += new
        self.changes += 1
        self._fit(held, min(room, self.most_blocks))
        return new

    def forget_until(self, held: Held, tick: int) -> int:
        """Forget what *held* was last known to hold at *tick* or before; returns how many blocks that are."""
        before = len(held.blocks)
        while held.blocks and _oldest_tick(held) <= tick:
            self._drop_oldest(held)
        self.changes += 1
        return before - len(held.blocks)

    def _fit(self, held: Held, room: int) -> None:
        while len(held.blocks) > room:
            held.pressed |= room == self.most_blocks
            self._drop_oldest(held)
            self.evictions += 1
        while self.memory_bytes > self.max_bytes:
            oldest = min((h for h in self._held if h.blocks), key=_oldest_tick)
            oldest.pressed = True
            until = _oldest_tick(oldest)
            while self.memory_bytes > self.max_bytes and oldest.blocks and _oldest_tick(oldest) == until:
                self._drop_oldest(oldest)
                self.evictions += 1

    def _drop_oldest(self, held: Held) -> None:
        block, _ = held.blocks.popitem(last=False)
        self._holdings -= 1
        left = self._holders[block] & ~held.bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _oldest_tick(held: Held) -> int:
    return next(iter(held.blocks.values()))


def _aged(runs: Sequence[tuple[int, int]], before: int) -> list[int]:
    """A tick for each block, in the order of *runs* and all older than *before*; neighbours share one."""
    ticks: list[int] = []
    newest = runs[-1][0] if runs else 0
    shared, left = 0, 0
    for tick, count in runs:
        if left <= 0:
            shared, left = before - 1 + tick - newest, MERGED_RUN
        ticks += [shared] * count
        left -= count
    return ticks


def _record(matched: dict[int, int], bits: int, depth: int) -> None:
    """Note *depth* for each single bit of *bits*."""
    while bits:
        bit = bits & -bits
        matched[bit] = depth
        bits ^= bit
