"""Block table: which holders hold which blocks, bounded in bytes, with least recently entered blocks evicted first.

Blocks are 64-bit hashes that cover all blocks before them (`smetric.request.prompt`), so two prompts share a block only
if they share all blocks before it. Blocks that were entered together are kept together as runs: a look-up or a repeated
entry costs by the number of runs, a few for each turn of the history, and not by the number of blocks.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

#: Bytes of a block, of each holding of a block (as much as it takes in an image), of a run beside its blocks, and of
#: each holding of a run. Measured with CPython 3.11 to 3.13; `test_table_memory_bound_counts_real_bytes` checks them.
BYTES_PER_BLOCK = 10
BYTES_PER_HOLDING = 8
BYTES_PER_RUN = 300
BYTES_PER_HELD_RUN = 600


class Run:
    """Blocks that follow each other and have the same holders. A prompt is a path of runs.

    Args:
        keys: the blocks, in prompt order.
        bits: the holders' bits.
    """

    __slots__ = ("bits", "keys")

    def __init__(self, keys: array[int], bits: int = 0) -> None:
        self.keys = keys
        self.bits = bits

    def common(self, blocks: Sequence[int], at: int) -> int:
        """Return how many of its leading blocks *blocks* has from *at* on; the first one must be equal.

        Equal blocks have equal blocks before them, so a binary search suffices.
        """
        keys = self.keys
        high = len(blocks) - at
        if high > len(keys):
            high = len(keys)
        if keys[high - 1] == blocks[at + high - 1]:
            return high
        low = 1  # `low` blocks are equal, `high` are not
        while high - low > 1:
            middle = (low + high) // 2
            if keys[middle - 1] == blocks[at + middle - 1]:
                low = middle
            else:
                high = middle
        return low


class HolderBlocks:
    """Blocks of one holder, each with the tick in which it was last entered.

    Within a tick the end of a prompt counts as older than its beginning, so evicting the oldest never leaves a block
    without the blocks before it.

    Attributes:
        bit: the holder's bit.
        ticks: by tick, oldest first, the runs last entered in it, in prompt order.
        runs_at: the tick of each run.
        size: blocks held.
        entered: blocks entered so far that were not held.
        pressed: whether blocks were evicted for want of memory here; the reader resets it.
        is_queued: whether the table has it among the holders to evict from.
    """

    __slots__ = ("_first", "bit", "entered", "is_queued", "pressed", "runs_at", "size", "ticks")

    def __init__(self, bit: int, first: dict[int, Run]) -> None:
        self._first = first
        self.bit = bit
        # The first key of a dict is found by a scan over all that were deleted before it.
        self.ticks: OrderedDict[int, list[Run]] = OrderedDict()
        self.runs_at: dict[Run, int] = {}
        self.size = 0
        self.entered = 0
        self.pressed = False
        self.is_queued = False

    def __len__(self) -> int:
        return self.size

    @property
    def oldest_tick(self) -> int:
        """Tick of the run that is evicted next; the holder must hold something."""
        return next(iter(self.ticks))

    def runs(self, path: Sequence[Run]) -> list[tuple[int, int]]:
        """Return how many leading blocks of *path* it holds, and since when: a (place, tick) pair for each new tick.

        The last pair is (number held, 0).
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
        """Return how many of the leading *blocks* it holds."""
        first, runs_at = self._first, self.runs_at
        place, end = 0, len(blocks)
        while place < end and (run := first.get(blocks[place])) is not None and run in runs_at:
            if place + 1 == end:
                return end
            place += run.common(blocks, place)
        return place

    def newer_than(self, tick: int, most: int) -> int:
        """Return how many blocks were entered after *tick*, at most *most*."""
        count = 0
        for at in reversed(self.ticks):
            if at <= tick or count >= most:
                break
            count += sum(len(run.keys) for run in self.ticks[at])
        return min(count, most)

    def image(self) -> tuple[array[int], list[tuple[int, int]]]:
        """Return all blocks, oldest run first and each run in prompt order, and the (tick, length) of each run."""
        blocks = array("Q")
        runs: list[tuple[int, int]] = []
        for tick, entered in self.ticks.items():
            for run in reversed(entered):
                blocks.extend(run.keys)
                runs.append((tick, len(run.keys)))
        return blocks, runs


def _path(first: dict[int, Run], blocks: Sequence[int]) -> Iterator[tuple[Run, int]]:
    """Yield the runs that *blocks* begin with, and how many blocks of each are equal: all, except in the last one."""
    at, end = 0, len(blocks)
    while at < end and (run := first.get(blocks[at])) is not None:
        common = run.common(blocks, at)
        at += common
        yield run, common


