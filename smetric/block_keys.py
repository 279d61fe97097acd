"""Names for blocks of tokens: chained keys, so that equal keys mean equal prompts up to the block's end.

A key covers the block's token ids, whatever else decides whether engines share the block (adapter, image, cache salt),
and all blocks before it. Who holds which block is in `smetric.sources.kv_index`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import xxhash

#: Key of the empty prompt.
ROOT = 0
_hash = xxhash.xxh3_64_intdigest
_encode = msgspec.msgpack.Encoder().encode


def suffix_of(extra: Sequence[object] | None) -> bytes:
    """What a block's extra keys (adapter, images, salt) add to the bytes its key is computed from."""
    return _encode(extra) if extra else b""


class BlockKeys:
    """The keys of a prompt's blocks, computed as far as somebody asked.

    Args:
        token_ids: of the whole prompt.
        block_size: tokens of a block.
        adapter: name of the adapter the prompt is for; empty for none.
        salt: cache salt; empty for none.
        root: key of the empty prompt, where more than these two tells prompts apart.
    """

    __slots__ = ("_ids", "_size", "_suffix", "keys")

    def __init__(
        self, token_ids: Sequence[int], block_size: int, adapter: str = "", salt: str = "", *, root: int = ROOT
    ) -> None:
        ids = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
        self._ids = memoryview(ids).cast("B")
        self._size = block_size * ids.itemsize
        self._suffix = suffix_of([adapter] if adapter else None)
        first = [part for part in (adapter, salt) if part]
        #: Those computed so far.
        self.keys: list[int] = []
        if len(self._ids) >= self._size:
            self.keys.append(_hash(bytes(self._ids[: self._size]) + suffix_of(first), root))

    def upto(self, count: int) -> list[int]:
        """At least the first *count* keys, or all there are."""
        keys, ids, size, suffix = self.keys, self._ids, self._size, self._suffix
        done = len(keys)
        end = min(count * size, len(ids) - size + 1)
        if keys and done < count:
            key = keys[-1]
            if suffix:
                for start in range(done * size, end, size):
                    key = _hash(bytes(ids[start : start + size]) + suffix, key)
                    keys.append(key)
            else:
                for start in range(done * size, end, size):
                    key = _hash(ids[start : start + size], key)
                    keys.append(key)
        return keys
