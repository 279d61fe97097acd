from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from smetric.fleet.instance import Instance
from smetric.fleet.record import DecisionRecord, Forecast, Migration
from smetric.policy import Snapshot
from smetric.request.request import Usage
from smetric.sources.measured import PrefillTime
from smetric.telemetry.decisions import full
from smetric.telemetry.exchange import Telemetry
from smetric.telemetry.outcomes import Forecasts
from smetric.telemetry.savings import MAX_DAYS, Savings
from tests.telemetry.samples import begin, fleet, record, telemetry

#: Seconds of the first of January 1970, noon.
NOON = 43_200.0


def flat(count: int = 3) -> list[Instance]:
    """Instances on which attention costs nothing to speak of."""
    instances = fleet(count)
    for instance in instances:
        instance.attention_tokens = 1e12
    return instances


def forecast(made: DecisionRecord, instances: list[Instance], start_s: float = 0.0, **rates: float) -> Forecast | None:
    """After the chosen one was charged; *rates* are tokens a second by id, with a _ for a -."""
    assert made.decision is not None
    assert made.instance is not None
    hit = made.hit_at(made.decision.index)
    made.instance.charge(1, made.request.prompt_len, hit or 0)
    by_id = {instance.id: instance for instance in instances}
    known = {name.replace("_", "-"): PrefillTime(start_s, 1 / rate) for name, rate in rates.items()}
    return Forecasts(lambda one: known.get(one.id), by_id.get).of(made, made.decision.runner_up_index)


def test_forecast_is_the_time_before_the_first_token() -> None:
    instances = flat()
    instances[1].charge(1, 500)
    instances[2].charge(1, 200)
    made = record(hits=(0, 880, 400), loads=(2, 3, 1), instances=instances)
    assert made.instance is instances[1]
    found = forecast(made, instances, start_s=0.05, gpu_1=1000.0, gpu_2=500.0)
    assert found is not None
    assert found.ttft_s == pytest.approx(0.05 + (500 + 120) / 1000)
    assert (found.other, found.other_hit) == ("gpu-2", 400)
    assert found.other_ttft_s == pytest.approx(0.05 + (200 + 600) / 500)


def test_forecast_of_a_migration_compares_the_instance_it_left() -> None:
    instances = flat()
    made = record(loads=(2, 30, 1), instances=instances)
    made.migration = Migration("gpu-1", "not_overloaded", 880)
    found = forecast(made, instances, gpu_1=1000.0, gpu_2=1000.0)
    assert found is not None
    assert found.other == "gpu-1"
    assert found.ttft_s == pytest.approx(1.0)
    assert found.other_ttft_s == pytest.approx(0.12)


def test_forecast_leaves_the_unknown_unknown() -> None:
    instances = flat()
    found = forecast(record(instances=instances), instances, gpu_0=1000.0)
    assert found is not None
    assert found.ttft_s is None
    assert forecast(record(instances=instances, known=[False] * 3), instances, gpu_0=1.0, gpu_2=1.0) is None
    assert forecast(record(instances=instances, prompts=2), instances, gpu_1=1.0) is None


def test_forecast_uses_hits_looked_up_for_another_policy() -> None:
    instances = flat(2)
    made = record(hits=(0, 0), loads=(1, 2), instances=instances)
    assert made.decision is not None
    snapshot = made.decision.snapshot
    made.decision.snapshot = Snapshot(snapshot.ids, {"requests": snapshot.columns["requests"]})
    assert made.hit_at(0) is None
    made.beside = ((Snapshot(snapshot.ids, {"hit_len": [64, 32]}), 0.001),)
    assert (made.hit_at(0), made.hit_at(1)) == (64, 32)


