"""Writes lines to a file from a thread of its own, so that no request ever waits for a disk.

What does not fit into the queue is dropped and counted, and so is what cannot be written. What the lines say is the
callers' business.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import deque
from collections.abc import Callable

import structlog

from smetric.records.compression import Pack
from smetric.records.file import RotatedFile
from smetric.telemetry import names
from smetric.telemetry.log_limit import CHANGES_TOLD, LogLimit

#: Seconds for which lines are gathered before they are written, and bytes of them that make a frame.
GATHER_S = 0.25
FRAME_BYTES = 256 << 10
#: Seconds that the end waits for the disk.
END_S = 2.0

log = structlog.get_logger("smetric.records")


class Writer:
    """A bounded queue of lines and the thread that empties it.

    Args:
        name: what is written, `decisions` or `trace`, for metric and log.
        file: where to.
        pack: makes a frame of lines.
        header: makes the first line of a file.
        max_queued: bytes that may wait to be written.
        on_lines: told what became of lines: one of `names.RECORD_RESULTS`, and how many. Called from both threads.
    """

    def __init__(
        self,
        name: str,
        file: RotatedFile,
        pack: Pack,
        header: Callable[[], bytes],
        *,
        max_queued: int,
        on_lines: Callable[[str, int], None],
    ) -> None:
        self._name = name
        self._file = file
        self._pack = pack
        self._header = header
        self._max_queued = max_queued
        self._on_lines = on_lines
        self._queue: deque[tuple[int, bytes, bytes]] = deque()
        # Each of the two is written by one thread alone: no increment is lost.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._is_stopping = threading.Event()
        self._thread: threading.Thread | None = None
        #: What stands in the file before the lines that refer to it.
        self._preambles: set[int] = set()
        self._is_failing = False
        self._log_limit = LogLimit()
        #: A disk that is nearly full takes the small frames and not the large ones.
        self._change_limit = LogLimit(lines=CHANGES_TOLD)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._put_bytes - self._taken_bytes

    def put(self, key: int, preamble: bytes, line: bytes) -> None:
        """Write *line*, in the order of these calls; where the file has no preamble *key* yet, *preamble* before it."""
        if self.queued_bytes + len(line) > self._max_queued:
            self._on_lines(names.RECORD_DROPPED, 1)
            return
        self._put_bytes += len(line)
        self._queue.append((key, preamble, line))

    def spoilt(self) -> int | None:
        """A line could not be made, which is a fault of ours: count it.

        Returns:
            How many were kept back from the log since, if this one is to be logged.
        """
        self._on_lines(names.RECORD_FAILED, 1)
        return self._log_limit.passes(self._name)

    async def start(self) -> None:
        """Begin to write."""
        try:
            # Whoever configured it learns at once, not when the record is wanted.
            self._file.require_file()
            folder = next(folder for folder in self._file.path.absolute().parents if folder.exists())
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, "Permission denied")
        except OSError as error:
            self._failed(error)
        self._thread = threading.Thread(target=self._run, name=f"record-{self._name}", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Write what waits, for two seconds at most."""
        self._is_stopping.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, END_S)

    # ── the thread ───────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._is_stopping.wait(GATHER_S):
            self.flush()
        self.flush()
        self._file.close()

    def flush(self) -> None:
        """Write all that waits, frame by frame. Called by the thread."""
        while self._queue:
            try:
                self._file.let_go()
            except OSError as error:
                self._failed(error)
            lines: list[bytes] = []
            preambles = set() if self._file.is_new else set(self._preambles)
            if self._file.is_new:
                lines.append(self._header())
            size = count = 0
            while self._queue and size < FRAME_BYTES:
                key, preamble, line = self._queue.popleft()
                if key not in preambles:
                    preambles.add(key)
                    lines.append(preamble)
                lines.append(line)
                size += len(line)
                count += 1
            try:
                self._file.append(self._pack(b"".join(lines)))
            except OSError as error:
                self._failed(error)
                self._on_lines(names.RECORD_FAILED, count)
            else:
                self._preambles = preambles
                if self._is_failing:
                    self._is_failing = False
                    self._tell(log.info, "smetric.record.resumed")
                self._on_lines(names.RECORD_WRITTEN, count)
            self._taken_bytes += size

    def _failed(self, error: OSError) -> None:
        """Say once, until it works again, that it does not."""
        if not self._is_failing:
            self._is_failing = True
            self._tell(
                log.error,
                "smetric.record.not_written",
                reason=error.strerror or str(error),
                remedy="make room, make the folder writable, or name another file; the router goes on without it",
            )

    def _tell(self, write: Callable[..., object], event: str, **fields: str) -> None:
        if (kept_back := self._change_limit.passes(event)) is not None:
            write(event, record=self._name, file=str(self._file.path), **fields, kept_back=kept_back)
