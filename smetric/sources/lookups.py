"""Looks a request up in all sources, best first and within one deadline, and tells them what becomes of it.

No source can cost a request more than the deadline, and none can fail it: what one raises is a fault of ours, counted
and logged, and what it should have said is unknown. When something is looked up is the router's business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import structlog

from smetric.fleet.instance import Instance
from smetric.fleet.lease import Lease
from smetric.request import InferenceRequest
from smetric.sources.follower import Follower
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
        limit = LogLimit(clock)
        known = [(source, _Failures(source.name, on_failed, limit)) for source in sources]
        followers = [(source, failures) for source, failures in known if isinstance(source, Follower)]
        self._forgetful = [(one, failures) for one, failures in known if one.fills or isinstance(one, Follower)]
        self._sources = [(source, failures) for source, failures in known if source.fills]
        self._describers = [(follower, failures) for follower, failures in followers if follower.describes]
        # Most followers follow one thing only, and most requests pass them all.
        self._sent = [(one.sent, failures) for one, failures in followers if _has_own(one, "sent")]
        self._first_token = [(one.first_token, failures) for one, failures in followers if _has_own(one, "first_token")]
        self._learners = [(source, failures) for source, failures in known if isinstance(source, Learner)]
        self._deadline = deadline

    def of(
        self, request: InferenceRequest, wanted: frozenset[str], candidates: Sequence[Instance]
    ) -> Columns | Awaitable[Columns]:
        """The *wanted* features of *request* over *candidates*, at once where no source has to be waited for.

        Cells that a source does not know fall to the next.
        """
        columns = {name: Column(candidates) for name in wanted}
        sources = iter(self._sources)
        pending = _ask(sources, request, columns, candidates)
        return columns if pending is None else self._wait(pending, sources, request, columns, candidates)

    async def _wait(
        self,
        pending: _Pending | None,
        sources: Iterator[tuple[Source, _Failures]],
        request: InferenceRequest,
        columns: Columns,
        candidates: Sequence[Instance],
    ) -> Columns:
        deadline = asyncio.get_running_loop().time() + self._deadline.of(request.prompt_len)
        while pending is not None:
            source, failures, answer = pending
            try:
                async with asyncio.timeout_at(deadline):
                    found = await answer
                _fill(columns, found, source)
            except TimeoutError:
                pass  # unknown to this source
            except Exception as error:
                failures.add(error)
            pending = _ask(sources, request, columns, candidates)
        return columns

    def describe(self, request: InferenceRequest, fields: frozenset[str]) -> None:
        """Fill those of *fields* of *request* that followers know."""
        for follower, failures in self._describers:
            if not follower.describes.isdisjoint(fields):
                try:
                    follower.describe(request)
                except Exception as error:
                    failures.add(error)

    def sent(self, request: InferenceRequest, lease: Lease) -> None:
        """*request* was charged to an instance."""
        for tell, failures in self._sent:
            try:
                tell(request, lease)
            except Exception as error:
                failures.add(error)

    def first_token(self, lease: Lease, seconds: float) -> None:
        """The stream of a charged request began after *seconds*."""
        for tell, failures in self._first_token:
            try:
                tell(lease, seconds)
            except Exception as error:
                failures.add(error)

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        """*instance* has prefilled *request*."""
        for source, failures in self._sources:
            try:
                source.prefilled(request, instance)
            except Exception as error:
                failures.add(error)

    def settled(self, request: InferenceRequest, instance: Instance, usage: Usage | None) -> None:
        """*instance* has answered *request* to the end."""
        for learner, failures in self._learners:
            try:
                learner.settled(request, instance, usage)
            except Exception as error:
                failures.add(error)

    def forget(self, instance: Instance) -> None:
        """*instance* restarted."""
        for source, failures in self._forgetful:
            try:
                source.forget(instance)
            except Exception as error:
                failures.add(error)


def _ask(
    sources: Iterator[tuple[Source, _Failures]],
    request: InferenceRequest,
    columns: Columns,
    candidates: Sequence[Instance],
) -> _Pending | None:
    """Ask those of *sources* that can fill what is open, until one has to be waited for; None where none has."""
    for source, failures in sources:
        if source.fills.isdisjoint([name for name, column in columns.items() if column.open]):
            continue
        try:
            answer = source.lookup(request, candidates)
            if not isinstance(answer, Mapping):
                return source, failures, answer
            _fill(columns, answer, source)
        except Exception as error:
            failures.add(error)
    return None


def _fill(columns: Columns, found: Mapping[str, Cells], source: Source) -> None:
    for name, cells in found.items():
        if name in columns:
            columns[name].fill(cells, source.name)


def _has_own(follower: Follower, name: str) -> bool:
    """Whether *follower* does anything when it is told of *name*."""
    return getattr(type(follower), name) is not getattr(Follower, name)


class _Failures:
    """What one source raises is counted, and logged unless something of it was logged just now."""

    __slots__ = ("_limit", "_on_failed", "_source")

    def __init__(self, source: str, on_failed: Callable[[str], None], limit: LogLimit) -> None:
        self._source = source
        self._on_failed = on_failed
        self._limit = limit

    def add(self, error: Exception) -> None:
        """The source raised *error*."""
        self._on_failed(self._source)
        if (kept_back := self._limit.passes(self._source)) is not None:
            log.error("smetric.source.failed", source=self._source, kept_back=kept_back, exc_info=error)


class Column:
    """One look-up feature over the candidates it was asked for, and which source gave each cell."""

    __slots__ = ("_is_empty", "candidates", "cells", "open", "origins")

    def __init__(self, candidates: Sequence[Instance]) -> None:
        self.candidates = candidates
        self.cells: list[float | None] = [None] * len(candidates)
        self.origins: list[str] = [""] * len(candidates)
        #: Whether a cell is still unknown.
        self.open = True
        self._is_empty = True

    def fill(self, cells: Cells, source: str) -> None:
        """Take the cells that are still unknown: sources are asked best first, so what is known stays."""
        if self._is_empty:
            self._is_empty = False
            self.cells = list(cells)
            self.open = None in self.cells
            self.origins = ["" if c is None else source for c in cells] if self.open else [source] * len(cells)
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


Columns: TypeAlias = dict[str, Column]
#: A source that has been asked, and what is awaited of it.
_Pending: TypeAlias = tuple[Source, _Failures, Awaitable[Mapping[str, Cells]]]
