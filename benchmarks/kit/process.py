"""A process that is measured: started on one core, its CPU time and memory read from /proc, stopped by its id."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

#: Where what is measured runs, and where that which measures it does; the same core on a machine with one.
MEASURED_CORE = max(os.sched_getaffinity(0))
OTHER_CORE = min(os.sched_getaffinity(0))
#: Seconds a process gets between SIGTERM and SIGKILL.
STOP_S = 8.0


class NotReady(Exception):
    """A process ended, or was not ready in time; the text holds the end of its log."""


class Process:
    """A running process and its descendants.

    Args:
        name: for messages.
        popen: leader of its own process group.
        log: what it writes.
    """

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self._popen = popen
        self._log = log

    def cpu_ns(self) -> int:
        """CPU time of all threads of all its processes so far, nanoseconds; ended threads are not in it."""
        total = 0
        for pid in self._tree():
            for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):
                    total += int(task.read_text().split()[0])
        return total

    def rss_bytes(self) -> int:
        """Resident memory of all its processes."""
        total = 0
        for pid in self._tree():
            with contextlib.suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return total

    def _tree(self) -> list[int]:
        found, open_ = [], [self._popen.pid]
        while open_:
            pid = open_.pop()
            found.append(pid)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    open_ += map(int, children.read_text().split())
        return found

    def wait_until(self, is_ready: Callable[[], bool], within_s: float, every_s: float = 0.2) -> None:
        """Wait until *is_ready*.

        Raises:
            NotReady: it is not so after *within_s* seconds, or the process ended.
        """
        end = time.monotonic() + within_s
        while not is_ready():
            if self._popen.poll() is not None or time.monotonic() > end:
                happened = "not ready in time" if self._popen.poll() is None else f"ended with {self._popen.returncode}"
                raise NotReady(f"{self.name}: {happened}: {self._log.read_text(errors='replace')[-2000:].strip()}")
            time.sleep(every_s)

    def send_signal(self, number: int) -> None:
        """Send signal *number* to the process itself."""
        self._popen.send_signal(number)

    def stop(self) -> None:
        """SIGTERM to its process group, SIGKILL if that does not end it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(STOP_S)
                return


@contextmanager
def running(
    name: str, command: Sequence[str], log: Path, *, core: int = MEASURED_CORE, environ: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """Start *command* on *core*, its output going to the file *log*, and stop it at the end.

    Args:
        name: for messages.
        command: program and arguments.
        log: file for both of its outputs.
        core: the CPU it may use.
        environ: variables added to ours.
    """
    with log.open("wb") as out, on_core(core):
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **(environ or {})},
            cwd=log.parent,
            start_new_session=True,
        )
    process = Process(name, popen, log)
    try:
        yield process
    finally:
        process.stop()


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Processes started inside run on *core*."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
