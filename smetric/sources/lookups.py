"""Look-ups of a decision, best source first, under one deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
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
    """Time that look-ups may take: base + per_1k for each thousand prompt tokens, at most cap; in seconds."""

    base_s: float = 0.020
    per_1k_s: float = 0.002
    cap_s: float = 0.300

    def of(self, prompt_len: int) -> float:
        """Return the seconds for a prompt of *prompt_len* tokens."""
        return min(self.cap_s, self.base_s + self.per_1k_s * prompt_len / 1000)


class LookupColumn:
    """Column of a look-up feature over the candidates it was asked for, with the source of each cell.

    Args:
        candidates: the instances asked for.
        cells: the values of the first source that knows any.
        source: its name.

    Attributes:
        open: whether a cell is still unknown.
    """

    __slots__ = ("candidates", "cells", "open", "origins")

    def __init__(self, candidates: Sequence[Instance], cells: Cells, source: str) -> None:
        self.candidates = candidates
        self.cells = cells
        self.open = None in cells
        self.origins: Origins = source

    def fill(self, cells: Cells, source: str) -> None:
        """Take the cells that are still unknown. Known ones stay, as better sources are asked first."""
        if not self.open:
            return
        each = zip(self.cells, self._origin_of_each(), cells, strict=True)
        merged = [(new, source) if old is None and new is not None else (old, origin) for old, origin, new in each]
        self.cells, self.origins = [cell for cell, _ in merged], [origin for _, origin in merged]
        self.open = None in self.cells

    def over(self, candidates: Sequence[Instance]) -> tuple[Cells, Origins]:
        """Return the cells of *candidates* and their origins; candidates that were not asked for are unknown."""
        if candidates == self.candidates:
            return self.cells, self.origins
        each = zip(self.candidates, self.cells, self._origin_of_each(), strict=True)
        known = {instance: (cell, origin) for instance, cell, origin in each}
        over = [known.get(instance, (None, "")) for instance in candidates]
        return [cell for cell, _ in over], [origin for _, origin in over]

    def _origin_of_each(self) -> Sequence[str]:
        origins = self.origins
        return ["" if cell is None else origins for cell in self.cells] if isinstance(origins, str) else origins


Columns: TypeAlias = dict[str, LookupColumn]


class Lookups:
    """All sources, as the router uses them. A source that raises is logged and counted, and costs no request.

    Args:
        sources: all sources, best first.
        deadline: the time that the look-ups of one decision may take together.
        on_failed: called with the name of a source that raised.
        on_late: called with a request whose look-ups were not there in time.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        deadline: LookupDeadline,
        on_failed: Callable[[str], None],
        on_late: Callable[[InferenceRequest], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadline = deadline
        self._on_failed = on_failed
        self._on_late = on_late
        self._log_limit = LogLimit(clock)
        self._filling = [source for source in sources if source.fills]
        followers = [source for source in sources if isinstance(source, Follower)]
        self._describing = [follower for follower in followers if follower.describes]
        self._described = frozenset[str]().union(*[follower.describes for follower in self._describing])
        # Most sources override few of these methods, and every request passes them.
        self._on_sent = _overriding(followers, Follower.sent)
        self._on_first_token = _overriding(followers, Follower.first_token)
        self._on_prefilled = _overriding(sources, Source.prefilled)
        self._on_settled = _overriding(sources, Source.settled)
        self._on_forget = _overriding(sources, Source.forget)

    def of(
        self, request: InferenceRequest, wanted: frozenset[str], candidates: Sequence[Instance], spent_s: float = 0.0
    ) -> Columns | Awaitable[Columns]:
        """Return the *wanted* features of *request* over *candidates*; an awaitable if a source has to be waited for.

        The next source is asked for cells that are still unknown. *spent_s* seconds of the deadline are spent already.
        """
        columns: Columns = {}
        sources = iter(self._filling)
        pending = self._ask(sources, request, wanted, columns, candidates)
        if pending is None:
            return columns
        within_s = self._deadline.of(request.prompt_len) - spent_s
        return self._wait(pending, sources, request, wanted, columns, candidates, within_s)

    def _ask(
        self,
        sources: Iterator[Source],
        request: InferenceRequest,
        wanted: frozenset[str],
        columns: Columns,
        candidates: Sequence[Instance],
    ) -> _Pending | None:
        """Ask the sources that can fill unknown cells, up to one whose answer has to be awaited; return that one.

        Return None once all are asked. Every *wanted* feature then has a column, even if no source knows it.
        """
        for source in sources:
            is_open = [name for name in wanted if name not in columns or columns[name].open] if columns else wanted
            if source.fills.isdisjoint(is_open):
                continue
            try:
                answer = source.lookup(request, candidates)
                if not isinstance(answer, dict):
                    return source, answer
                _fill(columns, wanted, answer, source, candidates)
            except Exception as error:
                self._failed(source, error)
        for name in wanted:
            if name not in columns:
                columns[name] = LookupColumn(candidates, [None] * len(candidates), "")
        return None

    async def _wait(
        self,
        pending: _Pending | None,
        sources: Iterator[Source],
        request: InferenceRequest,
        wanted: frozenset[str],
        columns: Columns,
        candidates: Sequence[Instance],
        within_s: float,
    ) -> Columns:
        deadline = asyncio.get_running_loop().time() + within_s
        while pending is not None:
            source, answer = pending
            try:
                async with asyncio.timeout_at(deadline):
                    found = await answer
                _fill(columns, wanted, found, source, candidates)
            except TimeoutError:
                self._on_late(request)  # unknown to this source
            except Exception as error:
                self._failed(source, error)
            pending = self._ask(sources, request, wanted, columns, candidates)
        return columns

    def describe(self, request: InferenceRequest, fields: frozenset[str]) -> None:
        """Fill those of *fields* of *request* that followers know."""
        if self._described.isdisjoint(fields):
            return
        request.is_described = True
        self._call(
            [(each, each.describe) for each in self._describing if not each.describes.isdisjoint(fields)], request
        )

    def sent(self, request: InferenceRequest, lease: Lease) -> None:
        """Report to the sources that *request* was charged to an instance."""
        self._call(self._on_sent, request, lease)

    def first_token(self, lease: Lease, seconds: float) -> None:
        """Report to the sources that the stream of a charged request began after *seconds*."""
        self._call(self._on_first_token, lease, seconds)

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        """Report to the sources that *instance* has prefilled *request*."""
        self._call(self._on_prefilled, request, instance)

    def settled(self, request: InferenceRequest, instance: Instance, usage: Usage | None) -> None:
        """Report to the sources that *instance* has answered *request* completely."""
        self._call(self._on_settled, request, instance, usage)

    def forget(self, instance: Instance) -> None:
        """Report to the sources that *instance* restarted."""
        self._call(self._on_forget, instance)

    def _call(self, methods: _Methods, *args: object) -> None:
        for source, method in methods:
            try:
                method(*args)
            except Exception as error:
                self._failed(source, error)

    def _failed(self, source: Source, error: Exception) -> None:
        self._on_failed(source.name)
        if (kept_back := self._log_limit.passes(source.name)) is not None:
            log.error("smetric.source.failed", source=source.name, kept_back=kept_back, exc_info=error)


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
            columns[name] = LookupColumn(candidates, cells, source.name)


def _overriding(sources: Iterable[Source], method: Callable[..., None]) -> _Methods:
    """Return the *method* of each of *sources* that overrides it."""
    name = method.__name__
    return [(source, getattr(source, name)) for source in sources if getattr(type(source), name) is not method]


#: Sources with one of their methods.
_Methods: TypeAlias = Sequence[tuple[Source, Callable[..., None]]]
#: A source that was asked, and the awaitable of its answer.
_Pending: TypeAlias = tuple[Source, Awaitable[dict[str, Cells]]]
