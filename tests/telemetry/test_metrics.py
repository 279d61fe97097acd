from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition
from prometheus_client.parser import text_string_to_metric_families

from smetric import names
from smetric.fleet.instance import PrefixTokens
from smetric.fleet.record import Shadowed
from smetric.names import Metric
from smetric.request.request import Usage
from smetric.sources.kv_events.source import CacheFigures, KvFigures
from smetric.sources.measured import PrefillTime
from smetric.sources.prefix_index.index import IndexFigures
from smetric.sources.shared.peers import PeerFigures
from smetric.telemetry.gauges import (
    OverloadFigures,
    cache_gauges,
    computed,
    fleet_gauges,
    index_gauges,
    kv_gauges,
    overload_gauges,
    peer_gauges,
    policy_gauges,
    refusal_gauges,
)
from smetric.telemetry.metrics import (
    MAX_MODELS,
    MAX_SERIES,
    Count,
    Metrics,
    ModelLabels,
    counter,
    histogram,
    loop_counter,
    loop_histogram,
)
from tests.clock import Clock
from tests.fakes import exchange_of
from tests.telemetry.samples import ROUTE, begin, fleet, record, run_one, telemetry


async def test_metrics_count_requests_and_decisions() -> None:
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
    assert read("smetric_requests_in_progress") == 0


async def test_metrics_count_the_tokens_of_a_retried_request_once() -> None:
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


def test_metrics_make_no_series_of_names_that_clients_choose() -> None:
    app = telemetry()

    def ask(model: str) -> set[tuple[str, str]]:
        exchange = begin(app)
        exchange.decided(record(names.PINNED, model=model))
        exchange.end(200)
        return {
            (sample.name, str(sample.labels)) for family in app.metrics.registry.collect() for sample in family.samples
        }

    before = ask("unknown")
    assert all(ask(f"model-{i}") == before for i in range(100))


def test_model_labels_are_served_names_and_bounded() -> None:
    served = [f"m{i}" for i in range(MAX_MODELS + 50)]
    labels = ModelLabels(lambda: served)
    assert labels.of("m1") == "m1"
    assert labels.of("evil\n") == "other"
    assert labels.of("") == ""
    assert len({labels.of(name) for name in served}) == MAX_MODELS + 1


def test_model_labels_ask_for_served_names_once_a_second() -> None:
    served, asked, clock = ["a"], [], Clock()
    labels = ModelLabels(lambda: asked.append(clock.now) or served, clock)  # type: ignore[func-returns-value]
    assert [labels.of(name) for name in ("a", "b", "b")] == ["a", "other", "other"]
    served.append("b")
    assert labels.of("b") == "other"
    clock.now += 1.0
    assert labels.of("b") == "b"
    assert len(asked) == 2


def add(series: Any, amount: float = 1) -> None:
    if isinstance(series, Count):
        series.value += amount
    else:
        series.inc(amount)


@pytest.mark.parametrize(("of_counts", "of_times"), [(counter, histogram), (loop_counter, loop_histogram)])
def test_series_beyond_the_bound_count_as_other(of_counts: Any, of_times: Any) -> None:
    registry = CollectorRegistry()
    counts, times = of_counts(names.MIGRATIONS, registry), of_times(names.DECISION_SECONDS, registry)
    for number in range(MAX_SERIES + 10):
        add(counts["p", "r", f"guard {number}"])
        times[f"policy {number}"].observe(0.001)
    (family,) = [each for each in registry.collect() if each.name == "smetric_migrations"]
    shown = [sample for sample in family.samples if sample.name.endswith("_total")]
    assert len(shown) == MAX_SERIES + 1
    assert sum(sample.value for sample in shown) == MAX_SERIES + 10
    labels = {"policy": "other", "rule": "other", "guard": "other"}
    assert registry.get_sample_value("smetric_migrations_total", labels) == 10
    assert registry.get_sample_value("smetric_decision_duration_seconds_count", {"policy": "other"}) == 10


@pytest.mark.parametrize(("of_counts", "of_times"), [(counter, histogram), (loop_counter, loop_histogram)])
def test_series_without_labels_exist_from_the_start(of_counts: Any, of_times: Any) -> None:
    registry = CollectorRegistry()
    of_counts(Metric("smetric_errors_total", "Errors."), registry)
    of_times(Metric("smetric_wait_seconds", "Waits.", (1.0,)), registry)
    assert registry.get_sample_value("smetric_errors_total") == 0
    assert registry.get_sample_value("smetric_wait_seconds_count") == 0


