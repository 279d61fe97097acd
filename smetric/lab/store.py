"""Prefix cache of one engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

# Names of KV blocks: each the hash of its tokens and of the name before it, so that one name stands for a prefix.

#: Bytes one token takes in the packed form: an unsigned 32-bit integer, little endian.
TOKEN_BYTES = 4


def root_key(salt: str = "") -> int:
    """The name the first block is chained to; a salt gives a caller prefixes of its own."""
    return xxh3_64_intdigest(salt.encode()) if salt else 0


def block_keys(tokens: bytes, block_size: int, parent: int = 0) -> list[int]:
    """The names of all full blocks of packed *tokens*; a last block that is not full has none.

    Args:
        tokens: packed token ids, `TOKEN_BYTES` each.
        block_size: tokens in a block.
        parent: the name the first block is chained to.
    """
    width = block_size * TOKEN_BYTES
    keys = []
    view = memoryview(tokens)
    for start in range(0, len(tokens) - width + 1, width):
        parent = xxh3_64_intdigest(view[start : start + width], parent)
        keys.append(parent)
    return keys


# The prefix cache of one engine: a limited pool of KV blocks, shared by prefix, forgotten least recently used.
#
# Blocks are named by chained hashes (`smetric.sim.blocks`), so that one key stands for a whole prefix. Who computes a
# block and when is the engine's business (`smetric.sim.engine`); nothing here knows of requests or of time.


class PrefixCache:
    """A pool of `capacity` blocks; each is free, private to one sequence, or cached under a key.

    A cached block is pinned while at least one sequence uses it; unpinned it can be reused by any prompt with the same
    prefix until its room is needed. As in vLLM, a sequence gives its blocks back tail first, so that of one
    prefix the end is forgotten before the beginning. Unlike vLLM, two sequences that compute the same block at the same
    time end up sharing one block instead of holding a copy each.

    Args:
        capacity: blocks in the pool, at least 1.
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
        """Blocks that sequences hold: pinned and private ones."""
        return len(self._pins) + self._private

    @property
    def cached(self) -> int:
        """Blocks that can be hit: pinned or not."""
        return len(self._pins) + len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that `reserve` can give: free ones and cached ones nobody uses."""
        return self.capacity - self.used

    def match(self, keys: Sequence[int]) -> int:
        """How many of the leading *keys* are cached; looks only, changes no order."""
        pins, idle = self._pins, self._idle
        count = 0
        for key in keys:
            if key not in pins and key not in idle:
                break
            count += 1
        return count

    def idle_among(self, keys: Sequence[int]) -> int:
        """How many of *keys* are cached and unpinned: pinning them takes that much from `available`."""
        return sum(key in self._idle for key in keys)

    def pin(self, keys: Sequence[int]) -> None:
        """Hold cached blocks.

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
        """Take *count* private blocks, evicting idle ones, oldest first; False, and nothing, if there is no room."""
        if count > self.available:
            return False
        free = self.capacity - self.used - len(self._idle)
        for _ in range(count - free):
            self._idle.popitem(last=False)
        self._private += count
        return True

    def commit(self, key: int) -> None:
        """A private block has been filled: from now on it is cached under *key* and pinned by its owner."""
        self._private -= 1
        pins = self._pins
        if key in pins:
            pins[key] += 1
            return
        # An idle block of the same name is the same content: one of the two goes back to the pool.
        self._idle.pop(key, None)
        pins[key] = 1

    def release(self, keys: Sequence[int], private: int) -> None:
        """Give back blocks one sequence held: its committed *keys*, in prefix order, and its *private* ones."""
        self._private -= private
        pins = self._pins
        for key in reversed(keys):
            left = pins[key] - 1
            if left:
                pins[key] = left
            else:
                del pins[key]
                self._idle[key] = None
