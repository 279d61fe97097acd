"""Series that the event loop alone counts: an increment is an addition, a histogram's observation one bisection.

The client library's own take a lock for each, which costs more than what is counted; those are for series that other
threads count too. Shown by the same registry, with the same names. What is counted is in `metrics.py`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Exemplar, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from smetric.telemetry import names

#: Series of one metric at most; what comes then is counted together, under labels that say `other`.
MOST_SERIES = 4096
OTHER = "other"


class Count:
    """One series of a counter."""

    __slots__ = ("created", "value")

    def __init__(self) -> None:
        self.created = time.time()
        self.value: float = 0

    def inc(self, by: float = 1) -> None:
        """Count *by* more."""
        self.value += by


class Counts(Collector):
    """A counter, by its label values. A counter without labels has its one series from the start.

    Args:
        metric: its name, labels and help.
    """

    def __init__(self, metric: names.Metric) -> None:
        self._metric = metric
        self._series: dict[tuple[str, ...], Count] = {}
        if not metric.labels:
            self.of()

    def of(self, *labels: str) -> Count:
        """The series with these label values."""
        found = self._series.get(labels)
        if found is None:
            assert len(labels) == len(self._metric.labels)
            labels = _within(labels, len(self._series))
            found = self._series.setdefault(labels, Count())
        return found

    def count(self, *labels: str, by: float = 1) -> None:
        """Count *by* more in the series with these label values."""
        try:
            self._series[labels].value += by
        except KeyError:
            self.of(*labels).inc(by)

    def describe(self) -> Iterable[Metric]:
        """Its name, for the registry."""
        return [CounterMetricFamily(self._metric.name, self._metric.doc)]

    def collect(self) -> Iterator[Metric]:
        """All series now; may run in another thread."""
        family = CounterMetricFamily(self._metric.name, self._metric.doc, labels=self._metric.labels)
        for labels, count in list(self._series.items()):
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
    """A histogram, by its label values. One without labels has its one series from the start.

    Args:
        metric: its name, labels, help and bounds.
    """

    def __init__(self, metric: names.Metric) -> None:
        self._metric = metric
        self._names = [_bound(bound) for bound in (*metric.buckets, float("inf"))]
        self._series: dict[tuple[str, ...], Histogram] = {}
        if not metric.labels:
            self.of()

    def of(self, *labels: str) -> Histogram:
        """The series with these label values."""
        found = self._series.get(labels)
        if found is None:
            assert len(labels) == len(self._metric.labels)
            labels = _within(labels, len(self._series))
            found = self._series.setdefault(labels, Histogram(self._metric.buckets))
        return found

    def observe(self, value: float, *labels: str, exemplar: Mapping[str, str] | None = None) -> None:
        """Take *value* in, in the series with these label values; *exemplar* as of a `Histogram`."""
        (self._series.get(labels) or self.of(*labels)).observe(value, exemplar)

    def describe(self) -> Iterable[Metric]:
        """Its name, for the registry."""
        return [HistogramMetricFamily(self._metric.name, self._metric.doc)]

    def collect(self) -> Iterator[Metric]:
        """All series now; may run in another thread."""
        metric = self._metric
        family = HistogramMetricFamily(metric.name, metric.doc, labels=metric.labels)
        for labels, one in list(self._series.items()):
            total, rows = 0, []
            for bucket, (name, count) in enumerate(zip(self._names, list(one.counts), strict=True)):
                total += count
                exemplar = one.exemplars.get(bucket)
                rows.append((name, float(total)) if exemplar is None else (name, float(total), exemplar))
            family.add_metric(labels, rows, one.sum)
            family.add_sample(f"{metric.name}_created", dict(zip(metric.labels, labels, strict=True)), one.created)
        yield family


def _within(labels: tuple[str, ...], series: int) -> tuple[str, ...]:
    """The labels by which one more of *series* is counted."""
    if series >= MOST_SERIES:
        return (OTHER,) * len(labels)
    return labels


def _bound(bound: float) -> str:
    """A bucket's `le`, as the client library writes it."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]
