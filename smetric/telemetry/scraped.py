"""What collectors have in common whose series are computed when somebody scrapes, in another thread than the loop's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from smetric.telemetry import names
from smetric.telemetry.series import Labels

By = TypeVar("By", bound=Labels)


class Scraped(Collector):
    """Series that are not known before."""

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked for at registration: the parts may not have started yet."""
        return []


def family(metric: names.Metric, values: Mapping[By, float] | float) -> Metric:
    """The series of *metric*: its one value, or the *values* by their labels."""
    kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    made = kind(metric.name, metric.doc, labels=metric.labels)
    for labels, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        made.add_metric((labels,) if isinstance(labels, str) else labels, value)
    return made
