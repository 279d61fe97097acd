"""Log lines."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import select
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import msgspec
import orjson
import structlog
from msgspec import UNSET, Struct, UnsetType
from structlog.typing import EventDict, Processor, WrappedLogger

from smetric.errors import ConfigError, HttpError, RequestError
from smetric.fleet.exchange import Exchange, Listener
from smetric.fleet.record import safe
from smetric.log_limit import CHANGES_TOLD, LogLimit

if TYPE_CHECKING:
    from smetric.fleet.record import DecisionRecord


# Where log lines end up: a text stream, written at once for most lines, a few times a second for those that can wait.
#
# A log that cannot be written, as its terminal is gone or its disk full, costs its lines and nothing else; one whose
# reader has stopped for a while keeps nobody waiting. What a line says is decided elsewhere.

#: Longest that a line waits, seconds, and most lines that do. One write of the kernel costs more than making a line.
WAIT_S = 0.05
MOST_WAITING = 256
#: Most lines kept for a reader who takes none; beyond that the oldest are lost.
MOST_KEPT = 10_000
#: Bytes that a pipe takes without waiting if it takes any (PIPE_BUF).
_PIECE = 4096


class LogLines:
    """A stream for loggers. Lines come out in the order they went in, those that can wait before what makes them.

    Args:
        out: where they are written.
    """

    #: Lines that could not be written, of all streams of this process.
    lost: ClassVar[int] = 0

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._fd = _fd_of(out)
        self._room = _room_of(self._fd)
        #: What was written last ends within a line, as the disk was full then.
        self._is_cut = False
        self._waiting: list[str] = []
        self._is_due = False
        #: The thread that writes may come here again: what it has made for that collects what is lost, and an object
        #: that is lost may log, as a task does that nobody waited for.
        self._lock = threading.RLock()
        self._is_writing = False

    def write(self, text: str) -> None:
        """Take *text*; `flush` writes it. Any thread may call these two."""
        self._waiting.append(text)

    def flush(self) -> None:
        """Write all that waits, as far as there is room for it."""
        with self._lock:
            if self._is_writing:
                return  # and goes on with this line
            self._is_writing = True
            try:
                while self._waiting and (self._room is None or self._room.poll(0)):
                    self._write_next()
                if (excess := len(self._waiting) - MOST_KEPT) > 0:
                    self._drop(excess)
            finally:
                self._is_writing = False
        if self._waiting and not self._is_due:
            self._flush_soon()

    def line(self, text: str) -> None:
        """Write a line at once: what structlog's loggers end in, each of the methods that they call."""
        self.write(f"{text}\n")
        self.flush()

    debug = info = warning = error = critical = line

    def write_soon(self, text: str) -> None:
        """Write *text* within `WAIT_S`, together with others; at once where no event loop runs."""
        self._waiting.append(text)
        if self._is_due:
            if len(self._waiting) >= MOST_WAITING:
                self.flush()
        elif not self._flush_soon():
            self.flush()

    def _write_next(self) -> None:
        """Write as many lines as there is room for, at least one."""
        waiting = self._waiting
        count = len(waiting) if self._room is None else _fitting(waiting)
        try:
            self._write("".join(waiting[:count]))
        except (OSError, ValueError):  # the latter where it was closed
            self._drop(count)
        else:
            del waiting[:count]

    def _write(self, text: str) -> None:
        if self._fd is None:
            self._out.write(text)
            self._out.flush()
            return
        if self._out.closed:  # its number may be another file's by now
            raise ValueError
        rest = b"\n" * self._is_cut + text.encode(errors="replace")
        while rest:
            written = os.write(self._fd, rest)
            self._is_cut = not rest.endswith(b"\n", 0, written)
            rest = rest[written:]

    def _drop(self, count: int) -> None:
        del self._waiting[:count]
        LogLines.lost += count

    def _flush_soon(self) -> bool:
        """Have the running loop flush in a while; false where none runs."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False
        self._is_due = True
        loop.call_later(WAIT_S, self._flush_due)
        return True

    def _flush_due(self) -> None:
        self._is_due = False
        self.flush()


def _fd_of(out: TextIO) -> int | None:
    try:
        return out.fileno()
    except OSError:  # it is in memory
        return None


def _room_of(fd: int | None) -> select.poll | None:
    """Tells whether *fd* takes a piece without waiting for a reader; None where there is nobody to wait for."""
    if fd is None:
        return None
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)):
        return None
    room = select.poll()
    room.register(fd, select.POLLOUT)
    return room


def _fitting(lines: list[str]) -> int:
    """How many of *lines* make a piece, at least one."""
    size = 0
    for count, line in enumerate(lines):
        size += len(line) if line.isascii() else len(line.encode())
        if count and size > _PIECE:
            return count
    return len(lines)


# How log lines look and where they go: structlog, one JSON object a line, readable text on a terminal.
#
# What is logged is decided where it happens. Records of other libraries come through here too, rate-limited and
# without their arguments: those quote bytes of requests.

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


# The access log: one line for every request, at a fraction of what the loggers' processors cost.
#
# Where lines go and how they look is set up in `logs.py`, and honoured here.


class AccessLine(Line):
    """What is said of one request, bounded and printable; what is UNSET is not said."""

    path: str | UnsetType = UNSET
    status: int | UnsetType = UNSET
    bytes: int | UnsetType = UNSET
    duration_s: float | UnsetType = UNSET
    trace_id: str | UnsetType = UNSET
    ttft_s: float | UnsetType = UNSET
    error_type: str | UnsetType = UNSET
    gave_up: str | UnsetType = UNSET
    decision_id: str | UnsetType = UNSET
    outcome: str | UnsetType = UNSET
    route: str | UnsetType = UNSET
    policy: str | UnsetType = UNSET
    rule: str | UnsetType = UNSET
    instance: str | UnsetType = UNSET
    api: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    turn: int | UnsetType | None = UNSET
    prompt_len: int | UnsetType = UNSET
    hit: int | UnsetType = UNSET
    prompt_tokens: int | UnsetType | None = UNSET
    cached_tokens: int | UnsetType | None = UNSET
    completion_tokens: int | UnsetType | None = UNSET
    held_s: float | UnsetType = UNSET
    lookup_s: float | UnsetType = UNSET
    arm: str | UnsetType = UNSET
    migrated_from: str | UnsetType = UNSET
    guard: str | UnsetType = UNSET
    left_tokens: int | UnsetType | None = UNSET
    attempts: int | UnsetType = UNSET
    event: str = "request"


class AccessLog(Listener):
    """Writes lines the way that logging was set up when this was made: before the first request, after the settings."""

    def __init__(self) -> None:
        # Bound here: binding anew for each line costs more than the line.
        self._logger = structlog.get_logger("smetric.access").bind()
        self._processors: list[Any] = structlog.get_config()["processors"]
        #: Whether lines are wanted at all; if not, none need be made.
        self.is_on: bool = self._logger.is_enabled_for(logging.INFO)
        self._refusals = LogLimit(lines=CHANGES_TOLD)

    def ended(self, exchange: Exchange) -> None:
        """Write the line of a request."""
        if not self.is_on:
            return
        record, ttft_s = exchange.record, exchange.ttft_s
        self.write(
            AccessLine(  # by position: by name it takes twice as long
                exchange.route,
                exchange.status,
                exchange.bytes_out,
                _rounded(exchange.duration_s),
                exchange.trace_id or UNSET,
                UNSET if ttft_s is None else _rounded(ttft_s),
                exchange.error_type or UNSET,
                exchange.gave_up or UNSET,
                *(() if record is None else _of_decision(record, len(exchange.attempts))),
            )
        )

    def unreadable(self, problem: HttpError, scope: Mapping[str, Any], is_seen: bool) -> None:
        """Warn of a request that is no HTTP as served here; a broken client may send nothing else."""
        # Refusals of other kinds say nothing of the request.
        if isinstance(problem, RequestError) and (kept_back := self._refusals.passes(problem.message)) is not None:
            client = scope["client"]
            self._logger.warning(
                "smetric.request.refused",
                status=problem.status,
                reason=problem.message,
                client=client[0] if client else "",
                kept_back=kept_back,
            )

    def write(self, line: AccessLine) -> None:
        """One request."""
        last = self._processors[-1] if self._processors else None
        if isinstance(last, JsonLines):
            last.write_soon(line)
        else:  # lines for people, or another set-up than ours
            fields = msgspec.to_builtins(line)
            del fields["level"], fields["timestamp"]
            self._logger.info(**fields)


def _of_decision(record: DecisionRecord, attempts: int) -> tuple[Any, ...]:
    """The fields from `decision_id` on."""
    request, usage, hit, migration = record.request, record.usage, record.hit, record.migration
    return (
        record.id,
        record.outcome,
        record.route,
        record.policy.name,
        safe(record.rule),
        safe(record.instance.id) if record.instance is not None else "",
        request.api._value_,  # which `value` takes a detour to
        safe(request.model),
        request.turn,
        request.prompt_len,
        UNSET if hit is None else hit[0],
        UNSET if usage is None else usage.prompt_tokens,
        UNSET if usage is None else usage.cached_tokens,
        UNSET if usage is None else usage.completion_tokens,
        _rounded(record.held_s) if record.held_s else UNSET,
        _rounded(record.lookup_s) if record.lookup_s else UNSET,
        record.arm or UNSET,
        UNSET if migration is None else migration.source,
        UNSET if migration is None else safe(migration.guard),
        UNSET if migration is None else migration.left_tokens,
        attempts,
    )


def _rounded(seconds: float) -> float:
    """To microseconds, half a one up; `round` costs four times as much, and to so many places goes through text."""
    return (seconds * 1e6 + 0.5) // 1.0 / 1e6
