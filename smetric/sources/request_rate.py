"""How many requests in a second this router sends to each instance."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from smetric.fleet.instance import Instance
from smetric.fleet.lease import Lease
from smetric.fleet.measure import Measured
from smetric.request import InferenceRequest
from smetric.sources.follower import Follower

#: The window, in whole seconds (production-stack's default).
WINDOW_S = 60


class RequestRates(Follower):
    """Fills `qps`: requests sent in the last minute, by its seconds; 0 for an instance that was sent none.

    Args:
        clock: monotonic seconds.
    """

    name = "qps"
    measures = frozenset({"qps"})

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent: dict[Instance, _Window] = {}

    def measure(self, feature: str, instances: Sequence[Instance]) -> Measured:
        """The rates now."""
        second = int(self._clock())
        windows = [self._sent.get(instance) for instance in instances]
        return [0.0 if window is None else window.total(second) / WINDOW_S for window in windows], None

    def sent(self, request: InferenceRequest, lease: Lease) -> None:
        """One request more."""
        window = self._sent.get(lease.instance)
        if window is None:
            window = self._sent[lease.instance] = _Window()
        window.add(int(self._clock()))


class _Window:
    """Counts by second, of the last `WINDOW_S` seconds."""

    __slots__ = ("_counts", "_newest", "_total")

    def __init__(self) -> None:
        self._counts = [0] * WINDOW_S
        self._newest = 0
        self._total = 0

    def add(self, second: int) -> None:
        if second > self._newest:
            self._move_to(second)
        self._counts[second % WINDOW_S] += 1
        self._total += 1

    def total(self, second: int) -> int:
        if second > self._newest:
            self._move_to(second)
        return self._total

    def _move_to(self, second: int) -> None:
        """Forget what has left the window by *second*, which is newer than all in it."""
        for passed in range(self._newest + 1, min(second, self._newest + WINDOW_S) + 1):
            self._total -= self._counts[passed % WINDOW_S]
            self._counts[passed % WINDOW_S] = 0
        self._newest = second
