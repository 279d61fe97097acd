"""Series computed at scrape time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from smetric import names
from smetric.telemetry.metrics import MOST_INSTANCES, family

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance
    from smetric.policy.decision import Decision
    from smetric.policy.policy import Policy
    from smetric.sources.kv_events.source import KvFigures
    from smetric.sources.prefix_index.index import IndexFigures
    from smetric.sources.shared.peers import PeerFigures


# Series computed when somebody scrapes, from the fleet and other parts as they are then; `metrics.py` counts.

#: Models whose imbalance is shown, at most.
_MOST_MODELS = 32


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


# Series of what engines find in their caches, and of whether predictions agree with it, computed when scraped.


class CacheGauges(Collector):
    """Collects per instance, while there are few of them.

    Args:
        instances: all instances.
        disagreements: whether predictions and reports disagree, by instance id and source.
    """

    def __init__(
        self,
        instances: Callable[[], Sequence[Instance]],
        disagreements: Callable[[], Mapping[tuple[str, str], bool]],
    ) -> None:
        self._instances = instances
        self._disagreements = disagreements

    def collect(self) -> Iterator[Metric]:
        """All series, now. Runs in a thread, so it works on copies."""
        instances = list(self._instances())
        if len(instances) > MOST_INSTANCES:
            return
        yield family(
            names.PREFIX_TOKENS,
            {
                (instance.id, where): getattr(found, where)
                for instance in instances
                if (found := instance.prefix_tokens) is not None
                for where in ("local", "external", "missed")
            },
        )
        yield family(names.HIT_DISAGREES, self._disagreements())


# Series of what is known of each KV cache from its engine's events, computed when somebody scrapes.


class KvGauges(Collector):
    """Collects the state of the source of KV events; *figures* may be called from any thread."""

    def __init__(self, figures: Callable[[], KvFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """All series, now; those of single instances only while there are few of them."""
        figures = self._figures()
        yield family(names.KV_INDEX_BLOCKS, figures.blocks)
        yield family(names.KV_INDEX_BYTES, figures.memory_bytes)
        yield family(names.KV_INDEX_REFUSED, figures.refused)
        of = figures.instances
        if len(of) > MOST_INSTANCES:
            return
        yield family(names.KV_KNOWN, {id: one.is_known for id, one in of.items()})
        yield family(names.KV_LAG, {id: one.lag_s for id, one in of.items() if one.lag_s is not None})
        messages = {(id, result): count for id, one in of.items() for result, count in one.messages.items()}
        yield family(names.KV_EVENTS, messages)
        yield family(names.KV_GAPS, {id: one.gaps for id, one in of.items()})
        yield family(names.KV_MISSED, {id: one.missed for id, one in of.items()})
        yield family(names.KV_ORPHANS, {id: one.orphans for id, one in of.items()})


# Series of what is taken at once and how full that is, computed when somebody scrapes; `metrics.py` counts.


@dataclass(frozen=True, slots=True)
class OverloadFigures:
    """What there is now.

    Args:
        queue_requests: requests in the queue.
        queue_bytes: bytes of their bodies.
        body_bytes: bytes of all bodies kept.
        connections: of clients.
        levels: of overload, by resource.
        saturation: of the instances, where that is known, and of the router; 1 is full.
    """

    queue_requests: int
    queue_bytes: int
    body_bytes: int
    connections: int
    levels: Mapping[str, int]
    saturation: Mapping[str, float]


class OverloadGauges(Collector):
    """Collects them.

    Args:
        figures: gives them.
    """

    def __init__(self, figures: Callable[[], OverloadFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """All series, now."""
        figures = self._figures()
        yield family(names.QUEUE_REQUESTS, figures.queue_requests)
        yield family(names.QUEUE_BYTES, figures.queue_bytes)
        yield family(names.BODY_BYTES, figures.body_bytes)
        yield family(names.CONNECTIONS, figures.connections)
        yield family(names.OVERLOAD_LEVEL, figures.levels)
        yield family(names.SATURATION, figures.saturation)


# How often each guard of the acting policies held and failed, counted by statement and summed up when scraped.

#: Generations of policies counted apart, and guards shown and remembered: those of the latest generations.
MOST_POLICIES = 32
MOST_GUARDS = 1024


class GuardOutcomes(Collector):
    """Counts them. A decision costs one addition for each statement visited."""

    def __init__(self) -> None:
        #: For each policy and each of its statements, how many decisions stopped at which guard: the last place but one
        #: is for those that passed all, the last for a filter that was ignored.
        self._stops: dict[Policy, list[list[int]]] = {}
        #: What policies that are gone have come to: by policy, rule, guard and whether it held.
        self._past: Counter[tuple[str, str, str, str]] = Counter()

    def decided(self, decision: Decision) -> None:
        """Count the guards of *decision*."""
        rows = self._stops.get(decision.policy)
        if rows is None:
            rows = self._begin(decision.policy)
        for at, stop in enumerate(decision.stops):
            rows[at][stop] += 1

    def _begin(self, policy: Policy) -> list[list[int]]:
        if len(self._stops) == MOST_POLICIES:
            oldest = next(iter(self._stops))
            self._past.update(_summed(oldest, self._stops.pop(oldest)))
            while len(self._past) > 2 * MOST_GUARDS:
                del self._past[next(iter(self._past))]
        rows = self._stops[policy] = [[0] * (len(step.guards) + 2) for step in policy.plan.steps]
        return rows

    def collect(self) -> Iterator[Metric]:
        """All of them, now; may run in another thread."""
        total: Counter[tuple[str, str, str, str]] = Counter()
        stops, past = list(self._stops.items()), dict(self._past)  # at one time: what goes meanwhile is in one of them
        for policy, rows in reversed(stops):
            total.update(_summed(policy, rows))
        total.update(past)
        yield family(names.GUARD_OUTCOMES, dict(list(total.items())[: 2 * MOST_GUARDS]))


def _summed(policy: Policy, rows: list[list[int]]) -> dict[tuple[str, str, str, str], int]:
    """By labels; a guard held in all decisions that stopped behind it."""
    summed: Counter[tuple[str, str, str, str]] = Counter()
    for step, row in zip(policy.plan.steps, rows, strict=True):
        for place, guard in enumerate(step.guards):
            summed[policy.name, step.label, guard.label, "true"] += sum(row[place + 1 :])
            summed[policy.name, step.label, guard.label, "false"] += row[place]
    return summed
