"""KV events as engines publish them, and the index of cached blocks that they build.

The order of messages, and the detection of lost ones, is in `subscriber.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
import xxhash
from msgspec.structs import replace

from smetric.errors import UNREADABLE
from smetric.request.prompt import ROOT, BlockKeys, suffix_of

#: Name of a block within one engine.
EngineHash: TypeAlias = int | bytes
#: Most blocks that are entered at once; they take about a millisecond.
PIECE_BLOCKS = 128
#: Memory of a block in the tables of holders and parents, and of each holding in the table of its cache. Measured with
#: CPython 3.11 where these tables are emptiest; see `benchmarks/kv_index.py`.
BYTES_PER_BLOCK = 160
BYTES_PER_HOLDING = 110
#: Most adapters whose names are kept.
MOST_ADAPTERS = 4096
#: Tables that share the blocks. A dict is copied when it grows, and copying one of millions would stall the loop.
_TABLES = 256
#: The feature that a medium of an event fills, besides the GPU's.
TIERS = {"CPU": "host_hit_len", "STORAGE": "disk_hit_len"}
#: Kinds of KV cache groups that hold a prefix exactly when they hold each of its blocks.
_WHOLE_PREFIX = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})


class MessageError(Exception):
    """Unreadable payload of a KV event message. The text never quotes the payload."""


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Event: blocks entered a cache, one copy each, in the order of the prompt.

    Args:
        block_hashes: the engine's names of the blocks.
        parent_block_hash: name of the block before the first; None at the start of a prompt.
        token_ids: tokens of all blocks.
        block_size: tokens per block.
        lora_id: number of the adapter, in engines that do not send its name.
        medium: GPU, CPU or STORAGE; None in engines that have only the first.
        lora_name: name of the adapter.
        extra_keys: for each block, the other inputs of its hash: adapter, images, cache salt, in this order.
        group_idx: KV cache group, in models whose layers have several kinds of caches.
        kv_cache_spec_kind: kind of that group.
        kv_cache_spec_sliding_window: its window in tokens.
        locality: LOCAL or REMOTE; None if unspecified.
    """

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Event: one copy of each of these blocks left a cache. The fields are those of `BlockStored`."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Event: the cache of the GPU is empty.

    vLLM 0.32 publishes it for that cache alone. Slower tiers keep their blocks after `/reset_prefix_cache`. Host memory
    loses them without an event after `reset_external=true`, a sleep or an update of weights.
    """


class _StoredRow(BlockStored, array_like=True, tag="BlockStored", gc=False):
    pass


class _RemovedRow(BlockRemoved, array_like=True, tag="BlockRemoved", gc=False):
    pass


class _ClearedRow(AllBlocksCleared, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class _Payload(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _Typed(msgspec.Struct):
    type: str


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
_PAYLOAD = msgspec.msgpack.Decoder(_Payload)
#: An event is a map in vLLM 0.23 and newer, an array before.
_MAP = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_ROW = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)
_MAP_TYPE = msgspec.msgpack.Decoder(_Typed)
_ROW_TYPE = msgspec.msgpack.Decoder(list[Any])
_MALFORMED = (*UNREADABLE, OverflowError)
_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


class EventBatch(msgspec.Struct, gc=False):
    """Events of one message.

    Args:
        at: time when the engine made it, seconds on its clock.
        rank: data-parallel rank of the engine.
        raws: the encoded events. Ten megabytes decoded at once would stop the loop for a third of a second.
    """

    at: float
    rank: int
    raws: list[msgspec.Raw]

    def events(self) -> Iterator[KvEvent]:
        """Decode the events one by one, without those of unknown types.

        Raises:
            MessageError: an event of a known type is malformed.
        """
        for raw in self.raws:
            try:
                event = _event(raw)
            except _MALFORMED as error:
                raise MessageError(type(error).__name__) from None
            if event is not None:
                yield event


def decode(payload: bytes) -> EventBatch:
    """Decode the payload of a message; unknown fields are ignored.

    Raises:
        MessageError: it is malformed.
    """
    try:
        batch = _PAYLOAD.decode(payload)
    except _MALFORMED as error:
        raise MessageError(type(error).__name__) from None
    return EventBatch(batch.ts, batch.data_parallel_rank or 0, batch.events)


def _event(raw: msgspec.Raw) -> KvEvent | None:
    # MessagePack: 0x90-0x9f, 0xdc and 0xdd begin an array.
    first = memoryview(raw)[0]
    is_row = first & 0xF0 == 0x90 or first in (0xDC, 0xDD)
    try:
        event: KvEvent = _ROW.decode(raw) if is_row else _MAP.decode(raw)
    except msgspec.ValidationError:
        kind = _ROW_TYPE.decode(raw)[:1] if is_row else [_MAP_TYPE.decode(raw).type]
        if kind and isinstance(kind[0], str) and kind[0] not in _TYPES:
            return None
        raise
    return event


def pieces(event: KvEvent) -> Iterator[KvEvent]:
    """Split *event* into events of at most `PIECE_BLOCKS` blocks that have the same effect in order.

    An engine that fetches a long prompt from elsewhere stores all of it in one event.
    """
    count = 0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
    if isinstance(event, AllBlocksCleared) or count <= PIECE_BLOCKS or not _is_consistent(event, count):
        yield event
        return
    parent = event.parent_block_hash if isinstance(event, BlockStored) else None
    for begin in range(0, count, PIECE_BLOCKS):
        end = begin + PIECE_BLOCKS
        names = event.block_hashes[begin:end]
        if isinstance(event, BlockRemoved):
            yield replace(event, block_hashes=names)
            continue
        extra_keys = event.extra_keys[begin:end] if event.extra_keys is not None else None
        token_ids = event.token_ids[begin * event.block_size : end * event.block_size]
        yield replace(event, block_hashes=names, parent_block_hash=parent, token_ids=token_ids, extra_keys=extra_keys)
        parent = names[-1]


def _is_consistent(event: BlockStored | BlockRemoved, count: int) -> bool:
    """Return whether each of the *count* blocks has its tokens and extra keys."""
    return isinstance(event, BlockRemoved) or (
        len(event.token_ids) == count * event.block_size
        and (event.extra_keys is None or len(event.extra_keys) == count)
    )


class KvIndex:
    """Blocks and the caches that hold them, for all caches.

    Engines name a block by a hash that differs with version, seed and algorithm. The index names blocks by the token
    ids that the events carry (`BlockKeys`), so equal prefixes on all engines share one entry.

    A full index refuses new blocks. The contents they belong to are then incomplete, so a miss is unknown.

    Args:
        max_bytes: bound on its memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        #: Bits of the caches that hold a block, and the block before it, by block.
        self._holders: list[dict[int, int]] = [{} for _ in range(_TABLES)]
        self._parents: list[dict[int, int]] = [{} for _ in range(_TABLES)]
        #: Number of blocks that at least one cache holds.
        self.blocks = 0
        self._holdings = 0
        self._bits_in_use = 0
        #: Adapters that blocks were stored for.
        self.adapters: set[str] = set()
        #: Number of holdings refused because the index was full.
        self.refused = 0

    @property
    def memory_bytes(self) -> int:
        """Memory in use, estimated from the costs above."""
        return self.blocks * BYTES_PER_BLOCK + self._holdings * BYTES_PER_HOLDING

    def note_adapter(self, name: str) -> None:
        """Remember that blocks are stored for the adapter *name*."""
        if len(self.adapters) < MOST_ADAPTERS:
            self.adapters.add(name)

    def take_bit(self) -> int:
        """Return a single free bit that identifies one more cache."""
        bit = ~self._bits_in_use & (self._bits_in_use + 1)
        self._bits_in_use |= bit
        return bit

    def give_back(self, bit: int) -> None:
        """Free *bit*; its cache holds no block any more."""
        self._bits_in_use &= ~bit

    def hold(self, key: int, parent_key: int, bit: int) -> bool:
        """Enter that the cache of *bit* holds block *key*; return False if the index is full."""
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
            table[key] = bit  # this very object: most blocks have one holder, and a new integer takes 32 bytes
            self._parents[key % _TABLES][key] = parent_key
            self.blocks += 1
        return True

    def release(self, key: int, bit: int) -> None:
        """Remove block *key* from the cache of *bit*."""
        table = self._holders[key % _TABLES]
        holders = table.get(key, 0)
        if not holders & bit:
            return  # the engine gave the block two names, and the other one was released before
        self._holdings -= 1
        if holders == bit:
            del table[key], self._parents[key % _TABLES][key]
            self.blocks -= 1
        else:
            table[key] = holders ^ bit

    def parent_of(self, key: int) -> int:
        """Return the key of the block before *key*."""
        return self._parents[key % _TABLES].get(key, ROOT)

    def depths(self, prompt: BlockKeys, limit: int, bits: Sequence[int]) -> list[int]:
        """Return how many leading blocks of *prompt*, at most *limit*, each of the caches *bits* holds."""
        following = 0
        for bit in bits:
            following |= bit
        ended: dict[int, int] = {}
        tables = self._holders
        depth, known = 0, 0
        keys = prompt.keys
        while following and depth < limit:
            if depth == known:
                # Double the number of keys each time: most prompts are held nowhere or almost to their end.
                keys = prompt.upto(min(limit, max(16, 2 * depth)))
                known = min(len(keys), limit)
                if depth == known:
                    break
            for key in keys[depth:known]:
                holding = tables[key % _TABLES].get(key, 0) & following
                if holding != following:
                    _set_each(ended, following & ~holding, depth)
                    following = holding
                    if not holding:
                        break
                depth += 1
        _set_each(ended, following, depth)
        return [ended[bit] for bit in bits]


