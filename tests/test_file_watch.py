"""What is watched is tried with the files themselves, in test_policy_file.py and proxy/test_tls.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from watchfiles._rust_notify import WatchfilesRustInternalError

from smetric import files
from tests.fakes import until


class Looked:
    """Counts how often it is asked to look, and may fail at that."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.folders = {folder}
        self.error = error
        self.times = 0

    def refresh(self) -> None:
        self.times += 1
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), WatchfilesRustInternalError("No space left on device")]
)
async def test_where_the_system_tells_of_no_change_files_are_compared_and_one_that_fails_ends_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*folders: Path, **_: object) -> AsyncIterator[None]:
        assert folders == (tmp_path,)
        raise error

    monkeypatch.setattr(files, "awatch", full)
    monkeypatch.setattr(files, "COMPARE_EVERY_S", 0.001)
    broken, file = Looked(tmp_path, RuntimeError("a fault")), Looked(tmp_path)
    with capture_logs() as lines:
        task = asyncio.create_task(files.watch([broken, file]))
        await until(lambda: file.times > 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    compared, failed = lines
    assert (compared["event"], compared["reason"]) == ("smetric.files.compared", "No space left on device")
    assert (failed["event"], failed["file"]) == ("smetric.files.failed", "Looked"), "once; and the other goes on"
