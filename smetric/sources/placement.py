"""What sidecars tell each other: which instance was sent which blocks, in numbered batches.

When batches are sent and what follows from a missing one is in `peers.py`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from smetric.sources.index_image import VERSION, unpack
from smetric.unreadable import UNREADABLE

#: Most bytes of a batch that is taken.
MAX_BATCH_BYTES = 4 * 1024 * 1024
#: A name of a sender or an instance, which may be kept and logged.
_Name = Annotated[str, msgspec.Meta(max_length=256)]


class UnreadableBatch(Exception):
    """Bytes that are no batch of this version; the message says why, without any of them."""


class Placement(msgspec.Struct, array_like=True, gc=False):
    """A prompt that an instance prefilled, or the end of one that it answered.

    Args:
        instance: its id.
        started_at: when its process started, seconds since the epoch; None where it does not say.
        packed: block hashes in prompt order, 8 bytes each in little endian.
        tokens: token ids in a block; 0 where blocks are of text.
    """

    instance: _Name
    started_at: float | None
    packed: bytes
    tokens: int = 0


class Batch(msgspec.Struct, array_like=True):
    """Placements in the order they were made.

    Args:
        version: of the form and of the hashes.
        sender: drawn at random by each process.
        number: 0 for a sender's first batch, then one more each time.
        placements: its own only, never what others told it.
        is_last: the sender ends, and places nothing any more.
    """

    version: int
    sender: _Name
    number: int
    placements: list[Placement]
    is_last: bool = False


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Batch)


def encode(sender: str, number: int, placements: list[Placement], *, is_last: bool = False) -> bytes:
    """A batch as bytes."""
    return _ENCODER.encode(Batch(VERSION, sender, number, placements, is_last))


def decode(data: bytes) -> Batch:
    """The batch that `encode` made *data* of.

    Raises:
        UnreadableBatch: it is of another version, or says what cannot be.
    """
    try:
        batch = _DECODER.decode(data)
    except UNREADABLE:
        raise UnreadableBatch("it is no batch of placements") from None
    if batch.version != VERSION:
        raise UnreadableBatch(f"it is of version {batch.version}, this router speaks {VERSION}; run the same release")
    if any(len(placement.packed) % 8 for placement in batch.placements):
        raise UnreadableBatch("a placement has a hash that is cut off")
    if any(len(set(unpack(placement.packed))) < len(placement.packed) // 8 for placement in batch.placements):
        raise UnreadableBatch("a placement has one block in two places")
    return batch
