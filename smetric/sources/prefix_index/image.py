"""Prefix index as bytes: file and image."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Iterable, Sequence

import msgspec
import xxhash

from smetric.errors import UNREADABLE
from smetric.fleet.instance import Instance
from smetric.request.prompt import BLOCK_BYTES

# A prefix index as bytes: what is written to disk and what a sidecar tells one that has just started.
#
# Hashes, ids, times and order; no text. When it is written, read and sent is in `index_file.py` and `peers.py`.

#: Goes up whenever the form changes, or what is hashed and how: hashes of two versions never match.
VERSION = 2
MAGIC = b"SMETRIC-INDEX\0\0" + bytes([VERSION])
_DIGEST_BYTES = 16
#: This machine keeps numbers the other way round.
_SWAP = sys.byteorder == "big"


class UnreadableImage(Exception):
    """Bytes that are no image of this version; the message says why, without any of them."""


class InstanceImage(msgspec.Struct, array_like=True, gc=False):
    """What one incarnation of an instance holds.

    Args:
        id: the instance's.
        started_at: when its process started, seconds since the epoch; None where it does not say.
        packed: block hashes, 8 bytes each in little endian, what was held longest ago first.
        runs: (tick, blocks) pairs: when they were entered, in the order of the ticks.
        tokens: token ids in a block; 0 where blocks are of text.
    """

    id: str
    started_at: float | None
    packed: bytes
    runs: list[tuple[int, int]]
    tokens: int = 0

    @property
    def blocks(self) -> array[int]:
        """The hashes."""
        return unpack(self.packed)


class IndexImage(msgspec.Struct, array_like=True):
    """What all instances hold, at *taken_at*, seconds since the epoch."""

    taken_at: float
    block_bytes: int
    instances: list[InstanceImage]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(IndexImage)


def pack(blocks: Sequence[int]) -> bytes:
    """Hashes as bytes, 8 each, in little endian."""
    packed = array("Q", blocks)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> array[int]:
    """The hashes that `pack` packed; *packed* is a multiple of 8 bytes long."""
    blocks = array("Q", packed)
    if _SWAP:
        blocks.byteswap()
    return blocks


def encode(image: IndexImage) -> bytes:
    """*image* with the mark of its version and a checksum in front."""
    payload = _ENCODER.encode(image)
    return MAGIC + xxhash.xxh3_128_digest(payload) + payload


def decode(data: bytes | bytearray) -> IndexImage:
    """The image that `encode` made *data* of.

    Raises:
        UnreadableImage: it is of another version, damaged, or says what cannot be.
    """
    payload = memoryview(data)[len(MAGIC) + _DIGEST_BYTES :]
    if data[: len(MAGIC) - 1] != MAGIC[:-1]:
        raise UnreadableImage("it is no image of a prefix index")
    if data[: len(MAGIC)] != MAGIC:
        raise UnreadableImage(f"it is of another version than {VERSION}")
    if data[len(MAGIC) : len(MAGIC) + _DIGEST_BYTES] != xxhash.xxh3_128_digest(payload):
        raise UnreadableImage("its checksum does not fit: it is damaged or cut off")
    try:
        image = _DECODER.decode(payload)
    except UNREADABLE:
        raise UnreadableImage("its content has another form") from None
    if image.block_bytes != BLOCK_BYTES:
        raise UnreadableImage(f"its blocks are not of {BLOCK_BYTES} bytes")
    for one in image.instances:
        ticks = [tick for tick, _ in one.runs]
        counts = [count for _, count in one.runs]
        if len(one.packed) != 8 * sum(counts) or any(count < 1 for count in counts) or ticks != sorted(ticks):
            raise UnreadableImage("its blocks and their ages do not fit together")
    return image


# What was learnt of instances before, by this process's predecessor or by a peer, and waits to be taken in.
#
# It holds of one process of an instance, so it waits until the instance has said which process it is.

#: Images that wait: of one instance, and instances.
MAX_WAITING = 8
MAX_INSTANCES_WAITING = 1024


class Restoring:
    """Images that wait."""

    def __init__(self) -> None:
        #: By instance id.
        self.waiting: dict[str, list[InstanceImage]] = {}

    def add(self, images: Iterable[InstanceImage]) -> None:
        """Keep *images*, the latest of each instance."""
        for one in images:
            if one.id not in self.waiting and len(self.waiting) >= MAX_INSTANCES_WAITING:
                continue
            waiting = self.waiting.setdefault(one.id, [])
            waiting.append(one)
            del waiting[:-MAX_WAITING]

    def latest(self) -> list[InstanceImage]:
        """The latest of each instance."""
        return [images[-1] for images in self.waiting.values()]

    def drop_strangers(self, ids: Collection[str]) -> None:
        """Keep only those of instances with one of these *ids*."""
        for id in self.waiting.keys() - set(ids):
            del self.waiting[id]

    def of(self, instance: Instance) -> list[InstanceImage]:
        """Those of *instance*, once, and none before it is known which process answers."""
        if instance.id not in self.waiting or (instance.scrape is None and instance.started_at is None):
            return []
        return self.waiting.pop(instance.id)
