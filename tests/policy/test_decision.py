"""Decisions: outcome, guards, reads, ranks and margins."""

from __future__ import annotations

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.features import VOCABULARY
from smetric.policy import Decision, Outcome, Policy, Snapshot
from tests.policy.deciding import decide, policy


def test_keep_without_survivors_is_503_and_names_the_filter() -> None:
    decision = decide("keep requests > 99 as has_load\nroute argmin(requests)")
    assert (decision.outcome, decision.status, decision.rule) == (Outcome.NO_CANDIDATE, 503, "has_load")
    assert decision.instance is None
    assert "has_load" in decision.message


def test_prefer_without_survivors_is_ignored() -> None:
    decision = decide("prefer requests > 99 as busy\nprefer healthy as well\nroute argmax(requests)")
    assert decision.instance == "a"
    assert [(f.label, f.ignored, list(f.left)) for f in decision.filters] == [
        ("busy", True, [0, 1, 2]),
        ("well", False, [0, 1]),
    ]


def test_pick_without_a_candidate_leaves_the_decision_to_the_next_rule() -> None:
    decision = decide("route argmin(requests where waiting > 9) as roomy\nroute argmax(requests) as rest")
    assert (decision.rule, decision.instance) == ("rest", "a")
    assert [tuple(trace) for trace in decision.guards] == [("roomy", (("nobody", False),)), ("rest", ())]
    assert decision.failed_guard == "nobody"


def test_reject_has_status_message_and_delay() -> None:
    decision = decide('reject 429 "full" retry 2s when min(waiting) >= 0 as shed\nroute argmin(requests)')
    assert (decision.outcome, decision.rule) == (Outcome.REJECT, "shed")
    assert (decision.status, decision.message, decision.retry_after_s) == (429, "full", 2.0)
    assert (decision.instance, decision.cursors, decision.runner_up, decision.tied) == (None, {}, None, 0)


def test_reject_delay_is_never_negative() -> None:
    rules = 'reject 429 "full" retry 2s - 1s * max(requests) / 1 request when count() > 0\nroute argmin(requests)'
    decision = decide(rules)
    assert decision.retry_after_s == 0.0


HOLD = (
    "param PATIENCE = 2s\nhold for PATIENCE when min(requests) >= 1 and req.turn == 0 as wait\nroute argmin(requests)"
)


def test_hold_has_the_total_wait() -> None:
    decision = decide(HOLD, held=1.5)
    assert (decision.outcome, decision.rule, decision.wait_s) == (Outcome.HOLD, "wait", 2.0)
    assert (decision.instance, decision.cursors, decision.status, decision.message) == (None, {}, 0, "")
    assert decision.failed_guard is None


def test_hold_fails_by_its_guard_when_the_patience_is_over() -> None:
    decision = decide(HOLD, held=2.0)
    assert (decision.outcome, decision.instance, decision.failed_guard) == (Outcome.ROUTE, "b", "held")
    assert decide(HOLD, held=2.0, turn=1).failed_guard == "req.turn == 0"


def test_guard_is_labelled_by_definition_or_source_text() -> None:
    decision = decide(
        """
        def busy(l) = max(l) > 99
        let calm = all(healthy)
        route argmin(requests)
          when req.turn  >  0     # a comment
           and (busy(requests)
                or busy(running)) and calm
        route argmin(requests)
        """,
        turn=1,
    )
    assert [label for label, _ in decision.guards[0].guards] == ["req.turn > 0", "busy or busy", "calm"]
    assert [held for _, held in decision.guards[0].guards] == [True, False, None]


def test_rule_without_a_label_gets_a_stable_one() -> None:
    decision = decide("keep healthy\nroute argmin(requests) when req.turn > 3\nroute argmin(requests)")
    assert decision.rule == "route_2"
    assert [step.label for step in decision.policy.plan.steps] == ["keep_1", "route_1", "route_2"]


def test_reads_are_those_of_the_visited_statements() -> None:
    body = "route argmin(running) when req.turn > 3 and max(waiting) > 9\nroute argmin(requests)"
    assert decide(body, turn=0).reads == {"requests"}
    assert decide(body, turn=4).reads == {"waiting", "requests"}
    assert policy(body).reads == {"running", "waiting", "requests"}


def test_mask_settled_by_a_parameter_leaves_all() -> None:
    body = "param OPEN = true\nkeep OPEN or healthy\nroute argmin(requests where OPEN or healthy)\nroute rr_argmin(0)"
    decision = decide(body)
    assert (decision.instance, decision.runner_up, decision.tied) == ("b", "c", 1)
    assert list(decision.candidates) == [0, 1, 2]


# ── the contest ──────────────────────────────────────────────────────────────

POLICIES = [
    policy(body)
    for body in (
        "route argmin(requests)",
        "keep waiting < 5 as calm\nroute argmax(requests)",
        "route rr_argmin(requests where waiting < 5) as few\nroute rr_argmin(0) as any",
    )
]


@pytest.mark.parametrize("rule", ["rr_argmin(kv_usage", "rr_argmax(-kv_usage"])
def test_tied_counts_the_candidates_of_the_rotation(rule: str) -> None:
    # 0.42 + 0.83 is 1.25, and 1.25 - 0.42 more than 0.83.
    seen = Snapshot(["a", "b"], {"kv_usage": [0.42, 1.25]})
    decisions = [decide(f"route {rule}, within: 0.83)", seen, last=last) for last in seen.ids]
    assert [decision.instance for decision in decisions] == ["b", "a"]
    assert [decision.tied for decision in decisions] == [2, 2]


@given(
    st.sampled_from(POLICIES),
    st.lists(
        st.tuples(st.integers(0, 20), st.sampled_from([0.0, 1.0, 2.0, float("inf")]), st.integers(0, 9).map(float)),
        min_size=1,
        max_size=7,
        unique_by=lambda cell: cell[0],
    ),
    st.integers(0, 2**63),
)
def test_runner_up_is_the_second_of_the_ranked(
    loaded: Policy, cells: list[tuple[int, float, float]], seed: int
) -> None:
    columns = {"requests": [requests for _, requests, _ in cells], "waiting": [waiting for _, _, waiting in cells]}
    snapshot = Snapshot([f"gpu-{number}" for number, _, _ in cells], columns)
    request = types.SimpleNamespace(**{name: field.default for name, field in VOCABULARY.request.items()})
    decision = loaded.decide(snapshot, request, {}, seed)
    assert isinstance(decision, Decision)
    ranked = decision.ranked
    second = ranked[1] if decision.index >= 0 and len(ranked) > 1 else None
    assert decision.runner_up_index == second
    assert decision.runner_up == (None if second is None else snapshot.ids[second])
    if decision.score is None or second is None:
        assert decision.margin is None
