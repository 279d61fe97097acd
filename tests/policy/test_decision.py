"""What a decision says: how it ends, which statements held, what they read."""

from __future__ import annotations

from smetric.policy import Outcome
from tests.policy.deciding import decide, policy


def test_keep_leaving_nobody_is_503_and_names_the_filter() -> None:
    decision = decide("keep requests > 99 as has_load\nroute argmin(requests)")
    assert (decision.outcome, decision.status, decision.rule) == (Outcome.NOBODY, 503, "has_load")
    assert decision.instance is None
    assert "has_load" in decision.message


def test_prefer_leaving_nobody_is_ignored_and_says_so() -> None:
    decision = decide("prefer requests > 99 as busy\nprefer healthy as well\nroute argmax(requests)")
    assert decision.instance == "a"
    assert [(f.label, f.ignored, list(f.left)) for f in decision.filters] == [
        ("busy", True, [0, 1, 2]),
        ("well", False, [0, 1]),
    ]


def test_a_pick_with_where_that_finds_nobody_lets_the_next_rule_decide() -> None:
    decision = decide("route argmin(requests where waiting > 9) as roomy\nroute argmax(requests) as rest")
    assert (decision.rule, decision.instance) == ("rest", "a")
    assert [tuple(trace) for trace in decision.guards] == [("roomy", (("nobody", False),)), ("rest", ())]
    assert decision.failed_guard == "nobody"


def test_reject_carries_status_message_and_delay() -> None:
    decision = decide('reject 429 "full" retry 2s when min(waiting) >= 0 as shed\nroute argmin(requests)')
    assert (decision.outcome, decision.rule) == (Outcome.REJECT, "shed")
    assert (decision.status, decision.message, decision.retry_after_s) == (429, "full", 2.0)
    assert (decision.instance, decision.cursors, decision.runner_up, decision.tied) == (None, {}, None, 0)


def test_no_rejected_client_is_told_to_come_back_before_it_came() -> None:
    rules = 'reject 429 "full" retry 2s - 1s * max(requests) / 1 request when count() > 0\nroute argmin(requests)'
    decision = decide(rules)
    assert decision.retry_after_s == 0.0


HOLD = (
    "param PATIENCE = 2s\nhold for PATIENCE when min(requests) >= 1 and req.turn == 0 as wait\nroute argmin(requests)"
)


def test_hold_carries_the_whole_time_a_request_may_be_held() -> None:
    decision = decide(HOLD, held=1.5)
    assert (decision.outcome, decision.rule, decision.wait_s) == (Outcome.HOLD, "wait", 2.0)
    assert (decision.instance, decision.cursors, decision.status, decision.message) == (None, {}, 0, "")
    assert decision.failed_guard is None


def test_a_patience_that_is_over_fails_its_rule_with_the_guard_held() -> None:
    decision = decide(HOLD, held=2.0)
    assert (decision.outcome, decision.instance, decision.failed_guard) == (Outcome.ROUTE, "b", "held")
    assert decide(HOLD, held=2.0, turn=1).failed_guard == "req.turn == 0"


def test_guards_are_labelled_by_definition_or_by_source_text() -> None:
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


def test_rules_without_a_label_get_one_that_is_stable() -> None:
    decision = decide("keep healthy\nroute argmin(requests) when req.turn > 3\nroute argmin(requests)")
    assert decision.rule == "route_2"
    assert [step.label for step in decision.policy.plan.steps] == ["keep_1", "route_1", "route_2"]


def test_reads_of_a_decision_are_what_its_visited_statements_ask_for() -> None:
    body = "route argmin(running) when req.turn > 3 and max(waiting) > 9\nroute argmin(requests)"
    assert decide(body, turn=0).reads == {"requests"}
    assert decide(body, turn=4).reads == {"waiting", "requests"}
    assert policy(body).reads == {"running", "waiting", "requests"}


def test_a_mask_that_a_parameter_settles_is_one_for_all_and_leaves_all() -> None:
    body = "param OPEN = true\nkeep OPEN or healthy\nroute argmin(requests where OPEN or healthy)\nroute rr_argmin(0)"
    decision = decide(body)
    assert (decision.instance, decision.runner_up, decision.tied) == ("b", "c", 1)
    assert list(decision.candidates) == [0, 1, 2]
