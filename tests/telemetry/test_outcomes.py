from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from smetric import names
from smetric.features import VOCABULARY
from smetric.fleet.instance import Instance
from smetric.fleet.record import DecisionRecord, Forecast, Migration
from smetric.policy import Decision, Policy, Snapshot, load
from smetric.request.prompt import Prompt
from smetric.request.request import Usage
from smetric.sources.measured import PrefillTime
from smetric.telemetry import outcomes
from smetric.telemetry.decisions import full
from smetric.telemetry.exchange import Telemetry
from smetric.telemetry.outcomes import (
    MAX_DAYS,
    Forecasts,
    GuardOutcomes,
    Savings,
    ServiceLevel,
    Sessions,
    migration_of,
)
from tests.telemetry.samples import begin, fleet, record, request, run_one, telemetry

OVERLOADED = (2, 30, 1)
SOURCE = """policy p
prefer requests < 5 when req.turn > 1 as calm
route argmin(requests) when req.turn != 0 and max(requests) <= {} as few
route argmax(requests) as many
"""


def told(counted: GuardOutcomes) -> dict[tuple[str, str, str], float]:
    (family,) = counted.collect()
    return {
        (one.labels["rule"], one.labels["guard"], one.labels["held"]): one.value
        for one in family.samples
        if one.name.endswith("_total")
    }


def decide(limit: int, turn: int, loads: list[float]) -> Decision:
    policy = load(SOURCE.format(limit), VOCABULARY)
    decision = policy.decide(Snapshot(["a", "b"], {"requests": loads}), request(turn=turn), {}, 1)
    assert isinstance(decision, Decision)
    return decision


def test_guard_outcomes_count_each_evaluated_guard_once() -> None:
    counted = GuardOutcomes()
    first = decide(9, 2, [1.0, 2.0])
    counted.decided(first)
    policy = first.policy
    for turn, loads in ((0, [1.0, 2.0]), (1, [1.0, 20.0]), (2, [30.0, 20.0])):
        decision = policy.decide(Snapshot(["a", "b"], {"requests": loads}), request(turn=turn), {}, 1)
        assert isinstance(decision, Decision)
        counted.decided(decision)
    assert told(counted) == {
        ("calm", "req.turn > 1", "true"): 2,  # one of them was ignored, as it would have left nobody
        ("calm", "req.turn > 1", "false"): 2,
        ("few", "req.turn != 0", "true"): 3,
        ("few", "req.turn != 0", "false"): 1,
        ("few", "max(requests) <= 9", "true"): 1,
        ("few", "max(requests) <= 9", "false"): 2,
    }


def test_guard_outcomes_survive_reloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "MAX_POLICIES", 3)
    counted = GuardOutcomes()
    for _ in range(9):
        counted.decided(decide(9, 1, [1.0, 2.0]))
    assert told(counted)["few", "max(requests) <= 9", "true"] == 9


def test_guard_outcomes_count_a_policy_once_that_goes_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "MAX_POLICIES", 1)
    counted = GuardOutcomes()
    counted.decided(decide(9, 1, [1.0, 2.0]))
    summed, later = outcomes._summed, [decide(8, 1, [1.0, 2.0])]

    def while_read(policy: Policy, rows: list[list[int]]) -> dict[tuple[str, str, str, str], int]:
        if later:
            counted.decided(later.pop())
        return summed(policy, rows)

    monkeypatch.setattr(outcomes, "_summed", while_read)
    assert told(counted)["few", "max(requests) <= 9", "true"] == 1


def test_guard_outcomes_are_bounded_and_show_the_latest_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "MAX_POLICIES", 2)
    monkeypatch.setattr(outcomes, "MAX_GUARDS", 3)
    counted = GuardOutcomes()
    for limit in range(6):
        counted.decided(decide(limit, 1, [1.0, 2.0]))
    assert told(counted)["few", f"max(requests) <= {limit}", "true"] == 1
    assert len(counted._past) <= 6


def test_guard_outcomes_are_those_of_the_trace() -> None:
    counted = GuardOutcomes()
    made = record(loads=(2, 30, 1))
    assert made.decision is not None
    counted.decided(made.decision)
    expected = {
        (rule, guard, str(held).lower()): 1
        for rule, guards in made.decision.guards
        for guard, held in guards
        if held is not None
    }
    assert {key: count for key, count in told(counted).items() if count} == expected


def prompt(text: bytes, answered: int = 0) -> Prompt:
    """A prompt whose last assistant turn begins after *answered* bytes."""
    return Prompt([text], 4.0, question_bytes=answered, history_bytes=answered)