async def test_page_has_every_metric_of_the_table_and_no_other() -> None:
    app = telemetry(prefill=lambda _: PrefillTime(0.0, 0.001))
    metrics, seen = app.metrics, fleet()
    seen[0].prefix_tokens = PrefixTokens(1, 1, 1)
    for families in (
        fleet_gauges(seen, 100.0),
        cache_gauges(seen, {("gpu-0", "kv_events"): False}),
        policy_gauges([("default", "sticky", "abc", 2)]),
        refusal_gauges({("default", ""): 12.0}),
        index_gauges(IndexFigures(10, 640, 3)),
        peer_gauges(PeerFigures({"http://10.0.0.2:9464": True}, {"sent": 4})),
        kv_gauges(KvFigures(1, 1, 1, {"gpu-0": CacheFigures(True, {"ok": 1}, 0.1, 0, 0, 0)})),
        overload_gauges(OverloadFigures(1, 1, 1, 1, {"lag": 0}, {"router": 0.5})),
        [computed(metric, 1) for metric in (names.SPANS_DROPPED, names.LOG_LINES_LOST, names.PANICS)],
    ):
        metrics.register(lambda made=list(families): made)  # type: ignore[misc]
    app.outcomes.answering(exchange_of(), record())
    made = record(loads=(2, 30, 1), stream=True)
    made.lookup_s, made.arm = 0.01, names.CANARY
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
    exchange = begin(app)
    exchange.decided(made)
    attempt = exchange.attempt(ROUTE)
    attempt.first_output()
    exchange.answering()
    usage = Usage(1000, 20, 400)
    attempt.end(names.OK, status=200, usage=usage)
    exchange.end(200, bytes_out=99, events=21, usage=usage)
    run_one(app, record())
    run_one(app, record(names.ERROR))
    metrics.scraped("gpu-0", "ok", 0.01)
    metrics.ejected(seen[0], names.CONNECT)
    metrics.looked_up("lmcache", names.LOOKUP_OK)
    metrics.suspended("lmcache", True)
    metrics.source_failed("kv_events")
    metrics.listener_failed("Outcomes")
    metrics.tokenized("engine", "ok", 0.01)
    metrics.ids_compared(True)
    metrics.hit_checked("gpu-0", "kv_events", names.HIT_OVER, 32)
    metrics.cache_broke("system", "changed")
    metrics.recorded("decisions", names.RECORD_WRITTEN, 3)
    metrics.reloaded(names.RELOAD_OK)
    metrics.restored("default", names.ERRORS)
    metrics.refused("bytes")
    metrics.client_retried(admitted=True)
    metrics.held(0.1)
    metrics.lagged(0.001)
    page, content_type = await metrics.page()
    assert content_type.startswith("text/plain")
    families = list(text_string_to_metric_families(page.decode()))
    shown = {
        (sample.name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum"), family.type)
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert shown == {(metric.name, metric.kind) for metric in names.METRICS}
    documented = {family.name: family.documentation for family in families}
    assert all(documented[metric.name.removesuffix("_total")] == metric.doc for metric in names.METRICS)


async def test_page_is_rendered_once_a_second() -> None:
    now = 0.0
    metrics = Metrics(clock=lambda: now)
    first = await metrics.page()
    metrics.reloaded(names.RELOAD_KEPT)
    assert await metrics.page() == first
    now = 1.0
    assert b'smetric_policy_reloads_total{result="kept"} 1.0' in (await metrics.page())[0]


async def test_page_has_exemplars_of_recorded_traces_in_openmetrics_only() -> None:
    app = telemetry({"OTEL_TRACES_EXPORTER": "console"})
    exchange = run_one(app, record())
    page, content_type = await app.metrics.page("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert f'trace_id="{exchange.trace_id}"'.encode() in page
    assert b"trace_id" not in (await app.metrics.page("text/plain"))[0]
    await app.tracing.shutdown()
    without = telemetry({"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXEMPLAR_FILTER": "always_off"})
    assert run_one(without, record()).trace is not None
    assert b"trace_id" not in (await without.metrics.page("application/openmetrics-text; version=1.0.0"))[0]
    await without.tracing.shutdown()


@pytest.mark.parametrize(("per_instance", "label"), [(True, "gpu-0"), (False, "all")])
def test_metrics_split_by_instance_only_where_asked(per_instance: bool, label: str) -> None:
    metrics = Metrics(per_instance=per_instance)
    metrics.scraped("gpu-0", "ok", 0.1)
    read = metrics.registry.get_sample_value
    assert read("smetric_telemetry_scrapes_total", {"instance": label, "result": "ok"}) == 1


def pages(registry: CollectorRegistry) -> list[str]:
    """The page in both formats, without the times at which series and exemplars were made."""
    both = generate_latest(registry).decode(), exposition.generate_latest(registry).decode()  # type: ignore[no-untyped-call]
    return [re.sub(r"(?m)(_created\S*|# \{.*\} \S+) \S+$", r"\1", page) for page in both]


COUNTED = Metric("smetric_things_total{kind}", "Things.")
TIMED = Metric("smetric_seconds{kind}", "Seconds.", (0.1, 1.0, 2.5))
VALUES = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.5, 3.0]) | st.floats(0, 10)


@given(st.lists(st.tuples(st.sampled_from("ab"), VALUES, st.sampled_from(["", "abc"]))))
def test_loop_metrics_look_like_those_of_the_client_library(observed: list[tuple[str, float, str]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts, times = loop_counter(COUNTED, ours), loop_histogram(TIMED, ours)
    their_counts, their_times = counter(COUNTED, theirs), histogram(TIMED, theirs)
    for kind, value, trace in observed:
        exemplar = {"trace_id": trace} if trace else None
        add(counts[kind], value)
        times[kind].observe(value, exemplar)
        add(their_counts[kind], value)
        their_times[kind].observe(value, exemplar)
    assert pages(ours) == pages(theirs)
