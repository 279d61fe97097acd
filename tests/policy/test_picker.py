"""Whom a pick chooses: the best, the next tie breaker, the rotation, a draw."""

from __future__ import annotations

from smetric.policy import Decision
from tests.policy.deciding import COLUMNS, decide, policy, request, snapshot


def test_first_takes_the_first_pick_that_is_somebody() -> None:
    body = "route first(argmin(requests where {0}), argmax(kv_usage where {1}), argmin(kv_usage))"
    assert decide(body.format("waiting > 9", "healthy")).instance == "a"
    assert decide(body.format("waiting > 9", "waiting > 9")).instance == "b"
    assert decide(body.format("not healthy", "healthy")).instance == "c"


def test_a_pick_chosen_by_if_carries_the_score_and_the_cursor_of_the_one_taken() -> None:
    body = "let s = argmin(requests) if req.turn > 3 else rr_argmin(kv_usage)\nroute s when requests[s] < 9\nroute s"
    early, late = decide(body, turn=1), decide(body, turn=4)
    assert (early.score, early.cursors) == (COLUMNS["kv_usage"], {"s.2": "b"})
    assert (late.score, late.cursors) == (COLUMNS["requests"], {})


def test_then_breaks_ties_in_order() -> None:
    snap = snapshot(requests=[1, 1, 1], waiting=[0, 0, 5], kv_usage=[0.9, 0.1, 0.0])
    assert decide("route argmin(requests, then: waiting, then: kv_usage)", snap).instance == "b"


def test_rotation_follows_the_order_of_ids_from_the_last_winner_around_the_end() -> None:
    snap = snapshot(requests=[1, 2, 1])
    got = [decide("route rr_argmin(requests)", snap, last=last).instance for last in ("a", "b", "c", "aa", "z")]
    assert got == ["c", "c", "a", "c", "a"]


def test_each_rotating_pick_has_a_cursor_named_after_its_rule_or_let() -> None:
    body = "let s = rr_argmin(requests)\nroute s when req.turn > 3\nroute rr_argmin(0) as around"
    assert decide(body, turn=4).cursors == {"s": "b"}
    assert decide(body, turn=0).cursors == {"around": "a"}


def test_draws_depend_on_the_seed_and_the_pick_not_on_edits_elsewhere() -> None:
    def draws(body: str) -> list[str | None]:
        loaded, snap = policy(body), snapshot(requests=[1, 1, 1])
        decisions = [loaded.decide(snap, request(), {}, seed) for seed in range(60)]
        return [decision.instance for decision in decisions if isinstance(decision, Decision)]

    body = "route argmin(requests) as even"
    drawn = draws(body)
    assert set(drawn) == {"a", "b", "c"}
    edited = "let busy = max(waiting)\nroute argmin(kv_usage) when busy > 9\n\n\n" + body
    assert draws(edited) == drawn
    renamed = body.replace("even", "other")
    assert draws(renamed) != drawn
