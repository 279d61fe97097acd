"""Files that are read again when they change: policies and their libraries, certificates.

What a change comes to, and what is done about files that cannot be used, is theirs to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import structlog
from watchfiles import awatch

from smetric.telemetry.log_limit import LogLimit

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
