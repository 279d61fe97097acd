"""How long instances make streams wait for their first token, compared among peers: finds those that are far slower.

A wait is compared as it was and per token that stood before it; an outlier is one by both. So neither long prompts nor
a queue of the router's own making count against an instance, nor prompts whose cached part the router does not know.
Leaving one out is `smetric.fleet.health`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from statistics import median, median_low

from smetric.fleet.instance import Instance

#: The last waits of an instance that are kept, how few of them say nothing, and seconds after which one is no news.
KEPT = 8
FEWEST = 5
FRESH_S = 60.0
#: What every first token costs beside prefill, in tokens of prefill; without it short prompts would look slow.
BASE_TOKENS = 512
#: An instance that answers within so many seconds is slow to nobody.
NOTICED_S = 0.25
#: Seconds between two comparisons.
EVERY_S = 1.0


class Latencies:
    """The last waits of each instance.

    Args:
        instances: those compared.
        factor: an instance is an outlier if its median is more than so many times its peers'; 0 for never.
        clock: monotonic seconds.
    """

    def __init__(self, instances: Iterable[Instance], factor: float, clock: Callable[[], float]) -> None:
        #: Of each: when, seconds waited, seconds per token.
        self._waits: dict[Instance, deque[tuple[float, float, float]]] = {
            instance: deque(maxlen=KEPT) for instance in instances
        }
        self._factor = factor
        self._clock = clock
        self._due = -float("inf")

    def add(self, instance: Instance, seconds: float, tokens: int) -> bool:
        """A first token came after *seconds*, behind *tokens* to prefill; returns whether it is time to compare."""
        if not self._factor:
            return False
        now = self._clock()
        self._waits[instance].append((now, seconds, seconds / (BASE_TOKENS + tokens)))
        if now < self._due:
            return False
        self._due = now + EVERY_S
        return True

    def forget(self, instance: Instance) -> None:
        """What *instance* did so far says nothing of what it will do."""
        self._waits[instance].clear()

    def outliers(self) -> list[Instance]:
        """Those that are far slower than their peers: instances of the same role, pool and models.

        Their lower median is the measure: of two the slower one may be an outlier, and where most are slow nobody is.
        """
        since = self._clock() - FRESH_S
        groups: dict[Hashable, list[tuple[float, float, Instance]]] = {}
        for instance, waits in self._waits.items():
            fresh = [(seconds, per_token) for at, seconds, per_token in waits if at >= since]
            if len(fresh) >= FEWEST:
                seconds, per_token = (median(column) for column in zip(*fresh, strict=True))
                peers = groups.setdefault((instance.role, instance.pool, instance.base_models), [])
                peers.append((seconds, per_token, instance))
        found = []
        for peers in groups.values():
            longest = max(NOTICED_S, self._factor * median_low(seconds for seconds, _, _ in peers))
            slowest = self._factor * median_low(per_token for _, per_token, _ in peers)
            found += [one for seconds, per_token, one in peers if seconds > longest and per_token > slowest]
        return found
