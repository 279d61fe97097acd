"""Metrics that are computed when the page is rendered; `metrics` has those that events change.

The functions run in a thread, so they work on copies of lists that the event loop changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from smetric import names
from smetric.telemetry.metrics import MAX_INSTANCES, Labels

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance
    from smetric.sources.kv_events.source import KvFigures
    from smetric.sources.prefix_index.index import IndexFigures
    from smetric.sources.shared.peers import PeerFigures

#: Models whose imbalance is shown.
_MAX_MODELS = 32

By = TypeVar("By", bound=Labels)


def computed(metric: names.Metric, values: Mapping[By, float] | float) -> Metric:
    """Return *metric* with its one value, or with *values* by their labels."""
    kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    family = kind(metric.name, metric.doc, labels=metric.labels)
    for labels, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        family.add_metric((labels,) if isinstance(labels, str) else labels, value)
    return family


def fleet_gauges(instances: Iterable[Instance], now: float) -> Iterator[Metric]:
    """Yield the state of the instances at *now*, monotonic seconds; each of them only while they are few."""
    instances = list(instances)
    yield computed(names.IMBALANCE, _imbalance(instances))
    if len(instances) > MAX_INSTANCES:
        return
    yield computed(names.UP, {one.id: one.healthy for one in instances})
    yield computed(names.DRAINING, {one.id: one.draining for one in instances})
    yield computed(names.STATE, {(one.id, one.state.value): 1 for one in instances})
    yield computed(names.INFLIGHT, {one.id: one.own for one in instances})
    yield computed(names.UNPREFILLED, {one.id: one.unprefilled for one in instances})
    # An instance never scraped has no such series: absent is not zero.
    last = {one.id: scrape for one in instances if (scrape := one.scrape) is not None}
    yield computed(names.RUNNING, {id: one.running for id, one in last.items()})
    yield computed(names.WAITING, {id: one.waiting for id, one in last.items()})
    yield computed(names.KV_USAGE, {id: one.kv_usage for id, one in last.items() if one.kv_usage is not None})
    yield computed(names.AGE, {id: max(0.0, now - one.measured_at) for id, one in last.items()})


def _imbalance(instances: Iterable[Instance]) -> dict[str, float]:
    """Return by model the largest load over the mean, of the instances that are healthy and not draining."""
    loads: dict[str, list[float]] = {}
    for instance in instances:
        if not instance.healthy or instance.draining:
            continue
        for model in sorted(instance.models) if instance.models is not None else [""]:
            if model in loads or len(loads) < _MAX_MODELS:
                loads.setdefault(model, []).append(instance.requests())
    return {
        model: max(values) * len(values) / total if (total := sum(values)) else 1.0 for model, values in loads.items()
    }


def cache_gauges(instances: Iterable[Instance], disagreements: Mapping[tuple[str, str], bool]) -> Iterator[Metric]:
    """Yield what engines find in their caches, and the *disagreements* with predictions by instance id and source."""
    instances = list(instances)
    if len(instances) > MAX_INSTANCES:
        return
    found = {one.id: tokens for one in instances if (tokens := one.prefix_tokens) is not None}
    places = ("local", "external", "missed")
    yield computed(
        names.PREFIX_TOKENS, {(id, at): getattr(tokens, at) for id, tokens in found.items() for at in places}
    )
    yield computed(names.HIT_DISAGREES, disagreements)


def policy_gauges(policies: Iterable[tuple[str, str, str, int]]) -> Iterator[Metric]:
    """Yield *policies*: route, name, hash and generation of each."""
    yield computed(names.POLICY_INFO, {(*about, str(generation)): 1 for *about, generation in policies})


def refusal_gauges(refusing: Mapping[tuple[str, str], float]) -> Iterator[Metric]:
    """Yield how long each route and arm has refused everything."""
    yield computed(names.POLICY_REFUSING, refusing)


def index_gauges(figures: IndexFigures) -> Iterator[Metric]:
    """Yield the size of the prefix index."""
    yield computed(names.INDEX_BLOCKS, figures.blocks)
    yield computed(names.INDEX_BYTES, figures.memory_bytes)
    yield computed(names.INDEX_EVICTIONS, figures.evictions)


def peer_gauges(figures: PeerFigures) -> Iterator[Metric]:
    """Yield the state of the exchange with other routers."""
    yield computed(names.PEER_UP, figures.up)
    yield computed(names.PLACEMENTS, figures.placements)


def kv_gauges(figures: KvFigures) -> Iterator[Metric]:
    """Yield the state of the source of KV events; of each instance only while they are few."""
    yield computed(names.KV_INDEX_BLOCKS, figures.blocks)
    yield computed(names.KV_INDEX_BYTES, figures.memory_bytes)
    yield computed(names.KV_INDEX_REFUSED, figures.refused)
    of = figures.instances
    if len(of) > MAX_INSTANCES:
        return
    yield computed(names.KV_KNOWN, {id: one.is_known for id, one in of.items()})
    yield computed(names.KV_LAG, {id: one.lag_s for id, one in of.items() if one.lag_s is not None})
    messages = {(id, result): count for id, one in of.items() for result, count in one.messages.items()}
    yield computed(names.KV_EVENTS, messages)
    yield computed(names.KV_GAPS, {id: one.gaps for id, one in of.items()})
    yield computed(names.KV_MISSED, {id: one.missed for id, one in of.items()})
    yield computed(names.KV_ORPHANS, {id: one.orphans for id, one in of.items()})


@dataclass(frozen=True, slots=True)
class OverloadFigures:
    """Load of the router.

    Args:
        queue_requests: requests in the queue.
        queue_bytes: bytes of their bodies.
        body_bytes: bytes of all bodies kept.
        connections: connections of clients.
        levels: level of overload by resource.
        saturation: of the instances, where that is known, and of the router; 1 is full.
    """

    queue_requests: int
    queue_bytes: int
    body_bytes: int
    connections: int
    levels: Mapping[str, int]
    saturation: Mapping[str, float]


def overload_gauges(figures: OverloadFigures) -> Iterator[Metric]:
    """Yield the load of the router."""
    yield computed(names.QUEUE_REQUESTS, figures.queue_requests)
    yield computed(names.QUEUE_BYTES, figures.queue_bytes)
    yield computed(names.BODY_BYTES, figures.body_bytes)
    yield computed(names.CONNECTIONS, figures.connections)
    yield computed(names.OVERLOAD_LEVEL, figures.levels)
    yield computed(names.SATURATION, figures.saturation)
