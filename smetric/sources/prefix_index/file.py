"""Prefix index on disk, kept over a restart."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import structlog

from smetric.files import read_regular
from smetric.log_limit import LogLimit
from smetric.sources.prefix_index.image import IndexImage, UnreadableImage, decode, encode
from smetric.sources.prefix_index.index import PrefixIndexes

#: The file's name in its folder.
NAME = "prefix-index"

log = structlog.get_logger("smetric.index_file")


class IndexFile:
    """A background part of the application. A file that cannot be read or written is a log line, never an error.

    Args:
        indexes: what is kept.
        folder: where; made if it does not exist. One router, one folder.
        interval_s: seconds between two times of writing it, if it changed.
    """

    def __init__(self, indexes: PrefixIndexes, folder: Path, *, interval_s: float) -> None:
        self._indexes = indexes
        self._folder = folder
        self._interval_s = interval_s
        self._saved_changes = 0
        self._is_failing = False
        self._ending = asyncio.Event()
        self._saving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read what there is, and begin to write."""
        try:
            image = await asyncio.to_thread(read_image, self._folder, self._indexes)
        except (OSError, UnreadableImage) as error:
            reason = str(error) if isinstance(error, UnreadableImage) else str(error.strerror)
            log.warning("smetric.index.unreadable", folder=str(self._folder), reason=reason)
        else:
            if image is not None:
                # Without a start time nobody can say whether it is still the same process.
                self._indexes.restore([one for one in image.instances if one.started_at is not None])
        try:
            # Whoever configured it learns at once that it cannot be kept, not when it is lost.
            await asyncio.to_thread(self._try_out)
        except OSError as error:
            self._not_saved(error)
        self._saving = asyncio.create_task(self._save_now_and_then(), name="prefix-index-file")

    async def stop(self) -> None:
        """Write it once more."""
        if self._saving is not None:
            # What is being written is written to its end: a thread cannot be cancelled, and two would spoil the draft.
            self._ending.set()
            await self._saving
            await self.save()

    async def save(self) -> None:
        """Write the index, unless it is as it was."""
        changes = self._indexes.changes
        if changes == self._saved_changes:
            return
        image = await self._indexes.image()
        try:
            await asyncio.to_thread(self._write, image)
        except OSError as error:
            self._not_saved(error)
        else:
            self._saved_changes, self._is_failing = changes, False

    def _not_saved(self, error: OSError) -> None:
        if not self._is_failing:
            log.warning("smetric.index.not_saved", folder=str(self._folder), reason=error.strerror)
        self._is_failing = True

    async def _save_now_and_then(self) -> None:
        log_limit = LogLimit()
        while not await self._ends_within(self._interval_s):
            try:
                await self.save()
            except Exception:
                # A fault of ours must not end the keeping for good.
                if (kept_back := log_limit.passes("save")) is not None:
                    log.exception("smetric.index.failed", kept_back=kept_back)

    async def _ends_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)
        return self._ending.is_set()

    def _try_out(self) -> None:
        self._make_draft(b"").unlink()

    def _make_draft(self, data: bytes) -> Path:
        """A new file in the folder, with *data*, in the place of whatever a crash left there; none if not all fits."""
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

    def _write(self, image: IndexImage) -> None:
        """Put the whole new file in the place of the old one, so that a crash leaves one of the two."""
        self._make_draft(encode(image)).replace(self._folder / NAME)


def read_image(folder: Path, indexes: PrefixIndexes) -> IndexImage | None:
    """What is kept of *indexes* in *folder*, None where nothing is. Reads a file, so it runs in a thread.

    Raises:
        OSError: the file cannot be read.
        UnreadableImage: it is no image that fits *indexes*.
    """
    most = indexes.image_bytes
    try:
        data = read_regular(folder / NAME, most + 1)
    except FileNotFoundError:
        return None
    if len(data) > most:
        raise UnreadableImage("it is larger than prefix_index.max_bytes")
    return decode(data)
