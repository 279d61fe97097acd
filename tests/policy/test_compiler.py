"""What compiled policies compute, in which order they ask, and where their errors point."""

from __future__ import annotations

import traceback
import types
from typing import Any

import pytest

from smetric.features import VOCABULARY
from smetric.policy import Decision, Need, Outcome, Policy, PolicyError, Snapshot, load

COLUMNS: dict[str, list[Any]] = {
    "requests": [4, 1, 3],
    "running": [2, 1, 3],
    "waiting": [2, 0, 0],
    "hit_len": [600, 0, 300],
    "unprefilled": [100, 0, 700],
    "kv_usage": [0.5, 0.25, 0.75],
    "healthy": [True, True, False],
    "draining": [False, False, False],
    "role": ["both", "decode", "prefill"],
    "zone": ["x", "y", "x"],
}


def snapshot(without: tuple[str, ...] = (), **columns: list[Any]) -> Snapshot:
    present = {name: list(cells) for name, cells in {**COLUMNS, **columns}.items() if name not in without}
    return Snapshot(["a", "b", "c"], present)


def request(**fields: Any) -> Any:
    defaults = {name: field.default for name, field in VOCABULARY.request.items()}
    return types.SimpleNamespace(**{**defaults, "prompt_len": 1000, **fields})


def policy(body: str, **settings: Any) -> Policy:
    return load(f"policy p\n{body}\n", VOCABULARY, settings=settings)


def decide(body: str, snap: Snapshot | None = None, *, seed: int = 1, last: str = "", **fields: Any) -> Decision:
    loaded = policy(body)
    cursors = dict.fromkeys(loaded.plan.keys, last) if last else {}
    decision = loaded.decide(snap or snapshot(), request(**fields), cursors, seed)
    assert isinstance(decision, Decision)
    return decision


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
def test_an_expression_has_the_value_the_manual_says(expression: str, score: list[float]) -> None:
    assert decide(f"route argmin({expression})").score == pytest.approx(score)


def test_a_definition_sees_names_above_it_and_its_arguments_hide_names_of_the_file() -> None:
    decision = decide(
        """
        let l = requests
        param K = 10
        def scaled(l, c) = K * l + c
        route argmin(scaled(running, waiting) + 0 * l)
        """
    )
    assert decision.score == [22, 10, 30]


def test_parameters_are_constants_and_may_name_a_feature() -> None:
    body = "param LOAD = requests in {requests, unprefilled}\nparam K = 2\nroute argmin(LOAD * K)"
    first = policy(body).decide(snapshot(), request(), {}, 1)
    second = policy(body, LOAD="unprefilled", K=3).decide(snapshot(), request(), {}, 1)
    assert isinstance(first, Decision)
    assert isinstance(second, Decision)
    assert (first.score, second.score) == ([8, 2, 6], [300, 0, 2100])
    assert policy(body).reads == {"requests"}
    assert policy(body, LOAD="unprefilled").reads == {"unprefilled"}


# ── filters ──────────────────────────────────────────────────────────────────


def test_a_let_is_over_the_candidates_left_on_its_line() -> None:
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


def test_a_filter_applies_only_where_its_condition_holds() -> None:
    body = "keep healthy when req.turn > 3 as careful\nroute argmax(unprefilled)"
    assert decide(body, turn=1).instance == "c"
    assert decide(body, turn=4).instance == "a"
    assert [f.applied for f in decide(body, turn=1).filters] == [False]


def test_picks_reductions_and_norm_see_survivors_only() -> None:
    body = "keep healthy\nlet n = norm(unprefilled)\nroute argmax(n * max(unprefilled))"
    decision = decide(body)
    assert decision.instance == "a"
    assert decision.score is not None
    assert decision.score[:2] == [100, 0]
    assert decide("keep healthy\nroute argmin(0 * unprefilled + max(unprefilled))").score == [100, 100, 100]


# ── picks ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("part", ["norm(requests)", "share(requests)", "rank(requests)"])
def test_those_whom_a_filter_removed_stay_within_what_the_checker_promised(part: str) -> None:
    upper = 2 if part.startswith(("norm", "share")) else 1e6 + 1
    for far in range(2, 40):
        decision = decide(f"keep healthy\nroute argmax(1 / ({upper} - {part}))", snapshot(requests=[1, 3, far]))
        assert decision.instance == "b"


