from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from smetric import names
from smetric.features import VOCABULARY
from smetric.fleet.record import DecisionRecord, Migration
from smetric.policy import Decision, Policy, Snapshot, load
from smetric.request.prompt import Prompt
from smetric.request.request import Usage
from smetric.telemetry import outcomes
from smetric.telemetry.decisions import full
from smetric.telemetry.outcomes import GuardOutcomes, ServiceLevel, Sessions, migration_of
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


def test_outcomes_count_where_prompt_tokens_are() -> None:
    app = telemetry()
    run_one(app, record(hits=(0, 880, 400), loads=OVERLOADED))
    read = app.metrics.registry.get_sample_value
    found = [
        read("smetric_hit_tokens_total", {"policy": "sticky", "found": at}) for at in ("local", "global", "missed")
    ]
    assert found == [400, 480, 120]
