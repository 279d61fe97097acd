"""Files: bounded reads and watching."""

from __future__ import annotations

import asyncio
import os
import pty
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from watchfiles._rust_notify import WatchfilesRustInternalError

from smetric import files
from smetric.files import read_once, read_regular, require_regular, state_of
from tests.fakes import until


def fifo(folder: Path) -> Path:
    path = folder / "fifo"
    os.mkfifo(path)
    return path


def folder(folder: Path) -> Path:
    return folder


def device(_: Path) -> Path:
    return Path("/dev/zero")


@pytest.mark.parametrize("read", [read_regular, read_once])
@pytest.mark.parametrize(("size", "most"), [(0, 10), (10, 10), (100_000, 100_001), (100_000, 7)])
def test_read_stops_at_the_limit(tmp_path: Path, read: Callable[[Path, int], bytes], size: int, most: int) -> None:
    path, content = tmp_path / "file", os.urandom(size)
    path.write_bytes(content)
    assert read(path, most) == content[:most]


@pytest.mark.parametrize("make", [fifo, folder, device])
def test_followed_file_must_be_regular(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    for refuse in (lambda: read_regular(path, 10), lambda: require_regular(path)):
        with pytest.raises(OSError, match="not a regular file") as told:
            refuse()
        assert (told.value.strerror, told.value.filename) == ("not a regular file", str(path))


def test_followed_file_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    require_regular(tmp_path / "link")
    assert read_regular(tmp_path / "link", 10) == b"x"


@pytest.mark.parametrize("read", [read_regular, read_once, lambda path, _: require_regular(path)])
def test_read_raises_for_a_missing_file(tmp_path: Path, read: Callable[[Path, int], object]) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none", 10)


def test_read_once_accepts_a_slow_pipe(tmp_path: Path) -> None:
    path = fifo(tmp_path)

    def write() -> None:
        with path.open("wb", buffering=0) as file:  # waits for the reader
            for piece in (b"one ", b"two ", b"three"):
                file.write(piece)
                time.sleep(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_once(path, 100) == b"one two three"
    writer.join()


def test_read_of_an_endless_device_is_bounded() -> None:
    assert read_once(Path("/dev/zero"), 100_000) == bytes(100_000)
    assert read_once(Path("/dev/null"), 10) == b""


@pytest.mark.parametrize("kind", ["no writer", "a stalled writer", "a terminal"])
def test_read_of_a_silent_pipe_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", 0.05)
    path, held = fifo(tmp_path), []
    if kind == "a stalled writer":
        held = [os.open(path, os.O_RDWR)]
        os.write(held[0], b"half")
    elif kind == "a terminal":
        held = list(pty.openpty())
        path = Path(os.ttyname(held[1]))
    with pytest.raises(TimeoutError) as told:
        read_once(path, 100)
    assert told.value.strerror == "nothing was written into it for 0.05 s"
    for fd in held:
        os.close(fd)


def test_state_differs_for_a_copy_and_for_other_permissions(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    before, times = state_of(path), path.stat()
    time.sleep(0.02)  # file systems count coarsely
    path.write_bytes(b"two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    copied = state_of(path)
    time.sleep(0.02)
    path.chmod(0o400)
    assert len({before, copied, state_of(path)}) == 3


# Tests of policy files and certificates cover watches of real files.


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
async def test_watch_compares_files_without_notifications(
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
