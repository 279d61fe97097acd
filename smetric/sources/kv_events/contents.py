"""Contents of one KV cache, as its engine's events say."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

from smetric.request.prompt import ROOT, BlockKeys, suffix_of
from smetric.sources.kv_events.message import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event

# Which cache holds which prompt block, and how long each cache's hit on a prompt is: one walk for all caches.
#
# Engines name a block by a hash of their own, which differs with version, seed and algorithm. The index never computes
# those: it names blocks by the token ids that the events carry (`smetric.block_keys`), so equal prefixes on all engines
# share one entry, whose value says which caches hold it. What one cache holds is in `smetric.sources.kv_contents`.

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


# What one KV cache holds, as its engine's events say.
#
# Engines publish one store and one removal for each physical copy of a block (in vLLM's default report mode), so copies
# are counted. How messages arrive, and which were lost, is in `smetric.sources.kv_stream`; all caches together are in
# `smetric.sources.kv_index`.

#: Kinds of KV cache groups in which a prefix is held exactly when each of its blocks is.
_WHOLE_PREFIX = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_hash = xxhash.xxh3_64_intdigest


class Contents:
    """What one cache (one data-parallel rank of one engine) holds; or did until it was lost sight of.

    It is complete while every event since the cache was empty has been seen. After a loss it is not: what was held
    before may have been removed (`stale`), what was stored meanwhile is not known. What is stored from then on is
    certain, and so is every block before it. It is complete again when the cache is cleared, or when as many blocks as
    the cache has were stored without one whose parent is unknown: by then an engine that evicts what was used longest
    ago has evicted all that was not used since, and what was used showed itself as the parent of something stored.

    Args:
        index: where its blocks are entered.

    Attributes:
        capacity: blocks the cache has, None while unknown.
        orphans: blocks that could not be entered because their parent is unknown or the index is full.
        unsupported: the engine has several kinds of KV caches, so that held blocks do not tell its hits.
    """

    __slots__ = (
        "_copies",
        "_extra_copies",
        "_group",
        "_index",
        "_keys",
        "_stale",
        "_stored_since_loss",
        "bit",
        "block_size",
        "capacity",
        "orphans",
        "unsupported",
    )

    def __init__(self, index: KvIndex) -> None:
        self._index = index
        #: What stands for it in the index.
        self.bit = index.take_bit()
        #: Engine's name to our key.
        self._keys: dict[EngineHash, int] = {}
        #: Copies beyond the first, of blocks that have any.
        self._copies: dict[EngineHash, int] = {}
        self._extra_copies = 0
        self._stale: set[int] = set()
        self._stored_since_loss: int | None = 0
        self._group: int | None = None
        self.block_size = 0
        self.capacity: int | None = None
        self.orphans = 0
        self.unsupported = False

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def is_complete(self) -> bool:
        """Whether a block that is not here is not in the cache."""
        return self._stored_since_loss is None and not self.unsupported

    def begin(self) -> None:
        """The cache is empty, or what it holds will be told from its first event on."""
        self.clear()
        self._stored_since_loss = None

    def lose(self) -> None:
        """Events were missed: what is held may be gone."""
        if self._stored_since_loss == 0 and len(self._stale) == len(self._keys):
            return
        self._stale = set(self._keys.values())
        # One copy too few is mended by its next store; one too many would never go.
        self._copies.clear()
        self._extra_copies = 0
        self._stored_since_loss = 0

    def apply(self, event: Event) -> None:
        """Enter what *event* says."""
        if isinstance(event, AllBlocksCleared):
            self.begin()
            return
        # Host and remote tiers are not this cache.
        if (event.medium or "GPU") != "GPU" or event.locality == "REMOTE" or self.unsupported:
            return
        if isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                self._remove(_short(name))
        else:
            self._store(event)

    def _store(self, event: BlockStored) -> None:
        count, size = len(event.block_hashes), event.block_size
        if not self.block_size:
            self.block_size, self._group = size, event.group_idx
        if (
            (size, event.group_idx) != (self.block_size, self._group)
            or event.kv_cache_spec_kind not in _WHOLE_PREFIX
            or len(event.token_ids) != count * size
            or size <= 0
        ):
            self.unsupported = True
            self.clear()
            return
        if event.lora_name:
            self._index.note_adapter(event.lora_name)
        suffixes = _suffixes(event, count)
        parent = event.parent_block_hash
        key = ROOT if parent is None else self._keys.get(_short(parent))
        if key is None or suffixes is None:
            self._orphaned(count)
            return
        if self._stale:
            self._confirm(key)
        try:
            tokens = memoryview(array("I", event.token_ids)).cast("B")
        except OverflowError:
            self._orphaned(count)
            return
        width = len(tokens) // count if count else 0
        for i, name in enumerate(event.block_hashes):
            block = tokens[i * width : (i + 1) * width]
            parent_key = key
            key = _hash(bytes(block) + suffixes[i] if suffixes[i] else block, parent_key)
            if not self._enter(_short(name), key, parent_key):
                self._orphaned(count - i)
                return
        if self._stored_since_loss is not None:
            self._stored_since_loss += count
            if self.capacity is not None and self._stored_since_loss >= self.capacity:
                self._turned_over()
        if self.capacity is not None and (len(self._keys) - len(self._stale) + self._extra_copies > self.capacity):
            # More than the cache can hold: removals were missed, so nothing here can be relied upon.
            self.clear()
            self._stored_since_loss = 0

    def _enter(self, name: EngineHash, key: int, parent_key: int) -> bool:
        """Hold one more copy of a block; False if the index is full."""
        if name in self._keys:
            if key in self._stale:
                # Its removal was among what was missed, most likely.
                self._stale.discard(key)
            else:
                self._copies[name] = self._copies.get(name, 0) + 1
                self._extra_copies += 1
            return True
        if not self._index.hold(key, parent_key, self.bit):
            return False
        self._keys[name] = key
        return True

    def _remove(self, name: EngineHash) -> None:
        extra = self._copies.get(name)
        if extra is not None:
            self._extra_copies -= 1
            if extra > 1:
                self._copies[name] = extra - 1
            else:
                del self._copies[name]
            return
        key = self._keys.pop(name, None)
        if key is not None:
            self._stale.discard(key)
            self._index.release(key, self.bit)
        elif self._stored_since_loss is None:
            # A block nobody told of: something was missed unnoticed.
            self._stored_since_loss = 0

    def _orphaned(self, count: int) -> None:
        self.orphans += count
        self._stored_since_loss = 0

    def _confirm(self, key: int) -> None:
        """A block was stored after *key*, so that one and all before it are held."""
        while key in self._stale:
            self._stale.discard(key)
            key = self._index.parent_of(key)

    def _turned_over(self) -> None:
        """What was not seen again since the loss has been evicted by now."""
        self._stored_since_loss = None
        for name in [name for name, key in self._keys.items() if key in self._stale]:
            self._index.release(self._keys.pop(name), self.bit)
        self._stale.clear()

    def certain(self, keys: Sequence[int], depth: int) -> int:
        """How many of the first *depth* blocks, all of them listed here, are held for certain."""
        if self._stale:
            while depth and keys[depth - 1] in self._stale:
                depth -= 1
        return depth

    def clear(self) -> None:
        """Nothing is held any more."""
        for key in self._keys.values():
            self._index.release(key, self.bit)
        self._keys.clear()
        self._copies.clear()
        self._stale.clear()
        self._extra_copies = 0

    def close(self) -> None:
        """The cache is gone."""
        self.clear()
        self._index.give_back(self.bit)


def _short(name: EngineHash) -> EngineHash:
    """Long hashes by their last 64 bits, as engines themselves shorten them: a quarter of the memory."""
    return name if isinstance(name, int) else int.from_bytes(name[-8:], "big")


def _suffixes(event: BlockStored, count: int) -> list[bytes] | None:
    """Each block's suffix; None where the engine does not say what its adapter is called."""
    if event.extra_keys is not None:
        return [suffix_of(extra) for extra in event.extra_keys] if len(event.extra_keys) == count else None
    if event.lora_name:
        return [suffix_of([event.lora_name])] * count
    return [b""] * count if event.lora_id is None else None
