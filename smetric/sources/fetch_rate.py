"""How fast cached tokens come from where instances can fetch them: host memory, disk, a shared store."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from smetric.fleet.instance import Instance
from smetric.fleet.lease import Lease
from smetric.fleet.measure import Measured
from smetric.sources.follower import Follower
from smetric.sources.prefill_rate import FEWEST, FRESH_S
from smetric.sources.prefill_times import PrefillTimes

#: Fetches that are kept, of all instances, and the fewest tokens of one that is looked at.
KEPT = 100
LEAST_TOKENS = 256
#: No fetch takes less, in seconds: what the estimate of computing leaves may be nothing.
LEAST_S = 0.001


class FetchRates(Follower):
    """Fills `fetch_rate`: tokens in a second, the same for all instances, as they share what they fetch through.

    Of the time to a first token, what the prefill before it does not account for was spent on the fetch, queueing
    included. The rate is all tokens by all seconds of the last fetches.

    Args:
        prefill: how long instances compute; where that is unknown a fetch cannot be told from computing.
        configured: tokens in a second, instead of measuring; 0 for none.
        clock: monotonic seconds.
    """

    name = "fetch_rate"
    measures = frozenset({"fetch_rate"})

    def __init__(
        self, prefill: PrefillTimes, *, configured: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._prefill = prefill
        self._configured = configured
        self._clock = clock
        #: Of each: when, tokens, seconds.
        self._fetches: deque[tuple[float, int, float]] = deque(maxlen=KEPT)

    def rate(self) -> float | None:
        """Tokens a second, at least 1; None while unknown."""
        if self._configured:
            return float(self._configured)
        since = self._clock() - FRESH_S
        while self._fetches and self._fetches[0][0] < since:
            self._fetches.popleft()
        if len(self._fetches) < FEWEST:
            return None
        return max(1.0, sum(tokens for _, tokens, _ in self._fetches) / sum(taken for _, _, taken in self._fetches))

    def measure(self, feature: str, instances: Sequence[Instance]) -> Measured:
        """The rate, as old as the last fetch; a configured one is never old."""
        rate = self.rate()
        at = None if self._configured else [self._fetches[-1][0] if self._fetches else None] * len(instances)
        return [rate] * len(instances), at

    def first_token(self, lease: Lease, seconds: float) -> None:
        """A sample of how long a fetch took, where there was one and the rest can be accounted for."""
        if lease.prompts != 1 or lease.fetched < LEAST_TOKENS:
            return
        prefill = self._prefill.of(lease.instance)
        if prefill is not None:
            computing = prefill.of(lease.cost_ahead)
            self._fetches.append((self._clock(), lease.fetched, max(LEAST_S, seconds - computing)))
