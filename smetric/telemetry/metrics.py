"""Prometheus metrics that events change, and the page of all metrics.

`gauges` computes the metrics that are read when the page is rendered. Names, labels and help are those of `names`. No
label value comes from a client, and no metric has more than `MAX_SERIES` series.
"""

from __future__ import annotations

import asyncio
import math
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from cachetools import TTLCache
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Exemplar, Sample
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import smetric
from smetric import names
from smetric.errors import HttpError
from smetric.fleet.exchange import Attempt, Exchange, Listener
from smetric.fleet.record import DecisionRecord, Shadowed

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance

#: Most series of one metric. Values of further label values are added to one series, whose labels are `other`.
MAX_SERIES = 4096
OTHER = "other"
#: Seconds that a rendered page is served again: 2,000 samples take 15 ms to render.
PAGE_TTL_S = 1.0
#: Forms of the page in memory: a client may ask for more escaping schemes than that.
_MAX_PAGES = 8
#: Above this many instances, series are not split by instance.
MAX_INSTANCES = 256
_ALL = "all"
#: Model names that become labels; other names are `other`.
MAX_MODELS = 100

#: Key of a series: the value of its label, or a tuple of them where there are several, or none.
Labels = str | tuple[str, ...]
Child = TypeVar("Child")


class Series(dict[Labels, Child]):
    """Series of a metric by their labels, each made on first use.

    Args:
        labels: number of its labels; without labels its only series is `[()]`.
        make: returns a new series with these labels.
    """

    def __init__(self, labels: int, make: Callable[..., Child]) -> None:
        super().__init__()
        self._make = make
        if not labels:
            self[()] = make()

    def __missing__(self, labels: Labels) -> Child:
        values = _values(labels)
        if len(self) >= MAX_SERIES:
            values = (OTHER,) * len(values)
        return self.setdefault(values if len(values) > 1 else values[0], self._make(*values))


def _values(labels: Labels) -> tuple[str, ...]:
    return (labels,) if isinstance(labels, str) else labels


def counter(metric: names.Metric, registry: CollectorRegistry) -> Series[Counter]:
    """Return the series of a new counter."""
    made = Counter(metric.name, metric.doc, metric.labels, registry=registry)
    return Series(len(metric.labels), made.labels if metric.labels else lambda: made)


def histogram(metric: names.Metric, registry: CollectorRegistry) -> Series[Histogram]:
    """Return the series of a new histogram."""
    made = Histogram(metric.name, metric.doc, metric.labels, registry=registry, buckets=metric.buckets)
    return Series(len(metric.labels), made.labels if metric.labels else lambda: made)


def gauge(metric: names.Metric, registry: CollectorRegistry) -> Series[Gauge]:
    """Return the series of a new gauge."""
    made = Gauge(metric.name, metric.doc, metric.labels, registry=registry)
    return Series(len(metric.labels), made.labels if metric.labels else lambda: made)


def loop_counter(metric: names.Metric, registry: CollectorRegistry) -> Series[Count]:
    """Return the series of a new counter for the path of every request, which only the event loop may count.

    The client library's counters and histograms take locks: for the 25 values of a request that is 8 % of its CPU,
    against 1 % here.
    """
    series: Series[Count] = Series(len(metric.labels), lambda *_: Count())
    registry.register(Computed(lambda: [_family(metric, series)]))
    return series


def loop_histogram(metric: names.Metric, registry: CollectorRegistry) -> Series[Observations]:
    """Return the series of a new histogram for the path of every request; see `loop_counter`."""
    series: Series[Observations] = Series(len(metric.labels), lambda *_: Observations(metric.buckets))
    registry.register(Computed(lambda: [_family(metric, series)]))
    return series


def _family(metric: names.Metric, series: Series[Count] | Series[Observations]) -> Metric:
    """Return the metric as the client library shows it."""
    family = Metric(metric.name.removesuffix("_total"), metric.doc, metric.kind)
    children: list[tuple[Labels, Count | Observations]] = [*series.items()]
    for key, child in children:
        labels = dict(zip(metric.labels, _values(key), strict=True))
        for sample in child.samples():
            name, of = family.name + sample.name, labels | sample.labels
            family.add_sample(name, of, sample.value, exemplar=sample.exemplar)
        family.add_sample(f"{family.name}_created", labels, child.created)
    return family


class Count:
    """Series of a counter that only the event loop counts, by adding to its `value`."""

    __slots__ = ("created", "value")

    def __init__(self) -> None:
        self.created = time.time()
        self.value: float = 0

    def samples(self) -> Iterator[Sample]:
        """Yield its samples, without labels."""
        yield Sample("_total", {}, self.value)