def test_sessions_follow_a_conversation_from_prompt_to_prompt() -> None:
    sessions = Sessions()
    first = request(turn=0, session="", prompt=prompt(b"how are you?"))
    assert first.prompt is not None
    _ = first.prompt.hashes  # as the prefix index does once the request was sent
    sessions.served(first, "gpu-1")
    follow_up = request(turn=1, session="", prompt=prompt(b"how are you? Well. Good.", len(b"how are you?")))
    assert sessions.last(follow_up) == "gpu-1"
    assert sessions.served(follow_up, "gpu-1") == "gpu-1"
    third = b"how are you? Well. Good. What now?"
    assert sessions.last(request(turn=2, session="", prompt=prompt(third, len(b"how are you? Well. Good.")))) == "gpu-1"
    other = request(turn=1, session="", prompt=prompt(b"who are you? Me. Good.", len(b"who are you?")))
    assert sessions.last(other) is None
    assert len(sessions) == 1


def test_sessions_follow_an_edited_history_by_its_session() -> None:
    sessions = Sessions()
    sessions.served(request(turn=0), "gpu-0")
    edited = request(turn=1, prompt=prompt(b"edited", 2))
    assert sessions.last(edited) == "gpu-0"
    assert sessions.served(edited, "gpu-2") == "gpu-0"
    assert sessions.last(request(turn=2)) == "gpu-2"
    assert sessions.last(request(turn=0)) is None


def test_sessions_follow_an_unhashed_prompt_by_its_session() -> None:
    sessions = Sessions()
    pinned = request(turn=1, prompt=prompt(b"continued", 2))  # no policy ran, and no index is kept
    pinned.answering()
    sessions.served(pinned, "gpu-1")
    assert sessions.last(request(turn=2)) == "gpu-1"
    assert len(sessions) == 1


def test_sessions_are_bounded_and_hold_no_text() -> None:
    sessions = Sessions(most=10)
    for number in range(100):
        sessions.served(request(session=f"secret-{number}"), "gpu-0")
    assert len(sessions) == 10
    assert sessions.last(request(session="secret-99")) == "gpu-0"
    assert sessions.last(request(session="secret-0")) is None
    assert "secret" not in str(vars(sessions))


def test_outcomes_count_whether_later_turns_stay() -> None:
    app = telemetry()
    for made, answers in ((record(), True), (record(), True), (record(loads=OVERLOADED), True), (record(), False)):
        exchange = begin(app)
        exchange.decided(made)
        if answers:
            exchange.answering()
    read = app.metrics.registry.get_sample_value
    assert read("smetric_session_turns_total", {"policy": "sticky", "place": "same"}) == 1
    assert read("smetric_session_turns_total", {"policy": "sticky", "place": "other"}) == 1


def decided(source: str, snapshot: Snapshot, **fields: object) -> DecisionRecord:
    policy, asked = load(source, VOCABULARY), request(**fields)
    decision = policy.decide(snapshot, asked, {}, 1)
    assert isinstance(decision, Decision)
    made = DecisionRecord(
        time_ns=1, outcome=names.ROUTED, request=asked, policy=policy, generation=1, decision=decision
    )
    made.instance = next((one for one in fleet() if one.id == decision.instance), None)
    return made


def test_migration_leaves_the_instance_with_the_largest_hit() -> None:
    assert migration_of(record(loads=OVERLOADED), None) == Migration("gpu-1", "not_overloaded", 880)


def test_migration_needs_a_later_turn_and_something_left_behind() -> None:
    assert migration_of(record(), "gpu-0") is None  # where most of the prompt is, wherever it was last
    assert migration_of(record(loads=OVERLOADED, turn=0), "gpu-1") is None
    assert migration_of(record(loads=OVERLOADED, hits=(0, 0, 0)), "gpu-1") is None  # nothing is left behind
    assert migration_of(record(names.PINNED), "gpu-1") is None


def test_migration_needs_a_whole_token_left_behind() -> None:
    source = "policy p\nroute argmin(requests) as calm\n"
    made = decided(source, Snapshot(["gpu-0", "gpu-1"], {"requests": [1.0, 2.0], "hit_len": [879.5, 880.0]}))
    assert migration_of(made, "gpu-1") is None


def test_migration_ignores_unknown_hits() -> None:
    assert migration_of(record(loads=OVERLOADED, known=[True, False, True]), None) is None
    made = migration_of(record(loads=OVERLOADED, known=[True, True, False]), None)
    assert made is not None
    assert (made.source, made.left_tokens) == ("gpu-1", None)


