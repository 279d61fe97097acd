"""Writer of record files, in a thread of its own, so that no request waits for a disk.

The file being written has the configured name. A full one is renamed with its time:
`decisions-20260529T100000.123Z.jsonl` beside `decisions.jsonl`, so that the order of names is the order of files.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import structlog

from smetric import names
from smetric.files import require_regular
from smetric.log_limit import CHANGE_LINES, LogLimit
from smetric.records.reader import Pack

_STAMP = r"[0-9]{8}T[0-9]{6}\.[0-9]{3}Z"
_STEP = timedelta(milliseconds=1)


class RotatedFile:
    """A file to append to. It is opened with the first frame, so a start that writes nothing leaves no file.

    Two processes may use the same name, as while one takes over from the other: each renames the other's file, and both
    go on with their own.

    Args:
        path: the file being written.
        max_bytes: size at which it is rotated.
        keep: rotated files that are kept.
        now: time for their names.
    """

    def __init__(
        self, path: Path, *, max_bytes: int, keep: int, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._now = now
        self._fd = -1
        self._size = 0
        # `decisions.jsonl.gz`: the stem ends at the first dot.
        self._stem, _, suffix = path.name.partition(".")
        self._suffix = f".{suffix}" if suffix else ""
        self._aside = re.compile(rf"{re.escape(self._stem)}-{_STAMP}{re.escape(self._suffix)}\Z")

    @property
    def is_new(self) -> bool:
        """Whether the next frame begins a file."""
        return self._fd < 0 or self._size == 0 or self._size >= self._max_bytes

    def let_go(self) -> None:
        """Close the file if it is not as this process left it, so that the next frame begins a readable file.

        It may have been deleted, truncated or moved, or have half a frame that a full disk could not take back.

        Raises:
            OSError: its state cannot be read, as on a server that has forgotten it. It is closed then too.
        """
        if self._fd < 0:
            return
        try:
            state = os.fstat(self._fd)
        except OSError:
            self.close()
            raise
        if state.st_nlink == 0 or state.st_size not in (0, self._size) or self._was_moved(state):
            self.close()
        else:
            self._size = min(self._size, state.st_size)

    def _was_moved(self, state: os.stat_result) -> bool:
        """Return whether the open file was renamed, other than by rotation."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), state):
                return False
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path.parent) as names:
            return not any(each.inode() == state.st_ino and self._aside.match(each.name) for each in names)
        return True

    def require_file(self) -> None:
        """Refuse a folder, pipe or device of this name, which must not be renamed.

        Raises:
            OSError: it is not a regular file.
        """
        with contextlib.suppress(FileNotFoundError):  # absent, or a dangling link
            require_regular(self.path)

    def append(self, frame: bytes) -> None:
        """Append *frame*, completely or not at all; begin a new file if the current one is full.

        Raises:
            OSError: it could not be written.
        """
        if self._fd < 0 or self._size >= self._max_bytes:
            self.close()
            self._open()
        written = 0
        try:
            while written < len(frame):
                written += os.write(self._fd, frame[written:])
        except OSError:
            with contextlib.suppress(OSError):  # the first error counts; a reader copes with half a frame
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(frame)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _open(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            self._rotate()
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self.path, flags, 0o600)
            except FileExistsError:
                continue  # another process was faster: rotate its file too
            self._size = 0
            return

    def _rotate(self) -> None:
        """Rename the file with this name, if there is one, and delete the oldest rotated files."""
        if not os.path.lexists(self.path):
            return
        self.require_file()
        # After the clock was set back, the newest must not look like the oldest.
        times = [time for each in self._rotated() if (time := _time(each.name)) is not None]
        at = max([self._now(), *(time + _STEP for time in times)])
        while (name := self.path.with_name(f"{self._stem}-{_stamp(at)}{self._suffix}")).exists():
            at += _STEP
        with contextlib.suppress(FileNotFoundError):  # another process has just renamed it
            os.rename(self.path, name)
        aside = self._rotated()
        for old in aside[: max(0, len(aside) - self._keep)]:
            old.unlink(missing_ok=True)

    def _rotated(self) -> list[Path]:
        return sorted(each for each in self.path.parent.iterdir() if self._aside.match(each.name))


def _stamp(at: datetime) -> str:
    return f"{at:%Y%m%dT%H%M%S}.{at.microsecond // 1000:03}Z"


def _time(name: str) -> datetime | None:
    """Return the time in *name*, or None."""
    stamp = re.search(_STAMP, name)
    try:
        return datetime.strptime(stamp[0], "%Y%m%dT%H%M%S.%fZ").replace(tzinfo=UTC) if stamp else None
    except ValueError:
        return None


#: Seconds for which lines are gathered before they are written, and bytes of a frame.
GATHER_S = 0.25
FRAME_BYTES = 256 << 10
#: Seconds that stopping waits for the disk.
END_S = 2.0

log = structlog.get_logger("smetric.records")


class Writer:
    """Bounded queue of lines, and the thread that empties it.

    Lines that do not fit, and lines that cannot be written, are dropped and counted.

    Args:
        name: `decisions` or `trace`, for metric and log.
        file: the file.
        pack: compresses lines into a frame.
        header: returns the first line of a file.
        max_queued: bytes that may wait.
        on_lines: called with a result, one of `names.RECORD_RESULTS`, and a number of lines; from both threads.
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
        # Each is written by one thread only, so no increment is lost.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._is_stopping = threading.Event()
        self._thread: threading.Thread | None = None
        #: Preambles in the file.
        self._preambles: set[int] = set()
        self._is_failing = False
        self._log_limit = LogLimit()
        #: A nearly full disk takes small frames and refuses large ones.
        self._change_limit = LogLimit(lines=CHANGE_LINES)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._put_bytes - self._taken_bytes

    def put(self, key: int, preamble: bytes, line: bytes) -> None:
        """Write *line*, in the order of calls, after *preamble* if the file has no preamble *key* yet."""
        if self.queued_bytes + len(line) > self._max_queued:
            self._on_lines(names.RECORD_DROPPED, 1)
            return
        self._put_bytes += len(line)
        self._queue.append((key, preamble, line))

    def record_failure(self) -> int | None:
        """Count a line that could not be made.

        Returns:
            The suppressed count since the last log line, or None if this failure is to be suppressed too.
        """
        self._on_lines(names.RECORD_FAILED, 1)
        return self._log_limit.passes(self._name)

    async def start(self) -> None:
        """Start to write."""
        try:
            # A file that cannot be written is reported at the start, not when the record is needed.
            self._file.require_file()
            folder = next(folder for folder in self._file.path.absolute().parents if folder.exists())
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, "Permission denied")
        except OSError as error:
            self._failed(error)
        self._thread = threading.Thread(target=self._run, name=f"record-{self._name}", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Write what waits, for at most two seconds."""
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
        """Write all that waits, frame by frame; called by the thread."""
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
                    self._log(log.info, "smetric.record.resumed")
                self._on_lines(names.RECORD_WRITTEN, count)
            self._taken_bytes += size

    def _failed(self, error: OSError) -> None:
        """Log a failure once, until writing works again."""
        if not self._is_failing:
            self._is_failing = True
            self._log(
                log.error,
                "smetric.record.not_written",
                reason=error.strerror or str(error),
                remedy="make room, make the folder writable, or name another file; the router goes on without it",
            )

    def _log(self, write: Callable[..., object], event: str, **fields: str) -> None:
        if (kept_back := self._change_limit.passes(event)) is not None:
            write(event, record=self._name, file=str(self._file.path), **fields, kept_back=kept_back)
