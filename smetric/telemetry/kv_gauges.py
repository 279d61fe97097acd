"""Series of what is known of each KV cache from its engine's events, computed when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from smetric.telemetry import names
from smetric.telemetry.metrics import MOST_INSTANCES


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """What is known of one instance's caches, and how it came.

    Args:
        is_known: whether the contents of all of them, one for each data-parallel rank, are complete.
        messages: messages by result: ok, replayed, repeated, malformed.
        lag_s: seconds from when the engine made its latest message until it was taken; None before the first.
        gaps: how often messages were missed for good.
        missed: how many of them.
        orphans: blocks that could not be entered.
        restarts: most that one publisher's numbers showed.
    """

    is_known: bool
    messages: Mapping[str, int]
    lag_s: float | None
    gaps: int
    missed: int
    orphans: int
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class KvFigures:
    """What the source of KV events says of itself: its index, and each instance by id."""

    blocks: int
    memory_bytes: int
    refused: int
    instances: Mapping[str, CacheFigures]


class KvGauges(Collector):
    """Collects the state of the source of KV events; *figures* may be called from any thread."""

    def __init__(self, figures: Callable[[], KvFigures]) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked for at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All series, now; those of single instances only while there are few of them."""
        figures = self._figures()
        for metric, value in ((names.KV_INDEX_BLOCKS, figures.blocks), (names.KV_INDEX_BYTES, figures.memory_bytes)):
            gauge = GaugeMetricFamily(metric.name, metric.doc, labels=metric.labels)
            gauge.add_metric([], value)
            yield gauge
        yield CounterMetricFamily(names.KV_INDEX_REFUSED.name, names.KV_INDEX_REFUSED.doc, value=figures.refused)
        if len(figures.instances) > MOST_INSTANCES:
            return
        known, lag = (
            GaugeMetricFamily(metric.name, metric.doc, labels=metric.labels)
            for metric in (names.KV_KNOWN, names.KV_LAG)
        )
        messages, gaps, missed, orphans = (
            CounterMetricFamily(metric.name, metric.doc, labels=metric.labels)
            for metric in (names.KV_EVENTS, names.KV_GAPS, names.KV_MISSED, names.KV_ORPHANS)
        )
        for id, caches in figures.instances.items():
            known.add_metric([id], caches.is_known)
            if caches.lag_s is not None:
                lag.add_metric([id], caches.lag_s)
            for result, count in caches.messages.items():
                messages.add_metric([id, result], count)
            gaps.add_metric([id], caches.gaps)
            missed.add_metric([id], caches.missed)
            orphans.add_metric([id], caches.orphans)
        yield from (known, lag, messages, gaps, missed, orphans)
