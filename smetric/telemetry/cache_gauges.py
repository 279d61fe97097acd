"""Series of what engines find in their caches, and of whether predictions agree with it, computed when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from smetric.telemetry import names
from smetric.telemetry.family import family
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
