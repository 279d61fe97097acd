"""Series computed when somebody scrapes, from the fleet and other parts as they are then; `metrics.py` counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from smetric.telemetry import names
from smetric.telemetry.metrics import MOST_INSTANCES

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance

#: Models whose imbalance is shown, at most.
_MOST_MODELS = 32


@dataclass(frozen=True, slots=True)
class IndexFigures:
    """What the prefix index says of itself."""

    blocks: int
    memory_bytes: int
    evictions: int


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """What the exchange with other routers says of itself.

    Args:
        up: whether each peer takes what it is sent, by its URL.
        placements: how many, by what became of them (`names.PLACEMENT_RESULTS`).
    """

    up: Mapping[str, bool]
    placements: Mapping[str, int]


class Gauges(Collector):
    """Collects the state of the app's parts.

    Args:
        instances: all instances.
        policies: route, name, hash and generation of each policy.
        dropped: spans lost so far.
        unlogged: log lines lost so far.
        panics: times candidates were taken whatever their health.
        index: the prefix index's figures, where there is one.
        peers: the figures of the exchange with other routers, where there is one.
        clock: monotonic seconds, the one scrapes are stamped with.
    """

    def __init__(
        self,
        *,
        instances: Callable[[], Sequence[Instance]],
        policies: Callable[[], Iterable[tuple[str, str, str, int]]],
        dropped: Callable[[], int],
        unlogged: Callable[[], int],
        panics: Callable[[], int],
        index: Callable[[], IndexFigures] | None = None,
        peers: Callable[[], PeerFigures] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instances = instances
        self._policies = policies
        self._dropped = dropped
        self._unlogged = unlogged
        self._panics = panics
        self._index = index
        self._peers = peers
        self._clock = clock

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked for at registration: the parts may not have started yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All series, now. Runs in a thread, so it works on a copy of the list of instances."""
        instances = list(self._instances())
        if len(instances) <= MOST_INSTANCES:
            yield from self._per_instance(instances)
        yield self._imbalance(instances)
        info = _gauge(names.POLICY_INFO)
        for route, name, digest, generation in self._policies():
            info.add_metric([route, name, digest, str(generation)], 1)
        yield info
        yield _counter(names.SPANS_DROPPED, self._dropped())
        yield _counter(names.LOG_LINES_LOST, self._unlogged())
        yield _counter(names.PANICS, self._panics())
        if self._index is not None:
            figures = self._index()
            for metric, value in ((names.INDEX_BLOCKS, figures.blocks), (names.INDEX_BYTES, figures.memory_bytes)):
                family = _gauge(metric)
                family.add_metric([], value)
                yield family
            yield _counter(names.INDEX_EVICTIONS, figures.evictions)
        if self._peers is not None:
            yield from self._exchange(self._peers())

    def _exchange(self, figures: PeerFigures) -> Iterator[Metric]:
        up = _gauge(names.PEER_UP)
        for peer, is_up in figures.up.items():
            up.add_metric([peer], is_up)
        placements = CounterMetricFamily(names.PLACEMENTS.name, names.PLACEMENTS.doc, labels=names.PLACEMENTS.labels)
        for result, count in figures.placements.items():
            placements.add_metric([result], count)
        yield from (up, placements)

    def _per_instance(self, instances: Sequence[Instance]) -> Iterator[Metric]:
        now = self._clock()
        up, draining, inflight, unprefilled = map(_gauge, (names.UP, names.DRAINING, names.INFLIGHT, names.UNPREFILLED))
        state = _gauge(names.STATE)
        running, waiting, kv_usage, age = map(_gauge, (names.RUNNING, names.WAITING, names.KV_USAGE, names.AGE))
        for instance in instances:
            label = [instance.id]
            up.add_metric(label, instance.healthy)
            draining.add_metric(label, instance.draining)
            state.add_metric([instance.id, instance.state.value], 1)
            inflight.add_metric(label, instance.own)
            unprefilled.add_metric(label, instance.unprefilled)
            scrape = instance.scrape
            # An instance never scraped has no such series: absent is not zero.
            if scrape is not None:
                running.add_metric(label, scrape.running)
                waiting.add_metric(label, scrape.waiting)
                age.add_metric(label, max(0.0, now - scrape.measured_at))
                if scrape.kv_usage is not None:
                    kv_usage.add_metric(label, scrape.kv_usage)
        yield from (up, draining, state, inflight, unprefilled, running, waiting, kv_usage, age)

    def _imbalance(self, instances: Sequence[Instance]) -> Metric:
        loads: dict[str, list[float]] = {}
        for instance in instances:
            for model in sorted(instance.models) if instance.models is not None else [""]:
                if model in loads or len(loads) < _MOST_MODELS:
                    loads.setdefault(model, []).append(instance.requests())
        family = _gauge(names.IMBALANCE)
        for model, values in loads.items():
            total = sum(values)
            family.add_metric([model], max(values) * len(values) / total if total else 1.0)
        return family


def _gauge(metric: names.Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.doc, labels=metric.labels)


def _counter(metric: names.Metric, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(metric.name, metric.doc, value=value)
