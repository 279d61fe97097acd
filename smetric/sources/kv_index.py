"""Which cache holds which prompt block, and how long each cache's hit on a prompt is: one walk for all caches.

Engines name a block by a hash of their own, which differs with version, seed and algorithm. The index never computes
those: it names blocks by the token ids that the events carry (`smetric.block_keys`), so equal prefixes on all engines
share one entry, whose value says which caches hold it. What one cache holds is in `smetric.sources.kv_contents`.
"""

from __future__ import annotations

from collections.abc import Sequence

from smetric.block_keys import ROOT, BlockKeys

#: What a block costs in the tables of holders and of parents, and what each holding of it costs in a cache's own
#: table, at the emptiest that the tables get. Measured with CPython 3.11; see `benchmarks/kv_index.py`.
BYTES_PER_BLOCK = 160
BYTES_PER_HOLDING = 110
#: Most adapters whose names are kept.
MOST_ADAPTERS = 4096
#: Tables the blocks are spread over: a dict that grows is copied whole, and one of millions would stall the loop.
_TABLES = 256


class KvIndex:
    """Blocks and their holders, over all caches.

    When it is full, a block that is stored is not entered, and the contents it belongs to are no longer complete: they
    are unknown, not missed.

    Args:
        max_bytes: bound on the memory it takes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        #: Block to the bits of the caches that hold it, and to the block before it.
        self._holders: list[dict[int, int]] = [{} for _ in range(_TABLES)]
        self._parents: list[dict[int, int]] = [{} for _ in range(_TABLES)]
        #: Blocks that at least one cache holds.
        self.blocks = 0
        self._holdings = 0
        self._taken = 0
        #: Adapters that blocks were stored for.
        self.adapters: set[str] = set()
        #: Times there was no room for a holding.
        self.refused = 0

    @property
    def memory_bytes(self) -> int:
        """Memory it takes, by the costs above."""
        return self.blocks * BYTES_PER_BLOCK + self._holdings * BYTES_PER_HOLDING

    def note_adapter(self, name: str) -> None:
        """Blocks are stored for the adapter *name*."""
        if len(self.adapters) < MOST_ADAPTERS:
            self.adapters.add(name)

    def take_bit(self) -> int:
        """A single bit to stand for one more cache."""
        bit = ~self._taken & (self._taken + 1)
        self._taken |= bit
        return bit

    def give_back(self, bit: int) -> None:
        """The cache of this bit is gone, and holds nothing any more."""
        self._taken &= ~bit

    def hold(self, key: int, parent_key: int, bit: int) -> bool:
        """One more cache holds a block; False if there is no room to say so."""
        table = self._holders[key % _TABLES]
        holders = table.get(key, 0)
        if holders & bit:
            return True
        if self.memory_bytes + BYTES_PER_HOLDING + (0 if holders else BYTES_PER_BLOCK) > self._max_bytes:
            self.refused += 1
            return False
        self._holdings += 1
        if holders:
            table[key] = holders | bit
        else:
            table[key] = bit
            self._parents[key % _TABLES][key] = parent_key
            self.blocks += 1
        return True

    def release(self, key: int, bit: int) -> None:
        """A cache holds a block no more."""
        table = self._holders[key % _TABLES]
        holders = table.get(key, 0)
        if not holders & bit:
            # An engine that gave one block two names has released the other one.
            return
        self._holdings -= 1
        if holders == bit:
            del table[key], self._parents[key % _TABLES][key]
            self.blocks -= 1
        else:
            table[key] = holders ^ bit

    def parent_of(self, key: int) -> int:
        """The block before a held one."""
        return self._parents[key % _TABLES].get(key, ROOT)

    def depths(self, prompt: BlockKeys, limit: int, bits: Sequence[int]) -> list[int]:
        """How many leading blocks of *prompt*, at most *limit*, each of the caches of *bits* holds."""
        following = 0
        for bit in bits:
            following |= bit
        ended: dict[int, int] = {}
        tables = self._holders
        depth, known = 0, 0
        keys = prompt.keys
        while following and depth < limit:
            if depth == known:
                # A little further each time: most prompts are held nowhere or almost to their end.
                keys = prompt.upto(min(limit, max(16, 2 * depth)))
                known = min(len(keys), limit)
                if depth == known:
                    break
            for key in keys[depth:known]:
                holding = tables[key % _TABLES].get(key, 0) & following
                if holding != following:
                    _end(ended, following & ~holding, depth)
                    following = holding
                    if not holding:
                        break
                depth += 1
        _end(ended, following, depth)
        return [ended[bit] for bit in bits]


def _end(ended: dict[int, int], bits: int, depth: int) -> None:
    """Note *depth* for each single bit of *bits*."""
    while bits:
        bit = bits & -bits
        ended[bit] = depth
        bits ^= bit
