"""Decoded messages of KV events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from smetric.errors import UNREADABLE

#: A block's name within one engine.
EngineHash: TypeAlias = int | bytes
#: Most blocks of a piece of an event: a millisecond's work.
PIECE_BLOCKS = 128


class MessageError(Exception):
    """A payload that is no message of KV events. Its text never quotes the payload."""


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Blocks were entered in a cache, one copy each, in the order of the prompt.

    Args:
        block_hashes: the engine's names for them.
        parent_block_hash: name of the block before the first; None at the start of a prompt.
        token_ids: the tokens of all of them.
        block_size: tokens of each.
        lora_id: number of the adapter, in engines that do not give its name.
        medium: GPU, CPU or STORAGE; None in engines that know only the first.
        lora_name: name of the adapter.
        extra_keys: for each block, what else went into its hash: adapter, images, cache salt, in this order.
        group_idx: KV cache group, in models whose layers have several kinds of caches.
        kv_cache_spec_kind: kind of that group.
        kv_cache_spec_sliding_window: its window in tokens.
        locality: LOCAL or REMOTE; None: unspecified.
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
    """One copy of each of these blocks left a cache; the fields are those of `BlockStored`."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The cache is empty."""


class _StoredRow(BlockStored, array_like=True, tag="BlockStored", gc=False):
    pass


class _RemovedRow(BlockRemoved, array_like=True, tag="BlockRemoved", gc=False):
    pass


class _ClearedRow(AllBlocksCleared, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class Message(msgspec.Struct, gc=False):
    """One message.

    Args:
        at: when the engine made it, seconds on its clock.
        rank: data-parallel rank of the engine.
        raws: its events, not decoded yet: all at once take a third of a second where they are ten megabytes.
    """

    at: float
    rank: int
    raws: list[msgspec.Raw]

    def events(self) -> Iterator[Event]:
        """Those of a known type, in order; each is decoded when it is asked for.

        Raises:
            MessageError: one of a known type is malformed.
        """
        for raw in self.raws:
            try:
                event = _event(raw)
            except _NO_EVENT as error:
                raise MessageError(type(error).__name__) from None
            if event is not None:
                yield event


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _Typed(msgspec.Struct):
    type: str


_BATCH = msgspec.msgpack.Decoder(_Batch)
_MAP = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_ROW = msgspec.msgpack.Decoder(_StoredRow | _RemovedRow | _ClearedRow)
_MAP_TYPE = msgspec.msgpack.Decoder(_Typed)
_ROW_TYPE = msgspec.msgpack.Decoder(list[Any])
_NO_EVENT = (*UNREADABLE, OverflowError)
_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def decode(payload: bytes) -> Message:
    """The message in the third frame; events of unknown types are left out, unknown fields ignored.

    Raises:
        MessageError: it is none.
    """
    try:
        batch = _BATCH.decode(payload)
    except _NO_EVENT as error:
        raise MessageError(type(error).__name__) from None
    return Message(batch.ts, batch.data_parallel_rank or 0, batch.events)


def pieces(event: Event) -> Iterator[Event]:
    """Events that say together what *event* says, in the order of its blocks, each of few enough to be entered at once.

    An engine that fetches a long prompt from elsewhere stores all of it in one event.
    """
    count = 0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
    if isinstance(event, AllBlocksCleared) or count <= PIECE_BLOCKS or not _fits(event, count):
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


def _fits(event: BlockStored | BlockRemoved, count: int) -> bool:
    """Whether each of its *count* blocks has its tokens and keys."""
    return isinstance(event, BlockRemoved) or (
        len(event.token_ids) == count * event.block_size
        and (event.extra_keys is None or len(event.extra_keys) == count)
    )


def _event(raw: msgspec.Raw) -> Event | None:
    # MessagePack: 0x90–0x9f, 0xdc and 0xdd begin an array.
    first = memoryview(raw)[0]
    is_row = first & 0xF0 == 0x90 or first in (0xDC, 0xDD)
    try:
        event: Event = _ROW.decode(raw) if is_row else _MAP.decode(raw)
    except msgspec.ValidationError:
        kind = _ROW_TYPE.decode(raw)[:1] if is_row else [_MAP_TYPE.decode(raw).type]
        if kind and isinstance(kind[0], str) and kind[0] not in _TYPES:
            return None
        raise
    return event
