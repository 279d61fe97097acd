"""Files: bounded reads, files that are read again when they change, and the policies that ship."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import select
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import structlog
from watchfiles import awatch

from smetric.errors import ConfigError
from smetric.log_limit import LogLimit

# What is in a file: never more than asked for, and never waited for without end.
#
# A pipe or a terminal blocks who opens or reads it until somebody writes. What the bytes mean is their reader's
# business.

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


# Files that are read again when they change: policies and their libraries, certificates.
#
# What a change comes to, and what is done about files that cannot be used, is theirs to say.

log = structlog.get_logger("smetric.files")

#: Besides being told of changes, the files are compared this often: some file systems tell nothing.
COMPARE_EVERY_S = 5.0


class Watched(Protocol):
    """What is read from files."""

    @property
    def folders(self) -> Collection[Path]:
        """Where the files are."""

    def refresh(self) -> object:
        """Read them again if they have changed."""


async def watch(files: Sequence[Watched]) -> None:
    """Refresh *files* whenever their folders change, until cancelled."""
    log_limit = LogLimit()

    def look() -> None:
        for file in files:
            try:
                file.refresh()
            except Exception:
                # A fault of ours must not end the watch for good.
                if (kept_back := log_limit.passes(id(file))) is not None:
                    log.exception("smetric.files.failed", file=type(file).__name__, kept_back=kept_back)

    # The folders, not the files: editors and mounted ConfigMaps replace the file, or a link above it.
    folders = {folder for file in files for folder in file.folders}
    try:
        async for _ in awatch(
            *folders,
            recursive=False,
            step=20,
            debounce=200,
            rust_timeout=int(COMPARE_EVERY_S * 1000),
            yield_on_timeout=True,
            stop_event=asyncio.Event(),
        ):
            look()
    except (OSError, RuntimeError) as error:  # the system has no watch left, say, or the library fails
        reason = getattr(error, "strerror", None) or str(error)
        log.warning("smetric.files.compared", reason=reason, every_s=COMPARE_EVERY_S)
    while True:
        await asyncio.sleep(COMPARE_EVERY_S)
        look()


# The policies that ship: where they lie, and what a setting or an argument means by its name or path.
#
# In a checkout they are in `policies/` beside the package, in an installed wheel inside it. The parser finds the
# grammar by itself, because `policy/` imports nothing of smetric; texts are read by `policy_text`.

#: The first line of a library, below its comments (`*+`: a line of them is never read in a second way).
_LIBRARY = re.compile(r"\A(?:\s|#[^\n]*)*+library\b")
_PACKAGE = Path(__file__).parent
_INSTALLED = _PACKAGE / "_data" / "policies"


def shipped_policies() -> dict[str, Path]:
    """The policies that come with SMetric, by name; their libraries and the files of their tests are none."""
    files = [path for path in sorted(_shipped_folder().glob("*.policy")) if "." not in path.stem]
    return {path.stem: path for path in files if not _LIBRARY.search(path.read_text("utf-8"))}


def _shipped_folder() -> Path:
    return _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "policies"


def is_policy_path(reference: str) -> bool:
    """Whether *reference* is a path, not the name of a shipped policy."""
    return "/" in reference or reference.endswith(".policy")


def policy_path(policy: str) -> Path:
    """The file of a policy given as the setting `policy` is: a shipped name, or a path.

    A shipped library is found by its name, too: whether a library will do is for the language to say.

    Raises:
        ConfigError: it is no path, and nothing of that name is shipped.
    """
    if is_policy_path(policy):
        return Path(policy)
    path = _shipped_folder() / f"{policy}.policy"
    if "." not in policy and os.path.isfile(path):
        return path
    from smetric.errors import did_you_mean

    shipped = shipped_policies()
    meant = did_you_mean(policy, shipped) or "; shipped: " + ", ".join(shipped)
    beside = f"{policy}.policy"
    if os.path.isfile(beside):
        meant = f"; did you mean the file {beside}?"
    elif os.path.isfile(policy):
        meant = f"; did you mean the file ./{policy}?"
    raise ConfigError(f"policy {policy}: no such shipped policy{meant} (a file's path has a / or ends in .policy)")
