"""Prefix cache of one engine, and the names of its blocks.

A block's name is the hash of its tokens and of the name before it, so that one name identifies a whole prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

#: Bytes of a packed token: an unsigned 32-bit integer, little endian.
TOKEN_BYTES = 4


def root_key(salt: str = "") -> int:
    """Return the parent name of the first block; each salt has prefixes of its own."""
    return xxh3_64_intdigest(salt.encode()) if salt else 0


def block_keys(tokens: bytes, block_size: int, parent: int = 0) -> list[int]:
    """Return the names of all full blocks of packed *tokens*.

    Args:
        tokens: packed token ids, `TOKEN_BYTES` each.
        block_size: tokens of a block.
        parent: parent name of the first block.
    """
    width = block_size * TOKEN_BYTES
    keys = []
    view = memoryview(tokens)
    for start in range(0, len(tokens) - width + 1, width):
        parent = xxh3_64_intdigest(view[start : start + width], parent)
        keys.append(parent)
    return keys


class PrefixCache:
    """Pool of KV blocks with LRU eviction; each block is free, private to one sequence, or cached under a key.

    A cached block is pinned while at least one sequence uses it; an unpinned one serves any prompt with the same prefix
    until it is evicted. As in vLLM, a sequence releases its blocks from the end, so that the end of a prefix is evicted
    before its beginning. Unlike vLLM, sequences that compute the same block at the same time share one block.

    Args:
        capacity: blocks of the pool, at least 1.
    """

    __slots__ = ("_idle", "_pins", "_private", "capacity")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}: a prefix cache needs at least 1 block")
        self.capacity = capacity
        self._pins: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._private = 0

    @property
    def used(self) -> int:
        """Blocks held by sequences: pinned and private ones."""
        return len(self._pins) + self._private

    @property
    def cached(self) -> int:
        """Blocks that can be hit, pinned or not."""
        return len(self._pins) + len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that `reserve` can give: free ones and unpinned ones."""
        return self.capacity - self.used

    def match(self, keys: Sequence[int]) -> int:
        """Return the number of leading *keys* that are cached; the eviction order stays."""
        pins, idle = self._pins, self._idle
        count = 0
        for key in keys:
            if key not in pins and key not in idle:
                break
            count += 1
        return count

    def idle_among(self, keys: Sequence[int]) -> int:
        """Return the number of *keys* that are cached and unpinned: pinning them reduces `available` by it."""
        return sum(key in self._idle for key in keys)

    def pin(self, keys: Sequence[int]) -> None:
        """Pin cached blocks.

        Raises:
            KeyError: one of *keys* is not cached.
        """
        pins = self._pins
        for key in keys:
            if key in pins:
                pins[key] += 1
            else:
                del self._idle[key]
                pins[key] = 1

    def reserve(self, count: int) -> bool:
        """Take *count* private blocks, evicting the oldest idle ones; return False if too few are available."""
        if count > self.available:
            return False
        free = self.capacity - self.used - len(self._idle)
        for _ in range(count - free):
            self._idle.popitem(last=False)
        self._private += count
        return True

    def commit(self, key: int) -> None:
        """Turn a private block into one cached under *key* and pinned by its owner."""
        self._private -= 1
        pins = self._pins
        if key in pins:
            pins[key] += 1
            return
        # An idle block of the same name has the same content: one of the two becomes free.
        self._idle.pop(key, None)
        pins[key] = 1

    def release(self, keys: Sequence[int], private: int) -> None:
        """Release the blocks of one sequence: its committed *keys*, in prefix order, and its *private* ones."""
        self._private -= private
        pins = self._pins
        for key in reversed(keys):
            left = pins[key] - 1
            if left:
                pins[key] = left
            else:
                del pins[key]
                self._idle[key] = None
