"""Which of many holders hold which blocks: a table bounded in bytes that forgets what was held longest ago.

Blocks are 64-bit hashes that cover all blocks before them (`smetric.reading.prompt`), so that two prompts share a block
only if they share all before it. Blocks that were entered together are kept together, as runs: looking a prompt up, or
entering it again, costs by the runs it consists of, a few in each turn's history, and not by its blocks. What holders
are, and what follows from a block that is missing, is in `smetric.sources.prefix_index`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from smetric.sources.held import Held, Run, path_of

#: What a block costs, what each holding of it counts for (it takes as much in an image), what a run costs beside its
#: blocks, and each holding of a run. Measured with CPython 3.11 to 3.13; see `test_the_bound_counts_real_bytes`.
BYTES_PER_BLOCK = 10
BYTES_PER_HOLDING = 8
BYTES_PER_RUN = 300
BYTES_PER_HELD_RUN = 500
#: Ticks of runs merged in are shared by neighbours of at least so many blocks.
MERGED_BLOCKS = 64


class Holdings:
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
        self._held: list[Held] = []
        self._holdings = 0
        self._held_runs = 0

    @property
    def memory_bytes(self) -> int:
        """Memory the table takes, by the costs above."""
        blocks = self.blocks * BYTES_PER_BLOCK + self._holdings * BYTES_PER_HOLDING
        return blocks + len(self._first) * BYTES_PER_RUN + self._held_runs * BYTES_PER_HELD_RUN

    def open(self) -> Held:
        """A new holder, of nothing."""
        taken = 0
        for held in self._held:
            taken |= held.bit
        held = Held(~taken & (taken + 1), self._first)
        self._held.append(held)
        return held

    def close(self, held: Held) -> None:
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

    def enter(self, held: Held, blocks: Sequence[int], room: int) -> list[tuple[int, int]]:
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

    def merge(self, held: Held, blocks: array[int], runs: Sequence[tuple[int, int]], room: int) -> int:
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

    def forget_until(self, held: Held, tick: int) -> int:
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

    def _take(self, held: Held, run: Run) -> None:
        """*held*, which did not hold *run*, holds it."""
        run.bits |= held.bit
        size = len(run.keys)
        held.size += size
        self._holdings += size
        self._held_runs += 1

    @staticmethod
    def _leave(held: Held, run: Run, tick: int) -> None:
        entered = held.ticks[tick]
        entered.remove(run)
        if not entered:
            del held.ticks[tick]

    def _count(self, held: Held, holdings: int, blocks: int) -> None:
        """So many holdings and blocks more, or fewer."""
        held.size += holdings
        self._holdings += holdings
        self.blocks += blocks

    def _fit(self, held: Held, room: int) -> None:
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

    def _press(self, held: Held) -> None:
        held.pressed = True
        self.surprises += 1

    def _drop_oldest(self, held: Held, most: int) -> int:
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
