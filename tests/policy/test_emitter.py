"""Values of expressions, and choices of picks."""

from __future__ import annotations

import pytest

from smetric.policy import Decision, Snapshot
from tests.policy.deciding import COLUMNS, decide, policy, request, snapshot


@pytest.mark.parametrize(
    ("expression", "score"),
    [
        ("requests + 1", [5, 2, 4]),
        ("2 * requests - running", [6, 1, 3]),
        ("hit_len / req.prompt_len", [0.6, 0, 0.3]),
        ("-requests", [-4, -1, -3]),
        ("norm(requests)", [1, 0, 2 / 3]),
        ("1 - kv_usage", [0.5, 0.75, 0.25]),
        ("greatest(requests, 2)", [4, 2, 3]),
        ("least(requests, running, 2)", [2, 1, 2]),
        ("clamp(requests, 2, 3)", [3, 2, 3]),
        ("abs(requests - 3)", [1, 2, 0]),
        ("ratio(running, waiting, default: 9)", [1, 9, 9]),
        ("ratio(running, max(waiting) - 2, default: 7)", [7, 7, 7]),
        ("ratio(running, waiting * 1e-10, default: 9)", [9, 9, 9]),
        ("ratio(running, 0 - max(waiting) * 1e-10, default: 7)", [7, 7, 7]),
        ("ratio(running, -waiting, default: 9)", [-1, 9, 9]),
        ("requests - mean(requests)", [4 - 8 / 3, 1 - 8 / 3, 3 - 8 / 3]),
        ("requests * count()", [12, 3, 9]),
        ("requests * count(waiting == 0)", [8, 2, 6]),
        ("requests * (count(true or healthy) + 9 * count(false and healthy))", [12, 3, 9]),
        ("requests + min(running where waiting == 0, default: 50)", [5, 2, 4]),
        ("requests + min(running where waiting > 9, default: 50)", [54, 51, 53]),
        ("requests + sum(running where waiting > 9)", [4, 1, 3]),
        ("requests if healthy else 9", [4, 1, 9]),
        ("requests if any(healthy) else running", [4, 1, 3]),
        ('requests if role in {"both", "prefill"} and not draining else 0', [4, 0, 3]),
        ('requests if zone not in {"x"} else 0', [0, 1, 0]),
        ("requests * hit_len[argmax(hit_len)]", [2400, 600, 1800]),
    ],
)
def test_expression_has_the_value_of_the_manual(expression: str, score: list[float]) -> None:
    assert decide(f"route argmin({expression})").score == pytest.approx(score)


def test_definition_sees_names_above_it_and_its_arguments_hide_them() -> None:
    decision = decide(
        """
        let l = requests
        param K = 10
        def scaled(l, c) = K * l + c
        route argmin(scaled(running, waiting) + 0 * l)
        """
    )
    assert decision.score == [22, 10, 30]


def test_let_reduces_over_the_candidates_left_on_its_line() -> None:
    decision = decide(
        """
        let before = mean(requests)
        keep requests <= 3
        let after = mean(requests)
        route argmin(requests * 0 + before - after)
        """
    )
    assert decision.score is not None
    assert decision.score[0] == pytest.approx(8 / 3 - 2)


def test_pick_reduction_and_scale_see_survivors_only() -> None:
    body = "keep healthy\nlet n = norm(unprefilled)\nroute argmax(n * max(unprefilled))"
    decision = decide(body)
    assert decision.instance == "a"
    assert decision.score is not None
    assert decision.score[:2] == [100, 0]
    assert decide("keep healthy\nroute argmin(0 * unprefilled + max(unprefilled))").score == [100, 100, 100]


@pytest.mark.parametrize("part", ["norm(requests)", "share(requests)", "rank(requests)"])
def test_scale_of_removed_candidates_stays_within_its_checked_interval(part: str) -> None:
    upper = 2 if part.startswith(("norm", "share")) else 1e6 + 1
    for far in range(2, 40):
        decision = decide(f"keep healthy\nroute argmax(1 / ({upper} - {part}))", snapshot(requests=[1, 3, far]))
        assert decision.instance == "b"


def test_let_is_set_on_each_path_that_reads_it() -> None:
    body = """
    let heavy = max(hit_len) / 100
    route argmin(requests) when req.turn > 3 and heavy > 99 as one
    route argmin(running)  when heavy > 99                  as two
    route argmax(requests) when heavy >= 6                  as three
    route argmin(requests)
    """
    assert decide(body, turn=1).rule == "three"
    assert decide(body, turn=9).rule == "three"


def test_known_age_and_fresh_follow_the_features_of_a_value() -> None:
    snap = Snapshot(
        ["a", "b", "c"],
        {name: list(cells) for name, cells in COLUMNS.items()},
        known={"requests": [True, False, True], "kv_usage": [True, True, False]},
        stamps={"requests": [9.0, 9.0, 2.0], "kv_usage": [5.0, 9.0, 9.0]},
        now=10.0,
    )
    body = "let l = requests * kv_usage\nroute argmin({} * 1)"
    assert decide(body.format("(1 if known(l) else 0)"), snap).score == [1, 0, 0]
    assert decide(body.format("age(l)"), snap).score == [5, 1e9, 1e9]
    assert decide(body.format("(1 if fresh(l, 6s) else 0)"), snap).score == [1, 0, 0]
    assert decide(body.format("(1 if fresh(l, 2s) else 0)"), snap).score == [0, 0, 0]


def test_python_names_are_ordinary_names() -> None:
    body = "let lambda = requests\nlet zip = lambda + running\nlet len = count()\nroute argmin(zip * len + max(zip))"
    assert decide(body).score == [6 * 3 + 6, 2 * 3 + 6, 6 * 3 + 6]


# ── picks ────────────────────────────────────────────────────────────────────


def test_first_takes_the_first_pick_with_a_candidate() -> None:
    body = "route first(argmin(requests where {0}), argmax(kv_usage where {1}), argmin(kv_usage))"
    assert decide(body.format("waiting > 9", "healthy")).instance == "a"
    assert decide(body.format("waiting > 9", "waiting > 9")).instance == "b"
    assert decide(body.format("not healthy", "healthy")).instance == "c"


def test_pick_chosen_by_if_has_the_score_and_cursor_of_the_branch_taken() -> None:
    body = "let s = argmin(requests) if req.turn > 3 else rr_argmin(kv_usage)\nroute s when requests[s] < 9\nroute s"
    early, late = decide(body, turn=1), decide(body, turn=4)
    assert (early.score, early.cursors) == (COLUMNS["kv_usage"], {"s.2": "b"})
    assert (late.score, late.cursors) == (COLUMNS["requests"], {})


def test_then_breaks_ties_in_order() -> None:
    snap = snapshot(requests=[1, 1, 1], waiting=[0, 0, 5], kv_usage=[0.9, 0.1, 0.0])
    assert decide("route argmin(requests, then: waiting, then: kv_usage)", snap).instance == "b"


def test_rotation_follows_the_order_of_ids() -> None:
    snap = snapshot(requests=[1, 2, 1])
    got = [decide("route rr_argmin(requests)", snap, last=last).instance for last in ("a", "b", "c", "aa", "z")]
    assert got == ["c", "c", "a", "c", "a"]


def test_cursor_is_named_after_its_rule_or_let() -> None:
    body = "let s = rr_argmin(requests)\nroute s when req.turn > 3\nroute rr_argmin(0) as around"
    assert decide(body, turn=4).cursors == {"s": "b"}
    assert decide(body, turn=0).cursors == {"around": "a"}


def test_draw_depends_on_seed_and_pick_but_not_on_edits_elsewhere() -> None:
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
