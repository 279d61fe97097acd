from __future__ import annotations

import pytest

from smetric.features import VOCABULARY
from smetric.policy import Decision, Policy, Snapshot, load
from smetric.telemetry import gauges
from smetric.telemetry.gauges import GuardOutcomes
from tests.telemetry.samples import record, request

SOURCE = """policy p
prefer requests < 5 when req.turn > 1 as calm
route argmin(requests) when req.turn != 0 and max(requests) <= {} as few
route argmax(requests) as many
"""


def told(outcomes: GuardOutcomes) -> dict[tuple[str, str, str], float]:
    (family,) = outcomes.collect()
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


def test_each_guard_that_was_evaluated_counts_once() -> None:
    outcomes = GuardOutcomes()
    first = decide(9, 2, [1.0, 2.0])
    outcomes.decided(first)
    policy = first.policy
    for turn, loads in ((0, [1.0, 2.0]), (1, [1.0, 20.0]), (2, [30.0, 20.0])):
        decision = policy.decide(Snapshot(["a", "b"], {"requests": loads}), request(turn=turn), {}, 1)
        assert isinstance(decision, Decision)
        outcomes.decided(decision)
    assert told(outcomes) == {
        ("calm", "req.turn > 1", "true"): 2,  # one of them was ignored, as it would have left nobody
        ("calm", "req.turn > 1", "false"): 2,
        ("few", "req.turn != 0", "true"): 3,
        ("few", "req.turn != 0", "false"): 1,
        ("few", "max(requests) <= 9", "true"): 1,
        ("few", "max(requests) <= 9", "false"): 2,
    }


def test_counts_survive_any_number_of_reloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "MOST_POLICIES", 3)
    outcomes = GuardOutcomes()
    for _ in range(9):
        outcomes.decided(decide(9, 1, [1.0, 2.0]))
    assert told(outcomes)["few", "max(requests) <= 9", "true"] == 9


def test_a_policy_that_goes_while_counts_are_read_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "MOST_POLICIES", 1)
    outcomes = GuardOutcomes()
    outcomes.decided(decide(9, 1, [1.0, 2.0]))
    summed, later = gauges._summed, [decide(8, 1, [1.0, 2.0])]

    def while_read(policy: Policy, rows: list[list[int]]) -> dict[tuple[str, str, str, str], int]:
        if later:
            outcomes.decided(later.pop())
        return summed(policy, rows)

    monkeypatch.setattr(gauges, "_summed", while_read)
    assert told(outcomes)["few", "max(requests) <= 9", "true"] == 1


def test_the_guards_of_the_latest_policy_show_however_many_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "MOST_POLICIES", 2)
    monkeypatch.setattr(gauges, "MOST_GUARDS", 3)
    outcomes = GuardOutcomes()
    for limit in range(6):
        outcomes.decided(decide(limit, 1, [1.0, 2.0]))
    assert told(outcomes)["few", f"max(requests) <= {limit}", "true"] == 1
    assert len(outcomes._past) <= 6


def test_the_guards_of_a_decision_are_those_of_its_trace() -> None:
    outcomes = GuardOutcomes()
    made = record(loads=(2, 30, 1))
    assert made.decision is not None
    outcomes.decided(made.decision)
    expected = {
        (rule, guard, str(held).lower()): 1
        for rule, guards in made.decision.guards
        for guard, held in guards
        if held is not None
    }
    assert {key: count for key, count in told(outcomes).items() if count} == expected
