"""Series computed when somebody scrapes, from the fleet and other parts as they are then; `metrics.py` counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from smetric.telemetry import names
from smetric.telemetry.family import family
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

    def collect(self) -> Iterator[Metric]:
        """All series, now. Runs in a thread, so it works on a copy of the list of instances."""
        instances = list(self._instances())
        if len(instances) <= MOST_INSTANCES:
            yield from self._per_instance(instances)
        yield family(names.IMBALANCE, _imbalance(instances))
        policies = self._policies()
        yield family(names.POLICY_INFO, {(*about, str(generation)): 1 for *about, generation in policies})
        yield family(names.SPANS_DROPPED, self._dropped())
        yield family(names.LOG_LINES_LOST, self._unlogged())
        yield family(names.PANICS, self._panics())
        if self._index is not None:
            index = self._index()
            yield family(names.INDEX_BLOCKS, index.blocks)
            yield family(names.INDEX_BYTES, index.memory_bytes)
            yield family(names.INDEX_EVICTIONS, index.evictions)
        if self._peers is not None:
            peers = self._peers()
            yield family(names.PEER_UP, peers.up)
            yield family(names.PLACEMENTS, peers.placements)

    def _per_instance(self, instances: Sequence[Instance]) -> Iterator[Metric]:
        now = self._clock()
        yield family(names.UP, {one.id: one.healthy for one in instances})
        yield family(names.DRAINING, {one.id: one.draining for one in instances})
        yield family(names.STATE, {(one.id, one.state.value): 1 for one in instances})
        yield family(names.INFLIGHT, {one.id: one.own for one in instances})
        yield family(names.UNPREFILLED, {one.id: one.unprefilled for one in instances})
        # An instance never scraped has no such series: absent is not zero.
        last = {one.id: scrape for one in instances if (scrape := one.scrape) is not None}
        yield family(names.RUNNING, {id: one.running for id, one in last.items()})
        yield family(names.WAITING, {id: one.waiting for id, one in last.items()})
        yield family(names.KV_USAGE, {id: one.kv_usage for id, one in last.items() if one.kv_usage is not None})
        yield family(names.AGE, {id: max(0.0, now - one.measured_at) for id, one in last.items()})


def _imbalance(instances: Sequence[Instance]) -> dict[str, float]:
    """By model: the largest load over the mean, of those that are there to be loaded."""
    loads: dict[str, list[float]] = {}
    for instance in instances:
        if not instance.healthy or instance.draining:
            continue
        for model in sorted(instance.models) if instance.models is not None else [""]:
            if model in loads or len(loads) < _MOST_MODELS:
                loads.setdefault(model, []).append(instance.requests())
    return {
        model: max(values) * len(values) / total if (total := sum(values)) else 1.0 for model, values in loads.items()
    }
