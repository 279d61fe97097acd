"""Files are put aside whole, in order, and only so many are kept."""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from smetric.records.writer import RotatedFile

AT = datetime(2026, 5, 29, 10, 0, 0, 123_456, UTC)


def rotated(path: Path, *, max_bytes: int = 10, keep: int = 3) -> RotatedFile:
    return RotatedFile(path, max_bytes=max_bytes, keep=keep, now=lambda: AT)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_there_is_no_file_before_the_first_frame_and_it_is_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "decisions.jsonl"
    file = rotated(path)
    assert not path.parent.exists()
    file.append(b"one\n")
    assert path.read_bytes() == b"one\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    file.close()


def test_a_full_file_is_put_aside_under_the_time_and_the_oldest_are_deleted(tmp_path: Path) -> None:
    file = rotated(tmp_path / "decisions.jsonl.gz", keep=2)
    for word in (b"first-frame", b"second-frame", b"third-frame", b"fourth-frame"):
        file.append(word)
    file.close()
    aside = ["decisions-20260529T100000.124Z.jsonl.gz", "decisions-20260529T100000.125Z.jsonl.gz"]
    assert names(tmp_path) == [*aside, "decisions.jsonl.gz"]  # in order of their names they are in order
    assert [(tmp_path / name).read_bytes() for name in names(tmp_path)] == [
        b"second-frame",
        b"third-frame",
        b"fourth-frame",
    ]


def test_the_newest_are_kept_when_the_clock_is_set_back(tmp_path: Path) -> None:
    times = iter([AT, AT - timedelta(hours=1), AT - timedelta(hours=2)])
    path = tmp_path / "decisions.jsonl"
    (tmp_path / "decisions-99999999T999999.999Z.jsonl").write_bytes(b"of no time")
    file = RotatedFile(path, max_bytes=10, keep=3, now=lambda: next(times))
    for word in (b"first-frame", b"second-frame", b"third-frame", b"fourth-frame"):
        file.append(word)
    file.close()
    assert [(tmp_path / name).read_bytes() for name in names(tmp_path)] == [
        b"second-frame",
        b"third-frame",
        b"of no time",
        b"fourth-frame",
    ]


def test_what_an_earlier_process_left_is_put_aside_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b"earlier\n")
    file = rotated(path)
    file.append(b"now\n")
    file.close()
    assert names(tmp_path) == ["decisions-20260529T100000.123Z.jsonl", "decisions.jsonl"]
    assert (tmp_path / "decisions-20260529T100000.123Z.jsonl").read_bytes() == b"earlier\n"


def test_two_processes_with_one_name_lose_nothing_of_each_other(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    one, other = rotated(path, max_bytes=8, keep=9), rotated(path, max_bytes=8, keep=9)
    for i in range(4):
        one.append(b"one %d" % i)
        other.append(b"two %d" % i)
    one.close()
    other.close()
    written = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert sorted(written[i : i + 5] for i in range(0, len(written), 5)) == sorted(
        b"%b %d" % (word, i) for word in (b"one", b"two") for i in range(4)
    )


def test_other_files_of_the_folder_are_left_alone(tmp_path: Path) -> None:
    for name in ("decisions-old.jsonl", "decisions-20260529T100000.000Z.txt", "trace-20260529T100000.000Z.jsonl"):
        (tmp_path / name).touch()
    file = rotated(tmp_path / "decisions.jsonl", keep=0)
    for _ in range(3):
        file.append(b"a full file")
    file.close()
    assert names(tmp_path) == [
        "decisions-20260529T100000.000Z.txt",
        "decisions-old.jsonl",
        "decisions.jsonl",
        "trace-20260529T100000.000Z.jsonl",
    ]


def test_half_a_frame_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "decisions.jsonl"
    file = rotated(path, max_bytes=1000)
    file.append(b"whole\n")
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(28, "No space left on device")
        return write(fd, data[:8])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            file.append(b"x" * 24)
    assert path.read_bytes() == b"whole\n"
    file.append(b"again\n")
    assert path.read_bytes() == b"whole\nagain\n"
    file.close()
