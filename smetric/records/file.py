"""A record's file on disk: frames appended whole, a new file begun when it is large, the oldest deleted.

The file being written has the name that was configured; full ones have the time at which they were put aside in theirs,
`decisions-20260529T100000.123Z.jsonl` beside `decisions.jsonl`, so that names in order are files in order.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from smetric.file_bytes import require_regular

_STAMP = r"[0-9]{8}T[0-9]{6}\.[0-9]{3}Z"
_STEP = timedelta(milliseconds=1)


class RotatedFile:
    """Appends to a file; opens it with the first frame, so a start that writes nothing leaves no file.

    Two processes may have the same name, as while one takes over from the other: each puts the other's file aside and
    both go on with their own.

    Args:
        path: the file being written.
        max_bytes: size from which on it is put aside.
        keep: how many files put aside are kept.
        now: the time, for their names.
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
        # `decisions.jsonl.gz`: what stands before the first dot is the stem, the rest the suffix.
        self._stem, _, suffix = path.name.partition(".")
        self._suffix = f".{suffix}" if suffix else ""
        self._aside = re.compile(rf"{re.escape(self._stem)}-{_STAMP}{re.escape(self._suffix)}\Z")

    @property
    def is_new(self) -> bool:
        """Whether the next frame begins a file."""
        return self._fd < 0 or self._size == 0 or self._size >= self._max_bytes

    def let_go(self) -> None:
        """Let go of what is not as this has left it, so that the next frame begins a file that can be read.

        Somebody has deleted, cut or moved it, or half a frame that the disk had no room for could not be taken back.

        Raises:
            OSError: nobody can tell, as where a server that kept it has forgotten it; it is let go of then too.
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
        """Whether the file that is open has another name now, but one that a process like this one has given it."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), state):
                return False
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path.parent) as names:
            return not any(each.inode() == state.st_ino and self._aside.match(each.name) for each in names)
        return True

    def require_file(self) -> None:
        """Refuse what is no file: a folder, a pipe or a device of our name is not to be renamed.

        Raises:
            OSError: it is none.
        """
        with contextlib.suppress(FileNotFoundError):  # nothing there yet, or a link to nothing
            require_regular(self.path)

    def append(self, frame: bytes) -> None:
        """Append *frame*, whole or not at all; begins a new file where the last one is full.

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
            with contextlib.suppress(OSError):  # what matters is the first error; a reader copes with half a frame
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(frame)

    def close(self) -> None:
        """Close what is open."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _open(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            self._put_aside()
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self.path, flags, 0o600)
            except FileExistsError:
                continue  # another process was faster: put its file aside too
            self._size = 0
            return

    def _put_aside(self) -> None:
        """Rename the file that has our name, if there is one, and delete the oldest of those put aside."""
        if not os.path.lexists(self.path):
            return
        self.require_file()
        # Where the clock was set back, the newest must not look like the oldest.
        times = [time for each in self._those_put_aside() if (time := _time(each.name)) is not None]
        at = max([self._now(), *(time + _STEP for time in times)])
        while (name := self.path.with_name(f"{self._stem}-{_stamp(at)}{self._suffix}")).exists():
            at += _STEP
        with contextlib.suppress(FileNotFoundError):  # another process has just done so
            os.rename(self.path, name)
        aside = self._those_put_aside()
        for old in aside[: max(0, len(aside) - self._keep)]:
            old.unlink(missing_ok=True)

    def _those_put_aside(self) -> list[Path]:
        return sorted(each for each in self.path.parent.iterdir() if self._aside.match(each.name))


def _stamp(at: datetime) -> str:
    return f"{at:%Y%m%dT%H%M%S}.{at.microsecond // 1000:03}Z"


def _time(name: str) -> datetime | None:
    """The time in *name*; None where there is no such time."""
    stamp = re.search(_STAMP, name)
    try:
        return datetime.strptime(stamp[0], "%Y%m%dT%H%M%S.%fZ").replace(tzinfo=UTC) if stamp else None
    except ValueError:
        return None
