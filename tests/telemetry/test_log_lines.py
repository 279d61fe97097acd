from __future__ import annotations

import asyncio
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from smetric.telemetry import logs
from smetric.telemetry.logs import LogLines


class Counting(io.StringIO):
    """A stream that counts how often it is written to, and says when it has been."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.written = asyncio.Event()

    def write(self, text: str) -> int:
        self.writes += 1
        self.written.set()
        return super().write(text)


async def test_lines_that_can_wait_are_written_together_within_a_moment() -> None:
    out = Counting()
    lines = LogLines(out)
    for number in range(10):
        lines.write_soon(f"{number}\n")
    assert out.writes == 0
    await asyncio.wait_for(out.written.wait(), 5)
    assert out.getvalue() == "".join(f"{number}\n" for number in range(10))
    out.written.clear()
    lines.write_soon("later\n")
    await asyncio.wait_for(out.written.wait(), 5)
    assert out.getvalue().endswith("9\nlater\n")
    assert out.writes == 2


async def test_a_line_that_is_written_at_once_takes_those_before_it_along() -> None:
    out = Counting()
    lines = LogLines(out)
    lines.write_soon("first\n")
    lines.write("second\n")
    lines.flush()
    assert out.getvalue() == "first\nsecond\n"
    out.written.clear()
    lines.write_soon("third\n")
    await asyncio.wait_for(out.written.wait(), 5)
    assert out.getvalue() == "first\nsecond\nthird\n"


async def test_no_more_lines_wait_than_allowed() -> None:
    out = io.StringIO()
    lines = LogLines(out)
    for _ in range(logs.MOST_WAITING):
        lines.write_soon("x\n")
    assert out.getvalue() == "x\n" * logs.MOST_WAITING


def test_without_an_event_loop_nothing_waits() -> None:
    out = io.StringIO()
    LogLines(out).write_soon("x\n")
    assert out.getvalue() == "x\n"


class Full(io.StringIO):
    """A stream on a disk that is full for as long as a test likes."""

    is_full = True

    def flush(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_log_that_cannot_be_written_costs_its_lines_alone() -> None:
    out = Full()
    lines, before = LogLines(out), LogLines.lost
    lines.write_soon("1\n")
    for number in (2, 3):
        lines.write(f"{number}\n")
        lines.flush()
    assert LogLines.lost - before == 3
    out.is_full = False
    lines.write_soon("4\n")
    assert out.getvalue().endswith("4\n")
    assert LogLines.lost - before == 3


def test_a_line_that_a_full_disk_cuts_off_does_not_spoil_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 9
    really = os.write

    def write(fd: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = really(fd, data[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", write)
    file = tmp_path / "log"
    with file.open("a") as out:
        lines = LogLines(out)
        for _ in range(3):
            lines.write("12345\n")
            lines.flush()
        room = 100
        for _ in range(2):
            lines.write("é\n")
            lines.flush()
    assert file.read_text() == "12345\n123\né\né\n"


def test_nothing_is_written_to_what_has_the_number_of_a_log_that_was_closed(tmp_path: Path) -> None:
    out = (tmp_path / "log").open("a")
    lines, number, before = LogLines(out), out.fileno(), LogLines.lost
    out.close()
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    assert other == number
    lines.write("1\n")
    lines.flush()
    assert (os.fstat(other).st_size, LogLines.lost - before) == (0, 1)
    os.close(other)


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """Who reads the log, and what it is written to; the test writes more than is read."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as out:
        yield reading, out
        os.close(reading)


async def test_a_reader_who_stops_keeps_nobody_waiting_and_gets_all_lines_in_order_later(
    pipe: tuple[int, TextIO],
) -> None:
    reading, out = pipe
    lines, before = LogLines(out), LogLines.lost
    expected = "".join(f"{number} {'x' * 90}é\n" for number in range(3000))
    for number, line in enumerate(expected.splitlines(keepends=True)):
        if number % 2:
            lines.write_soon(line)
        else:
            lines.write(line)
            lines.flush()
    read = b""
    async with asyncio.timeout(10):
        while len(read) < len(expected.encode()):
            read += await asyncio.to_thread(os.read, reading, 1 << 16)
    assert read.decode() == expected
    assert LogLines.lost == before


def test_the_oldest_lines_are_lost_where_too_many_wait_for_a_reader(
    pipe: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_KEPT", 10)
    reading, out = pipe
    lines, before = LogLines(out), LogLines.lost
    for number in range(200):
        lines.write(f"{number} {'x' * 995}\n")
        lines.flush()
    read, lost = b"", LogLines.lost - before
    while len(read.splitlines()) < 200 - lost:
        read += os.read(reading, 1 << 16)
        lines.flush()
    numbers = [int(line.split()[0]) for line in read.decode().splitlines()]
    assert 0 < lost < 190
    assert numbers == [*range(190 - lost), *range(190, 200)]


def test_a_log_whose_reader_is_gone_costs_its_lines_alone() -> None:
    reading, writing = os.pipe()
    out = os.fdopen(writing, "w")
    lines, before = LogLines(out), LogLines.lost
    os.close(reading)
    for _ in range(3):
        lines.write("x\n")
        lines.flush()
    assert LogLines.lost - before == 3
    out.close()
