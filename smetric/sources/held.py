"""What one holder holds: blocks in runs, as prompts follow each other, by when each was last entered.

The table of all holders, which enters and forgets, is in `smetric.sources.holdings`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence


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


class Held:
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
