"""Observed policies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from smetric.features import VOCABULARY
from smetric.fleet.fleet import Candidates, Fleet
from smetric.fleet.instance import Instance
from smetric.policy import Decision, Outcome, Policy, Snapshot
from smetric.sources.lookups import Columns, Lookups

if TYPE_CHECKING:
    from smetric.fleet.record import DecisionRecord


class Observer:
    """Reads for policies that do not decide.

    Args:
        fleet: the instances.
        lookups: the sources.
        policies: the observed policies.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        lookups: Lookups,
        policies: Iterable[Policy],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._lookups = lookups
        self._clock = clock
        self._looked_up: frozenset[str] = frozenset()
        self._at_hand: frozenset[str] = frozenset()
        #: Fields of the request that they may read.
        self.fields: frozenset[str] = frozenset()
        self._tasks: set[asyncio.Task[None]] = set()
        self.follow(policies)

    def follow(self, policies: Iterable[Policy]) -> None:
        """Read for *policies* from now on."""
        reads = frozenset(name for policy in policies for name in policy.reads)
        self._looked_up = frozenset(name for name in reads if VOCABULARY.features[name].lookup)
        self._at_hand = reads - self._looked_up
        self.fields = frozenset(name for policy in policies for name in policy.fields)

    def at_hand(self, acting: Policy, candidates: Candidates) -> Snapshot | None:
        """What *acting* has not read of *candidates* though it is at hand; None for nothing. Before the charge."""
        missing = self._at_hand - acting.reads
        return self._fleet.snapshot(candidates, missing) if missing else None

    def look_up(self, record: DecisionRecord) -> None:
        """Begin to look up what the decision of *record* did without, and add it to the record when it is there.

        Called when the request is about to be sent; the look-ups begin when that has been done.
        """
        decision = record.decision
        if decision is None or decision.outcome is Outcome.HOLD:
            return
        missing = self._looked_up.difference(decision.snapshot.columns)
        if missing:
            asyncio.get_running_loop().call_soon(self._look_up, record, decision, missing, self._clock())

    def _look_up(self, record: DecisionRecord, decision: Decision, missing: frozenset[str], began: float) -> None:
        candidates = [self._fleet[id] for id in decision.snapshot.ids]
        found = self._lookups.of(record.request, missing, candidates)
        add = partial(self._add, record, decision, candidates, began)
        if isinstance(found, dict):
            add(found)
        else:
            # A task of its own only where there is something to wait for: it costs more than most look-ups.
            task = asyncio.create_task(_when_there(found, add))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _add(
        self, record: DecisionRecord, decision: Decision, candidates: Sequence[Instance], began: float, columns: Columns
    ) -> None:
        request = record.request
        # Once an answer has begun, what sources know may be of this very prompt.
        if request.body is not None:
            snapshot = Snapshot(decision.snapshot.ids, {}, now=self._fleet.clock())
            for name, column in columns.items():
                self._fleet.fill(snapshot, name, *column.over(candidates), request.prompt_len)
            record.beside = (*record.beside, (snapshot, self._clock() - began))


async def _when_there(found: Awaitable[Columns], add: Callable[[Columns], None]) -> None:
    add(await found)
