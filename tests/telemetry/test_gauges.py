from __future__ import annotations

from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from smetric.fleet.instance import PrefixTokens
from smetric.sources.kv_events.source import CacheFigures, KvFigures
from smetric.telemetry.gauges import cache_gauges, fleet_gauges, kv_gauges, policy_gauges
from smetric.telemetry.metrics import Computed
from tests.telemetry.samples import fleet


class Page:
    """Values of computed metrics by name and labels."""

    def __init__(self, families: Iterable[Metric]) -> None:
        made = list(families)
        self._registry = CollectorRegistry()
        self._registry.register(Computed(lambda: made))

    def __call__(self, metric: str, /, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"smetric_{metric}", labels)


def test_fleet_gauges_show_the_state_and_leave_out_unknown_values() -> None:
    instances = fleet(2)
    scrape = instances[0].scrape
    assert scrape is not None
    instances[0].own = 4
    instances[0].draining = True
    instances[1].scrape = None
    instances[1].healthy = False
    read = Page(fleet_gauges(instances, scrape.measured_at + 1.5))
    assert [read("instance_up", instance=id) for id in ("gpu-0", "gpu-1")] == [1, 0]
    assert read("instance_draining", instance="gpu-0") == 1
    assert read("instance_state", instance="gpu-0", state="well") == 1
    assert read("inflight_requests", instance="gpu-0") == 4
    assert read("instance_running", instance="gpu-0") == 2
    assert read("instance_kv_cache_usage_ratio", instance="gpu-0") == 0.25
    assert read("telemetry_age_seconds", instance="gpu-0") == 1.5
    assert read("instance_running", instance="gpu-1") is None


def test_imbalance_is_over_healthy_instances_that_are_not_draining() -> None:
    instances = fleet(4)
    for instance, own in zip(instances, (6, 2, 0, 0), strict=True):
        instance.own, instance.scrape = own, None

    def imbalance() -> float | None:
        return Page(fleet_gauges(instances, 0.0))("load_imbalance_ratio", model="m")

    assert imbalance() == 3.0
    instances[2].draining = True
    instances[3].healthy = False
    assert imbalance() == 1.5
    instances[0].draining = instances[1].draining = True
    assert imbalance() is None


@pytest.mark.parametrize(("count", "is_shown"), [(256, True), (257, False)])
def test_gauges_show_each_instance_only_while_they_are_few(count: int, is_shown: bool) -> None:
    instances = fleet(count)
    instances[0].prefix_tokens = PrefixTokens(1, 1, 1)
    figures = KvFigures(1, 1, 1, {each.id: CacheFigures(True, {"ok": 1}, 0.1, 0, 0, 0) for each in instances})
    read = Page([*fleet_gauges(instances, 0.0), *cache_gauges(instances, {}), *kv_gauges(figures)])
    assert (read("instance_up", instance="gpu-0") == 1) is is_shown
    assert (read("instance_prefix_tokens_total", instance="gpu-0", found="local") == 1) is is_shown
    assert (read("kv_events_known", instance="gpu-0") == 1) is is_shown
    assert read("kv_index_blocks") == 1
    assert read("load_imbalance_ratio", model="m") == 1


def test_cache_gauges_show_reports_of_engines() -> None:
    instances = fleet(2)
    instances[0].prefix_tokens = PrefixTokens(local=100, external=20, missed=7)
    read = Page(cache_gauges(instances, {("gpu-1", "kv_events"): True}))
    found = [read("instance_prefix_tokens_total", instance="gpu-0", found=at) for at in ("local", "external", "missed")]
    assert found == [100, 20, 7]
    assert read("instance_prefix_tokens_total", instance="gpu-1", found="local") is None
    assert read("prefix_disagreement", instance="gpu-1", source="kv_events") == 1


def test_policy_gauges_name_the_generation() -> None:
    read = Page(policy_gauges([("default", "sticky", "abc", 2)]))
    assert read("policy_info", route="default", name="sticky", hash="abc", generation="2") == 1
