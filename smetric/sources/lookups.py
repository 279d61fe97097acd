"""Looks a request up in all sources, best first and within one deadline, and tells them what becomes of it.

No source can cost a request more than the deadline, and none can fail it: what one raises is a fault of ours, counted
and logged, and what it should have said is unknown. When something is looked up is the router's business.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from smetric.fleet.instance import Instance
from smetric.request import InferenceRequest
from smetric.sources.source import Cells, Learner, Source
from smetric.telemetry.log_limit import LogLimit
from smetric.telemetry.record import Usage

log = structlog.get_logger("smetric.sources")


@dataclass(frozen=True, slots=True)
class LookupDeadline:
    """How long look-ups may take: base + per_1k for each thousand prompt tokens, at most cap; seconds."""

    base_s: float = 0.020
    per_1k_s: float = 0.002
    cap_s: float = 0.300

    def of(self, prompt_len: int) -> float:
        """Seconds for a prompt of *prompt_len* tokens."""
        return min(self.cap_s, self.base_s + self.per_1k_s * prompt_len / 1000)


class Lookups:
    """The sources, as the router sees them.

    Args:
        sources: all of them, best first.
        deadline: the time the look-ups of one decision's step may take together.
        on_failed: told the name of a source that raised.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        deadline: LookupDeadline,
        on_failed: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = [source for source in sources if source.fills]
        self._learners = [(source.name, source) for source in sources if isinstance(source, Learner)]
        self._deadline = deadline
        self._on_failed = on_failed
        self._log_limit = LogLimit(clock)

    async def of(
        self, request: InferenceRequest, wanted: frozenset[str], candidates: Sequence[Instance]
    ) -> dict[str, Column]:
        """The *wanted* features of *request* over *candidates*; cells that a source does not know fall to the next."""
        columns = {name: Column(candidates) for name in wanted}
        deadline: float | None = None
        for source in self._sources:
            if not any(name in source.fills and column.open for name, column in columns.items()):
                continue
            with self._sparing(source.name):
                answer = source.lookup(request, candidates)
                if inspect.isawaitable(answer):
                    if deadline is None:
                        deadline = asyncio.get_running_loop().time() + self._deadline.of(request.prompt_len)
                    try:
                        async with asyncio.timeout_at(deadline):
                            answer = await answer
                    except TimeoutError:
                        continue
                assert isinstance(answer, Mapping)
                for name, cells in answer.items():
                    if name in columns:
                        columns[name].fill(cells, source.name)
        return columns

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        """*instance* has prefilled *request*."""
        for source in self._sources:
            with self._sparing(source.name):
                source.prefilled(request, instance)

    def settled(self, request: InferenceRequest, instance: Instance, usage: Usage | None) -> None:
        """*instance* has answered *request* to the end."""
        for name, learner in self._learners:
            with self._sparing(name):
                learner.settled(request, instance, usage)

    def forget(self, instance: Instance) -> None:
        """*instance* restarted."""
        for source in self._sources:
            with self._sparing(source.name):
                source.forget(instance)

    @contextmanager
    def _sparing(self, source: str) -> Iterator[None]:
        """What *source* raises within is counted, and logged unless something of it was logged just now."""
        try:
            yield
        except Exception:
            self._on_failed(source)
            if (kept_back := self._log_limit.passes(source)) is not None:
                log.exception("smetric.source.failed", source=source, kept_back=kept_back)


class Column:
    """One look-up feature over the candidates it was asked for, and which source gave each cell."""

    __slots__ = ("candidates", "cells", "open", "origins")

    def __init__(self, candidates: Sequence[Instance]) -> None:
        self.candidates = candidates
        self.cells: list[float | None] = [None] * len(candidates)
        self.origins: list[str] = [""] * len(candidates)
        #: Whether a cell is still unknown.
        self.open = True

    def fill(self, cells: Cells, source: str) -> None:
        """Take the cells that are still unknown: sources are asked best first, so what is known stays."""
        if all(cell is None for cell in self.cells):
            self.cells = list(cells)
            self.origins = [source if cell is not None else "" for cell in cells]
        else:
            for i, cell in enumerate(cells):
                if self.cells[i] is None and cell is not None:
                    self.cells[i] = cell
                    self.origins[i] = source
        self.open = None in self.cells

    def over(self, candidates: Sequence[Instance]) -> tuple[list[float | None], list[str]]:
        """The column for *candidates*, which may differ from those asked for: new ones are unknown."""
        if candidates == self.candidates:
            return self.cells, self.origins
        at = {instance: i for i, instance in enumerate(self.candidates)}
        return (
            [self.cells[at[i]] if i in at else None for i in candidates],
            [self.origins[at[i]] if i in at else "" for i in candidates],
        )
