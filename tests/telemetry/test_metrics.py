from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from smetric import names
from smetric.fleet.instance import Instance, PrefixTokens
from smetric.fleet.record import DecisionRecord, Shadowed
from smetric.request.request import Usage
from smetric.sources.kv_events.source import CacheFigures, KvFigures
from smetric.sources.measured import PrefillTime
from smetric.sources.prefix_index.index import IndexFigures
from smetric.sources.shared.peers import PeerFigures
from smetric.telemetry.exchange import Telemetry
from smetric.telemetry.gauges import (
    CacheGauges,
    Gauges,
    KvGauges,
    OverloadFigures,
    OverloadGauges,
)
from smetric.telemetry.metrics import MOST, Metrics, ModelLabels
from tests.fakes import exchange_of
from tests.telemetry.samples import ROUTE, begin, fleet, record, run_one, telemetry


def gauges(instances: list[Instance], now: float = 100.0) -> Gauges:
    return Gauges(
        instances=lambda: instances,
        policies=lambda: [("default", "sticky", "abc", 2)],
        dropped=lambda: 5,
        unlogged=lambda: 6,
        panics=lambda: 7,
        index=lambda: IndexFigures(10, 640, 3),
        peers=lambda: PeerFigures({"http://10.0.0.2:9464": True}, {"sent": 4}),
        clock=lambda: now,
    )


def series(page: bytes) -> Iterator[tuple[str, str]]:
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                yield sample.name, str(sorted(sample.labels.items()))


def run_stream(app: Telemetry, made: DecisionRecord) -> None:
    """A stream of 21 events, answered to the end."""
    exchange = begin(app)
    exchange.decided(made)
    attempt = exchange.attempt(ROUTE)
    attempt.first_byte()
    exchange.answering()
    usage = Usage(1000, 20, 400)
    attempt.end(names.OK, status=200, usage=usage)
    exchange.end(200, bytes_out=99, events=21, usage=usage)


async def test_what_passes_is_counted() -> None:
    app = telemetry()
    run_one(app, record())
    run_one(app, record(names.REJECTED))
    run_one(app, record(names.PINNED))
    read = app.metrics.registry.get_sample_value
    policy = {"policy": "sticky"}
    assert read("smetric_decisions_total", policy | {"outcome": "routed", "reason": "policy"}) == 1
    assert read("smetric_decisions_total", policy | {"outcome": "rejected", "reason": "policy"}) == 1
    assert read("smetric_decisions_total", policy | {"outcome": "pinned", "reason": "pinned"}) == 1
    assert read("smetric_instance_selected_total", policy | {"instance": "gpu-1"}) == 1
    assert read("smetric_decision_duration_seconds_count", policy) == 2
    assert read("smetric_prompt_tokens_total", {"model": "m"}) == 2000
    assert read("smetric_prefix_hit_tokens_total", {"model": "m"}) == 880
    assert read("smetric_requests_total", {"route": ROUTE, "code": "429"}) == 1
    assert read("smetric_time_to_first_chunk_seconds_count", {"model": "m"}) == 2
    assert read("smetric_overhead_seconds_count") == 2


async def test_a_retry_counts_its_tokens_once_and_usage_calibrates_the_hit() -> None:
    app = telemetry()
    exchange = begin(app)
    exchange.decided(record())
    exchange.attempt(ROUTE).end(names.CONNECT_ERROR)
    exchange.decided(record())
    exchange.attempt(ROUTE).end(names.OK, status=200)
    exchange.end(200, usage=Usage(1000, 1, 864))
    read = app.metrics.registry.get_sample_value
    assert read("smetric_prompt_tokens_total", {"model": "m"}) == 1000
    assert read("smetric_prefix_actual_hit_tokens_total", {"model": "m"}) == 864
    assert read("smetric_overhead_seconds_count") == 1


def test_ten_thousand_model_names_make_no_more_series_than_one() -> None:
    app = telemetry()

    def ask(model: str) -> set[tuple[str, str]]:
        exchange = begin(app)
        exchange.decided(record(names.PINNED, model=model))
        exchange.end(200)
        return {
            (sample.name, str(sample.labels)) for family in app.metrics.registry.collect() for sample in family.samples
        }

    before = ask("unknown")
    with capture_logs() as lines:
        for i in range(10_000):
            exchange = begin(app)
            exchange.decided(record(names.PINNED, model=f"model-{i}"))
            exchange.end(200)
    assert len(lines) == 10_000
    assert ask("the-last") == before