def test_the_mean_of_equal_values_removes_nobody() -> None:
    for alike in (0.1, 0.173, 0.175, 0.7):
        for order in ("<=", ">="):
            body = f"keep kv_usage {order} mean(kv_usage)\nroute rr_argmin(0)"
            decision = decide(body, snapshot(kv_usage=[alike] * 3))
            assert decision.survivors == ([0, 1, 2],)


def test_a_pick_with_where_that_finds_nobody_lets_the_next_rule_decide() -> None:
    decision = decide("route argmin(requests where waiting > 9) as roomy\nroute argmax(requests) as rest")
    assert (decision.rule, decision.instance) == ("rest", "a")
    assert [tuple(trace) for trace in decision.guards] == [("roomy", (("nobody", False),)), ("rest", ())]
    assert decision.failed_guard == "nobody"


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


def test_reject_carries_status_message_and_delay() -> None:
    decision = decide('reject 429 "full" retry 2s when min(waiting) >= 0 as shed\nroute argmin(requests)')
    assert (decision.outcome, decision.rule) == (Outcome.REJECT, "shed")
    assert (decision.status, decision.message, decision.retry_after_s) == (429, "full", 2.0)
    assert (decision.instance, decision.cursors, decision.runner_up, decision.tied) == (None, {}, None, 0)


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


def test_a_patience_may_be_computed_and_is_asked_for_behind_the_guards() -> None:
    body = "hold for max(hit_len) / 300 tokens * 1s when req.turn == 0 as wait\nroute argmin(requests)"
    assert decide(body, held=1.9).wait_s == 2.0
    assert decide(body, held=2.1).instance == "b"
    assert asked(body, turn=0) == {"hit_len"}
    assert asked(body, turn=1) == set()


# ── what is asked for, and when ──────────────────────────────────────────────


def asked(body: str, **fields: Any) -> frozenset[str]:
    """The look-ups asked for when none was fetched; empty when none is needed."""
    decision = policy(body).decide(snapshot(without=("hit_len",)), request(**fields), {}, 1)
    return decision.features if isinstance(decision, Need) else frozenset()


@pytest.mark.parametrize(
    ("body", "fields", "expected"),
    [
        ("route argmin(requests)", {}, False),
        ("let unused = hit_len\nroute argmin(requests)", {}, False),
        ("route argmax(hit_len)", {}, True),
        ("route argmax(hit_len) when req.turn > 3\nroute argmin(requests)", {"turn": 1}, False),
        ("route argmax(hit_len) when req.turn > 3\nroute argmin(requests)", {"turn": 4}, True),
        ("route argmin(requests) when req.turn > 3 and max(hit_len) > 0\nroute argmin(running)", {"turn": 1}, False),
        ("route argmin(requests) when req.turn > 3 or max(hit_len) > 0\nroute argmin(running)", {"turn": 4}, False),
        ("route argmin(requests) when req.turn > 3 or max(hit_len) > 0\nroute argmin(running)", {"turn": 1}, True),
        ("route argmin(requests, then: hit_len)", {}, False),
        ("route argmin(0, then: hit_len)", {}, True),
        ("route argmin(min(unprefilled where healthy, default: max(hit_len)) + unprefilled)", {}, False),
        ("route argmin(min(unprefilled where draining, default: max(hit_len)) + unprefilled)", {}, True),
        ("param DEEP = false\nroute argmin(unprefilled + (hit_len if DEEP else 0))", {}, False),
        ("route argmin(unprefilled + (hit_len if req.turn > 3 else 0 * hit_len + 1))", {"turn": 0}, True),
        ("route argmin(unprefilled if req.turn > 3 else hit_len)", {"turn": 4}, False),
        ("let m = req.turn > 3 and hit_len > 0\nroute first(argmin(requests where m), argmin(requests))", {}, False),
        ("keep draining or healthy\nkeep known(hit_len)\nroute argmin(requests)", {}, True),
    ],
)
def test_a_look_up_is_asked_for_only_where_evaluation_reaches_it(
    body: str, fields: dict[str, Any], expected: bool
) -> None:
    assert asked(body, **fields) == ({"hit_len"} if expected else set())