class BlockTable:
    """The blocks of all holders.

    Args:
        max_bytes: bound on the memory it takes.

    Attributes:
        most_blocks: the blocks of a single holder that fit into *max_bytes*.
        tick: number of the last entry.
        blocks: blocks with at least one holder.
        evictions: holdings evicted to stay within *max_bytes* or a holder's room.
        changes: goes up with every change, so that a copy can be compared with the present state.
        surprises: goes up when it may have changed whether the table knows everything a holder holds.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.most_blocks = max_bytes // (BYTES_PER_BLOCK + BYTES_PER_HOLDING)
        self.tick = 0
        self.blocks = 0
        self.evictions = 0
        self.changes = 0
        self.surprises = 0
        #: Runs by their first block.
        self._first: dict[int, Run] = {}
        self._held: list[HolderBlocks] = []
        #: Heap of the holders that hold something: a tick no later than the oldest one of each, its bit, the holder.
        self._by_age: list[tuple[int, int, HolderBlocks]] = []
        self._holdings = 0
        self._held_runs = 0

    @property
    def memory_bytes(self) -> int:
        """Memory that the table takes, by the constants above."""
        blocks = self.blocks * BYTES_PER_BLOCK + self._holdings * BYTES_PER_HOLDING
        return blocks + len(self._first) * BYTES_PER_RUN + self._held_runs * BYTES_PER_HELD_RUN

    def open(self) -> HolderBlocks:
        """Return a new holder without blocks."""
        taken = 0
        for held in self._held:
            taken |= held.bit
        held = HolderBlocks(~taken & (taken + 1), self._first)
        self._held.append(held)
        return held

    def close(self, held: HolderBlocks) -> None:
        """Remove *held* and its blocks."""
        while held.size:
            self._drop_oldest(held, held.size)
        self._held.remove(held)
        self._by_age = [each for each in self._by_age if each[2] is not held]
        heapq.heapify(self._by_age)
        self.changes += 1

    def holders(self, block: int) -> int:
        """Return the bits of the holders of *block*, which must be the first of a run."""
        run = self._first.get(block)
        return 0 if run is None else run.bits

    def depths(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Return how many leading *blocks* each holder of the first one holds: (bits of holders, depth) pairs."""
        found: list[tuple[int, int]] = []
        following, depth = 0, 0
        for run, common in _path(self._first, blocks):
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
        """Enter *blocks*, in prompt order, as the most recent of *held*, which has room for *room* blocks.

        Blocks that exceed the room or *max_bytes* are evicted, oldest first.

        Returns:
            The leading blocks that it held before, as of `HolderBlocks.runs`.
        """
        if room > self.most_blocks:
            room = self.most_blocks
        if len(blocks) > room:
            blocks = blocks[:room]
        self.tick = tick = self.tick + 1
        self.changes += 1
        path, rest = self._find(blocks)
        runs = held.runs(path) if path else [(0, 0)]
        before = held.size
        if rest and path and path[-1].bits == held.bit:
            # It is the only holder of the last run, and both parts are of this tick now.
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
            held.ticks[tick] = path[:]  # a copy has no spare capacity, which would be memory that nothing counts
            if not held.is_queued:
                self._queue(held)
        held.entered += held.size - before
        if held.size > room or self.memory_bytes > self.max_bytes:
            self._fit(held, room)
        return runs

    def merge(self, held: HolderBlocks, blocks: array[int], runs: Sequence[tuple[int, int]], room: int) -> int:
        """Enter *blocks* as older than everything known of *held*; return how many are new.

        Args:
            held: the holder.
            blocks: blocks run by run, oldest first, as of `HolderBlocks.image`.
            runs: the ticks of the runs in the table they come from, and their lengths.
            room: blocks that *held* has room for.
        """
        self.changes += 1
        before = held.size
        oldest = min(0, held.oldest_tick) if held.size else 0
        shift = oldest - 1 - runs[-1][0] if runs else 0
        end = len(blocks)
        # Newest first, so no run precedes the one it continues.
        for tick, count in reversed(runs):
            path, rest = self._find(blocks[end - count : end])
            if rest:
                path.append(self._add(rest))
            for run in path:
                if run not in held.runs_at:
                    self._take(held, run)
                    held.runs_at[run] = tick + shift
                    held.ticks.setdefault(tick + shift, []).append(run)
            end -= count
        held.ticks = OrderedDict(sorted(held.ticks.items()))
        if held.size:
            self._queue(held)
        new = held.size - before
        self._fit(held, min(room, self.most_blocks))
        return new

    def forget_until(self, held: HolderBlocks, tick: int) -> int:
        """Drop the blocks that *held* was last entered with at *tick* or before; return how many."""
        before = held.size
        while held.size and held.oldest_tick <= tick:
            self._drop_oldest(held, held.size)
        self.changes += 1
        return before - held.size

    def touch(self, held: HolderBlocks, blocks: Sequence[int], tick: int) -> None:
        """Make *blocks*, which *held* was entered with at *tick*, its most recent."""
        own = held.ticks.get(tick)
        if own is None or next(reversed(held.ticks)) == tick:
            return  # entered again since, or most recent anyway
        del held.ticks[tick]
        path = []  # its beginning may be entered again since, and must not become older than the rest
        for run, common in _path(self._first, blocks):
            if run is own[0]:
                break
            if common < len(run.keys):
                run = self._split(run, common)
            self._leave(held, run, held.runs_at[run])
            path.append(run)
        self.tick = tick = self.tick + 1
        held.ticks[tick] = path = [*path, *own]
        for run in path:
            held.runs_at[run] = tick
        if self.memory_bytes > self.max_bytes:  # of a run that was split
            self._fit(held, self.most_blocks)

    def rename(self, held: HolderBlocks, block: int, new: int) -> bool:
        """Replace *block*, a run of its own, by the unknown block *new*, its most recent; False if that cannot be."""
        first = self._first
        run = first.get(block)
        if run is None or run.bits != held.bit or len(run.keys) > 1 or new in first:
            return False
        del first[block]
        run.keys[0] = new
        first[new] = run
        self._leave(held, run, held.runs_at[run])
        self.tick = held.runs_at[run] = tick = self.tick + 1
        held.ticks[tick] = [run]
        held.entered += 1
        self.changes += 1
        return True

    def drop(self, held: HolderBlocks, block: int) -> None:
        """Drop the run of *held* that begins with *block*, if there is one."""
        run = self._first.get(block)
        if run is not None and run in held.runs_at:
            self._remove(held, run, held.runs_at[run])

    def _find(self, blocks: Sequence[int]) -> tuple[list[Run], array[int]]:
        """Return the runs that *blocks* begin with, the last one split where they part, and the remaining blocks."""
        path: list[Run] = []
        at = 0
        if blocks and blocks[0] in self._first:
            for run, common in _path(self._first, blocks):
                path.append(run if common == len(run.keys) else self._split(run, common))
                at += common
        rest = blocks[at:]
        return path, rest if isinstance(rest, array) else array("Q", rest)

    def _split(self, run: Run, at: int) -> Run:
        """Split *run* at *at*; return the new first half. The second half is *run* itself."""
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
        """Make *held* a holder of *run*."""
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
        held.size += holdings
        self._holdings += holdings
        self.blocks += blocks

    def _fit(self, held: HolderBlocks, room: int) -> None:
        """Evict the oldest blocks of *held* beyond *room*, and of all holders beyond *max_bytes*."""
        while held.size > room:
            if room == self.most_blocks:
                self._press(held)
            self.evictions += self._drop_oldest(held, held.size - room)
        while self.memory_bytes > self.max_bytes:
            oldest = self._oldest()
            self._press(oldest)
            excess = -(-(self.memory_bytes - self.max_bytes) // (BYTES_PER_BLOCK + BYTES_PER_HOLDING))
            # A run with other holders is dropped whole: splitting it would take more memory than it frees.
            is_alone = oldest.ticks[oldest.oldest_tick][-1].bits == oldest.bit
            self.evictions += self._drop_oldest(oldest, excess if is_alone else oldest.size)

    def _queue(self, held: HolderBlocks) -> None:
        held.is_queued = True
        heapq.heappush(self._by_age, (held.oldest_tick, held.bit, held))

    def _oldest(self) -> HolderBlocks:
        """Return the holder of the oldest run, and put the heap right as far as that needs."""
        while True:
            tick, bit, held = self._by_age[0]
            if not held.size:
                heapq.heappop(self._by_age)
                held.is_queued = False
            elif held.oldest_tick != tick:
                heapq.heapreplace(self._by_age, (held.oldest_tick, bit, held))
            else:
                return held

    def _press(self, held: HolderBlocks) -> None:
        held.pressed = True
        self.surprises += 1

    def _drop_oldest(self, held: HolderBlocks, most: int) -> int:
        """Drop up to *most* blocks from the end of the oldest run of *held*; return how many."""
        tick = held.oldest_tick
        run = held.ticks[tick][-1]
        size = len(run.keys)
        if size > most:
            if run.bits == held.bit:
                del run.keys[size - most :]
                self._count(held, -most, -most)
                return most
            self._split(run, size - most)
            size = most
        self._remove(held, run, tick)
        return size

    def _remove(self, held: HolderBlocks, run: Run, tick: int) -> None:
        size = len(run.keys)
        self._leave(held, run, tick)
        del held.runs_at[run]
        self._held_runs -= 1
        run.bits ^= held.bit
        self._count(held, -size, 0 if run.bits else -size)
        if not run.bits and self._first.get(run.keys[0]) is run:  # after a hash collision another run has its place
            del self._first[run.keys[0]]
