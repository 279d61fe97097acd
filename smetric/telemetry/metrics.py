"""Prometheus metrics."""

from __future__ import annotations

import asyncio
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily
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


# Series that the event loop alone counts: an increment is an addition, a histogram's observation one bisection.
#
# The client library's own take a lock for each, which costs more than what is counted; those are for series that other
# threads count too. Shown by the same registry, with the same names. What is counted is in `metrics.py`.

#: Series of one metric at most; what comes then is counted together, under labels that say `other`.
MOST_SERIES = 4096
OTHER = "other"

#: By what a series is found: the value of its label; a tuple of them where there are several, or none.
Labels = str | tuple[str, ...]
One = TypeVar("One")


class Series(dict[Labels, One]):
    """The series of one metric, each made when it is first asked for; one without labels is there from the start.

    Finding one is the dictionary's own work: `counts[policy, outcome].value += 1`. It may stand for series of several
    metrics that have this label in common and are always counted together.

    Args:
        labels: how many there are.
        make: a new series, of their values.
    """

    def __init__(self, labels: int, make: Callable[..., One]) -> None:
        super().__init__()
        self._labels = labels
        self._make = make
        if not labels:
            self[()] = make()

    def __missing__(self, labels: Labels) -> One:
        values = (labels,) if isinstance(labels, str) else labels
        assert len(values) == self._labels
        if len(self) >= MOST_SERIES:
            values = (OTHER,) * self._labels
        return self.setdefault(values if self._labels > 1 else values[0], self._make(*values))

    def now(self) -> list[tuple[tuple[str, ...], One]]:
        """All of them with their labels; may be called in another thread."""
        return [((labels,) if isinstance(labels, str) else labels, one) for labels, one in list(self.items())]


class Count:
    """One series of a counter."""

    __slots__ = ("created", "value")

    def __init__(self) -> None:
        self.created = time.time()
        #: To be added to.
        self.value: float = 0


class Counts(Collector):
    """A counter.

    Args:
        metric: its name, labels and help.
    """

    def __init__(self, metric: names.Metric) -> None:
        self._metric = metric
        #: What it counts.
        self.series = Series(len(metric.labels), lambda *_: Count())

    def describe(self) -> Iterable[Metric]:
        """Its name, for the registry."""
        return [CounterMetricFamily(self._metric.name, self._metric.doc)]

    def collect(self) -> Iterator[Metric]:
        """All series now; may run in another thread."""
        family = CounterMetricFamily(self._metric.name, self._metric.doc, labels=self._metric.labels)
        for labels, count in self.series.now():
            family.add_metric(labels, count.value, count.created)
        yield family


