"""Log lines: structlog renders them, a queue takes them off the event loop, a thread writes them.

Also here: the records of other libraries, and the access log. Each event is logged where it happens.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from logging import LogRecord
from logging.handlers import QueueHandler, QueueListener
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from smetric.errors import ConfigError, HttpError, RequestError
from smetric.fleet.exchange import Exchange, Listener
from smetric.fleet.record import safe
from smetric.log_limit import CHANGE_LINES, LogLimit

if TYPE_CHECKING:
    from smetric.fleet.record import DecisionRecord

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
FORMATS = ("auto", "json", "console")
#: Lines that wait for a stalled reader; a full queue drops its oldest line.
MAX_QUEUED = 10_000
#: Seconds that the writing thread collects lines for one batch, and the lines of a batch.
BATCH_S = 0.05
MAX_BATCH = 256
#: Seconds that a flush waits for the writing thread.
FLUSH_S = 1.0
#: Query of a URL: it may hold a collector's key.
_QUERY = re.compile(r"\?[^\s'\"]+")
#: Labels of rules and ids of instances as lines show them; they come from files, so they are few.
_shown = lru_cache(1024)(safe)
#: Frames of a traceback in a line.
_MAX_FRAMES = 12


def configure(level: str = "info", format: str = "auto", stream: TextIO | None = None) -> None:
    """Configure the logging of the process; a second call replaces the first.

    Args:
        level: the least severe level written: debug, info, warning, error or critical.
        format: json, console, or auto: console on a terminal.
        stream: where lines are written; standard error by default.

    Raises:
        ConfigError: an unknown level or format.
    """
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    if format not in FORMATS:
        raise ConfigError(f"log format {format!r} is not one of {', '.join(FORMATS)}")
    shutdown()
    out = stream if stream is not None else sys.stderr
    console = format == "console" or (format == "auto" and out.isatty())
    colours = out.isatty() and not os.environ.get("NO_COLOR")
    lines = LogQueue(out)
    processors: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        ExceptionLimit(),
        _drop_exception_text,
        _bound_texts,
        structlog.dev.ConsoleRenderer(colors=colours) if console else JsonRenderer(lines),
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.addHandler(LibraryHandler(lines))
    root.setLevel(max(LEVELS[level], logging.WARNING))


def flush() -> None:
    """Wait at most `FLUSH_S` until the lines so far are written."""
    for handler in _library_handlers():
        handler.lines.flush()


def shutdown() -> None:
    """Write the lines that wait, and end what `configure` began."""
    flush()
    for handler in _library_handlers():
        logging.getLogger().removeHandler(handler)
        handler.lines.close()


def _library_handlers() -> list[LibraryHandler]:
    return [each for each in logging.getLogger().handlers if isinstance(each, LibraryHandler)]


def lost_lines() -> int:
    """Return how many lines of this process were lost: dropped from a full queue, or not writable."""
    return LogQueue.dropped + LineWriter.failed


class LogQueue(QueueHandler):
    """Bounded queue of rendered lines, and the logger that structlog's loggers end in.

    Callers take no lock that is not reentrant: a finalizer may log while its own thread adds a line. `logging.shutdown`
    flushes the queue at exit.

    Args:
        out: where its thread writes the lines.
    """

    #: Lines dropped from full queues of this process.
    dropped: ClassVar[int] = 0

    def __init__(self, out: TextIO) -> None:
        self._lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        super().__init__(self._lines)
        self._writer = LineWriter(self._lines, out)
        self._writer.start()
        self._is_closed = False

    def enqueue(self, record: Any) -> None:
        """Add a line; a full queue drops its oldest one. After `close` a line is written at once."""
        if self._is_closed:
            self._writer.write(record)
            return
        lines = self._lines
        if lines.qsize() >= MAX_QUEUED:
            try:
                oldest = lines.get_nowait()
            except queue.Empty:
                pass
            else:
                if isinstance(oldest, str):
                    LogQueue.dropped += 1
                else:  # the end of the writer, or the mark of a flush
                    lines.put(oldest)
        lines.put(record)

    debug = info = warning = error = critical = enqueue

    def flush(self) -> None:
        """Wait at most `FLUSH_S` until the lines so far are written."""
        self._writer.flush()

    def close(self) -> None:
        """End the writing thread after the lines so far; a stalled reader delays only the thread."""
        self._is_closed = True
        self._writer.enqueue_sentinel()
        super().close()


class LineWriter(QueueListener):
    """Thread that writes lines in batches: a write per line would cost more than to render it.

    A line that cannot be written, as on a full disk or for a reader that is gone, is lost and counted.

    Args:
        lines: the queue that lines come from.
        out: where they are written.
    """

    #: Lines of this process that could not be written.
    failed: ClassVar[int] = 0

    def __init__(self, lines: queue.SimpleQueue[Any], out: TextIO) -> None:
        super().__init__(lines)
        self._lines = lines
        self._out = out
        try:
            self._fd: int | None = out.fileno()
        except OSError:  # a stream in memory
            self._fd = None
        self._batch: list[str] = []
        self._hurry = threading.Event()
        #: Whether the last write ended within a line, as the disk was full.
        self._is_cut = False

    def flush(self) -> None:
        """Wait at most `FLUSH_S` until the lines so far are written. Any other thread may call this."""
        written = threading.Event()
        self._lines.put(written)
        self._hurry.set()
        written.wait(FLUSH_S)

    def dequeue(self, block: bool) -> Any:
        """Return the next item; an empty queue ends the batch."""
        try:
            return self._lines.get_nowait()
        except queue.Empty:
            self._write_batch()
        self._hurry.wait(BATCH_S)
        self._hurry.clear()
        return self._lines.get(block)

    def handle(self, record: Any) -> None:
        """Add a line to the batch; the mark of a flush ends it."""
        if isinstance(record, str):
            self._batch += record, "\n"
            if len(self._batch) >= 2 * MAX_BATCH:
                self._write_batch()
        else:
            self._write_batch()
            record.set()

    def write(self, line: str) -> None:
        """Write *line* without the thread, unless the reader has stalled."""
        try:
            if self._fd is not None and not select.select([], [self._fd], [], 0)[1]:
                raise BlockingIOError
            self._write(f"{line}\n")
        except (OSError, ValueError):
            LineWriter.failed += 1

    def _write_batch(self) -> None:
        if not self._batch:
            return
        try:
            self._write("".join(self._batch))
        except (OSError, ValueError):  # the latter from a closed stream
            LineWriter.failed += len(self._batch) // 2
        self._batch.clear()

    def _write(self, text: str) -> None:
        # The descriptor, not the stream: at exit the interpreter needs the stream's lock.
        if self._fd is None:
            self._out.write(text)
            self._out.flush()
            return
        if self._out.closed:  # the descriptor may be another file's
            raise ValueError
        rest = b"\n" * self._is_cut + text.encode(errors="replace")
        while rest:
            try:
                written = os.write(self._fd, rest)
            except BlockingIOError:
                select.select([], [self._fd], [])
                continue
            self._is_cut = not rest.endswith(b"\n", 0, written)
            rest = rest[written:]


class ExceptionLimit:
    """Processor that limits repeated exceptions to a line a minute for each event, type and place.

    A bug on the path of every request must not fill the log. A line that has `kept_back` has been limited already.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = LogLimit(clock)

    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> EventDict:
        """Return *event*, with the number of lines suppressed before it.

        Raises:
            structlog.DropEvent: it is suppressed.
        """
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


