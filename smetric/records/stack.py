"""What the settings say is recorded, put together: writers, and what makes their lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from smetric.config import Settings
from smetric.policy import Policy
from smetric.records.compression import packer
from smetric.records.file import RotatedFile
from smetric.records.recorder import Recorder, header
from smetric.records.traffic import Traffic
from smetric.records.writer import Writer


class RecordStack:
    """The records of one router.

    Args:
        settings: which, and where: the section `record`.
        observed: policies that the record of decisions is to be replayed with.
        on_lines: told the record, what became of lines (`names.RECORD_RESULTS`), and how many. From any thread.

    Raises:
        ConfigError: a file is to be packed by something that is not installed.
    """

    def __init__(
        self, settings: Settings, observed: Sequence[Policy], on_lines: Callable[[str, str, int], None]
    ) -> None:
        self._settings = settings
        self._on_lines = on_lines
        #: What is started and stopped with the router.
        self.writers: list[Writer] = []
        #: Writes decisions; None for not at all.
        self.decisions: Recorder | None = None
        if settings.record.path:
            self.decisions = Recorder(self._writer("decisions", Path(settings.record.path), header), observed)
        #: Writes the traffic; None for not at all.
        self.traffic: Traffic | None = None
        if settings.record.trace:
            self.traffic = Traffic(self._writer("trace", Path(settings.record.trace), lambda: b""))

    def follow(self, observed: Sequence[Policy]) -> None:
        """The record of decisions is to be replayed with *observed* from now on."""
        if self.decisions is not None:
            self.decisions.follow(observed)

    def _writer(self, name: str, path: Path, first_line: Callable[[], bytes]) -> Writer:
        settings = self._settings
        writer = Writer(
            name,
            RotatedFile(path, max_bytes=settings.record.max_file, keep=settings.record.keep),
            packer(path),
            first_line,
            max_queued=settings.record.queue,
            on_lines=lambda result, count: self._on_lines(name, result, count),
        )
        self.writers.append(writer)
        return writer
