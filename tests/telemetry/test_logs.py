from __future__ import annotations

import asyncio
import errno
import gc
import io
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import orjson
import pytest
import structlog

from smetric.errors import ConfigError
from smetric.fleet.exchange import Exchanges
from smetric.request.request import Usage
from smetric.telemetry import logs
from smetric.telemetry.logs import AccessLog, LogQueue, lost_lines
from tests.telemetry.samples import ROUTE, begin, record, telemetry


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def lines(out: io.StringIO) -> list[dict[str, Any]]:
    logs.flush()
    return [orjson.loads(line) for line in out.getvalue().splitlines()]


def test_line_is_one_json_object_of_bounded_printable_texts(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    odd = ["\udcff", "a\nb", "x" * 10_000, 7]
    structlog.get_logger().info("request", model="a\r\n\x1b[31m\u2028b\x85", path="x" * 10_000, status=200, names=odd)
    (shown,) = lines(out)
    assert "\x1b" not in out.getvalue()
    assert (shown["event"], shown["level"], shown["status"]) == ("request", "info", 200)
    assert shown["timestamp"].endswith("Z")
    assert shown["model"].isprintable()
    assert len(shown["path"]) == 256
    assert shown["names"] == ["\\udcff", "a\\nb", "x" * 255 + "…", 7]


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_console_line_has_colours_unless_no_color_is_set(
    out: io.StringIO, monkeypatch: pytest.MonkeyPatch, no_color: str, is_coloured: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(out, "isatty", lambda: True)
    logs.configure("info", "auto", out)
    structlog.get_logger().info("smetric.ready")
    logs.flush()
    assert "smetric.ready" in out.getvalue()
    assert ("\x1b[" in out.getvalue()) is is_coloured


def test_console_line_stays_one_line(out: io.StringIO) -> None:
    logs.configure("info", "console", out)
    structlog.get_logger().info("request", model="a\r\nb\x1b[31m")
    logs.flush()
    assert len(out.getvalue().splitlines()) == 1
    assert "\x1b" not in out.getvalue()


def test_level_drops_lines_below_it(out: io.StringIO) -> None:
    logs.configure("warning", "json", out)
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines(out)] == ["loud"]


def test_configure_replaces_the_configuration_before(out: io.StringIO) -> None:
    first = io.StringIO()
    logs.configure("info", "json", first)
    bound_before = structlog.get_logger().bind()
    bound_before.info("first")
    logs.configure("info", "json", out)
    bound_before.info("second")
    logging.getLogger("x").error("once")
    assert [line["event"] for line in lines(first)] == ["first", "second"]
    assert [line["event"] for line in lines(out)] == ["library"]


def test_configure_names_an_unknown_level_or_format() -> None:
    with pytest.raises(ConfigError, match="log level 'loud' is not one of debug, info"):
        logs.configure("loud")
    with pytest.raises(ConfigError, match="log format 'xml' is not one of auto, json, console"):
        logs.configure("info", "xml")


# Records of other libraries.


def test_library_records_are_limited_and_lose_their_arguments(out: io.StringIO) -> None:
    logs.configure("debug", "json", out)
    library = logging.getLogger("aiohttp.client")
    for i in range(5):
        library.warning("cannot parse %r", b"canary %d" % i)
    library.debug("canary")
    try:
        raise ValueError("canary: bad byte in 'the prompt'")
    except ValueError:
        logging.getLogger("asyncio").exception("Task exception was never retrieved\nfuture: canary")
    first, second = lines(out)
    assert "canary" not in out.getvalue()
    assert (first["event"], first["logger"], first["message"]) == ("library", "aiohttp.client", "cannot parse %r")
    assert (second["exception"], second["message"]) == ("ValueError", "Task exception was never retrieved")
    assert "test_logs.py:" in str(second["raised_at"])


def test_library_level_between_ours_is_rounded_down(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    for level in (35, 60):
        logging.getLogger("library").log(level, f"of level {level}")
    assert [(line["message"], line["level"]) for line in lines(out)] == [
        ("of level 35", "warning"),
        ("of level 60", "critical"),
    ]


def test_library_warning_is_reduced_to_its_place_and_kind(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    logging.getLogger("py.warnings").warning("/lib/x.py:3: UserWarning: a prompt: with\ntwo lines\n  its source\n")
    (line,) = lines(out)
    assert (line["event"], line["message"]) == ("library", "/lib/x.py:3: UserWarning")


def test_exporter_records_keep_their_arguments_without_queries(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    now = 0.0
    queue = LogQueue(out)
    handler = logs.LibraryHandler(queue, lambda: now)
    reason = ("Max retries exceeded with url: /v1/traces?key=secret (Caused by ...)",)
    made = logging.LogRecord("opentelemetry.x", logging.ERROR, "f", 1, "Failed to export: %s", reason, None)
    for _ in range(4):
        handler.emit(made)
    now = 60.0
    handler.emit(made)
    queue.close()
    first, second = lines(out)
    assert first["message"] == "Failed to export: Max retries exceeded with url: /v1/traces?… (Caused by ...)"
    assert "kept_back" not in first
    assert second["kept_back"] == 3


# Exceptions.


def test_exception_is_written_without_its_text(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    try:
        raise KeyError("canary")
    except KeyError as error:
        structlog.get_logger().exception("smetric.policy.failed")
        structlog.get_logger().error("again", exc_info=error)
    written = lines(out)
    assert len(written) == 2
    assert "canary" not in out.getvalue()
    for line in written:
        assert line["exception"] == "KeyError"
        assert "test_exception_is_written" in str(line["raised_at"])
        assert "exc_info" not in line


def fail(limit: logs.ExceptionLimit, event: str, number: int) -> dict[str, object] | None:
    """The line of an exception, None where it is suppressed; every *number* is another place."""
    try:
        if number:
            raise KeyError(number)
        raise KeyError(0)
    except KeyError as error:
        try:
            return dict(limit(None, "error", {"event": event, "exc_info": error}))
        except structlog.DropEvent:
            return None


def test_exception_limit_passes_one_a_minute_for_each_event_and_place() -> None:
    now = 0.0
    limit = logs.ExceptionLimit(lambda: now)
    assert fail(limit, "a", 0) is not None
    assert [fail(limit, "a", 0) for _ in range(5)] == [None] * 5
    assert fail(limit, "b", 0) is not None
    assert fail(limit, "a", 1) is not None
    now = 60.0
    again = fail(limit, "a", 0)
    assert again is not None
    assert again["kept_back"] == 5
    assert limit(None, "error", {"event": "a"}) == {"event": "a"}
    assert limit(None, "error", {"event": "a", "exc_info": ValueError(), "kept_back": 0})["kept_back"] == 0


# The access log.


def answer_here(access: AccessLog) -> None:
    """The router itself answers a request."""
    Exchanges([access]).begin({}, "/v1/models", trusted=False).end(404, bytes_out=10)


def test_access_line_has_the_form_of_other_lines(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    answer_here(AccessLog())
    structlog.get_logger().info("request", path="/v1/models", status=404, bytes=10, duration_s=0.25)
    ours, theirs = lines(out)
    assert {**ours, "timestamp": "", "duration_s": 0.25} == {**theirs, "timestamp": ""}
    assert len(ours["timestamp"]) == len(theirs["timestamp"])


def test_access_line_has_the_known_fields_of_a_request(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    app, made = telemetry(), record(stream=True, model="m\n")
    made.held_s, made.arm = 0.25, "canary"
    exchange = begin(app)
    exchange.decided(made)
    attempt = exchange.attempt(ROUTE)
    attempt.first_output()
    attempt.end("ok", status=200)
    exchange.end(200, bytes_out=9, usage=Usage(1000, None, 400), error_type="aborted")
    (line,) = [each for each in lines(out) if each["event"] == "request"]
    assert line.keys() == {
        *("event", "level", "timestamp", "path", "status", "bytes", "duration_s", "ttft_s", "error_type"),
        *("decision_id", "outcome", "route", "policy", "rule", "instance", "api", "model", "turn", "prompt_len", "hit"),
        *("prompt_tokens", "cached_tokens", "completion_tokens", "held_s", "arm", "attempts"),
    }
    assert (line["model"], line["instance"], line["completion_tokens"], line["held_s"]) == ("m\\n", "gpu-1", None, 0.25)


@pytest.mark.parametrize(("level", "format", "shown"), [("warning", "json", ""), ("info", "console", "status=404")])
def test_access_log_follows_level_and_format(out: io.StringIO, level: str, format: str, shown: str) -> None:
    logs.configure(level, format, out)
    access = AccessLog()
    assert access.is_on == bool(shown)
    answer_here(access)
    logs.flush()
    assert shown in out.getvalue() if shown else not out.getvalue()


def test_access_line_can_be_captured_like_other_lines(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    access = AccessLog()
    with structlog.testing.capture_logs() as captured:
        answer_here(access)
    assert [line["status"] for line in captured] == [404]
    assert lines(out) == []


# The queue and the thread that writes.


class Counting(io.StringIO):
    """A stream that counts its writes."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


@pytest.fixture
def queue_of() -> Iterator[Callable[[TextIO], LogQueue]]:
    made = []

    def make(out: TextIO) -> LogQueue:
        made.append(LogQueue(out))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


def test_queue_writes_lines_in_order_and_in_batches(queue_of: Callable[[TextIO], LogQueue]) -> None:
    out = Counting()
    queue = queue_of(out)
    expected = [f"{number}" for number in range(1000)]
    for line in expected:
        queue.info(line)
    queue.flush()
    assert out.getvalue().splitlines() == expected
    assert out.writes < 20


def test_queue_writes_within_a_moment_by_itself(queue_of: Callable[[TextIO], LogQueue]) -> None:
    out = io.StringIO()
    queue = queue_of(out)
    for number in range(2):
        queue.info(f"{number}")
        deadline = time.monotonic() + 5
        while len(out.getvalue().splitlines()) <= number and time.monotonic() < deadline:
            time.sleep(0.01)
    assert out.getvalue() == "0\n1\n"


@pytest.mark.slow
def test_lines_are_written_at_exit() -> None:
    code = "import structlog; from smetric.telemetry import logs; logs.configure(); structlog.get_logger().info('bye')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert orjson.loads(done.stderr)["event"] == "bye"


class Finalized:
    """Logs when it is collected, as a pending task does."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        logging.getLogger("asyncio").error("Task was destroyed but it is pending!")


@pytest.mark.parametrize("where", ["caller", "writer"])
def test_finalizer_that_logs_while_a_line_is_logged_does_not_deadlock(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Collecting(io.StringIO):
        def write(self, text: str) -> int:
            if where == "writer":
                gc.collect()
            return super().write(text)

    out = Collecting()
    logs.configure("info", "json", out)
    if where == "caller":
        enqueue = LogQueue.enqueue

        def collecting(self: LogQueue, line: str) -> None:
            gc.collect()
            enqueue(self, line)

        monkeypatch.setattr(LogQueue, "info", collecting)

    def lose() -> None:
        Finalized()
        structlog.get_logger().info("first")

    thread = threading.Thread(target=lose, daemon=True)
    gc.disable()
    try:
        thread.start()
        thread.join(5)
        logs.flush()
    finally:
        gc.enable()
    assert not thread.is_alive()
    assert {line["event"] for line in lines(out)} == {"first", "library"}


class Full(io.StringIO):
    """A stream on a disk that is full for as long as a test likes."""

    is_full = True

    def flush(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_lines_that_cannot_be_written_are_counted(queue_of: Callable[[TextIO], LogQueue]) -> None:
    out, before = Full(), lost_lines()
    queue = queue_of(out)
    for number in range(3):
        queue.info(f"{number}")
    queue.flush()
    assert lost_lines() - before == 3
    out.is_full = False
    queue.info("4")
    queue.flush()
    assert out.getvalue().endswith("4\n")
    assert lost_lines() - before == 3


def test_line_cut_off_by_a_full_disk_leaves_the_next_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue_of: Callable[[TextIO], LogQueue]
) -> None:
    room, file, really = 9, tmp_path / "log", os.write

    def write(fd: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = really(fd, data[:room])
        room -= written
        return written

    monkeypatch.setattr(os, "write", write)
    with file.open("a") as out:
        queue = queue_of(out)
        for _ in range(3):
            queue.info("12345")
            queue.flush()
        room = 100
        for _ in range(2):
            queue.info("é")
            queue.flush()
    assert file.read_text() == "12345\n123\né\né\n"


def test_queue_of_a_closed_stream_writes_to_no_other_file(
    tmp_path: Path, queue_of: Callable[[TextIO], LogQueue]
) -> None:
    out = (tmp_path / "log").open("a")
    queue, number, before = queue_of(out), out.fileno(), lost_lines()
    out.close()
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    assert other == number
    queue.info("1")
    queue.flush()
    assert (os.fstat(other).st_size, lost_lines() - before) == (0, 1)
    os.close(other)


def test_queue_of_a_gone_reader_counts_its_lines(queue_of: Callable[[TextIO], LogQueue]) -> None:
    reading, writing = os.pipe()
    before = lost_lines()
    with os.fdopen(writing, "w") as out:
        queue = queue_of(out)
        os.close(reading)
        for _ in range(3):
            queue.info("x")
            queue.flush()
    assert lost_lines() - before == 3


@pytest.mark.parametrize("blocking", [True, False])
async def test_stalled_reader_gets_all_lines_in_order_later(
    blocking: bool, queue_of: Callable[[TextIO], LogQueue]
) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, blocking)
    with os.fdopen(writing, "w") as out:
        queue, before = queue_of(out), lost_lines()
        expected = "".join(f"{number} {'x' * 90}é\n" for number in range(3000))
        for line in expected.splitlines():
            queue.info(line)
        read = b""
        async with asyncio.timeout(10):
            while len(read) < len(expected.encode()):
                read += await asyncio.to_thread(os.read, reading, 1 << 16)
        assert read.decode() == expected
        assert lost_lines() == before
    os.close(reading)


def test_full_queue_drops_its_oldest_lines(
    monkeypatch: pytest.MonkeyPatch, queue_of: Callable[[TextIO], LogQueue]
) -> None:
    monkeypatch.setattr(logs, "MAX_QUEUED", 10)
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as out:
        queue, before = queue_of(out), lost_lines()
        for number in range(200):
            queue.info(f"{number} {'x' * 995}")
            time.sleep(0.001 if number < 150 else 0)
        lost = lost_lines() - before
        read = b""
        while len(read.splitlines()) < 200 - lost or not read.endswith(b"\n"):
            read += os.read(reading, 1 << 16)
    numbers = [int(line.split()[0]) for line in read.decode().splitlines()]
    assert 0 < lost < 190
    assert numbers == sorted(numbers)
    assert numbers[-10:] == [*range(190, 200)]
    os.close(reading)