def _drop_exception_text(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Replace an exception by its type and where it was raised, innermost frame first; its text may quote a request."""
    error = _exception_of(event.pop("exc_info", None))
    if error is not None:
        event["exception"] = type(error).__name__
        frames = traceback.extract_tb(error.__traceback__, limit=-_MAX_FRAMES)
        event["raised_at"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames)]
    return event


def _exception_of(exc_info: Any) -> BaseException | None:
    """Return the exception that a logger was given as `exc_info`."""
    given = sys.exc_info() if exc_info is True else exc_info
    error = given[1] if isinstance(given, tuple) else given
    return error if isinstance(error, BaseException) else None


def _bound_texts(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Bound every string and escape control characters: a line stays one line, on a terminal too."""
    for name, value in event.items():
        if type(value) is str and (len(value) > 256 or not value.isprintable()):
            event[name] = safe(value)
        elif type(value) is list:
            event[name] = [safe(one) if type(one) is str else one for one in value]
    return event


class JsonRenderer:
    """Last processor where lines are JSON.

    Args:
        lines: where the access log puts its lines.
    """

    def __init__(self, lines: LogQueue) -> None:
        self._lines = lines

    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> str:
        """Return *event* as one line."""
        return orjson.dumps(event, default=repr).decode()

    def write(self, event: dict[str, Any]) -> None:
        """Write *event* past the other processors: its texts are bounded and printable."""
        event["level"] = "info"
        event["timestamp"] = datetime.now(UTC)
        self._lines.enqueue(orjson.dumps(event, option=orjson.OPT_UTC_Z).decode())


class LibraryHandler(logging.Handler):
    """Handler that passes the records of other libraries on to structlog, at most one a minute for each message.

    Only the first line of a message's template is written, and of an exception its type and place: arguments and texts
    quote bytes of requests. The exporter's messages are about our own spans and keep their arguments, without queries.

    Args:
        lines: where the lines end up, for `shutdown`.
        clock: monotonic seconds.
    """

    def __init__(self, lines: LogQueue, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.lines = lines
        self._limit = LogLimit(clock)

    def emit(self, record: LogRecord) -> None:
        """Write *record*, or count it as suppressed."""
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


class AccessLog(Listener):
    """Access log: one line for each request, at a third of the cost of the processors.

    It follows the configuration of logging at its creation: after the settings, before the first request.
    """

    def __init__(self) -> None:
        self._logger = structlog.get_logger("smetric.access").bind()
        self._processors: list[Any] = structlog.get_config()["processors"]
        #: Whether the level lets the lines through.
        self.is_on: bool = self._logger.is_enabled_for(logging.INFO)
        self._refusals = LogLimit(lines=CHANGE_LINES)

    def ended(self, exchange: Exchange) -> None:
        """Log the end of a request."""
        if not self.is_on:
            return
        fields: dict[str, Any] = {
            "event": "request",
            "path": exchange.route,
            "status": exchange.status,
            "bytes": exchange.bytes_out,
            "duration_s": round(exchange.duration_s, 6),
        }
        if exchange.error_type:
            fields["error_type"] = exchange.error_type
        if exchange.trace_id:
            fields["trace_id"] = exchange.trace_id
        if exchange.ttft_s is not None:
            fields["ttft_s"] = round(exchange.ttft_s, 6)
        if exchange.gave_up:
            fields["gave_up"] = exchange.gave_up
        if exchange.record is not None:
            _add_decision(fields, exchange.record)
            fields["attempts"] = len(exchange.attempts)
        self.write(fields)

    def unreadable(self, problem: HttpError, scope: Mapping[str, Any], is_seen: bool) -> None:
        """Warn of a request that is not HTTP as served here; a broken client may send nothing else."""
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

    def write(self, fields: dict[str, Any]) -> None:
        """Write a line; texts in *fields* are bounded and printable."""
        last = self._processors[-1] if self._processors else None
        if isinstance(last, JsonRenderer):
            last.write(fields)
        else:  # lines for a terminal, or a configuration that is not ours
            self._logger.info(**fields)


def _add_decision(fields: dict[str, Any], record: DecisionRecord) -> None:
    request, usage, migration = record.request, record.usage, record.migration
    fields |= {
        "decision_id": record.id,
        "outcome": record.outcome,
        "route": record.route,
        "policy": record.policy.name,
        "rule": _shown(record.rule),
        "instance": _shown(record.instance.id) if record.instance is not None else "",
        "api": request.api.value,
        "model": safe(request.model),
        "turn": request.turn,
        "prompt_len": request.prompt_len,
    }
    if record.hit is not None:
        fields["hit"] = record.hit[0]
    if usage is not None:
        fields["prompt_tokens"] = usage.prompt_tokens
        fields["cached_tokens"] = usage.cached_tokens
        fields["completion_tokens"] = usage.completion_tokens
    if record.held_s:
        fields["held_s"] = round(record.held_s, 6)
    if record.lookup_s:
        fields["lookup_s"] = round(record.lookup_s, 6)
    if record.arm:
        fields["arm"] = record.arm
    if migration is not None:
        fields["migrated_from"] = migration.source
        fields["guard"] = safe(migration.guard)
        fields["left_tokens"] = migration.left_tokens
