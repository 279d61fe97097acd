from __future__ import annotations

import os
import pty
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from smetric import files
from smetric.files import read_once, read_regular, require_regular, state_of


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
def test_a_file_is_read_as_far_as_asked(
    tmp_path: Path, read: Callable[[Path, int], bytes], size: int, most: int
) -> None:
    path, content = tmp_path / "file", os.urandom(size)
    path.write_bytes(content)
    assert read(path, most) == content[:most]


@pytest.mark.parametrize("make", [fifo, folder, device])
def test_what_is_read_again_must_be_a_regular_file(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    for refuse in (lambda: read_regular(path, 10), lambda: require_regular(path)):
        with pytest.raises(OSError, match="not a regular file") as told:
            refuse()
        assert (told.value.strerror, told.value.filename) == ("not a regular file", str(path))


def test_a_link_to_a_regular_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    require_regular(tmp_path / "link")
    assert read_regular(tmp_path / "link", 10) == b"x"


@pytest.mark.parametrize("read", [read_regular, read_once, lambda path, _: require_regular(path)])
def test_what_is_not_there_is_told(tmp_path: Path, read: Callable[[Path, int], object]) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none", 10)


def test_what_is_read_once_may_be_a_pipe_whose_writer_comes_late_and_writes_slowly(tmp_path: Path) -> None:
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


def test_a_device_that_never_ends_is_read_no_further_than_asked() -> None:
    assert read_once(Path("/dev/zero"), 100_000) == bytes(100_000)
    assert read_once(Path("/dev/null"), 10) == b""


@pytest.mark.parametrize("kind", ["nobody writes", "somebody has stopped writing", "a terminal"])
def test_what_says_nothing_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", 0.05)
    path, held = fifo(tmp_path), []
    if kind == "somebody has stopped writing":
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


def test_a_copy_that_keeps_size_and_time_and_a_change_of_who_may_read_are_other_states(tmp_path: Path) -> None:
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