def test_a_let_is_computed_once_whichever_way_leads_to_it() -> None:
    body = """
    let heavy = max(hit_len) / 100
    route argmin(requests) when req.turn > 3 and heavy > 99 as one
    route argmin(running)  when heavy > 99                  as two
    route argmax(requests) when heavy >= 6                  as three
    route argmin(requests)
    """
    assert decide(body, turn=1).rule == "three"
    assert decide(body, turn=9).rule == "three"


def test_a_guard_that_reads_an_unknown_number_of_the_request_fails() -> None:
    body = """
    let expected = req.est_hit * 2
    route argmin(requests) when not (expected > 5) and req.turn == 0 as quiet
    route argmax(requests)                                           as rest
    """
    assert decide(body, est_hit=None).rule == "rest"
    assert decide(body, est_hit=0).rule == "quiet"
    assert decide(body, est_hit=None).failed_guard == "not (expected > 5)"


def test_a_pick_reads_the_default_of_an_unknown_number_of_the_request() -> None:
    assert decide("route argmin(unprefilled + req.est_hit)", est_hit=None).score == COLUMNS["unprefilled"]


def test_known_age_and_fresh_follow_what_a_value_is_computed_from() -> None:
    snap = Snapshot(
        ["a", "b", "c"],
        {name: list(cells) for name, cells in COLUMNS.items()},
        known={"requests": [True, False, True]},
        stamps={"requests": [9.0, 9.0, 2.0]},
        now=10.0,
    )
    body = "let l = requests * kv_usage\nroute argmin({} * 1)"
    assert decide(body.format("(1 if known(l) else 0)"), snap).score == [1, 0, 1]
    assert decide(body.format("age(l)"), snap).score == [1, 1e9, 8]
    assert decide(body.format("(1 if fresh(l, 2s) else 0)"), snap).score == [1, 0, 0]


# ── names in traces, places in tracebacks ────────────────────────────────────


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


def test_a_traceback_points_into_the_policy_file() -> None:
    source = "policy p\nlet l = requests\n\nroute argmin(l\n  * kv_usage)\n"
    loaded = load(source, VOCABULARY, path="some/where.policy")
    with pytest.raises(TypeError) as error:
        loaded.decide(snapshot(kv_usage=[None, None, None]), request(), {}, 1)
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.value.__traceback__)]
    assert ("some/where.policy", 4) in places


def test_the_digest_is_of_the_source() -> None:
    one, two = policy("route argmin(requests)"), policy("route argmin(running)")
    assert len(one.digest) == 12
    assert one.digest == policy("route argmin(requests)").digest != two.digest


def test_names_that_mean_something_in_python_are_ordinary_names() -> None:
    body = "let lambda = requests\nlet zip = lambda + running\nlet len = count()\nroute argmin(zip * len + max(zip))"
    assert decide(body).score == [6 * 3 + 6, 2 * 3 + 6, 6 * 3 + 6]


@pytest.mark.parametrize(
    "chain",
    [
        "let x{n} = x{p} if req.turn > {n} else x{p} + 1",
        "let x{n} = (x{p} if req.turn > {n} else 1) if req.turn < {n} else (x{p} if req.turn > 2 else 2)",
        "let x{n} = max(x{p} + kv_usage)",
    ],
)
def test_a_chain_that_would_grow_without_bound_is_refused_or_small(chain: str) -> None:
    """Each step of a chain may double the code, or nest it; loading ends soon either way."""
    outcomes = []
    for length in (8, 60, 80):
        body = "let x0 = req.turn\n" + "\n".join(chain.format(n=n, p=n - 1) for n in range(1, length))
        try:
            loaded = policy(f"{body}\nroute argmin(requests) when x{length - 1} > 3\nroute argmin(requests)")
        except PolicyError as error:
            outcomes.append(error.diagnostics[0].code)
        else:
            outcomes.append(type(loaded.decide(snapshot(), request(), {}, 1)).__name__)
    assert outcomes[0] == "Decision"
    assert set(outcomes[1:]) <= {"Decision", "too-large", "too-deep"}
