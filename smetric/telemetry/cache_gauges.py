"""Series of what engines find in their caches, and of whether predictions agree with it, computed when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from smetric.telemetry import names
from smetric.telemetry.metrics import MOST_INSTANCES

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance


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

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked for at registration: the parts may not have started yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All series, now. Runs in a thread, so it works on copies."""
        instances = list(self._instances())
        if len(instances) > MOST_INSTANCES:
            return
        tokens = CounterMetricFamily(
            names.PREFIX_TOKENS.name, names.PREFIX_TOKENS.doc, labels=names.PREFIX_TOKENS.labels
        )
        for instance in instances:
            found = instance.prefix_tokens
            if found is not None:
                tokens.add_metric([instance.id, "local"], found.local)
                tokens.add_metric([instance.id, "external"], found.external)
                tokens.add_metric([instance.id, "missed"], found.missed)
        disagrees = GaugeMetricFamily(
            names.HIT_DISAGREES.name, names.HIT_DISAGREES.doc, labels=names.HIT_DISAGREES.labels
        )
        for (instance_id, source), is_wrong in self._disagreements().items():
            disagrees.add_metric([instance_id, source], is_wrong)
        yield from (tokens, disagrees)