class Observations:
    """Series of a histogram that only the event loop observes.

    Args:
        bounds: upper bounds of its buckets but the last.
    """

    __slots__ = ("_bounds", "_counts", "_exemplars", "_sum", "created")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.created = time.time()
        self._bounds = (*bounds, math.inf)
        #: By bucket, without those below.
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, exemplar: dict[str, str] | None = None) -> None:
        """Add *value*; *exemplar* are the labels of a trace that shows it."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._sum += value
        if exemplar is not None:
            self._exemplars[bucket] = Exemplar(exemplar, value, time.time())

    def samples(self) -> Iterator[Sample]:
        """Yield its samples, without the labels of the series."""
        totals = list(accumulate(self._counts))
        for bucket, (bound, total) in enumerate(zip(self._bounds, totals, strict=True)):
            le = str(floatToGoString(bound))  # type: ignore[no-untyped-call]
            yield Sample("_bucket", {"le": le}, total, None, self._exemplars.get(bucket))
        yield Sample("_count", {}, totals[-1])
        yield Sample("_sum", {}, self._sum)


class Computed(Collector):
    """Collector of metrics that a callable computes for each page, in the thread that renders it."""

    def __init__(self, compute: Callable[[], Iterable[Metric]]) -> None:
        self._compute = compute

    def collect(self) -> Iterable[Metric]:
        """Return the metrics as they are now."""
        return self._compute()


class Metrics(Listener):
    """Counters and timers of a router.

    Args:
        per_instance: whether series are split by instance; otherwise the label says `all`.
        clock: monotonic seconds, for the age of the rendered page.
    """

    def __init__(self, *, per_instance: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry = CollectorRegistry()
        self._per_instance = per_instance
        self._pages: TTLCache[str, bytes] = TTLCache(_MAX_PAGES, PAGE_TTL_S, clock)
        self._rendering = asyncio.Lock()
        self._decisions = loop_counter(names.DECISIONS, registry)
        self._selected = loop_counter(names.SELECTED, registry)
        self._decision_seconds = loop_histogram(names.DECISION_SECONDS, registry)
        self._lookup_seconds = loop_histogram(names.LOOKUP_SECONDS, registry)[()]
        self._lookups = loop_counter(names.LOOKUPS, registry)
        self._suspended = gauge(names.LOOKUP_IS_SUSPENDED, registry)
        self._requests = loop_counter(names.REQUESTS, registry)
        self._request_seconds = loop_histogram(names.REQUEST_SECONDS, registry)
        self._first_chunk_seconds = loop_histogram(names.FIRST_CHUNK_SECONDS, registry)
        self._chunk_seconds = loop_histogram(names.TIME_PER_CHUNK, registry)
        self._overhead_seconds = loop_histogram(names.OVERHEAD_SECONDS, registry)[()]
        self._attempts = loop_counter(names.ATTEMPTS, registry)
        self._ejections = counter(names.EJECTIONS, registry)
        self._in_progress = 0
        gauge(names.IN_PROGRESS, registry)[()].set_function(lambda: self._in_progress)
        self._source_failures = counter(names.SOURCE_FAILURES, registry)
        self._tokenizations = counter(names.TOKENIZATIONS, registry)
        self._tokenize_seconds = histogram(names.TOKENIZE_SECONDS, registry)
        self._tokenize_checks = counter(names.TOKENIZE_CHECKS, registry)
        self._retries_refused = counter(names.RETRIES_REFUSED, registry)[()]
        self._refused = counter(names.REFUSED, registry)
        self._client_retries = counter(names.CLIENT_RETRIES, registry)
        #: Times a wait in the queue, seconds.
        self.held = histogram(names.HOLD_SECONDS, registry)[()].observe
        #: Times the lag of the event loop, seconds.
        self.lagged = histogram(names.LOOP_LAG, registry)[()].observe
        self._scrapes = counter(names.SCRAPES, registry)
        self._scrape_seconds = histogram(names.SCRAPE_SECONDS, registry)[()]
        self._prompt_tokens = loop_counter(names.PROMPT_TOKENS_TOTAL, registry)
        self._hit_tokens = loop_counter(names.HIT_TOKENS_TOTAL, registry)
        self._actual_hit_tokens = loop_counter(names.ACTUAL_HIT_TOKENS_TOTAL, registry)
        self._hit_checks = loop_counter(names.HIT_CHECKS, registry)
        self._hit_wrong_tokens = loop_counter(names.HIT_WRONG_TOKENS, registry)
        self._cache_breaks = counter(names.CACHE_BREAKS, registry)
        self._record_lines = counter(names.RECORD_LINES, registry)
        self._shadow_decisions = counter(names.SHADOW_DECISIONS, registry)
        self._shadow_regret = histogram(names.SHADOW_REGRET_RATIO, registry)
        self._shadow_sessions = counter(names.SHADOW_SESSIONS, registry)
        self._shadow_diverged = counter(names.SHADOW_DIVERGED_SESSIONS, registry)
        self._shadow_seconds = histogram(names.SHADOW_SECONDS, registry)
        self._arm_requests = counter(names.ARM_REQUESTS, registry)
        self._arm_first_chunk_seconds = histogram(names.ARM_FIRST_CHUNK_SECONDS, registry)
        self._guardrail_restores = counter(names.GUARDRAIL_RESTORES, registry)
        self._policy_errors = counter(names.POLICY_ERRORS, registry)
        self._policy_reloads = counter(names.POLICY_RELOADS, registry)
        self._listener_failures = counter(names.LISTENER_FAILURES, registry)
        gauge(names.BUILD_INFO, registry)[smetric.__version__, platform.python_version()].set(1)

    def register(self, compute: Callable[[], Iterable[Metric]]) -> None:
        """Add metrics that *compute* returns for each page; it runs in another thread."""
        self.registry.register(Computed(compute))

    async def page(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page as text or OpenMetrics, by the Accept header, at most a second old; and its content type."""
        encode, content_type = choose_encoder(accept)
        async with self._rendering:
            page = self._pages.get(content_type)
            if page is None:
                page = self._pages[content_type] = await asyncio.to_thread(encode, self.registry)
        return page, content_type

    # Listener of exchanges.

    def arrived(self, exchange: Exchange) -> None:
        """Count a request in progress."""
        self._in_progress += 1

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Count a decision."""
        policy, model = record.policy.name, exchange.model
        self._decisions[policy, record.outcome, record.reason].value += 1
        if record.outcome == names.ERROR:
            self._policy_errors[policy].inc()
        if record.decision is not None:
            self._decision_seconds[policy].observe(record.evaluate_s)
            if record.lookup_s:
                self._lookup_seconds.observe(record.lookup_s)
        if record.instance is None:
            return
        self._selected[self._instance(record.instance.id), policy].value += 1
        # A retry routes the same tokens again.
        if record.rank == 0 and record.is_inference:
            self._prompt_tokens[model].value += record.request.prompt_len
            hit = record.hit
            if hit is not None:
                self._hit_tokens[model].value += hit[0]

    def sent(self, exchange: Exchange, attempt: Attempt) -> None:
        """Time the router's own part of a request."""
        if attempt.number == 1:
            self._overhead_seconds.observe(attempt.started - exchange.started)

    def attempt_ended(self, exchange: Exchange, attempt: Attempt) -> None:
        """Count an attempt by its result."""
        instance = attempt.record.instance
        assert instance is not None
        label = self._instance(instance.id)
        self._attempts[label, attempt.result].value += 1
        if attempt.resends:
            self._attempts[label, names.RESENT].value += attempt.resends

    def ended(self, exchange: Exchange) -> None:
        """Count and time a request."""
        self._in_progress -= 1
        status, model, usage, exemplar = exchange.status, exchange.model, exchange.usage, exchange.exemplar
        self._requests[exchange.route, str(status) if 100 <= status <= 599 else OTHER].value += 1
        self._request_seconds[exchange.route, model].observe(exchange.duration_s, exemplar)
        if exchange.gave_up:
            self._retries_refused.inc()
        if exchange.gap_s is not None:
            self._chunk_seconds[model].observe(exchange.gap_s, exemplar)
        if usage is not None and usage.cached_tokens is not None:
            self._actual_hit_tokens[model].value += usage.cached_tokens
        record = exchange.record
        if record is None:
            return
        if record.ttft_s is not None:
            self._first_chunk_seconds[model].observe(record.ttft_s, exemplar)
        for one in record.shadowed:
            self.shadowed(one)
        if record.arm:
            self._arm_requests[record.route, record.arm, str(status)].inc()
            if record.ttft_s is not None:
                self._arm_first_chunk_seconds[record.route, record.arm].observe(record.ttft_s)

    def unreadable(self, problem: HttpError, scope: Mapping[str, Any], is_seen: bool) -> None:
        """Count a request that no endpoint has seen; there is nothing to time."""
        if not is_seen:
            self._requests[OTHER, str(problem.status)].value += 1

    # What other parts count.

    def listener_failed(self, listener: str) -> None:
        """Count a failure of a *listener* to exchanges."""
        self._listener_failures[listener].inc()

    def refused(self, reason: str) -> None:
        """Count a request refused before its decision for *reason*, one of `names.REFUSALS`."""
        self._refused[reason].inc()

    def client_retried(self, admitted: bool) -> None:
        """Count a request that a client sends again."""
        self._client_retries[names.RETRY_ADMITTED if admitted else names.RETRY_REFUSED].inc()

    def ejected(self, instance: Instance, reason: str) -> None:
        """Count an ejection for *reason*, one of `names.EJECTION_REASONS`."""
        self._ejections[self._instance(instance.id), reason].inc()

    def scraped(self, instance: str, result: str, duration_s: float) -> None:
        """Count a scrape; *result* is ok, timeout, connect_error, http_error or bad_page."""
        self._scrapes[self._instance(instance), result].inc()
        self._scrape_seconds.observe(duration_s)

    def looked_up(self, source: str, result: str) -> None:
        """Count a look-up; *result* is one of `names.LOOKUP_RESULTS`."""
        self._lookups[source, result].value += 1

    def source_failed(self, source: str) -> None:
        """Count an exception of *source*."""
        self._source_failures[source].inc()

    def suspended(self, source: str, is_suspended: bool) -> None:
        """Record whether the service behind *source* is suspended because it fails."""
        self._suspended[source].set(is_suspended)

    def tokenized(self, source: str, result: str, duration_s: float) -> None:
        """Count a prompt whose ids were wanted of *source*; *result* is one of `names.TOKENIZE_RESULTS`."""
        self._tokenizations[source, result].inc()
        if result in ("ok", "late"):
            self._tokenize_seconds[source].observe(duration_s)

    def ids_compared(self, equal: bool) -> None:
        """Count a prompt whose ids were known and whose tokens an instance counted."""
        self._tokenize_checks["equal" if equal else "different"].inc()

    def hit_checked(self, instance: str, source: str, result: str, wrong_tokens: int) -> None:
        """Count a predicted hit that was reported as *result*, one of `names.HIT_RESULTS`."""
        labels = self._instance(instance), source, result
        self._hit_checks[labels].value += 1
        self._hit_wrong_tokens[labels].value += wrong_tokens

    def cache_broke(self, part: str, change: str) -> None:
        """Count a cache break by *part*, one of `names.BROKEN_PARTS`, and *change*, one of `names.CHANGES`."""
        self._cache_breaks[part, change].inc()

    def recorded(self, record: str, result: str, lines: int) -> None:
        """Count *lines* of a record; *result* is one of `names.RECORD_RESULTS`. Any thread may call this."""
        self._record_lines[record, result].inc(lines)

    def reloaded(self, result: str) -> None:
        """Count a change of a policy; *result* is one of `names.RELOADS`."""
        self._policy_reloads[result].inc()

    def restored(self, route: str, reason: str) -> None:
        """Count a restore by the guardrail; *reason* is one of `names.OUT_OF_BAND`."""
        self._guardrail_restores[route, reason].inc()

    def shadowed(self, one: Shadowed) -> None:
        """Count the answer of a policy in shadow."""
        policy = one.policy.name
        self._shadow_decisions[policy, one.answer].inc()
        if one.decision is None:
            return
        self._shadow_seconds[policy].observe(one.evaluate_s)
        if one.is_new_session:
            self._shadow_sessions[policy].inc()
        if one.answer == names.DIFFERS:
            if one.regret is not None:
                self._shadow_regret[policy].observe(one.regret)
            if one.had_diverged is False:
                self._shadow_diverged[policy].inc()

    def _instance(self, id: str) -> str:
        return id if self._per_instance else _ALL


class ModelLabels:
    """Labels of models: only names that this router serves, so that clients cannot make up series.

    Args:
        served: the names that instances serve, and aliases; called for a name not seen before, at most once a second.
        clock: monotonic seconds.
    """

    def __init__(self, served: Callable[[], Iterable[str]], clock: Callable[[], float] = time.monotonic) -> None:
        self._served = served
        self._clock = clock
        self._known: set[str] = set()
        #: What *served* returned, and until when it counts.
        self._names: frozenset[str] = frozenset()
        self._until = -math.inf

    def of(self, model: str) -> str:
        """Return *model* if it is served here, else `other`; empty stays empty."""
        if model in self._known or not model:
            return model
        now = self._clock()
        if now >= self._until:
            self._names, self._until = frozenset(self._served()), now + 1.0
        if len(self._known) < MAX_MODELS and model in self._names:
            self._known.add(model)
            return model
        return OTHER
