"""How log lines look and where they go: structlog, one JSON object a line, readable text on a terminal.

What is logged is decided where it happens. Records of other libraries come through here too, rate-limited and
without their arguments: those quote bytes of requests.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

import msgspec
import orjson
import structlog
from msgspec import Struct
from structlog.typing import EventDict, Processor, WrappedLogger

from smetric.errors import ConfigError
from smetric.telemetry.client_text import safe
from smetric.telemetry.log_limit import LogLimit
from smetric.telemetry.log_lines import LogLines

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
FORMATS = ("auto", "json", "console")
#: What follows a URL's path: collectors' keys, maybe.
_QUERY = re.compile(r"\?[^\s'\"]+")
#: Frames of a traceback written.
_FRAMES = 12
_encode_lines = msgspec.json.Encoder().encode_lines


def configure(level: str = "info", format: str = "auto", stream: TextIO | None = None) -> None:
    """Set logging up for the process.

    Args:
        level: the least severe level written: debug, info, warning, error or critical.
        format: json, console, or auto: console on a terminal.
        stream: where to write; standard error by default.

    Raises:
        ConfigError: an unknown level or format.
    """
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    if format not in FORMATS:
        raise ConfigError(f"log format {format!r} is not one of {', '.join(FORMATS)}")
    out = stream if stream is not None else sys.stderr
    console = format == "console" or (format == "auto" and out.isatty())
    colours = out.isatty() and not os.environ.get("NO_COLOR")
    lines, stamp = LogLines(out), Stamp()
    processors: list[Processor] = [
        structlog.processors.add_log_level,
        stamp,
        ExceptionLimit(),
        _without_text,
        _bounded,
        structlog.dev.ConsoleRenderer(colors=colours) if console else JsonLines(lines, stamp),
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, LibraryHandler)]:
        root.removeHandler(handler)
    root.addHandler(LibraryHandler())
    root.setLevel(max(LEVELS[level], logging.WARNING))


class ExceptionLimit:
    """Keeps back exceptions that repeat: one line a minute for each event, type and place, with how many there were.

    A bug in what every request goes through must not fill the log. Lines that say what they kept back have been limited
    already.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = LogLimit(clock)

    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> EventDict:
        """*event*, or none of it."""
        error = _exception_of(event.get("exc_info"))
        if error is None or "kept_back" in event:
            return event
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        place = (trace.tb_frame.f_code, trace.tb_lineno) if trace is not None else None
        kept_back = self._limit.passes((event["event"], type(error), place))
        if kept_back is None:
            raise structlog.DropEvent
        if kept_back:
            event["kept_back"] = kept_back
        return event


class Stamp:
    """Adds the time of a line, ISO 8601 in UTC; the second is written out once, and only its fraction every time."""

    def __init__(self) -> None:
        self._second = ""
        self._written = ""

    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> EventDict:
        """Stamp *event*."""
        event["timestamp"] = self.now()
        return event

    def now(self) -> str:
        """The time."""
        digits = str(time.time_ns())
        second, microseconds = digits[:-9], digits[-9:-3]
        if second != self._second:
            self._written = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(int(second)))
            self._second = second
        return f"{self._written}.{microseconds}Z"


class Line(Struct, kw_only=True):
    """A line made for speed: its fields are declared, so that no dictionary of them is built."""

    level: str = "info"
    timestamp: str = ""


class JsonLines:
    """The last processor where lines are JSON; lines that are made for speed pass by all others.

    Args:
        lines: where those are written.
        stamp: tells the time.
    """

    def __init__(self, lines: LogLines, stamp: Stamp) -> None:
        self._lines = lines
        self._stamp = stamp

    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> str:
        """*event* as one line."""
        return orjson.dumps(event, default=repr).decode()

    def write_soon(self, line: Line) -> None:
        """Write *line*, whose fields are bounded and printable already, within a moment."""
        line.timestamp = self._stamp.now()
        self._lines.write_soon(_encode_lines((line,)).decode())


class LibraryHandler(logging.Handler):
    """Passes records of the standard library's loggers on to structlog.

    Only the first line of a message's template is written, never its arguments, and of an exception only its type and
    place: texts of parsers and HTTP clients quote the bytes they choked on. The exporter's messages are about our own
    spans and keep their arguments, but not what follows a URL's path.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limit = LogLimit(clock)

    def emit(self, record: logging.LogRecord) -> None:
        """Write *record*, or count it as kept back."""
        template = str(record.msg).partition("\n")[0]
        if record.name == "py.warnings":
            template = ":".join(template.split(":", 3)[:3])  # place and kind: its text may quote anything
        kept_back = self._limit.passes((record.name, template))
        if kept_back is None:
            return
        fields: dict[str, Any] = {"logger": record.name, "message": template}
        if record.name.startswith("opentelemetry"):
            fields["message"] = _QUERY.sub("?…", record.getMessage())
        if kept_back:
            fields["kept_back"] = kept_back
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        level = min(50, record.levelno // 10 * 10)  # a library may have levels of its own between ours
        structlog.get_logger("smetric.library").log(level, "library", **fields)


def _without_text(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Write of an exception its type and where it was raised, innermost frame first; never its text."""
    error = _exception_of(event.pop("exc_info", None))
    if error is not None:
        event["exception"] = type(error).__name__
        frames = traceback.extract_tb(error.__traceback__, limit=-_FRAMES)
        event["raised_at"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames)]
    return event


def _exception_of(exc_info: Any) -> BaseException | None:
    """What a logger was given as `exc_info`, as an exception."""
    given = sys.exc_info() if exc_info is True else exc_info
    error = given[1] if isinstance(given, tuple) else given
    return error if isinstance(error, BaseException) else None


def _bounded(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Bound every string and escape control characters: a line stays one line, on a terminal too."""
    for name, value in event.items():
        if type(value) is str and (len(value) > 256 or not value.isprintable()):
            event[name] = safe(value)
        elif type(value) is list:
            event[name] = [safe(one) if type(one) is str else one for one in value]
    return event
