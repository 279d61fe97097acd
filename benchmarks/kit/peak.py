"""The most memory that a process takes while something is going on."""

from __future__ import annotations

import threading
from types import TracebackType

from benchmarks.kit.process import Process

#: Seconds between two looks.
EVERY_S = 0.1


class Peak:
    """Looks at the memory of *process*, if there is one, from a thread, as long as its context lasts."""

    def __init__(self, process: Process | None) -> None:
        #: The most so far.
        self.bytes = 0
        self._process = process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        assert self._process is not None
        while not self._ended.wait(EVERY_S):
            self.bytes = max(self.bytes, self._process.rss_bytes())

    def __enter__(self) -> Peak:
        if self._process is not None:
            self.bytes = self._process.rss_bytes()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._process is not None:
            self._thread.join()
