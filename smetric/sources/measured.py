"""Features measured on passing answers."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from smetric.fleet.fleet import Measured
from smetric.fleet.instance import Instance, Lease, PrefillTime, fitted
from smetric.request.request import InferenceRequest
from smetric.sources.source import Follower

# How fast each instance prefills, measured on the answers that stream.
#
# How long prompts take to fetch is in `fetch_rate.py`, what first tokens are expected after in `prefill_times.py`.

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


# What time a prefill takes on each instance, learnt from the answers that stream, for forecasts.
#
# The rate that policies read, which knows of no start, is in `prefill_rate.py`; the line through the samples in
# `smetric.fleet.prefill_time`.

#: Samples that are kept of each doubling of the cost: many small ones push no large one out.
KEPT_TIMES = 16
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
            group = self.groups[doubling] = deque(maxlen=KEPT_TIMES)
        group.append(sample)

    def fit(self, now: float) -> None:
        for group in self.groups.values():
            while group and group[0].at < now - FRESH_S:
                group.popleft()
        told = [[one[1:] for one in group] for group in self.groups.values() if group]
        self.time = fitted(told) if sum(map(len, told)) >= FEWEST else None
        self.until = now + EVERY_S


# How many requests in a second this router sends to each instance.

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


# How fast cached tokens come from where instances can fetch them: host memory, disk, a shared store.

#: Fetches that are kept, of all instances, and the fewest tokens of one that is looked at.
KEPT_FETCHES = 100
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
        self._fetches: deque[tuple[float, int, float]] = deque(maxlen=KEPT_FETCHES)

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


# Classes of prompts that begin alike: how large a share each has of the traffic, and whether it follows its caches.
#
# A class that floods the instances which hold its beginning is a hot spot (LMetric, "KV hot-spots"); what to do about
# it is a policy's business.

#: Requests that the window holds (Dynamo's port of LMetric), and seconds after which one is no news.
WINDOW = 1000
CLASS_FRESH_S = 600.0


class PromptClasses(Follower):
    """Fills `req.class_share` and `req.class_streak`; the class of a request is its `req.prefix`, computed here while
    the text is there.

    It counts from when a policy first asks.

    Args:
        clock: monotonic seconds.
    """

    name = "prompt_class"
    describes = frozenset({"prefix", "class_share", "class_streak"})

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_asked = False
        self._window: deque[tuple[float, str]] = deque()
        self._counts: Counter[str] = Counter()
        #: Of each class in the window: how many of its last requests went to an instance that held some of them.
        self._streaks: dict[str, int] = {}

    def describe(self, request: InferenceRequest) -> None:
        """Say how its class has fared so far."""
        self._is_asked = True
        self._forget_old()
        if self._window and request.prefix:
            request.class_share = self._counts[request.prefix] / len(self._window)
            request.class_streak = float(self._streaks.get(request.prefix, 0))

    def sent(self, request: InferenceRequest, lease: Lease) -> None:
        """Enter the request into the window."""
        key = request.prefix if self._is_asked else ""
        if not key:
            return
        self._window.append((self._clock(), key))
        self._counts[key] += 1
        held = lease.new_tokens < lease.prompt_len
        self._streaks[key] = self._streaks.get(key, 0) + 1 if held else 0
        self._forget_old()

    def _forget_old(self) -> None:
        since = self._clock() - CLASS_FRESH_S
        while self._window and (len(self._window) > WINDOW or self._window[0][0] < since):
            _, key = self._window.popleft()
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key], self._streaks[key]


# Whether the model that a request asks for is an adapter, by what the instances say of their models.

#: Seconds for which the names are kept; instances are asked less often.
RENEWED_S = 1.0


class Adapters(Follower):
    """Fills `req.lora`.

    Args:
        instances: whose adapters count.
        clock: monotonic seconds.
    """

    name = "adapters"
    describes = frozenset({"lora"})

    def __init__(self, instances: Sequence[Instance], clock: Callable[[], float] = time.monotonic) -> None:
        self._instances = instances
        self._clock = clock
        self._names: frozenset[str] = frozenset()
        self._due = float("-inf")

    def describe(self, request: InferenceRequest) -> None:
        """Name the adapter, where it asks for one."""
        now = self._clock()
        if now >= self._due:
            self._due = now + RENEWED_S
            self._names = frozenset[str]().union(*(instance.adapters for instance in self._instances))
        served = request.served or request.model
        request.lora = served if served in self._names else ""
