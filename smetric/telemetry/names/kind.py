"""What a name of telemetry says of itself: attribute, metric."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attribute:
    """A span attribute: OTLP type (string, int, double, bool), unit (empty: none), and one sentence."""

    name: str
    type: str
    unit: str
    doc: str


@dataclass(frozen=True, slots=True)
class Metric:
    """A Prometheus metric: kind (counter, gauge, histogram), labels, one sentence, and a histogram's bounds."""

    name: str
    kind: str
    labels: tuple[str, ...]
    doc: str
    buckets: tuple[float, ...] = ()
