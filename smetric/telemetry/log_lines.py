"""Where log lines end up: a text stream, written at once for most lines, a few times a second for those that can wait.

A log that cannot be written, as its terminal is gone or its disk full, costs its lines and nothing else; one whose
reader has stopped for a while keeps nobody waiting. What a line says is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import select
import stat
import threading
from typing import ClassVar, TextIO

#: Longest that a line waits, seconds, and most lines that do. One write of the kernel costs more than making a line.
WAIT_S = 0.05
MOST_WAITING = 256
#: Most lines kept for a reader who takes none; beyond that the oldest are lost.
MOST_KEPT = 10_000
#: Bytes that a pipe takes without waiting if it takes any (PIPE_BUF).
_PIECE = 4096


class LogLines:
    """A stream for loggers. Lines come out in the order they went in, those that can wait before what makes them.

    Args:
        out: where they are written.
    """

    #: Lines that could not be written, of all streams of this process.
    lost: ClassVar[int] = 0

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._fd = _fd_of(out)
        self._room = _room_of(self._fd)
        #: What was written last ends within a line, as the disk was full then.
        self._is_cut = False
        self._waiting: list[str] = []
        self._is_due = False
        #: The thread that writes may come here again: what it has made for that collects what is lost, and an object
        #: that is lost may log, as a task does that nobody waited for.
        self._lock = threading.RLock()
        self._is_writing = False

    def write(self, text: str) -> None:
        """Take *text*; `flush` writes it. Any thread may call these two."""
        self._waiting.append(text)

    def flush(self) -> None:
        """Write all that waits, as far as there is room for it."""
        with self._lock:
            if self._is_writing:
                return  # and goes on with this line
            self._is_writing = True
            try:
                while self._waiting and (self._room is None or self._room.poll(0)):
                    self._write_next()
                if (excess := len(self._waiting) - MOST_KEPT) > 0:
                    self._drop(excess)
            finally:
                self._is_writing = False
        if self._waiting and not self._is_due:
            self._flush_soon()

    def line(self, text: str) -> None:
        """Write a line at once: what structlog's loggers end in, each of the methods that they call."""
        self.write(f"{text}\n")
        self.flush()

    debug = info = warning = error = critical = line

    def write_soon(self, text: str) -> None:
        """Write *text* within `WAIT_S`, together with others; at once where no event loop runs."""
        self._waiting.append(text)
        if self._is_due:
            if len(self._waiting) >= MOST_WAITING:
                self.flush()
        elif not self._flush_soon():
            self.flush()

    def _write_next(self) -> None:
        """Write as many lines as there is room for, at least one."""
        waiting = self._waiting
        count = len(waiting) if self._room is None else _fitting(waiting)
        try:
            self._write("".join(waiting[:count]))
        except (OSError, ValueError):  # the latter where it was closed
            self._drop(count)
        else:
            del waiting[:count]

    def _write(self, text: str) -> None:
        if self._fd is None:
            self._out.write(text)
            self._out.flush()
            return
        if self._out.closed:  # its number may be another file's by now
            raise ValueError
        rest = b"\n" * self._is_cut + text.encode(errors="replace")
        while rest:
            written = os.write(self._fd, rest)
            self._is_cut = not rest.endswith(b"\n", 0, written)
            rest = rest[written:]

    def _drop(self, count: int) -> None:
        del self._waiting[:count]
        LogLines.lost += count

    def _flush_soon(self) -> bool:
        """Have the running loop flush in a while; false where none runs."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False
        self._is_due = True
        loop.call_later(WAIT_S, self._flush_due)
        return True

    def _flush_due(self) -> None:
        self._is_due = False
        self.flush()


def _fd_of(out: TextIO) -> int | None:
    try:
        return out.fileno()
    except OSError:  # it is in memory
        return None


def _room_of(fd: int | None) -> select.poll | None:
    """Tells whether *fd* takes a piece without waiting for a reader; None where there is nobody to wait for."""
    if fd is None:
        return None
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)):
        return None
    room = select.poll()
    room.register(fd, select.POLLOUT)
    return room


def _fitting(lines: list[str]) -> int:
    """How many of *lines* make a piece, at least one."""
    size = 0
    for count, line in enumerate(lines):
        size += len(line) if line.isascii() else len(line.encode())
        if count and size > _PIECE:
            return count
    return len(lines)