def test_labels_are_served_names_and_bounded() -> None:
    served = [f"m{i}" for i in range(MOST + 50)]
    labels = ModelLabels(lambda: served)
    assert labels.of("m1") == "m1"
    assert labels.of("evil\n") == "other"
    assert labels.of("") == ""
    assert len({labels.of(name) for name in served}) == MOST + 1


async def test_gauges_show_the_fleet_and_absent_is_not_zero() -> None:
    metrics = Metrics()
    instances = fleet(2)
    for instance in instances:
        assert instance.scrape is not None
    instances[0].own = 4
    instances[0].draining = True
    instances[1].scrape = None
    instances[1].healthy = False
    metrics.register(gauges(instances, now=(instances[0].scrape.measured_at if instances[0].scrape else 0) + 1.5))
    read = metrics.registry.get_sample_value
    assert read("smetric_instance_up", {"instance": "gpu-0"}) == 1
    assert read("smetric_instance_up", {"instance": "gpu-1"}) == 0
    assert read("smetric_instance_draining", {"instance": "gpu-0"}) == 1
    assert read("smetric_instance_state", {"instance": "gpu-0", "state": "well"}) == 1
    assert read("smetric_panics_total") == 7
    assert read("smetric_inflight_requests", {"instance": "gpu-0"}) == 4
    assert read("smetric_instance_running", {"instance": "gpu-0"}) == 2
    assert read("smetric_instance_kv_cache_usage_ratio", {"instance": "gpu-0"}) == 0.25
    assert read("smetric_telemetry_age_seconds", {"instance": "gpu-0"}) == 1.5
    assert read("smetric_instance_running", {"instance": "gpu-1"}) is None
    assert read("smetric_policy_info", {"route": "default", "name": "sticky", "hash": "abc", "generation": "2"}) == 1
    assert read("smetric_trace_spans_dropped_total") == 5
    assert read("smetric_log_lines_lost_total") == 6
    assert read("smetric_prefix_index_blocks") == 10
    assert read("smetric_prefix_index_evictions_total") == 3


def test_imbalance_is_that_of_the_instances_which_are_there_to_be_loaded() -> None:
    metrics, instances = Metrics(), fleet(4)
    for instance, own in zip(instances, (6, 2, 0, 0), strict=True):
        instance.own, instance.scrape = own, None
    metrics.register(gauges(instances))
    read = metrics.registry.get_sample_value
    assert read("smetric_load_imbalance_ratio", {"model": "m"}) == 3.0
    instances[2].draining = True
    instances[3].healthy = False
    assert read("smetric_load_imbalance_ratio", {"model": "m"}) == 1.5
    instances[0].draining = instances[1].draining = True
    assert read("smetric_load_imbalance_ratio", {"model": "m"}) is None


async def test_what_engines_find_in_their_caches_is_shown_once_they_have_said_it() -> None:
    metrics = Metrics()
    instances = fleet(2)
    instances[0].prefix_tokens = PrefixTokens(local=100, external=20, missed=7)
    metrics.register(CacheGauges(lambda: instances, lambda: {("gpu-1", "kv_events"): True}))
    read = metrics.registry.get_sample_value
    found = {
        where: ("smetric_instance_prefix_tokens_total", {"instance": "gpu-0", "found": where})
        for where in ("local", "external", "missed")
    }
    assert [read(*found[where]) for where in found] == [100, 20, 7]
    assert read("smetric_instance_prefix_tokens_total", {"instance": "gpu-1", "found": "local"}) is None
    assert read("smetric_prefix_disagreement", {"instance": "gpu-1", "source": "kv_events"}) == 1


