"""Memory and open files of this process, and their limits."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys
from pathlib import Path

_STATM = Path("/proc/self/statm")
_FILES = "/proc/self/fd"
_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_PAGE_BYTES = resource.getpagesize()
#: cgroups v1 writes a number near 2**63 for "no limit".
_NO_LIMIT = 1 << 60


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None if unknown."""
    try:
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    except OSError:
        return None


def open_files() -> int | None:
    """Return the number of open files; None if unknown."""
    try:
        # Since Linux 6.2 the size of the folder is their number; before it is 0.
        return os.stat(_FILES).st_size or len(os.listdir(_FILES))
    except OSError as error:
        return most_files() if error.errno == errno.EMFILE else None  # no file is left to count with


def most_files() -> int:
    """Return the limit on open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def memory_limit(root: Path = _CGROUPS, own: Path = _CGROUP) -> int | None:
    """Return the memory limit of this process's container; None if there is none.

    Args:
        root: where cgroups are mounted.
        own: the file that names the cgroups of this process.
    """
    limits = []
    for file in _limit_files(root, own):
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_LIMIT:
            limits.append(int(text))
    return min(limits, default=None)


def _limit_files(root: Path, own: Path) -> list[Path]:
    """Return the files of limits: of this process's cgroup, of those around it, and of the container's root."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    files = [root / "memory.max", root / "memory" / "memory.limit_in_bytes"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            if not controllers:
                files.append(root / folder / "memory.max")
            elif "memory" in controllers.split(","):
                files.append(root / "memory" / folder / "memory.limit_in_bytes")
    return files


def give_back() -> None:
    """Return free memory of this process to the system, if the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
