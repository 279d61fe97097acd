"""Names of KV blocks: each the hash of its tokens and of the name before it, so that one name stands for a prefix."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

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