def _set_each(ended: dict[int, int], bits: int, depth: int) -> None:
    """Set *depth* for each single bit of *bits*."""
    while bits:
        bit = bits & -bits
        ended[bit] = depth
        bits ^= bit


class CacheContents:
    """Contents of one KV cache, which belongs to one data-parallel rank of one engine.

    Engines publish one store and one removal for each physical copy of a block (vLLM's default report mode), so
    copies are counted.

    Contents are complete while every event since the cache was empty was applied. After a loss, a block held before
    is `stale`: it may have been removed. A block stored from then on is certain, and so are all blocks before it.
    Contents become complete again when the cache is cleared, or when as many blocks as it has were stored without an
    unknown parent. By then an engine that evicts the least recently used blocks has evicted all that were not used
    since the loss, and those that were used appeared as parents of stored blocks.

    Args:
        index: the index its blocks are entered in.
    """

    def __init__(self, index: KvIndex) -> None:
        self._index = index
        #: Bit that identifies it in the index.
        self.bit = index.take_bit()
        #: Key by the engine's name.
        self._keys: dict[EngineHash, int] = {}
        #: Number of copies beyond the first, for blocks that have any.
        self._copies: dict[EngineHash, int] = {}
        self._extra_copies = 0
        self._stale: set[int] = set()
        #: None while complete.
        self._stored_since_loss: int | None = 0
        #: Every event since `begin` was applied, so a slower tier that none named is empty.
        self._heard_all = False
        self._group: int | None = None
        #: Tokens per block; 0 before the first block.
        self.block_size = 0
        #: Blocks that the cache has; None while unknown.
        self.capacity: int | None = None
        #: Number of blocks refused because their parent is unknown or the index is full.
        self.orphans = 0
        #: The engine has several kinds of KV caches, so its blocks do not determine its hits.
        self.unsupported = False
        #: Slower tiers that events told of, by the feature they fill.
        self.tiers: dict[str, TierContents] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def is_complete(self) -> bool:
        """Whether a block that is missing here is missing in the cache."""
        return self._stored_since_loss is None and not self.unsupported

    def begin(self) -> None:
        """Start complete and without slower tiers: the cache is empty, or every event from its first one on follows."""
        self.clear()
        self._forget_tiers()
        self._stored_since_loss = None
        self._heard_all = True

    def mark_incomplete(self) -> None:
        """Note that events were lost: blocks held so far may have been removed."""
        self._lose_tiers()
        self._heard_all = False
        if self._stored_since_loss == 0 and len(self._stale) == len(self._keys):
            return
        self._stale = set(self._keys.values())
        # A copy too few is corrected by the next store of the block. A copy too many would stay for ever.
        self._copies.clear()
        self._extra_copies = 0
        self._stored_since_loss = 0

    def apply(self, event: KvEvent) -> None:
        """Enter *event*; remote tiers are ignored.

        After `AllBlocksCleared` the contents are complete. What slower tiers held before is unknown.
        """
        if isinstance(event, AllBlocksCleared):
            self.clear()
            self._stored_since_loss = None
            return
        if event.locality == "REMOTE" or self.unsupported:
            return
        if (event.medium or "GPU") != "GPU":
            if event.medium in TIERS:
                self._tier(TIERS[event.medium]).apply(event)
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                self._remove(_short(name))
        else:
            self._store(event)

    def key_of(self, name: EngineHash) -> int | None:
        """Return the key of the block that the engine calls *name*; None if it is not held."""
        return self._keys.get(name)

    def _tier(self, feature: str) -> TierContents:
        tier = self.tiers.get(feature)
        if tier is None:
            tier = self.tiers[feature] = TierContents(self._index, self, is_complete=self._heard_all)
        return tier

    def _lose_tiers(self) -> None:
        for tier in self.tiers.values():
            tier.lose()

    def _forget_tiers(self) -> None:
        """Remove the slower tiers, which hold no block any more."""
        for tier in self.tiers.values():
            self._index.give_back(tier.bit)
        self.tiers.clear()

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
            self._refuse(count)
            return
        if self._stale:
            self._confirm(key)
        try:
            tokens = memoryview(array("I", event.token_ids)).cast("B")
        except OverflowError:
            self._refuse(count)
            return
        width, digest_of = len(tokens) // count if count else 0, xxhash.xxh3_64_intdigest
        for i, name in enumerate(event.block_hashes):
            block = tokens[i * width : (i + 1) * width]
            parent_key = key
            key = digest_of(bytes(block) + suffixes[i] if suffixes[i] else block, parent_key)
            if not self._enter(_short(name), key, parent_key):
                self._refuse(count - i)
                return
        if self._stored_since_loss is not None:
            self._stored_since_loss += count
            if self.capacity is not None and self._stored_since_loss >= self.capacity:
                self._drop_stale()
        if self.capacity is not None and (len(self._keys) - len(self._stale) + self._extra_copies > self.capacity):
            # More blocks than the cache has: removals were lost, so none of this is reliable.
            self.clear()
            self._note_loss()

    def _enter(self, name: EngineHash, key: int, parent_key: int) -> bool:
        """Add one copy of a block; return False if the index is full."""
        if name in self._keys:
            if key in self._stale:
                self._stale.discard(key)  # its removal was probably among the lost events
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
            self._note_loss()  # a block that was never stored: an event was lost unnoticed

    def _refuse(self, count: int) -> None:
        self.orphans += count
        self._note_loss()

    def _note_loss(self) -> None:
        """Become incomplete; blocks held so far are as certain as before."""
        self._stored_since_loss = 0
        self._heard_all = False

    def _confirm(self, key: int) -> None:
        """Mark *key* and all blocks before it as held, because a block was stored after it."""
        while key in self._stale:
            self._stale.discard(key)
            key = self._index.parent_of(key)

    def _drop_stale(self) -> None:
        """Become complete: blocks not seen since the loss are evicted by now."""
        self._stored_since_loss = None
        for name in [name for name, key in self._keys.items() if key in self._stale]:
            self._index.release(self._keys.pop(name), self.bit)
        self._stale.clear()

    def certain(self, keys: Sequence[int], depth: int) -> int:
        """Return how many of the first *depth* blocks, all of them entered here, are held for certain."""
        if self._stale:
            while depth and keys[depth - 1] in self._stale:
                depth -= 1
        return depth

    def clear(self) -> None:
        """Remove all blocks, those of slower tiers too."""
        self._lose_tiers()
        for key in self._keys.values():
            self._index.release(key, self.bit)
        self._keys.clear()
        self._copies.clear()
        self._stale.clear()
        self._extra_copies = 0

    def close(self) -> None:
        """Remove all blocks and give the bit back."""
        self.clear()
        self._index.give_back(self.bit)
        self._forget_tiers()


