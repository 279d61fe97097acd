"""What is watched is tried with the files themselves, in test_policy_file.py and proxy/test_tls.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from smetric import file_watch


class Looked:
    """Counts how often it is asked to look."""

    def __init__(self, folder: Path) -> None:
        self.folders = {folder}
        self.times = 0

    def refresh(self) -> None:
        self.times += 1


async def test_where_the_system_tells_of_no_change_files_are_compared_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*folders: Path, **_: object) -> AsyncIterator[None]:
        assert folders == (tmp_path,)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_watch, "awatch", full)
    monkeypatch.setattr(file_watch, "COMPARE_EVERY_S", 0.001)
    file, seen = Looked(tmp_path), asyncio.Event()
    with capture_logs() as lines:
        task = asyncio.create_task(file_watch.watch([file], changed=lambda: seen.set() if file.times > 2 else None))
        async with asyncio.timeout(5):
            await seen.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    (line,) = lines
    assert (line["event"], line["reason"]) == ("smetric.files.compared", "No space left on device")
