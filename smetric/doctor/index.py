"""Check of what the prefix index is kept in over a restart: its folder can be written, and its file read.

Nothing is written here; a router that runs goes on writing meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from smetric.doctor.check import Skipped
from smetric.doctor.finding import Finding, error, shown, warning
from smetric.doctor.site import Site
from smetric.sources.index_file import NAME, read_image
from smetric.sources.index_image import UnreadableImage
from smetric.sources.prefix_indexes import PrefixIndexes

#: Free bytes that a disk has to have, beside what a new file of the present size takes.
LEAST_FREE = 1024 * 1024

_LOST = "after a restart the router knows nothing of what its instances hold, and sessions scatter"


async def index(site: Site) -> list[Finding]:
    """The index outlives a restart."""
    settings = site.settings.prefix_index
    if not settings.enabled or not settings.folder:
        raise Skipped("prefix_index.folder is not set")
    return await asyncio.to_thread(_look, Path(settings.folder), site.router.knows.indexes)


def _look(folder: Path, indexes: PrefixIndexes) -> list[Finding]:
    existing = folder.absolute()
    while not os.path.exists(existing):
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return [
            error(
                f"prefix_index.folder {shown(str(folder))}",
                f"{shown(str(existing))} is no folder that can be written",
                _LOST,
                "let the user that the router runs as own it, or set `prefix_index.folder` to another",
            )
        ]
    found = _problem(folder, indexes)
    path = folder / NAME
    size = path.stat().st_size if path.is_file() else 0
    free = shutil.disk_usage(existing).free
    if free < size + LEAST_FREE:
        found.append(
            warning(
                f"prefix_index.folder {shown(str(folder))}",
                f"{free} bytes are free, and a new file of the index takes {size} before it replaces the old one",
                _LOST,
                "make room on that disk, or set `prefix_index.folder` to another",
            )
        )
    return found


def _problem(folder: Path, indexes: PrefixIndexes) -> list[Finding]:
    try:
        read_image(folder, indexes)
    except UnreadableImage as problem:
        reason = str(problem)
    except OSError as problem:
        reason = str(problem.strerror).lower()
    else:
        return []
    return [
        warning(
            f"prefix_index.folder {shown(str(folder))}",
            f"its file {NAME} cannot be used: {reason}",
            _LOST,
            "give each router a folder of its own, which its user owns; a router of this release writes the file anew",
        )
    ]
