"""How fast each instance prefills, measured on the answers that stream.

How long prompts take to fetch is in `fetch_rate.py`, what first tokens are expected after in `prefill_times.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from smetric.fleet.instance import Instance
from smetric.fleet.lease import Lease
from smetric.fleet.measure import Measured
from smetric.sources.follower import Follower

#: Samples of an instance that are kept, and how few of them say nothing.
KEPT = 64
FEWEST = 8
#: Seconds after which a sample is no news.
FRESH_S = 600.0
#: Of the samples, the share below the one that counts: what waited behind others looks slow, so the fast ones tell.
QUANTILE = 0.9
#: A first token that came sooner than this, in seconds, was not computed after the request had been sent.
SOONEST_S = 0.001


def tells_of_prefill(lease: Lease, seconds: float) -> bool:
    """Whether the first token of a request, after *seconds*, says how fast its prompt was computed.

    Requests that fetch, compute nothing, or whose hit nobody knew do not; neither do batches, whose first token says
    nothing of the rest.
    """
    is_computed = lease.is_hit_known and not lease.fetched and lease.computed > 0
    return is_computed and lease.prompts == 1 and seconds >= SOONEST_S


class PrefillRates(Follower):
    """Fills `prefill_rate`: tokens without attention that an instance computes in a second.

    A sample is the cost of a request by the time to its first token (SMetric, revised: 90th percentile of the last 64,
    unknown before there are 8). Whatever else is in that time makes it low where all requests are small;
    `prefill_times.py` tells that apart.

    Args:
        clock: monotonic seconds.
    """

    name = "prefill_rate"
    measures = frozenset({"prefill_rate"})

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: dict[Instance, deque[tuple[float, float]]] = {}
        #: The rate of each instance, and until when it holds; renewed when a sample is added or grows old.
        self._rates: dict[Instance, tuple[float | None, float]] = {}

    def rate(self, instance: Instance) -> float | None:
        """Tokens a second, at least 1; None while unknown."""
        now = self._clock()
        known = self._rates.get(instance)
        if known is None or now > known[1]:
            known = self._rates[instance] = self._rate(instance, now)
        return known[0]

    def measure(self, feature: str, instances: Sequence[Instance]) -> Measured:
        """The rates, each as old as its last sample."""
        cells = [self.rate(instance) for instance in instances]
        samples = [self._samples.get(instance) for instance in instances]
        return cells, [None if one is None or not one else one[-1][0] for one in samples]

    def first_token(self, lease: Lease, seconds: float) -> None:
        """A sample of how long a prefill took."""
        if tells_of_prefill(lease, seconds):
            samples = self._samples.setdefault(lease.instance, deque(maxlen=KEPT))
            samples.append((self._clock(), lease.cost / seconds))
            self._rates.pop(lease.instance, None)

    def forget(self, instance: Instance) -> None:
        """A new process may be another model on other hardware."""
        self._samples.pop(instance, None)
        self._rates.pop(instance, None)

    def _rate(self, instance: Instance, now: float) -> tuple[float | None, float]:
        samples = self._samples.get(instance, ())
        fresh = [(at, rate) for at, rate in samples if at >= now - FRESH_S]
        until = min((at for at, _ in fresh), default=now) + FRESH_S
        if len(fresh) < FEWEST:
            return None, until
        rates = sorted(rate for _, rate in fresh)
        return max(1.0, rates[int(QUANTILE * (len(rates) - 1))]), until
