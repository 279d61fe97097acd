"""What time a prefill takes on each instance, learnt from the answers that stream, for forecasts.

The rate that policies read, which knows of no start, is in `prefill_rate.py`; the line through the samples in
`smetric.fleet.prefill_time`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from smetric.fleet.instance import Instance
from smetric.fleet.lease import Lease
from smetric.fleet.prefill_time import PrefillTime, fitted
from smetric.sources.follower import Follower
from smetric.sources.prefill_rate import FEWEST, FRESH_S, tells_of_prefill

#: Samples that are kept of each doubling of the cost: many small ones push no large one out.
KEPT = 16
#: Seconds for which what was found holds.
EVERY_S = 1.0


class PrefillTimes(Follower):
    """Knows how long the prompts that stand before a first token take.

    A sample is the cost of all that stood before a first token, by the ledger, and the time that it took. Samples are
    kept by doublings of the cost, for ten minutes, and say nothing before there are 8.

    Args:
        clock: monotonic seconds.
    """

    name = "prefill_times"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[Instance, _Known] = {}

    def of(self, instance: Instance) -> PrefillTime | None:
        """What a prefill takes there; None while unknown."""
        known = self._known.get(instance)
        if known is None:
            return None
        now = self._clock()
        if known.time is None or now >= known.until:
            known.fit(now)
        return known.time

    def first_token(self, lease: Lease, seconds: float) -> None:
        """A sample of how long what stood before a first token took."""
        if tells_of_prefill(lease, seconds):
            known = self._known.get(lease.instance)
            if known is None:
                known = self._known[lease.instance] = _Known()
            known.add(_Sample(self._clock(), lease.cost_ahead, seconds))

    def forget(self, instance: Instance) -> None:
        """A new process may be another model on other hardware."""
        self._known.pop(instance, None)


class _Sample(NamedTuple):
    at: float
    cost: float
    seconds: float


@dataclass(slots=True)
class _Known:
    """Of one instance: its samples, and the line through them."""

    groups: dict[int, deque[_Sample]] = field(default_factory=dict)
    time: PrefillTime | None = None
    until: float = 0.0

    def add(self, sample: _Sample) -> None:
        doubling = int(sample.cost).bit_length()
        group = self.groups.get(doubling)
        if group is None:
            group = self.groups[doubling] = deque(maxlen=KEPT)
        group.append(sample)

    def fit(self, now: float) -> None:
        for group in self.groups.values():
            while group and group[0].at < now - FRESH_S:
                group.popleft()
        told = [[one[1:] for one in group] for group in self.groups.values() if group]
        self.time = fitted(told) if sum(map(len, told)) >= FEWEST else None
        self.until = now + EVERY_S
