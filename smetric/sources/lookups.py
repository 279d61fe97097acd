"""Look-ups of a decision, best source first, under one deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import structlog

from smetric.fleet.instance import Instance, Lease
from smetric.log_limit import LogLimit
from smetric.policy.snapshot import Origins
from smetric.request.request import InferenceRequest, Usage
from smetric.sources.source import Cells, Follower, Source

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
        deadline: the time the look-ups of one decision may take together.
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
        self._known = known
        self._sources = [(source, failures) for source, failures in known if source.fills]
        self._describers = [(follower, failures) for follower, failures in followers if follower.describes]
        self._described = frozenset[str]().union(*[follower.describes for follower, _ in self._describers])
        # Most want to be told of one thing only, and most requests pass them all.
        self._sent = [(one.sent, failures) for one, failures in followers if _has_own(one, Follower.sent)]
        self._first_token = [
            (one.first_token, failures) for one, failures in followers if _has_own(one, Follower.first_token)
        ]
        self._prefilled = [(one.prefilled, failures) for one, failures in known if _has_own(one, Source.prefilled)]
        self._settled = [(one.settled, failures) for one, failures in known if _has_own(one, Source.settled)]
        self._deadline = deadline

    def of(
        self, request: InferenceRequest, wanted: frozenset[str], candidates: Sequence[Instance], spent_s: float = 0.0
    ) -> Columns | Awaitable[Columns]:
        """The *wanted* features of *request* over *candidates*, at once where no source has to be waited for.

        Cells that a source does not know fall to the next. Of its time the decision has spent *spent_s* already.
        """
        columns: Columns = {}
        sources = iter(self._sources)
        pending = _ask(sources, request, wanted, columns, candidates)
        if pending is None:
            return columns
        within_s = self._deadline.of(request.prompt_len) - spent_s
        return self._wait(pending, sources, request, wanted, columns, candidates, within_s)

    async def _wait(
        self,
        pending: _Pending | None,
        sources: Iterator[tuple[Source, _Failures]],
        request: InferenceRequest,
        wanted: frozenset[str],
        columns: Columns,
        candidates: Sequence[Instance],
        within_s: float,
    ) -> Columns:
        deadline = asyncio.get_running_loop().time() + within_s
        while pending is not None:
            source, failures, answer = pending
            try:
                async with asyncio.timeout_at(deadline):
                    found = await answer
                _fill(columns, wanted, found, source, candidates)
            except TimeoutError:
                pass  # unknown to this source
            except Exception as error:
                failures.add(error)
            pending = _ask(sources, request, wanted, columns, candidates)
        return columns

    def describe(self, request: InferenceRequest, fields: frozenset[str]) -> None:
        """Fill those of *fields* of *request* that followers know."""
        if self._described.isdisjoint(fields):
            return
        request.is_described = True
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
        for tell, failures in self._prefilled:
            try:
                tell(request, instance)
            except Exception as error:
                failures.add(error)

    def settled(self, request: InferenceRequest, instance: Instance, usage: Usage | None) -> None:
        """*instance* has answered *request* to the end."""
        for tell, failures in self._settled:
            try:
                tell(request, instance, usage)
            except Exception as error:
                failures.add(error)

    def forget(self, instance: Instance) -> None:
        """*instance* restarted."""
        for source, failures in self._known:
            try:
                source.forget(instance)
            except Exception as error:
                failures.add(error)


def _ask(
    sources: Iterator[tuple[Source, _Failures]],
    request: InferenceRequest,
    wanted: frozenset[str],
    columns: Columns,
    candidates: Sequence[Instance],
) -> _Pending | None:
    """Ask those of *sources* that can fill what is open, until one has to be waited for; None where none has.

    Then there is a column for all that is *wanted*, also for what nobody knows.
    """
    for source, failures in sources:
        is_open = [name for name in wanted if name not in columns or columns[name].open] if columns else wanted
        if source.fills.isdisjoint(is_open):
            continue
        try:
            answer = source.lookup(request, candidates)
            if not isinstance(answer, dict):
                return source, failures, answer
            _fill(columns, wanted, answer, source, candidates)
        except Exception as error:
            failures.add(error)
    for name in wanted:
        if name not in columns:
            columns[name] = Column(candidates, [None] * len(candidates), "")
    return None


def _fill(
    columns: Columns,
    wanted: frozenset[str],
    found: dict[str, Cells],
    source: Source,
    candidates: Sequence[Instance],
) -> None:
    for name, cells in found.items():
        if name in columns:
            columns[name].fill(cells, source.name)
        elif name in wanted:
            columns[name] = Column(candidates, cells, source.name)


def _has_own(source: Source, told: Callable[..., None]) -> bool:
    """Whether *source* does anything when it is *told*, a method of what it derives from."""
    return getattr(type(source), told.__name__) is not told


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
    """One look-up feature over the candidates it was asked for, and which source gave each cell.

    Args:
        candidates: those asked for.
        cells: what the first source that knows something of it says.
        source: its name.
    """

    __slots__ = ("candidates", "cells", "open", "origins")

    def __init__(self, candidates: Sequence[Instance], cells: Cells, source: str) -> None:
        self.candidates = candidates
        self.cells = cells
        #: Whether a cell is still unknown.
        self.open = None in cells
        self.origins: Origins = source

    def fill(self, cells: Cells, source: str) -> None:
        """Take the cells that are still unknown: sources are asked best first, so what is known stays."""
        if not self.open:
            return
        each = zip(self.cells, self._origin_of_each(), cells, strict=True)
        merged = [(new, source) if old is None and new is not None else (old, origin) for old, origin, new in each]
        self.cells, self.origins = [cell for cell, _ in merged], [origin for _, origin in merged]
        self.open = None in self.cells

    def over(self, candidates: Sequence[Instance]) -> tuple[Cells, Origins]:
        """The column for *candidates*, which may differ from those asked for: new ones are unknown."""
        if candidates == self.candidates:
            return self.cells, self.origins
        each = zip(self.candidates, self.cells, self._origin_of_each(), strict=True)
        known = {instance: (cell, origin) for instance, cell, origin in each}
        over = [known.get(instance, (None, "")) for instance in candidates]
        return [cell for cell, _ in over], [origin for _, origin in over]

    def _origin_of_each(self) -> Sequence[str]:
        origins = self.origins
        return ["" if cell is None else origins for cell in self.cells] if isinstance(origins, str) else origins


Columns: TypeAlias = dict[str, Column]
#: A source that has been asked, and what is awaited of it.
_Pending: TypeAlias = tuple[Source, _Failures, Awaitable[dict[str, Cells]]]
