"""Writer of record files, and their rotation."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from smetric.log_limit import CHANGE_LINES
from smetric.records import writer as module
from smetric.records.writer import RotatedFile
from tests.fakes import until
from tests.records.drive import make_writer

# Rotation

AT = datetime(2026, 5, 29, 10, 0, 0, 123_456, UTC)


def rotated(path: Path, *, max_bytes: int = 10, keep: int = 3) -> RotatedFile:
    return RotatedFile(path, max_bytes=max_bytes, keep=keep, now=lambda: AT)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_is_created_private_at_the_first_frame(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "decisions.jsonl"
    file = rotated(path)
    assert not path.parent.exists()
    file.append(b"one\n")
    assert path.read_bytes() == b"one\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    file.close()


def test_full_file_is_rotated_and_the_oldest_deleted(tmp_path: Path) -> None:
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


def test_rotation_keeps_the_newest_after_a_clock_set_back(tmp_path: Path, path: Path) -> None:
    times = iter([AT, AT - timedelta(hours=1), AT - timedelta(hours=2)])
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


def test_file_of_an_earlier_process_is_rotated(tmp_path: Path, path: Path) -> None:
    path.write_bytes(b"earlier\n")
    file = rotated(path)
    file.append(b"now\n")
    file.close()
    assert names(tmp_path) == ["decisions-20260529T100000.123Z.jsonl", "decisions.jsonl"]
    assert (tmp_path / "decisions-20260529T100000.123Z.jsonl").read_bytes() == b"earlier\n"


def test_file_shared_by_two_processes_loses_nothing(tmp_path: Path, path: Path) -> None:
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


def test_rotation_ignores_other_files(tmp_path: Path) -> None:
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


def test_file_truncates_half_a_frame(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# Writer: headers, faults and its thread


def put(writer: module.Writer, *lines: bytes, key: int = 1) -> None:
    for line in lines:
        writer.put(key, b"policy %d\n" % key, line)


def write_lines(writer: module.Writer, *lines: bytes, key: int = 1) -> None:
    put(writer, *lines, key=key)
    writer.flush()


def without_header(file: Path) -> list[bytes]:
    """Return the lines of a whole file, whose first one must be a header."""
    header, *rest = file.read_bytes().splitlines()
    assert b'"kind":"header"' in header
    return rest


def test_file_has_header_and_policies_before_their_decisions(path: Path) -> None:
    writer = make_writer(path, {}, max_bytes=1000)
    write_lines(writer, b"a\n", b"b\n")
    put(writer, b"c\n", key=2)
    write_lines(writer, b"d\n")
    assert without_header(path) == [b"policy 1", b"a", b"b", b"policy 2", b"c", b"d"]


def test_rotated_file_repeats_header_and_policies(tmp_path: Path, path: Path) -> None:
    writer = make_writer(path, {}, max_bytes=10)
    for line in (b"a\n", b"b\n"):
        write_lines(writer, line)
    assert len(list(tmp_path.iterdir())) == 2
    for file in tmp_path.iterdir():
        assert without_header(file)[0] == b"policy 1"


@pytest.mark.parametrize("to", ["decisions.jsonl.1", "archive/decisions.jsonl", "decisions-20260529.jsonl"])
def test_moved_file_is_begun_again(tmp_path: Path, path: Path, to: str) -> None:
    (tmp_path / "archive").mkdir()
    writer = make_writer(path, {}, max_bytes=1000)
    write_lines(writer, b"a\n")
    path.rename(tmp_path / to)  # as log rotation does
    write_lines(writer, b"b\n")
    assert without_header(tmp_path / to) == [b"policy 1", b"a"]
    assert without_header(path) == [b"policy 1", b"b"]


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: os.truncate(path, 0)], ids=["deleted", "emptied"])
def test_deleted_or_emptied_file_is_begun_again(path: Path, spoil: Callable[[Path], None]) -> None:
    writer = make_writer(path, {}, max_bytes=1000)
    write_lines(writer, b"a\n")
    spoil(path)
    write_lines(writer, b"b\n")
    assert without_header(path) == [b"policy 1", b"b"]
    assert list(path.parent.iterdir()) == [path]


def test_file_rotated_by_another_process_is_continued(tmp_path: Path, path: Path) -> None:
    one, other = (make_writer(path, {}, max_bytes=1000) for _ in range(2))
    for line in (b"a\n", b"b\n", b"c\n"):
        for writer in (one, other):
            write_lines(writer, line)
    assert len(list(tmp_path.iterdir())) == 2
    for file in tmp_path.iterdir():
        assert file.read_bytes().splitlines()[1:] == [b"policy 1", b"a", b"b", b"c"]


@pytest.mark.parametrize("bytes_left", [5, 500])
def test_file_changed_by_another_program_is_rotated(tmp_path: Path, path: Path, bytes_left: int) -> None:
    writer = make_writer(path, {}, max_bytes=1000)
    write_lines(writer, b"a\n")
    os.truncate(path, bytes_left)
    write_lines(writer, b"b\n")
    assert without_header(path) == [b"policy 1", b"b"]
    assert bytes_left in [each.stat().st_size for each in tmp_path.iterdir()]


def test_half_a_frame_that_stays_ends_its_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: dict[str, int] = {}
    writer = make_writer(path, results)
    write_lines(writer, b"a\n")
    write = os.write

    def half(fd: int, data: bytes) -> int:
        if not data.startswith(b"b"):
            raise OSError(5, "Input/output error")
        return write(fd, data[:1])

    def never(fd: int, size: int) -> None:
        raise OSError(1, "Operation not permitted")

    put(writer, b"bc\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        patch.setattr(os, "ftruncate", never)
        writer.flush()
    write_lines(writer, b"d\n")
    assert results == {"written": 2, "failed": 1}
    assert without_header(path) == [b"policy 1", b"d"]


def test_stale_file_handle_is_logged_and_the_file_begun_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: dict[str, int] = {}
    writer = make_writer(path, results)
    write_lines(writer, b"a\n")

    def stale(fd: int) -> os.stat_result:
        raise OSError(116, "Stale file handle")

    put(writer, b"b\n")
    with capture_logs() as logs, monkeypatch.context() as patch:
        patch.setattr(os, "fstat", stale)
        writer.flush()
    assert [line["event"] for line in logs] == ["smetric.record.not_written", "smetric.record.resumed"]
    assert results == {"written": 2}
    assert without_header(path) == [b"policy 1", b"b"]


async def test_writer_writes_in_a_thread_and_flushes_at_stop(path: Path) -> None:
    results: dict[str, int] = {}
    writer = make_writer(path, results)
    await writer.start()
    put(writer, b"a\n")
    await until(lambda: results == {"written": 1})
    put(writer, b"b\n", b"c\n")
    await writer.stop()
    assert results == {"written": 3}
    assert without_header(path) == [b"policy 1", b"a", b"b", b"c"]


def test_writer_drops_and_counts_lines_beyond_its_queue(tmp_path: Path) -> None:
    results: dict[str, int] = {}
    writer = make_writer(tmp_path / "decisions.jsonl", results, max_queued=100)
    put(writer, *[b"x" * 40] * 5)
    assert results == {"dropped": 3}
    assert writer.queued_bytes == 80
    writer.flush()
    assert results == {"dropped": 3, "written": 2}
    assert writer.queued_bytes == 0


def test_writer_logs_a_full_disk_once_and_resumes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: dict[str, int] = {}
    writer = make_writer(path, results)
    write_lines(writer, b"a\n")

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with capture_logs() as logs:
        with monkeypatch.context() as patch:
            patch.setattr("os.write", full)
            for _ in range(3):
                write_lines(writer, b"lost\n", b"lost\n", key=2)
        write_lines(writer, b"b\n", key=2)
    assert [line["event"] for line in logs] == ["smetric.record.not_written", "smetric.record.resumed"]
    assert logs[0]["reason"] == "No space left on device"
    assert results == {"written": 2, "failed": 6}
    assert without_header(path) == [b"policy 1", b"a", b"policy 2", b"b"]


def test_writer_bounds_log_lines_of_a_nearly_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, write = make_writer(tmp_path / "decisions.jsonl", {}, max_bytes=1 << 20), os.write

    def nearly_full(fd: int, data: bytes) -> int:
        if len(data) > 1000:
            raise OSError(28, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr("os.write", nearly_full)
    with capture_logs() as logs:
        for _ in range(3 * CHANGE_LINES):
            write_lines(writer, b"x" * 2000)
            write_lines(writer, b"x")
    assert len(logs) == 2 * CHANGE_LINES


async def test_writer_logs_a_read_only_folder_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)  # root may write everywhere
    writer = make_writer(tmp_path / "new" / "decisions.jsonl", {})
    with capture_logs() as logs:
        await writer.start()
        await writer.stop()
    assert [line["event"] for line in logs] == ["smetric.record.not_written"]


def obstruct(path: Path, kind: str) -> Path:
    """Make *path*, or the path returned, unusable as a file."""
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link to a device":
            path.symlink_to("/dev/null")
        case "below a file":
            path.touch()
            return path / "decisions.jsonl"
        case _:
            return path.parent / ("n" * 300) / "decisions.jsonl"
    return path


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to a device", "below a file", "long name"])
async def test_writer_refuses_and_keeps_other_file_kinds(tmp_path: Path, path: Path, kind: str) -> None:
    results: dict[str, int] = {}
    writer = make_writer(obstruct(path, kind), results)
    before = os.listdir(tmp_path)
    with capture_logs() as logs:
        await writer.start()
        put(writer, b"a\n")
        await until(lambda: results == {"failed": 1})
        await writer.stop()
    (line,) = logs
    assert line["event"] == "smetric.record.not_written"
    assert (line["reason"] == "not a regular file") is (kind in ("folder", "pipe", "link to a device"))
    assert os.listdir(tmp_path) == before


async def test_writer_stop_does_not_wait_for_a_hanging_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_S", 0.05)
    hung, released = threading.Event(), threading.Event()

    def hang(fd: int, data: bytes) -> int:
        hung.set()
        released.wait(5)
        return len(data)

    writer = make_writer(tmp_path / "decisions.jsonl", {})
    monkeypatch.setattr("os.write", hang)
    await writer.start()
    put(writer, b"a\n")
    await until(hung.is_set)
    await writer.stop()  # returns
    released.set()