def ended(found: Forecast | None, **fields: Any) -> DecisionRecord:
    made = record(stream=True)
    made.forecast, made.status, made.ttfc_s, made.usage = found, 200, 0.5, Usage(1000, 20, 864)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_savings_settle_what_decisions_saved_and_lost() -> None:
    registry = CollectorRegistry()
    savings = Savings(registry, lambda: NOON)
    savings.settle(ended(Forecast(0.4, "gpu-0", 2.0, 64)))
    savings.settle(ended(Forecast(0.6, "gpu-0", 0.3, 1000), ttfc_s=0.5, held_s=0.1, lookup_s=0.1))
    savings.settle(ended(Forecast(0.4), usage=None))
    savings.settle(ended(None, migration=Migration("gpu-0", "g", 880)))
    savings.settle(ended(None, migration=Migration("gpu-0", "not picked", None)))
    (row,) = savings.report()
    assert (row["day"], row["policy"], row["rule"], row["decisions"]) == ("1970-01-01", "sticky", "stick", 5)
    assert row["tokens"] == {"compared": 2, "saved": 800 - 136}
    assert row["seconds"] == {"compared": 2, "saved": pytest.approx(1.5 - 0.2)}
    assert row["forecast"]["count"] == 3
    assert row["forecast"]["actual_of_predicted"] == pytest.approx(1.5 / 1.4, abs=1e-3)
    assert row["migrations"] == {"count": 2, "compared": 1, "left_tokens": 880}
    read, rule = registry.get_sample_value, {"policy": "sticky", "rule": "stick"}
    assert read("smetric_savings_tokens_total", rule | {"effect": "saved"}) == 800
    assert read("smetric_savings_tokens_total", rule | {"effect": "lost"}) == 136
    assert read("smetric_savings_seconds_total", rule | {"effect": "saved"}) == pytest.approx(1.5)
    predicted = read("smetric_forecast_ttft_seconds_total", {"policy": "sticky", "kind": "predicted"})
    assert predicted == pytest.approx(1.4)


def test_savings_compare_tokens_as_the_instance_counted_them() -> None:
    savings = Savings(CollectorRegistry(), lambda: NOON)
    # Both held all of a prompt that was taken for 1,000 tokens and is 700.
    savings.settle(ended(Forecast(0.4, "gpu-0", None, 1000), usage=Usage(700, 20, 700)))
    (row,) = savings.report()
    assert row["tokens"] == {"compared": 1, "saved": 0}


@pytest.mark.parametrize("fields", [{"status": 503}, {"error_type": "upstream_closed"}, {"decision": None}])
def test_savings_ignore_failed_requests(fields: dict[str, Any]) -> None:
    savings = Savings(CollectorRegistry(), lambda: NOON)
    savings.settle(ended(Forecast(0.4, "gpu-0", 2.0, 64), **fields))
    assert savings.report() == []


def test_savings_take_times_from_streams_and_first_attempts_only() -> None:
    savings = Savings(CollectorRegistry(), lambda: NOON)
    savings.settle(ended(Forecast(0.4, "gpu-0", 2.0, 64), rank=1))
    in_one_piece = record(stream=False)
    in_one_piece.forecast, in_one_piece.status, in_one_piece.ttfc_s = Forecast(0.4, "gpu-0", 2.0, 64), 200, 0.5
    savings.settle(in_one_piece)
    (row,) = savings.report()
    assert row["seconds"]["compared"] == row["forecast"]["count"] == 0
    assert row["tokens"]["compared"] == 2


def test_savings_bound_days_and_report_the_latest_first() -> None:
    now = NOON
    savings = Savings(CollectorRegistry(), lambda: now)
    for _ in range(MAX_DAYS + 5):
        savings.settle(ended(None))
        now += 86_400
    days = [row["day"] for row in savings.report()]
    assert days == sorted(days, reverse=True)
    assert len(days) <= MAX_DAYS


def test_savings_recover_from_a_clock_that_was_a_year_ahead() -> None:
    now = NOON + 365 * 86_400
    savings = Savings(CollectorRegistry(), lambda: now)
    savings.settle(ended(None))
    now = NOON
    savings.settle(ended(None))
    assert savings.report()[0]["day"] == time.strftime("%Y-%m-%d", time.gmtime(NOON))


def answered(app: Telemetry, made: DecisionRecord) -> None:
    exchange = begin(app)
    exchange.started -= 100.0  # its client was as slow as that to send it
    exchange.decided(made)
    attempt = exchange.attempt("/v1/chat/completions")
    attempt.first_byte()
    attempt.end("ok", status=200)
    exchange.end(200, usage=Usage(1000, 20, 880))


def test_outcomes_forecast_each_decision_and_settle_it_at_its_end() -> None:
    instances = flat()
    app = telemetry(instances=lambda: instances, prefill=lambda _: PrefillTime(0.0, 0.001))
    made = record(instances=instances, stream=True)
    assert made.instance is not None
    made.instance.charge(1, 1000, 880)
    answered(app, made)
    shown = full(made)["forecast"]
    assert shown["ttft_s"] == pytest.approx(0.12)
    assert shown["other"] == "gpu-0"
    assert shown["other_ttft_s"] == pytest.approx(1.0)
    (row,) = app.outcomes.savings.report()
    assert row["tokens"] == {"compared": 1, "saved": 880}
    assert row["seconds"]["saved"] == pytest.approx(1.0, abs=0.2)
    assert row["forecast"]["actual_s"] < 0.2
