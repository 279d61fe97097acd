"""What is in a file: never more than asked for, and never waited for without end.

A pipe or a terminal blocks who opens or reads it until somebody writes. What the bytes mean is their reader's business.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: Longest that a pipe or a terminal may say nothing, seconds.
PATIENCE_S = 10.0
_PIECE = 1 << 20


def read_regular(path: Path, most: int) -> bytes:
    """The first *most* bytes of a regular file: for what is read again, or while others wait.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    with _opened(path) as fd:
        _require_regular(os.fstat(fd), path)
        return _read(fd, most)


def read_once(path: Path, most: int) -> bytes:
    """The first *most* bytes of any file, pipes too: for what is read a single time, at the start.

    Raises:
        OSError: it cannot be read, or says nothing for `PATIENCE_S`.
    """

    def wait() -> None:
        if not ready.poll(PATIENCE_S * 1000):
            raise TimeoutError(errno.ETIMEDOUT, f"nothing was written into it for {PATIENCE_S:g} s", str(path))

    with _opened(path) as fd:
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        return _read(fd, most, wait)


def require_regular(path: Path) -> None:
    """Refuse a file that a library is to read by its name, unless that is a regular one.

    Raises:
        OSError: it is none, or not there.
    """
    _require_regular(os.stat(path), path)


def state_of(path: Path) -> tuple[int, int, int]:
    """What tells one state of a file from another, without reading it.

    The time is that of any change: who copies may keep the time of modification, and who was let in changes none.

    Raises:
        OSError: it is not there.
    """
    state = os.stat(path)
    return state.st_ino, state.st_ctime_ns, state.st_size


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    # Without O_NONBLOCK a pipe is not even opened before somebody writes.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _require_regular(state: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def _read(fd: int, most: int, wait: Callable[[], None] = lambda: None) -> bytes:
    """What *fd* holds up to its end, at most *most* bytes; *wait* returns when there is more, or the end."""
    content = bytearray()
    while missing := most - len(content):
        wait()
        piece = os.read(fd, min(missing, _PIECE))
        if not piece:
            break
        content += piece
    return bytes(content)
