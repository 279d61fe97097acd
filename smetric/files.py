"""Files: bounded reads that never hang, files that are read again when they change, and the shipped policies."""

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

from smetric.errors import ConfigError, did_you_mean
from smetric.log_limit import LogLimit

#: Seconds that a pipe or a terminal may yield nothing.
PATIENCE_S = 10.0
#: Seconds between comparisons of watched files: some file systems send no notifications.
COMPARE_EVERY_S = 5.0
_PIECE = 1 << 20
#: First line of a library, below its comments. `*+` keeps the match linear.
_LIBRARY = re.compile(r"\A(?:\s|#[^\n]*)*+library\b")
_PACKAGE = Path(__file__).parent
#: In a checkout the policies are in `policies/` beside the package, in an installed wheel inside it.
_INSTALLED = _PACKAGE / "_data" / "policies"

log = structlog.get_logger("smetric.files")


def read_regular(path: Path, most: int) -> bytes:
    """Return the first *most* bytes of a regular file; for files that are read again, or while others wait.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with _opened(path) as fd:
        _require_regular(os.fstat(fd), path)
        return _read(fd, most)


def read_once(path: Path, most: int) -> bytes:
    """Return the first *most* bytes of any file, also of a pipe; for files that are read once, at the start.

    Raises:
        OSError: it cannot be read, or yields nothing for `PATIENCE_S`.
    """

    def wait() -> None:
        if not ready.poll(PATIENCE_S * 1000):
            raise TimeoutError(errno.ETIMEDOUT, f"nothing was written into it for {PATIENCE_S:g} s", str(path))

    with _opened(path) as fd:
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        return _read(fd, most, wait)


def require_regular(path: Path) -> None:
    """Refuse a file that is not regular, before a library reads it by name.

    Raises:
        OSError: it is not regular, or does not exist.
    """
    _require_regular(os.stat(path), path)


def state_of(path: Path) -> tuple[int, int, int]:
    """Return inode, change time and size of a file, which differ after any change.

    The change time covers copies that keep the modification time, and changes of permissions.

    Raises:
        OSError: it does not exist.
    """
    state = os.stat(path)
    return state.st_ino, state.st_ctime_ns, state.st_size


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    # Without O_NONBLOCK, opening a pipe blocks until it has a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _require_regular(state: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def _read(fd: int, most: int, wait: Callable[[], None] = lambda: None) -> bytes:
    """Return at most *most* bytes of *fd*; *wait* returns when there are more, or at the end."""
    content = bytearray()
    while missing := most - len(content):
        wait()
        piece = os.read(fd, min(missing, _PIECE))
        if not piece:
            break
        content += piece
    return bytes(content)


class Watched(Protocol):
    """Something that is read from files."""

    @property
    def folders(self) -> Collection[Path]:
        """Folders of the files."""

    def refresh(self) -> object:
        """Read the files again if they have changed."""


async def watch(files: Sequence[Watched]) -> None:
    """Refresh *files* whenever their folders change, until cancelled."""
    log_limit = LogLimit()

    def look() -> None:
        for file in files:
            try:
                file.refresh()
            except Exception:
                # A bug in one file must not end the watch.
                if (kept_back := log_limit.passes(id(file))) is not None:
                    log.exception("smetric.files.failed", file=type(file).__name__, kept_back=kept_back)

    # Folders, not files: editors and mounted ConfigMaps replace the file, or a link above it.
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
    except (OSError, RuntimeError) as error:  # no inotify watch is left, or the library fails
        reason = getattr(error, "strerror", None) or str(error)
        log.warning("smetric.files.compared", reason=reason, every_s=COMPARE_EVERY_S)
    while True:
        await asyncio.sleep(COMPARE_EVERY_S)
        look()


def shipped_policies() -> dict[str, Path]:
    """Return the shipped policies by name, without their libraries and files of tests."""
    files = [path for path in sorted(_shipped_folder().glob("*.policy")) if "." not in path.stem]
    return {path.stem: path for path in files if not _LIBRARY.search(path.read_text("utf-8"))}


def _shipped_folder() -> Path:
    return _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "policies"


def is_policy_path(reference: str) -> bool:
    """Return whether *reference* is a path, not the name of a shipped policy."""
    return "/" in reference or reference.endswith(".policy")


def policy_path(policy: str) -> Path:
    """Return the file of a policy given by the name of a shipped one or by its path.

    Libraries are found by name, too; the language judges whether a library will do.

    Raises:
        ConfigError: it is not a path, and no shipped policy has this name.
    """
    if is_policy_path(policy):
        return Path(policy)
    path = _shipped_folder() / f"{policy}.policy"
    if "." not in policy and os.path.isfile(path):
        return path
    shipped = shipped_policies()
    meant = did_you_mean(policy, shipped) or "; shipped: " + ", ".join(shipped)
    beside = f"{policy}.policy"
    if os.path.isfile(beside):
        meant = f"; did you mean the file {beside}?"
    elif os.path.isfile(policy):
        meant = f"; did you mean the file ./{policy}?"
    raise ConfigError(f"policy {policy}: no such shipped policy{meant} (a file's path has a / or ends in .policy)")