def test_migration_without_hits_leaves_the_instance_of_the_last_turn() -> None:
    source = "policy p\nroute rr_argmin(requests) as balance\n"
    made = decided(source, Snapshot(["gpu-0", "gpu-1", "gpu-2"], {"requests": [2.0, 3.0, 1.0]}))
    assert migration_of(made, "gpu-1") == Migration("gpu-1", names.NOT_PICKED, None)
    assert migration_of(made, "gpu-2") is None
    assert migration_of(made, None) is None
    assert migration_of(made, "gpu-9") == Migration("gpu-9", names.LEFT_OUT, None)


def test_migration_names_the_filter() -> None:
    source = "policy p\nkeep requests < 9 as calm\nroute argmax(hit_len) as warm\n"
    made = decided(source, Snapshot(["gpu-0", "gpu-1"], {"requests": [2.0, 30.0], "hit_len": [10.0, 880.0]}))
    assert migration_of(made, None) == Migration("gpu-1", "calm", 870)


def test_outcomes_count_migrations_and_log_them_once_a_minute_for_each_source() -> None:
    app = telemetry()
    with capture_logs() as lines:
        for _ in range(3):
            made = record(loads=OVERLOADED)
            run_one(app, made)
        run_one(app, record(hits=(880, 0, 0), loads=(30, 2, 1)))
    assert [line["from"] for line in lines if line["event"] == "smetric.migration"] == ["gpu-1", "gpu-0"]
    assert made.migration is not None
    labels = {"policy": "sticky", "rule": "balance"}
    read = app.metrics.registry.get_sample_value
    assert read("smetric_migrations_total", labels | {"guard": made.migration.guard}) == 4
    assert read("smetric_migration_left_tokens_total", labels) == 4 * 880
    assert full(made)["migration"] == {"from": "gpu-1", "guard": made.migration.guard, "left_tokens": 880}


def met(gap_s: float | None = None, **ended: Any) -> tuple[int, bool] | None:
    """Tokens, and whether the objective was met: 1 s + 1 ms a token to the first, 50 ms between two."""
    made = record(stream=ended.pop("stream", True), prompt_len=1000)
    given = {"status": 200, "ttft_s": 1.9, "duration_s": 2.8, "usage": Usage(1000, 20, 0)} | ended
    for name, value in given.items():
        setattr(made, name, value)
    return ServiceLevel(1.0, 0.001, 0.05).measure(made, gap_s)


@pytest.mark.parametrize(
    ("ended", "measured"),
    [
        ({}, (1020, True)),
        ({"ttft_s": 2.1}, (1020, False)),
        ({"duration_s": 3.0}, (1020, False)),
        ({"error_type": "upstream_closed"}, (1020, False)),
        ({"status": 429, "ttft_s": None, "usage": None}, (1000, False)),
        ({"status": 503, "ttft_s": None, "usage": None}, (1000, False)),
        # Without usage, the gap between events stands for the time per token.
        ({"gap_s": 0.06, "usage": None}, (1000, False)),
        ({"gap_s": 0.04, "usage": None}, (1000, True)),
        ({"gap_s": None, "usage": None}, (1000, True)),
        # Left out: no stream, and a client that left.
        ({"stream": False}, None),
        ({"status": 499}, None),
    ],
)
def test_service_level_measures_streams(ended: dict[str, Any], measured: tuple[int, bool] | None) -> None:
    assert met(**ended) == measured


def test_outcomes_count_goodput_by_arm() -> None:
    app = telemetry()
    for arm in ("", names.CANARY):
        made = record(stream=True)
        made.arm = arm
        run_one(app, made)
    read = app.metrics.registry.get_sample_value
    for arm in ("", "canary"):
        assert read("smetric_slo_tokens_total", {"policy": "sticky", "arm": arm, "met": "true"}) == 1000


@pytest.mark.parametrize(
    ("tiers", "found"),
    [
        ({}, [400, None, 480, 120]),
        ({"host_hit_len": [0.0, 0.0, 300.0]}, [400, None, 480, 120]),
        ({"host_hit_len": [900.0, 0.0, 600.0], "store_hit_len": [700.0] * 3}, [400, 300, 180, 120]),
        ({"disk_hit_len": [0.0, 0.0, 950.0]}, [400, 550, 0, 50]),
    ],
)
def test_outcomes_count_where_prompt_tokens_are(tiers: dict[str, list[float]], found: list[int | None]) -> None:
    app, made = telemetry(), record(hits=(0, 880, 400), loads=OVERLOADED)
    assert made.decision is not None
    made.decision.snapshot.columns.update(tiers)
    run_one(app, made)
    read = app.metrics.registry.get_sample_value
    assert [read("smetric_hit_tokens_total", {"policy": "sticky", "found": at}) for at in names.HOLDERS] == found


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


def test_savings_settle_saved_and_lost_time_of_decisions() -> None:
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
    attempt.first_output()
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
