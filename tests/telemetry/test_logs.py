from __future__ import annotations

import gc
import io
import logging
import threading

import orjson
import pytest
import structlog

from smetric.errors import ConfigError
from smetric.telemetry import logs


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


def lines(out: io.StringIO) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in out.getvalue().splitlines()]


def test_a_line_is_one_json_object_whatever_a_client_sent(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    structlog.get_logger().info("request", model="a\r\n\x1b[31m\u2028b\x85", path="x" * 10_000, status=200)
    (line,) = out.getvalue().splitlines()
    assert "\x1b" not in line
    shown = orjson.loads(line)
    assert shown["event"] == "request"
    assert shown["level"] == "info"
    assert shown["timestamp"].endswith("Z")
    assert shown["status"] == 200
    assert shown["model"].isprintable()
    assert len(shown["path"]) == 256


def test_texts_in_a_list_are_bounded_and_escaped_as_well(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    structlog.get_logger().info("odd", names=["\udcff", "a\nb", "x" * 10_000, 7])
    (line,) = lines(out)
    assert line["names"] == ["\\udcff", "a\\nb", "x" * 255 + "…", 7]


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_a_terminal_has_colours_unless_no_color_is_set(
    out: io.StringIO, monkeypatch: pytest.MonkeyPatch, no_color: str, is_coloured: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(out, "isatty", lambda: True)
    logs.configure("info", "auto", out)
    structlog.get_logger().info("smetric.ready")
    assert "smetric.ready" in out.getvalue()
    assert ("\x1b[" in out.getvalue()) is is_coloured


def test_a_console_line_is_one_line_too(out: io.StringIO) -> None:
    logs.configure("info", "console", out)
    structlog.get_logger().info("request", model="a\r\nb\x1b[31m")
    assert len(out.getvalue().splitlines()) == 1
    assert "\x1b" not in out.getvalue()


def test_levels_filter(out: io.StringIO) -> None:
    logs.configure("warning", "json", out)
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines(out)] == ["loud"]


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
    assert "canary" not in out.getvalue()
    first, second = lines(out)
    assert (first["event"], first["logger"], first["message"]) == ("library", "aiohttp.client", "cannot parse %r")
    assert (second["exception"], second["message"]) == ("ValueError", "Task exception was never retrieved")
    assert "test_logs.py:" in str(second["raised_at"])


def test_a_library_may_have_levels_of_its_own(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    for level in (35, 60):
        logging.getLogger("library").log(level, f"of level {level}")
    assert [(line["message"], line["level"]) for line in lines(out)] == [
        ("of level 35", "warning"),
        ("of level 60", "critical"),
    ]


class Lost:
    """Logs when it is collected, as a task does that nobody waited for."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        logging.getLogger("asyncio").error("Task was destroyed but it is pending!")


@pytest.mark.slow
def test_what_is_collected_while_a_line_is_written_may_log() -> None:
    class Collecting(io.StringIO):
        def write(self, text: str) -> int:
            gc.collect()
            return super().write(text)

    out = Collecting()
    logs.configure("info", "json", out)

    def lose() -> None:
        Lost()
        structlog.get_logger().info("first")

    thread = threading.Thread(target=lose, daemon=True)
    gc.disable()
    try:
        thread.start()
        thread.join(5)
    finally:
        gc.enable()
    assert not thread.is_alive()
    assert [line["event"] for line in lines(out)] == ["first", "library"]


def test_of_a_warning_its_place_and_kind_are_written(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    logging.getLogger("py.warnings").warning("/lib/x.py:3: UserWarning: a prompt: with\ntwo lines\n  its source\n")
    (line,) = lines(out)
    assert (line["event"], line["message"]) == ("library", "/lib/x.py:3: UserWarning")


def test_an_exception_of_ours_is_written_without_its_text(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    try:
        raise KeyError("canary")
    except KeyError as error:
        structlog.get_logger().exception("smetric.policy.failed")
        structlog.get_logger().error("again", exc_info=error)
    assert "canary" not in out.getvalue()
    for line in lines(out):
        assert line["exception"] == "KeyError"
        assert "test_an_exception_of_ours" in str(line["raised_at"])
        assert "exc_info" not in line


def fail(limit: logs.ExceptionLimit, event: str, number: int) -> dict[str, object] | None:
    """The line of an exception, None where it is kept back; every *number* is another place."""
    try:
        if number:
            raise KeyError(number)
        raise KeyError(0)
    except KeyError as error:
        try:
            return dict(limit(None, "error", {"event": event, "exc_info": error}))
        except structlog.DropEvent:
            return None


def test_an_exception_that_repeats_is_written_once_a_minute_with_how_many_there_were() -> None:
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


def test_the_exporters_messages_keep_their_arguments_and_say_how_many_were_kept_back(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    now = 0.0
    handler = logs.LibraryHandler(lambda: now)
    record = logging.LogRecord("opentelemetry.x", logging.ERROR, "f", 1, "Failed to export: %s", ("refused",), None)
    for _ in range(4):
        handler.emit(record)
    now = 60.0
    handler.emit(record)
    first, second = lines(out)
    assert first["message"] == "Failed to export: refused"
    assert "kept_back" not in first
    assert second["kept_back"] == 3


def test_what_follows_the_path_of_a_collectors_address_is_left_out(out: io.StringIO) -> None:
    logs.configure("info", "json", out)
    text = "Transient error %s"
    reason = ("Max retries exceeded with url: /v1/traces?key=secret (Caused by ...)",)
    logs.LibraryHandler().emit(logging.LogRecord("opentelemetry.x", logging.ERROR, "f", 1, text, reason, None))
    (line,) = lines(out)
    assert line["message"] == "Transient error Max retries exceeded with url: /v1/traces?… (Caused by ...)"


def test_setting_up_again_replaces(out: io.StringIO) -> None:
    logs.configure("info", "json", io.StringIO())
    logs.configure("info", "json", out)
    logging.getLogger("x").error("once")
    assert len(lines(out)) == 1


def test_what_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="log level 'loud' is not one of debug, info"):
        logs.configure("loud")
    with pytest.raises(ConfigError, match="log format 'xml' is not one of auto, json, console"):
        logs.configure("info", "xml")
