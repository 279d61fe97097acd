"""A family of series whose values are known only when somebody scrapes: what collectors make theirs with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from smetric.telemetry import names
from smetric.telemetry.series import Labels

By = TypeVar("By", bound=Labels)


def family(metric: names.Metric, values: Mapping[By, float] | float) -> Metric:
    """The series of *metric*: its one value, or the *values* by their labels."""
    kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    made = kind(metric.name, metric.doc, labels=metric.labels)
    for labels, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        made.add_metric((labels,) if isinstance(labels, str) else labels, value)
    return made
