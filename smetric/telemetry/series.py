"""Series that the event loop alone counts: an increment is an addition, a histogram's observation one bisection.

The client library's own take a lock for each, which costs more than what is counted; those are for series that other
threads count too. Shown by the same registry, with the same names. What is counted is in `metrics.py`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, Exemplar, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from smetric.telemetry import names

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
