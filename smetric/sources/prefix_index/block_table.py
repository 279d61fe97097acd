"""Block table: which holders hold which blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

# What one holder holds: blocks in runs, as prompts follow each other, by when each was last entered.
#
# The table of all holders, which enters and forgets, is in `smetric.sources.holdings`.


class Run:
    """Blocks that follow each other, held by the same holders; a prompt is a path of runs.

    Args:
        keys: the blocks, in prompt order.
        bits: of those who hold them.
    """

    __slots__ = ("bits", "keys")

    def __init__(self, keys: array[int], bits: int = 0) -> None:
        self.keys = keys
        self.bits = bits

    def common(self, blocks: Sequence[int], at: int) -> int:
        """How many of its blocks *blocks* has from *at* on, which has the first of them.

        A block that is the same there has the same blocks before it, so that few need be compared.
        """
        keys = self.keys
        high = len(blocks) - at
        if high > len(keys):
            high = len(keys)
        if keys[high - 1] == blocks[at + high - 1]:
            return high
        low = 1  # so many are the same, and not `high`
        while high - low > 1:
            middle = (low + high) // 2
            if keys[middle - 1] == blocks[at + middle - 1]:
                low = middle
            else:
                high = middle
        return low


class HolderBlocks:
    """What one holder holds, and the tick in which it was last entered.

    The end of a prompt counts as older than its beginning, so that forgetting the oldest never leaves a block without
    those before it.
    """

    __slots__ = ("_first", "bit", "entered", "pressed", "runs_at", "size", "ticks")

    def __init__(self, bit: int, first: dict[int, Run]) -> None:
        self._first = first
        self.bit = bit
        #: By tick, oldest first: the runs last entered in it, what comes earlier in a prompt before what comes later.
        self.ticks: dict[int, list[Run]] = {}
        #: The tick of each.
        self.runs_at: dict[Run, int] = {}
        #: Blocks held.
        self.size = 0
        #: Blocks entered so far that were not held.
        self.entered = 0
        #: Blocks were forgotten for want of room here, not there, since somebody last took note.
        self.pressed = False

    def __len__(self) -> int:
        return self.size

    @property
    def oldest_tick(self) -> int:
        """The tick of what is forgotten next; there must be something."""
        return next(iter(self.ticks))

    @property
    def oldest(self) -> Run:
        """What is forgotten next, from its end."""
        return self.ticks[self.oldest_tick][-1]

    def runs(self, path: Sequence[Run]) -> list[tuple[int, int]]:
        """How many of the leading blocks of *path* it holds, and when each was last entered: (place, tick) runs.

        The last one is (number held, 0).
        """
        found: list[tuple[int, int]] = []
        tick, place = None, 0
        for run in path:
            at = self.runs_at.get(run)
            if at is None:
                break
            if at != tick:
                found.append((place, at))
                tick = at
            place += len(run.keys)
        found.append((place, 0))
        return found

    def depth(self, blocks: Sequence[int]) -> int:
        """How many of the leading *blocks* it holds."""
        first, runs_at = self._first, self.runs_at
        place, end = 0, len(blocks)
        while place < end and (run := first.get(blocks[place])) is not None and run in runs_at:
            if place + 1 == end:
                return end
            place += run.common(blocks, place)
        return place

    def newer_than(self, tick: int, most: int) -> int:
        """How many blocks were entered after *tick*; stops counting at *most*."""
        count = 0
        for at in reversed(self.ticks):
            if at <= tick or count >= most:
                break
            count += sum(len(run.keys) for run in self.ticks[at])
        return min(count, most)

    def image(self) -> tuple[array[int], list[tuple[int, int]]]:
        """All blocks, run by run, oldest first, each run in prompt order; and the (tick, number of blocks) of each."""
        blocks = array("Q")
        runs: list[tuple[int, int]] = []
        for tick, entered in self.ticks.items():
            for run in reversed(entered):
                blocks.extend(run.keys)
                runs.append((tick, len(run.keys)))
        return blocks, runs


def path_of(first: dict[int, Run], blocks: Sequence[int]) -> Iterator[tuple[Run, int]]:
    """The runs that *blocks* begin with, and how many blocks of each: all, where another one is known to follow it."""
    at, end = 0, len(blocks)
    while at < end and (run := first.get(blocks[at])) is not None:
        common = run.common(blocks, at)
        at += common
        yield run, common


# Which of many holders hold which blocks: a table bounded in bytes that forgets what was held longest ago.
#
# Blocks are 64-bit hashes that cover all blocks before them (`smetric.reading.prompt`), so that two prompts share a
# block only if they share all before it. Blocks that were entered together are kept together, as runs: looking a prompt
# up, or entering it again, costs by the runs it consists of, a few in each turn's history, and not by its blocks. What
# holders are, and what follows from a block that is missing, is in `smetric.sources.prefix_index`.

#: What a block costs, what each holding of it counts for (it takes as much in an image), what a run costs beside its
#: blocks, and each holding of a run. Measured with CPython 3.11 to 3.13; see `test_the_bound_counts_real_bytes`.
BYTES_PER_BLOCK = 10
BYTES_PER_HOLDING = 8
BYTES_PER_RUN = 300
BYTES_PER_HELD_RUN = 500
#: Ticks of runs merged in are shared by neighbours of at least so many blocks.
MERGED_BLOCKS = 64


class BlockTable:
    """The table.

    Args:
        max_bytes: bound on the memory it takes.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        #: Blocks of a single holder for which there is memory.
        self.most_blocks = max_bytes // (BYTES_PER_BLOCK + BYTES_PER_HOLDING)
        self.tick = 0
        #: Blocks that at least one holder holds.
        self.blocks = 0
        #: Holdings forgotten to stay within the bound or within a holder's room.
        self.evictions = 0
        #: Counts changes, so that who has copied the table knows whether to copy it again.
        self.changes = 0
        #: Counts what makes it doubtful, or certain, that holders hold nothing but what is known here.
        self.surprises = 0
        #: Runs by their first block.
        self._first: dict[int, Run] = {}
        self._held: list[HolderBlocks] = []
        self._holdings = 0
        self._held_runs = 0

    @property
    def memory_bytes(self) -> int:
        """Memory the table takes, by the costs above."""
        blocks = self.blocks * BYTES_PER_BLOCK + self._holdings * BYTES_PER_HOLDING
        return blocks + len(self._first) * BYTES_PER_RUN + self._held_runs * BYTES_PER_HELD_RUN

    def open(self) -> HolderBlocks:
        """A new holder, of nothing."""
        taken = 0
        for held in self._held:
            taken |= held.bit
        held = HolderBlocks(~taken & (taken + 1), self._first)
        self._held.append(held)
        return held

    def close(self, held: HolderBlocks) -> None:
        """*held* is gone."""
        while held.size:
            self._drop_oldest(held, held.size)
        self._held.remove(held)
        self.changes += 1

    def holders(self, block: int) -> int:
        """The bits of those who hold *block*, one that was entered as the first of several."""
        run = self._first.get(block)
        return 0 if run is None else run.bits

    def depths(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """How many leading *blocks* those hold who hold any: (bits of who, how many), by one walk along the blocks."""
        found: list[tuple[int, int]] = []
        following, depth = 0, 0
        for run, common in path_of(self._first, blocks):
            if not depth:
                following = run.bits
            elif run.bits & following != following:
                found.append((following & ~run.bits, depth))
                following &= run.bits
                if not following:
                    return found
            depth += common
        if following:
            found.append((following, depth))
        return found

    def enter(self, held: HolderBlocks, blocks: Sequence[int], room: int) -> list[tuple[int, int]]:
        """*held* has just come to hold *blocks*, in prompt order; it has room for *room* in all.

        What does not fit there, or in the memory allowed here, is forgotten, oldest first.

        Returns:
            What it held of them before, as of `Held.runs`.
        """
        if room > self.most_blocks:
            room = self.most_blocks
        if len(blocks) > room:
            blocks = blocks[:room]
        self.tick = tick = self.tick + 1
        self.changes += 1
        path, rest = self._cut(blocks)
        runs = held.runs(path) if path else [(0, 0)]
        before = held.size
        if rest and path and path[-1].bits == held.bit:
            # It alone holds what this goes on from, and both are of this tick now.
            path[-1].keys.extend(rest)
            self._count(held, len(rest), len(rest))
        elif rest:
            path.append(self._add(rest))
        runs_at = held.runs_at
        for run in path:
            at = runs_at.get(run)
            if at is None:
                self._take(held, run)
            else:
                self._leave(held, run, at)
            runs_at[run] = tick
        if path:
            held.ticks[tick] = path[:]  # as large as it need be, which a list that has grown is not
        held.entered += held.size - before
        if held.size > room or self.memory_bytes > self.max_bytes:
            self._fit(held, room)
        return runs

    def merge(self, held: HolderBlocks, blocks: array[int], runs: Sequence[tuple[int, int]], room: int) -> int:
        """*held* came to hold *blocks* before all that is known here of it; returns how many are new.

        Args:
            held: whose.
            blocks: run by run, oldest first, as of `Held.image`.
            runs: their ticks in the table they come from, and lengths.
            room: what *held* has room for in all.
        """
        self.changes += 1
        before = held.size
        ticks = _aged(runs, min(0, held.oldest_tick) if held.size else 0)
        end = len(blocks)
        # The newest first: no run comes before the one it goes on from.
        for (_, count), tick in zip(reversed(runs), reversed(ticks), strict=True):
            path, rest = self._cut(blocks[end - count : end])
            if rest:
                path.append(self._add(rest))
            for run in path:
                if run not in held.runs_at:
                    self._take(held, run)
                    held.runs_at[run] = tick
                    held.ticks.setdefault(tick, []).append(run)
            end -= count
        held.ticks = dict(sorted(held.ticks.items()))
        new = held.size - before
        self._fit(held, min(room, self.most_blocks))
        return new

    def forget_until(self, held: HolderBlocks, tick: int) -> int:
        """Forget what *held* was last known to hold at *tick* or before; returns how many blocks that are."""
        before = held.size
        while held.size and held.oldest_tick <= tick:
            self._drop_oldest(held, held.size)
        self.changes += 1
        return before - held.size

    def _cut(self, blocks: Sequence[int]) -> tuple[list[Run], array[int]]:
        """The runs that *blocks* begin with, the last of them cut where they part, and the blocks behind them."""
        path: list[Run] = []
        at = 0
        if blocks and blocks[0] in self._first:
            for run, common in path_of(self._first, blocks):
                path.append(run if common == len(run.keys) else self._split(run, common))
                at += common
        rest = blocks[at:]
        return path, rest if isinstance(rest, array) else array("Q", rest)

    def _split(self, run: Run, at: int) -> Run:
        """Cut *run* in two at *at*; returns the first half. The second one is *run* itself."""
        head = Run(run.keys[:at], run.bits)
        run.keys = run.keys[at:]
        self._first[head.keys[0]] = head
        self._first[run.keys[0]] = run
        for held in self._held:
            if held.bit & run.bits:
                held.runs_at[head] = tick = held.runs_at[run]
                entered = held.ticks[tick]
                entered.insert(entered.index(run), head)
                self._held_runs += 1
        return head

    def _add(self, keys: array[int]) -> Run:
        run = self._first[keys[0]] = Run(keys)
        self.blocks += len(keys)
        return run

    def _take(self, held: HolderBlocks, run: Run) -> None:
        """*held*, which did not hold *run*, holds it."""
        run.bits |= held.bit
        size = len(run.keys)
        held.size += size
        self._holdings += size
        self._held_runs += 1

    @staticmethod
    def _leave(held: HolderBlocks, run: Run, tick: int) -> None:
        entered = held.ticks[tick]
        entered.remove(run)
        if not entered:
            del held.ticks[tick]

    def _count(self, held: HolderBlocks, holdings: int, blocks: int) -> None:
        """So many holdings and blocks more, or fewer."""
        held.size += holdings
        self._holdings += holdings
        self.blocks += blocks

    def _fit(self, held: HolderBlocks, room: int) -> None:
        while held.size > room:
            if room == self.most_blocks:
                self._press(held)
            self.evictions += self._drop_oldest(held, held.size - room)
        while self.memory_bytes > self.max_bytes:
            oldest = min((h for h in self._held if h.size), key=lambda h: h.oldest_tick)
            self._press(oldest)
            excess = -(-(self.memory_bytes - self.max_bytes) // (BYTES_PER_BLOCK + BYTES_PER_HOLDING))
            # Of a run that others hold too all is forgotten: to cut it in two would take more than it frees.
            is_alone = oldest.oldest.bits == oldest.bit
            self.evictions += self._drop_oldest(oldest, excess if is_alone else oldest.size)

    def _press(self, held: HolderBlocks) -> None:
        held.pressed = True
        self.surprises += 1

    def _drop_oldest(self, held: HolderBlocks, most: int) -> int:
        """Forget blocks of the run that *held* holds longest, from its end, at most *most*; returns how many."""
        tick, run = held.oldest_tick, held.oldest
        size = len(run.keys)
        if size > most:
            if run.bits == held.bit:
                del run.keys[size - most :]
                self._count(held, -most, -most)
                return most
            self._split(run, size - most)
            size = most
        self._leave(held, run, tick)
        del held.runs_at[run]
        self._held_runs -= 1
        run.bits ^= held.bit
        self._count(held, -size, 0 if run.bits else -size)
        if not run.bits and self._first.get(run.keys[0]) is run:  # another run has its place where hashes collide
            del self._first[run.keys[0]]
        return size


def _aged(runs: Sequence[tuple[int, int]], before: int) -> list[int]:
    """A tick for each run, in the order of *runs* and all older than *before*; neighbours share one."""
    ticks: list[int] = []
    newest = runs[-1][0] if runs else 0
    shared, left = 0, 0
    for tick, count in runs:
        if left <= 0:
            shared, left = before - 1 + tick - newest, MERGED_BLOCKS
        ticks.append(shared)
        left -= count
    return ticks
