"""Series of what is taken at once and how full that is, computed when somebody scrapes; `metrics.py` counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from smetric.telemetry import names
from smetric.telemetry.family import family


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