class Histogram:
    """One series of a histogram."""

    __slots__ = ("_bounds", "counts", "created", "exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.created = time.time()
        #: Observations in each bucket, not those below; the last is without a bound.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        #: The last of each bucket that came with one.
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, exemplar: Mapping[str, str] | None = None) -> None:
        """Take *value* in; *exemplar* are the labels of a trace that shows it."""
        bucket = bisect_left(self._bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        if exemplar is not None:
            self.exemplars[bucket] = Exemplar(dict(exemplar), value, time.time())


class Histograms(Collector):
    """A histogram.

    Args:
        metric: its name, labels, help and bounds.
    """

    def __init__(self, metric: names.Metric) -> None:
        self._metric = metric
        self._names = [_bound(bound) for bound in (*metric.buckets, float("inf"))]
        #: What it observes.
        self.series = Series(len(metric.labels), lambda *_: Histogram(metric.buckets))

    def describe(self) -> Iterable[Metric]:
        """Its name, for the registry."""
        return [HistogramMetricFamily(self._metric.name, self._metric.doc)]

    def collect(self) -> Iterator[Metric]:
        """All series now; may run in another thread."""
        metric = self._metric
        family = HistogramMetricFamily(metric.name, metric.doc, labels=metric.labels)
        for labels, one in self.series.now():
            total, rows = 0, []
            for bucket, (name, count) in enumerate(zip(self._names, list(one.counts), strict=True)):
                total += count
                exemplar = one.exemplars.get(bucket)
                rows.append((name, float(total)) if exemplar is None else (name, float(total), exemplar))
            family.add_metric(labels, rows, one.sum)
            family.add_sample(f"{metric.name}_created", dict(zip(metric.labels, labels, strict=True)), one.created)
        yield family


def _bound(bound: float) -> str:
    """A bucket's `le`, as the client library writes it."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


# A family of series whose values are known only when somebody scrapes: what collectors make theirs with.

By = TypeVar("By", bound=Labels)


def family(metric: names.Metric, values: Mapping[By, float] | float) -> Metric:
    """The series of *metric*: its one value, or the *values* by their labels."""
    kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    made = kind(metric.name, metric.doc, labels=metric.labels)
    for labels, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        made.add_metric((labels,) if isinstance(labels, str) else labels, value)
    return made


# Prometheus metrics: one registry per app, the page rendered off the event loop.
#
# What is counted as requests pass is here; what is read when somebody scrapes is in `gauges.py`. Names and help are
# those of `names`. No label value comes from a client.

#: Seconds a rendered page is served again: 2,000 samples take 15 ms to render.
PAGE_TTL_S = 1.0
#: Above this many instances series are not split by instance any more.
MOST_INSTANCES = 256
_ALL = "all"


class Metrics(Listener):
    """Counts and times what passes.

    Args:
        per_instance: whether series are split by instance; otherwise the label says `all`.
        clock: monotonic seconds, for the age of the rendered page.
    """

    def __init__(self, *, per_instance: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._per_instance = per_instance
        self._clock = clock
        self._pages: dict[str, tuple[float, bytes]] = {}
        self._rendering = asyncio.Lock()
        self._decisions = self._counts(names.DECISIONS)
        self._selected = self._counts(names.SELECTED)
        self._decision_seconds = self._histograms(names.DECISION_SECONDS)
        self._lookup_seconds = self._histograms(names.LOOKUP_SECONDS)[()]
        self._lookups = self._counts(names.LOOKUPS)
        self._suspended = self._gauge(names.LOOKUP_IS_SUSPENDED)
        self._requests = self._counts(names.REQUESTS)
        self._request_seconds = self._histograms(names.REQUEST_SECONDS)
        self._first_chunk_seconds = self._histograms(names.FIRST_CHUNK_SECONDS)
        self._chunk_seconds = self._histograms(names.TIME_PER_CHUNK)
        self._overhead_seconds = self._histograms(names.OVERHEAD_SECONDS)[()]
        self._attempts = self._counts(names.ATTEMPTS)
        self._ejections = self._counts(names.EJECTIONS)
        #: Requests in progress.
        self._in_progress = 0
        self._gauge(names.IN_PROGRESS).set_function(lambda: self._in_progress)
        self._source_failures = self._counts(names.SOURCE_FAILURES)
        self._tokenizations = self._counts(names.TOKENIZATIONS)
        self._tokenize_seconds = self._histograms(names.TOKENIZE_SECONDS)
        self._tokenize_checks = self._counts(names.TOKENIZE_CHECKS)
        self._retries_refused = self._counts(names.RETRIES_REFUSED)[()]
        self._refused = self._counts(names.REFUSED)
        self._client_retries = self._counts(names.CLIENT_RETRIES)
        #: A request left the queue after so many seconds.
        self.held = self._histograms(names.HOLD_SECONDS)[()].observe
        #: The event loop was so many seconds late.
        self.lagged = self._histograms(names.LOOP_LAG)[()].observe
        self._scrapes = self._counts(names.SCRAPES)
        self._scrape_seconds = self._histograms(names.SCRAPE_SECONDS)[()]
        self._prompt_tokens = self._counts(names.PROMPT_TOKENS_TOTAL)
        self._hit_tokens = self._counts(names.HIT_TOKENS_TOTAL)
        self._actual_hit_tokens = self._counts(names.ACTUAL_HIT_TOKENS_TOTAL)
        self._hit_checks = self._counts(names.HIT_CHECKS)
        self._hit_wrong_tokens = self._counts(names.HIT_WRONG_TOKENS)
        self._cache_breaks = self._counts(names.CACHE_BREAKS)
        # Counted from other threads as well, as the loop's own counts must not be.
        lines = names.RECORD_LINES
        self._record_lines = Counter(lines.name, lines.doc, lines.labels, registry=self.registry)
        self._shadow_decisions = self._counts(names.SHADOW_DECISIONS)
        self._shadow_regret = self._histograms(names.SHADOW_REGRET_RATIO)
        self._shadow_sessions = self._counts(names.SHADOW_SESSIONS)
        self._shadow_diverged = self._counts(names.SHADOW_DIVERGED_SESSIONS)
        self._shadow_seconds = self._histograms(names.SHADOW_SECONDS)
        self._arm_requests = self._counts(names.ARM_REQUESTS)
        self._arm_first_chunk_seconds = self._histograms(names.ARM_FIRST_CHUNK_SECONDS)
        self._guardrail_restores = self._counts(names.GUARDRAIL_RESTORES)
        self._policy_errors = self._counts(names.POLICY_ERRORS)
        self._policy_reloads = self._counts(names.POLICY_RELOADS)
        self._listener_failures = self._counts(names.LISTENER_FAILURES)
        build = self._gauge(names.BUILD_INFO)
        build.labels(smetric.__version__, platform.python_version()).set(1)

    def register(self, collector: Collector) -> None:
        """Add series that are computed when somebody scrapes."""
        self.registry.register(collector)

    def arrived(self, exchange: Exchange) -> None:
        """Count a request in progress."""
        self._in_progress += 1

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Count a decision."""
        policy, model = record.policy.name, exchange.model
        self._decisions[policy, record.outcome, record.reason].value += 1
        if record.outcome == names.ERROR:
            self._policy_errors[policy].value += 1
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

    def refused(self, reason: str) -> None:
        """A request was refused before anything was decided, for *reason*, one of `names.REFUSALS`."""
        self._refused[reason].value += 1

    def client_retried(self, admitted: bool) -> None:
        """A client sent a request again; it was let in, or refused."""
        self._client_retries[names.RETRY_ADMITTED if admitted else names.RETRY_REFUSED].value += 1

    def ejected(self, instance: Instance, reason: str) -> None:
        """*instance* was left out for *reason*, one of `names.EJECTION_REASONS`."""
        self._ejections[self._instance(instance.id), reason].value += 1

    def ended(self, exchange: Exchange) -> None:
        """Count and time a request."""
        self._in_progress -= 1
        status, model, usage, exemplar = exchange.status, exchange.model, exchange.usage, exchange.exemplar
        self._requests[exchange.route, str(status) if 100 <= status <= 599 else "other"].value += 1
        self._request_seconds[exchange.route, model].observe(exchange.duration_s, exemplar)
        if exchange.gave_up:
            self._retries_refused.value += 1
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
            self._arm_requests[record.route, record.arm, str(status)].value += 1
            if record.ttft_s is not None:
                self._arm_first_chunk_seconds[record.route, record.arm].observe(record.ttft_s)

    def unreadable(self, problem: HttpError, scope: Mapping[str, Any], is_seen: bool) -> None:
        """Count a request that no endpoint has seen; there is nothing to time."""
        if not is_seen:
            self._requests[OTHER, str(problem.status)].value += 1

    def listener_failed(self, listener: str) -> None:
        """Count a failure of a *listener* to exchanges."""
        self._listener_failures[listener].value += 1

    def scraped(self, instance: str, result: str, duration_s: float) -> None:
        """A scrape of *instance* ended; *result* is ok, timeout, connect_error, http_error or bad_page."""
        self._scrapes[self._instance(instance), result].value += 1
        self._scrape_seconds.observe(duration_s)

    def looked_up(self, source: str, result: str) -> None:
        """*source* answered a look-up; *result* is one of `names.LOOKUP_RESULTS`."""
        self._lookups[source, result].value += 1

    def source_failed(self, source: str) -> None:
        """*source* raised."""
        self._source_failures[source].value += 1

    def suspended(self, source: str, is_suspended: bool) -> None:
        """The service behind *source* began to count as failing, or as well again."""
        self._suspended.labels(source).set(is_suspended)

    def tokenized(self, source: str, result: str, duration_s: float) -> None:
        """The ids of a prompt were wanted of *source*; *result* is one of `names.TOKENIZE_RESULTS`."""
        self._tokenizations[source, result].value += 1
        if result == "ok":
            self._tokenize_seconds[source].observe(duration_s)

    def ids_compared(self, equal: bool) -> None:
        """An instance counted a prompt whose ids were known: as many tokens, or not."""
        self._tokenize_checks["equal" if equal else "different"].value += 1

    def hit_checked(self, instance: str, source: str, result: str, wrong_tokens: int) -> None:
        """A predicted hit was reported to be *result* (one of `names.HIT_RESULTS`), wrong by *wrong_tokens*."""
        labels = self._instance(instance), source, result
        self._hit_checks[labels].value += 1
        self._hit_wrong_tokens[labels].value += wrong_tokens

    def cache_broke(self, part: str, change: str) -> None:
        """A follow-up missed the cache because of *part*, one of `names.BROKEN_PARTS`; *change* of `names.CHANGES`."""
        self._cache_breaks[part, change].value += 1

    def recorded(self, record: str, result: str, lines: int) -> None:
        """*lines* of *record* came to *result*, one of `names.RECORD_RESULTS`. From any thread."""
        self._record_lines.labels(record, result).inc(lines)

    def reloaded(self, result: str) -> None:
        """A policy file changed, or was undone: *result* is one of `names.RELOADS`."""
        self._policy_reloads[result].value += 1

    def restored(self, route: str, reason: str) -> None:
        """The guardrail restored the policy of *route* for *reason*, one of `names.OUT_OF_BAND`."""
        self._guardrail_restores[route, reason].value += 1

    def shadowed(self, one: Shadowed) -> None:
        """Count the answer of a policy in shadow."""
        policy = one.policy.name
        self._shadow_decisions[policy, one.answer].value += 1
        if one.decision is None:
            return
        self._shadow_seconds[policy].observe(one.evaluate_s)
        if one.is_new_session:
            self._shadow_sessions[policy].value += 1
        if one.answer == names.DIFFERS:
            if one.regret is not None:
                self._shadow_regret[policy].observe(one.regret)
            if one.had_diverged is False:
                self._shadow_diverged[policy].value += 1

    async def page(self, accept: str = "") -> tuple[bytes, str]:
        """The page as text or OpenMetrics, by the Accept header, at most a second old; and its content type."""
        encode, content_type = choose_encoder(accept)
        async with self._rendering:
            cached = self._pages.get(content_type)
            if cached is None or self._clock() - cached[0] >= PAGE_TTL_S:
                # choose_encoder has a handful of types; escaping variants are the client's to multiply.
                if len(self._pages) > 8:
                    self._pages.clear()
                cached = self._clock(), await asyncio.to_thread(encode, self.registry)
                self._pages[content_type] = cached
        return cached[1], content_type

    def _instance(self, id: str) -> str:
        return id if self._per_instance else _ALL

    def _counts(self, metric: names.Metric) -> Series[Count]:
        counts = Counts(metric)
        self.registry.register(counts)
        return counts.series

    def _histograms(self, metric: names.Metric) -> Series[Histogram]:
        histograms = Histograms(metric)
        self.registry.register(histograms)
        return histograms.series

    def _gauge(self, metric: names.Metric) -> Gauge:
        return Gauge(metric.name, metric.doc, metric.labels, registry=self.registry)


# Model names as metric labels and span names: only names this router serves, so that clients cannot make up series.

#: What every other name becomes.
OTHER_MODEL = "other"
#: Names remembered at most; the rest are `other` too.
MOST = 100


class ModelLabels:
    """Maps what a client asked for to a label from a bounded set.

    Args:
        served: the names the instances serve and the aliases configured, asked anew for a name not seen before.
    """

    def __init__(self, served: Callable[[], Iterable[str]]) -> None:
        self._served = served
        self._known: set[str] = set()

    def of(self, model: str) -> str:
        """*model* if it is served here, else `other`; empty stays empty."""
        if model in self._known or not model:
            return model
        if len(self._known) < MOST and model in self._served():
            self._known.add(model)
            return model
        return OTHER_MODEL
