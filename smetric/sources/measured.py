"""Features measured on passing requests: each is one `Follower`, listed in `smetric.sources.build`.

A follower of a feature of instances sets `measures`, learns in `sent` or `first_token`, returns its values and their
times from `measure`, and drops them in `forget`. A follower of a field of requests sets `describes` and fills it in
`describe`. What a follower keeps is bounded and grows old.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from smetric.fleet.fleet import Measured
from smetric.fleet.instance import Instance, Lease
from smetric.request.request import InferenceRequest
from smetric.sources.source import Follower

#: Seconds after which a sample is dropped.
FRESH_S = 600.0
#: Fewest samples that give a value.
FEWEST = 8
#: Samples of prefills kept for each instance.
KEPT = 64
#: Quantile of the samples that is the rate: requests that wait behind others look slow, so the fast ones count.
QUANTILE = 0.9
#: A first token that came sooner, in seconds, was not computed after the request was sent.
SOONEST_S = 0.001
#: Samples kept of each doubling of the cost: many small ones evict no large one.
KEPT_TIMES = 16
#: Lower bound of the share of computing in the time of the largest prefills. Small prefills show little but their
#: start; this bounds what they can claim about large ones.
LEAST_COMPUTING = 0.1
#: Seconds for which a fitted prefill time holds.
EVERY_S = 1.0
#: Window of `qps` in whole seconds (production-stack's default).
WINDOW_S = 60
#: Fetches kept, of all instances, and the fewest tokens of one that counts.
KEPT_FETCHES = 100
LEAST_TOKENS = 256
#: Shortest time of a fetch, in seconds: the estimate for computing may account for all of it.
LEAST_S = 0.001
#: Requests in the window of prompt classes (Dynamo's port of LMetric), and seconds after which one is dropped.
WINDOW = 1000
CLASS_FRESH_S = 600.0
#: Seconds for which names of adapters are kept; instances are asked less often.
RENEWED_S = 1.0


def is_prefill_sample(lease: Lease, seconds: float) -> bool:
    """Return whether the first token of a request, after *seconds*, is a sample of the prefill rate.

    Requests that fetch, compute nothing, or have an unknown hit are no samples. Batches are none either: their first
    token may come long before the other prompts are computed.
    """
    is_computed = lease.is_hit_known and not lease.fetched and lease.computed > 0
    return is_computed and lease.prompts == 1 and seconds >= SOONEST_S


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """Time to first token as a linear function of cost.

    Args:
        start_s: constant part in seconds: the round trip and one engine step.
        per_token_s: seconds for each token of cost.
    """

    start_s: float
    per_token_s: float

    def of(self, cost: float) -> float:
        """Return the seconds until the first token behind *cost* tokens of cost."""
        return self.start_s + self.per_token_s * cost


def fitted(groups: Iterable[Collection[tuple[float, float]]]) -> PrefillTime:
    """Return the line with the least relative errors at the median cost and median time of each group.

    Errors are relative so that 10 % of a large prefill counts as much as 10 % of a small one. A line that would start
    below 0, which happens if all samples are about equally large, starts at 0.

    Args:
        groups: samples of about equal cost; each sample is its cost (at least 1) and its time in seconds (above 0).
            There is at least one group, and none is empty.
    """
    points = [
        (len(group), median(cost for cost, _ in group), median(seconds for _, seconds in group)) for group in groups
    ]
    # Minimises Σ n (start/t + per_token·c/t - 1)².
    uu = sum(n / t**2 for n, _, t in points)
    uv = sum(n * c / t**2 for n, c, t in points)
    vv = sum(n * (c / t) ** 2 for n, c, t in points)
    u = sum(n / t for n, _, t in points)
    v = sum(n * c / t for n, c, t in points)
    _, most, longest = max(points, key=lambda point: point[1])
    determinant = uu * vv - uv * uv
    if len(points) == 1 or determinant <= 1e-9 * uu * vv:
        return PrefillTime(0.0, v / vv)
    per_token = max((uu * v - uv * u) / determinant, LEAST_COMPUTING * longest / most)
    start = (u - per_token * uv) / uu
    return PrefillTime(start, per_token) if start > 0 else PrefillTime(0.0, v / vv)


@dataclass(slots=True)
class _Samples:
    """Prefills of one instance: (time, rate) of the latest; (time, cost, seconds) by doubling of the cost.

    A rate and a line are known until the time beside them.
    """

    rates: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT))
    groups: dict[int, deque[tuple[float, float, float]]] = field(default_factory=dict)
    rate: float | None = None
    rate_until: float = -math.inf
    line: PrefillTime | None = None
    line_until: float = -math.inf


class Prefills(Follower):
    """Speed of prefills on each instance: the feature `prefill_rate`, and the time that a prefill takes, for forecasts.

    The rate is tokens without attention that an instance computes per second: the cost of a request divided by the time
    to its first token (SMetric, revised: 90th percentile of the last 64, unknown before there are 8). Other parts of
    that time make it low if all requests are small; the line separates them. It is fitted through the cost of
    everything that stood before a first token, by the ledger, and the time that it took.
    """

    name = "prefill_rate"
    measures = frozenset({"prefill_rate"})

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._known: dict[Instance, _Samples] = {}

    def rate(self, instance: Instance) -> float | None:
        """Return tokens per second, at least 1; None if unknown."""
        known = self._known.get(instance)
        if known is None:
            return None
        now = self._clock()
        if now > known.rate_until:
            fresh = [(at, rate) for at, rate in known.rates if at >= now - FRESH_S]
            rates = sorted(rate for _, rate in fresh)
            known.rate = max(1.0, rates[int(QUANTILE * (len(rates) - 1))]) if len(rates) >= FEWEST else None
            known.rate_until = min((at for at, _ in fresh), default=now) + FRESH_S
        return known.rate

    def time_of(self, instance: Instance) -> PrefillTime | None:
        """Return the time that a prefill takes on *instance*; None if unknown."""
        known = self._known.get(instance)
        if known is None:
            return None
        now = self._clock()
        if now >= known.line_until:
            for group in known.groups.values():
                while group and group[0][0] < now - FRESH_S:
                    group.popleft()
            samples = [[one[1:] for one in group] for group in known.groups.values() if group]
            known.line = fitted(samples) if sum(map(len, samples)) >= FEWEST else None
            known.line_until = now + EVERY_S
        return known.line

    def measure(self, feature: str, instances: Sequence[Instance]) -> Measured:
        """Return the rates, each as old as its last sample."""
        known = [self._known.get(instance) for instance in instances]
        return [self.rate(instance) for instance in instances], [one.rates[-1][0] if one else None for one in known]

    def first_token(self, lease: Lease, seconds: float) -> None:
        """Add a sample."""
        if not is_prefill_sample(lease, seconds):
            return
        known = self._known.get(lease.instance)
        if known is None:
            known = self._known[lease.instance] = _Samples()
        now, cost = self._clock(), lease.cost_ahead
        known.rates.append((now, lease.cost / seconds))
        known.rate_until = -math.inf
        known.groups.setdefault(int(cost).bit_length(), deque(maxlen=KEPT_TIMES)).append((now, cost, seconds))
        if known.line is None:
            known.line_until = -math.inf

    def forget(self, instance: Instance) -> None:
        """Drop the samples: a new process may be another model on other hardware."""
        self._known.pop(instance, None)


class FetchRates(Follower):
    """`fetch_rate`: cached tokens fetched per second from host memory, disk or a shared store.

    It is the same for all instances, as they share the path. The part of the time to a first token that the prefill
    before it does not explain was spent on the fetch, queueing included. The rate is all tokens by all seconds of the
    last fetches.

    Args:
        prefill: how long instances compute. While that is unknown, so is the rate.
        configured: tokens per second, instead of measuring; 0 for none.
    """

    name = "fetch_rate"
    measures = frozenset({"fetch_rate"})

    def __init__(self, prefill: Prefills, *, configured: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._prefill = prefill
        self._configured = configured
        #: (time, tokens, seconds) of the last fetches.
        self._fetches: deque[tuple[float, int, float]] = deque(maxlen=KEPT_FETCHES)

    def rate(self) -> float | None:
        """Return tokens per second, at least 1; None if unknown."""
        if self._configured:
            return float(self._configured)
        since = self._clock() - FRESH_S
        while self._fetches and self._fetches[0][0] < since:
            self._fetches.popleft()
        if len(self._fetches) < FEWEST:
            return None
        return max(1.0, sum(tokens for _, tokens, _ in self._fetches) / sum(taken for _, _, taken in self._fetches))

    def measure(self, feature: str, instances: Sequence[Instance]) -> Measured:
        """Return the rate, as old as the last fetch. A configured rate never grows old."""
        rate = self.rate()
        at = None if self._configured else [self._fetches[-1][0] if self._fetches else None] * len(instances)
        return [rate] * len(instances), at

    def first_token(self, lease: Lease, seconds: float) -> None:
        """Add a sample if the request fetched tokens and the time for computing is known."""
        if lease.prompts != 1 or lease.fetched < LEAST_TOKENS:
            return
        prefill = self._prefill.time_of(lease.instance)
        if prefill is not None:
            computing = prefill.of(lease.cost_ahead)
            self._fetches.append((self._clock(), lease.fetched, max(LEAST_S, seconds - computing)))


class RequestRates(Follower):
    """`qps`: requests per second that this router sent to each instance in the last minute, in whole seconds."""

    name = "qps"
    measures = frozenset({"qps"})

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        #: The present second and its requests by instance; earlier ones of the window, oldest first; and their sums.
        self._second = 0
        self._counts: Counter[Instance] = Counter()
        self._earlier: deque[tuple[int, Counter[Instance]]] = deque()
        self._totals: Counter[Instance] = Counter()

    def measure(self, feature: str, instances: Sequence[Instance]) -> Measured:
        """Return the present rates; 0 for an instance that was sent nothing."""
        self._turn(int(self._clock()))
        return [(self._totals[instance] + self._counts[instance]) / WINDOW_S for instance in instances], None

    def sent(self, request: InferenceRequest, lease: Lease) -> None:
        """Count the request."""
        now = int(self._clock())
        if now != self._second:
            self._turn(now)
        self._counts[lease.instance] += 1

    def _turn(self, now: int) -> None:
        """Begin the second *now*, and drop the seconds that have left the window."""
        if now != self._second:
            self._earlier.append((self._second, self._counts))
            self._totals.update(self._counts)
            self._second, self._counts = now, Counter()
        while self._earlier and self._earlier[0][0] <= now - WINDOW_S:
            self._totals.subtract(self._earlier.popleft()[1])


class PromptClasses(Follower):
    """`req.class_share` and `req.class_streak` of the class of a request: all prompts with the same `req.prefix`.

    A class that floods the instances that hold its beginning is a hot spot (LMetric, "KV hot-spots"); the response to
    that is a policy's business. Counting begins when a policy first reads one of the fields. The prefix is computed
    here, while the text is there.
    """

    name = "prompt_class"
    describes = frozenset({"prefix", "class_share", "class_streak"})

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._is_asked = False
        self._window: deque[tuple[float, str]] = deque()
        self._counts: Counter[str] = Counter()
        #: By class, how many of its last requests in a row went to an instance that held a part of them.
        self._streaks: dict[str, int] = {}

    def describe(self, request: InferenceRequest) -> None:
        """Fill the share and the streak of the request's class so far."""
        self._is_asked = True
        self._drop_old()
        if self._window and request.prefix:
            request.class_share = self._counts[request.prefix] / len(self._window)
            request.class_streak = float(self._streaks.get(request.prefix, 0))

    def sent(self, request: InferenceRequest, lease: Lease) -> None:
        """Add the request to the window."""
        key = request.prefix if self._is_asked else ""
        if not key:
            return
        self._window.append((self._clock(), key))
        self._counts[key] += 1
        is_hit = lease.new_tokens < lease.prompt_len
        self._streaks[key] = self._streaks.get(key, 0) + 1 if is_hit else 0
        self._drop_old()

    def _drop_old(self) -> None:
        since = self._clock() - CLASS_FRESH_S
        while self._window and (len(self._window) > WINDOW or self._window[0][0] < since):
            _, key = self._window.popleft()
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key], self._streaks[key]


class Adapters(Follower):
    """`req.lora`: the adapter that a request asks for, by the model lists of the instances.

    Args:
        instances: the instances whose adapters count.
    """

    name = "adapters"
    describes = frozenset({"lora"})

    def __init__(self, instances: Sequence[Instance], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._instances = instances
        self._names: frozenset[str] = frozenset()
        self._due = -math.inf

    def describe(self, request: InferenceRequest) -> None:
        """Fill the name of the adapter; empty if the model is not one."""
        now = self._clock()
        if now >= self._due:
            self._due = now + RENEWED_S
            self._names = frozenset[str]().union(*(instance.adapters for instance in self._instances))
        served = request.served or request.model
        request.lora = served if served in self._names else ""
