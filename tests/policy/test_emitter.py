"""What expressions compute, and how often."""

from __future__ import annotations

import pytest

from smetric.policy import Snapshot
from tests.policy.deciding import COLUMNS, decide, snapshot


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


def test_picks_reductions_and_norm_see_survivors_only() -> None:
    body = "keep healthy\nlet n = norm(unprefilled)\nroute argmax(n * max(unprefilled))"
    decision = decide(body)
    assert decision.instance == "a"
    assert decision.score is not None
    assert decision.score[:2] == [100, 0]
    assert decide("keep healthy\nroute argmin(0 * unprefilled + max(unprefilled))").score == [100, 100, 100]


@pytest.mark.parametrize("part", ["norm(requests)", "share(requests)", "rank(requests)"])
def test_those_whom_a_filter_removed_stay_within_what_the_checker_promised(part: str) -> None:
    upper = 2 if part.startswith(("norm", "share")) else 1e6 + 1
    for far in range(2, 40):
        decision = decide(f"keep healthy\nroute argmax(1 / ({upper} - {part}))", snapshot(requests=[1, 3, far]))
        assert decision.instance == "b"


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


def test_names_that_mean_something_in_python_are_ordinary_names() -> None:
    body = "let lambda = requests\nlet zip = lambda + running\nlet len = count()\nroute argmin(zip * len + max(zip))"
    assert decide(body).score == [6 * 3 + 6, 2 * 3 + 6, 6 * 3 + 6]