class TierContents:
    """Contents of a slower tier of one KV cache: host memory or a disk, to which the engine copies blocks of the GPU.

    Its events mostly name blocks and nothing else (vLLM's OffloadingConnector), and follow those of the GPU's copies. A
    block may stand for several of the GPU's, of which it names the last.

    Args:
        index: the index its blocks are entered in.
        gpu: contents of the GPU's cache.
        is_complete: whether every event was seen so far.

    Attributes:
        bit: identifies it in the index.
        is_complete: whether a block that is missing here is missing in the tier.
    """

    def __init__(self, index: KvIndex, gpu: CacheContents, *, is_complete: bool) -> None:
        self._index = index
        self._gpu = gpu
        self.bit = index.take_bit()
        self.is_complete = is_complete
        #: Keys of the GPU's blocks by the engine's name, the last one first.
        self._keys: dict[EngineHash, tuple[int, ...]] = {}

    def apply(self, event: BlockStored | BlockRemoved) -> None:
        """Enter *event*."""
        for name in map(_short, event.block_hashes):
            if isinstance(event, BlockRemoved):
                for key in self._keys.pop(name, ()):
                    self._index.release(key, self.bit)
            elif name not in self._keys:
                self._store(name, event.block_size)

    def _store(self, name: EngineHash, size: int) -> None:
        own, key = self._gpu.block_size, self._gpu.key_of(name)
        if not size or not own or size % own:
            self.is_complete = False  # not known how many blocks of the GPU it stands for
        if key is None:
            self.is_complete = False
            return
        keys = []
        for _ in range(max(1, size // own)):
            parent = self._index.parent_of(key)
            if not self._index.hold(key, parent, self.bit):
                self.is_complete = False
                break
            keys.append(key)
            key = parent
            if key == ROOT:
                break
        self._keys[name] = tuple(keys)

    def lose(self) -> None:
        """Drop all blocks, as each may have been removed."""
        for keys in self._keys.values():
            for key in keys:
                self._index.release(key, self.bit)
        self._keys.clear()
        self.is_complete = False


def _short(name: EngineHash) -> EngineHash:
    """Return the last 64 bits of a long hash, as engines themselves shorten it. They take a quarter of the memory."""
    return name if isinstance(name, int) else int.from_bytes(name[-8:], "big")


def _suffixes(event: BlockStored, count: int) -> list[bytes] | None:
    """Return the key suffix of each block; None if the engine does not send the name of its adapter."""
    if event.extra_keys is not None:
        return [suffix_of(extra) for extra in event.extra_keys] if len(event.extra_keys) == count else None
    if event.lora_name:
        return [suffix_of([event.lora_name])] * count
    return [b""] * count if event.lora_id is None else None