async def test_every_metric_of_the_table_is_on_the_page_and_no_other() -> None:
    app = telemetry(prefill=lambda _: PrefillTime(0.0, 0.001))
    app.metrics.register(gauges(fleet()))
    app.metrics.register(KvGauges(lambda: KvFigures(1, 1, 1, {"gpu-0": CacheFigures(True, {"ok": 1}, 0.1, 0, 0, 0)})))
    app.consequences.answering(exchange_of(), record())
    run_stream(app, record(loads=(2, 30, 1), stream=True))
    seen = fleet()
    seen[0].prefix_tokens = PrefixTokens(1, 1, 1)
    app.metrics.register(CacheGauges(lambda: seen, lambda: {("gpu-0", "kv_events"): False}))
    run_one(app, record())
    run_one(app, record(names.ERROR))
    exchange = begin(app)
    made = record()
    made.lookup_s = 0.01
    exchange.decided(made)
    exchange.end(200, usage=Usage(1, 1, 1))
    app.metrics.scraped("gpu-0", "ok", 0.01)
    app.metrics.ejected(seen[0], names.CONNECT)
    app.metrics.looked_up("lmcache", names.LOOKUP_OK)
    app.metrics.suspended("lmcache", True)
    app.metrics.source_failed("kv_events")
    app.metrics.tokenized("engine", "ok", 0.01)
    app.metrics.ids_compared(True)
    app.metrics.hit_checked("gpu-0", "kv_events", names.HIT_OVER, 32)
    app.metrics.cache_broke("system", "changed")
    app.metrics.recorded("decisions", names.RECORD_WRITTEN, 3)
    app.metrics.reloaded(names.RELOAD_OK)
    app.metrics.restored("default", names.ERRORS)
    made = record()
    assert made.decision is not None
    made.arm = names.CANARY
    made.shadowed = (
        Shadowed(
            made.policy,
            1,
            names.DIFFERS,
            decision=made.decision,
            regret=0.5,
            is_new_session=True,
            had_diverged=False,
        ),
    )
    run_one(app, made)
    app.metrics.listener_failed("AccessLog")
    app.metrics.register(OverloadGauges(lambda: OverloadFigures(1, 1, 1, 1, {"lag": 0}, {"router": 0.5})))
    app.metrics.refused("bytes")
    app.metrics.client_retried(admitted=True)
    app.metrics.held(0.1)
    app.metrics.lagged(0.001)
    page, content_type = await app.metrics.page()
    assert content_type.startswith("text/plain")
    shown = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name, _ in series(page)}
    assert shown == {metric.name for metric in names.METRICS}


async def test_the_page_is_rendered_once_a_second() -> None:
    now = 0.0
    metrics = Metrics(clock=lambda: now)
    first = await metrics.page()
    metrics.reloaded(names.RELOAD_KEPT)
    assert await metrics.page() == first
    now = 1.0
    assert b'smetric_policy_reloads_total{result="kept"} 1.0' in (await metrics.page())[0]


async def test_exemplars_name_recorded_traces_in_openmetrics_only() -> None:
    app = telemetry({"OTEL_TRACES_EXPORTER": "console"})
    exchange = run_one(app, record())
    page, content_type = await app.metrics.page("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert f'trace_id="{exchange.trace_id}"'.encode() in page
    assert b"trace_id" not in (await app.metrics.page("text/plain"))[0]
    await app.tracing.shutdown()
    without = telemetry({"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXEMPLAR_FILTER": "always_off"})
    assert run_one(without, record()).trace.server is not None
    assert b"trace_id" not in (await without.metrics.page("application/openmetrics-text; version=1.0.0"))[0]
    await without.tracing.shutdown()


@pytest.mark.parametrize("count", [256, 257])
async def test_instances_are_told_apart_up_to_a_bound(count: int) -> None:
    metrics = Metrics(per_instance=count <= 256)
    metrics.register(gauges(fleet(count)))
    exchange = exchange_of(record(hits=(9, 0, 0)))
    exchange.attempt(ROUTE).result = names.OK
    metrics.attempt_ended(exchange, exchange.attempts[0])
    read = metrics.registry.get_sample_value
    assert (read("smetric_instance_up", {"instance": "gpu-0"}) is None) == (count > 256)
    assert (
        read("smetric_upstream_attempts_total", {"instance": "gpu-0" if count <= 256 else "all", "result": "ok"}) == 1
    )
