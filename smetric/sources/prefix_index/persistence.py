"""Prefix index as bytes, and its file, which is kept over a restart.

An image has hashes, ids, times and order, but no text. Routers also send images to each other
(`smetric.sources.shared.peers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from array import array
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import structlog
import xxhash

from smetric.errors import UNREADABLE
from smetric.files import read_regular
from smetric.log_limit import LogLimit
from smetric.request.prompt import BLOCK_BYTES

#: Version of the form and of what is hashed; hashes of two versions never match.
VERSION = 2
MAGIC = b"SMETRIC-INDEX\0\0" + bytes([VERSION])
#: The file's name in its folder.
NAME = "prefix-index"
_DIGEST_BYTES = 16
#: This machine is big-endian; images are little-endian.
_SWAP = sys.byteorder == "big"

log = structlog.get_logger("smetric.index_file")


class UnreadableImage(Exception):
    """Bytes that are not an image of this version. The message says why and quotes none of them."""


class InstanceImage(msgspec.Struct, array_like=True, gc=False):
    """Blocks that one incarnation of an instance holds.

    Args:
        id: the instance's.
        started_at: start of its process, seconds since the epoch; None if unknown.
        packed: block hashes, 8 bytes each in little endian, the oldest run first.
        runs: (tick, blocks) pairs: when each run was entered and its length, in the order of the ticks.
        tokens: token ids per block; 0 for blocks of text.
    """

    id: str
    started_at: float | None
    packed: bytes
    runs: list[tuple[int, int]]
    tokens: int = 0

    @property
    def blocks(self) -> array[int]:
        """The block hashes."""
        return unpack(self.packed)


class IndexImage(msgspec.Struct, array_like=True):
    """Blocks of all instances at *taken_at*, seconds since the epoch."""

    taken_at: float
    block_bytes: int
    instances: list[InstanceImage]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(IndexImage)


def pack(blocks: Sequence[int]) -> bytes:
    """Return hashes as bytes, 8 each, in little endian."""
    packed = array("Q", blocks)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def unpack(packed: bytes) -> array[int]:
    """Return the hashes that `pack` packed; *packed* is a multiple of 8 bytes long."""
    blocks = array("Q", packed)
    if _SWAP:
        blocks.byteswap()
    return blocks


def encode_image(image: IndexImage) -> bytes:
    """Return *image* as bytes, after the version mark and a checksum."""
    payload = _ENCODER.encode(image)
    return MAGIC + xxhash.xxh3_128_digest(payload) + payload


def decode_image(data: bytes | bytearray) -> IndexImage:
    """Return the image that `encode_image` encoded as *data*.

    Raises:
        UnreadableImage: it has another version, is damaged, or is inconsistent.
    """
    payload = memoryview(data)[len(MAGIC) + _DIGEST_BYTES :]
    if data[: len(MAGIC) - 1] != MAGIC[:-1]:
        raise UnreadableImage("it is no image of a prefix index")
    if data[: len(MAGIC)] != MAGIC:
        raise UnreadableImage(f"it is of another version than {VERSION}")
    if data[len(MAGIC) : len(MAGIC) + _DIGEST_BYTES] != xxhash.xxh3_128_digest(payload):
        raise UnreadableImage("its checksum does not match: it is damaged or truncated")
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
            raise UnreadableImage("its blocks and their ages do not match")
    return image


def read_image(folder: Path, most: int) -> IndexImage | None:
    """Return the image in *folder*, at most *most* bytes; None if there is no file. It blocks, so run it in a thread.

    Raises:
        OSError: the file cannot be read.
        UnreadableImage: it is no image, or is larger than *most*.
    """
    try:
        data = read_regular(folder / NAME, most + 1)
    except FileNotFoundError:
        return None
    if len(data) > most:
        raise UnreadableImage("it is larger than prefix_index.max_bytes")
    return decode_image(data)


class Indexes(Protocol):
    """The indexes that are kept; `PrefixIndexes` implements it."""

    @property
    def image_bytes(self) -> int:
        """Most bytes of an image of them."""

    @property
    def changes(self) -> int:
        """Number that goes up with every change."""

    async def image(self) -> IndexImage:
        """Return an image of them."""

    def restore(self, images: Collection[InstanceImage]) -> None:
        """Take in *images*."""


class IndexFile:
    """Background task that keeps the index in a file. A failing read or write is logged and costs nothing else.

    Args:
        indexes: what is kept.
        folder: where; created if it does not exist. Each router needs its own.
        interval_s: seconds between two writes, if the index has changed.
    """

    def __init__(self, indexes: Indexes, folder: Path, *, interval_s: float) -> None:
        self._indexes = indexes
        self._folder = folder
        self._interval_s = interval_s
        self._saved_changes = 0
        self._is_failing = False
        self._ending = asyncio.Event()
        self._saving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the file if there is one, and begin to write."""
        try:
            image = await asyncio.to_thread(read_image, self._folder, self._indexes.image_bytes)
        except (OSError, UnreadableImage) as error:
            reason = str(error) if isinstance(error, UnreadableImage) else str(error.strerror)
            log.warning("smetric.index.unreadable", folder=str(self._folder), reason=reason)
        else:
            if image is not None:
                # Without a start time it is unknown whether it is still the same process.
                self._indexes.restore([one for one in image.instances if one.started_at is not None])
        try:
            # A folder that cannot be written is reported now, not when the index is lost.
            await asyncio.to_thread(lambda: self._write_draft(b"").unlink())
        except OSError as error:
            self._log_not_saved(error)
        self._saving = asyncio.create_task(self._save_periodically(), name="prefix-index-file")

    async def stop(self) -> None:
        """Write the index a last time."""
        if self._saving is not None:
            # A write in progress ends first: a thread cannot be cancelled, and two writes would share one draft.
            self._ending.set()
            await self._saving
            await self.save()

    async def save(self) -> None:
        """Write the index if it has changed."""
        changes = self._indexes.changes
        if changes == self._saved_changes:
            return
        image = await self._indexes.image()
        try:
            await asyncio.to_thread(self._write, image)
        except OSError as error:
            self._log_not_saved(error)
        else:
            self._saved_changes, self._is_failing = changes, False

    def _log_not_saved(self, error: OSError) -> None:
        if not self._is_failing:
            log.warning("smetric.index.not_saved", folder=str(self._folder), reason=error.strerror)
        self._is_failing = True

    async def _save_periodically(self) -> None:
        log_limit = LogLimit()
        while not self._ending.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), self._interval_s)
                return
            try:
                await self.save()
            except Exception:
                # A bug must not end the task for good.
                if (kept_back := log_limit.passes("save")) is not None:
                    log.exception("smetric.index.failed", kept_back=kept_back)

    def _write(self, image: IndexImage) -> None:
        """Replace the file atomically, so that a crash leaves the old one or the new one."""
        self._write_draft(encode_image(image)).replace(self._folder / NAME)

    def _write_draft(self, data: bytes) -> Path:
        """Return a new file in the folder with *data*, in place of a draft that a crash left. None stays on failure."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self._folder / f"{NAME}.new"
        draft.unlink(missing_ok=True)
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        return draft
