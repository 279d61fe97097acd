"""In which order compiled policies ask, what fails a guard, and where their errors point."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from smetric.features import VOCABULARY
from smetric.policy import PolicyError, load
from tests.policy.deciding import COLUMNS, asked, decide, policy, request, snapshot


def test_a_filter_applies_only_where_its_condition_holds() -> None:
    body = "keep healthy when req.turn > 3 as careful\nroute argmax(unprefilled)"
    assert decide(body, turn=1).instance == "c"
    assert decide(body, turn=4).instance == "a"
    assert [f.applied for f in decide(body, turn=1).filters] == [False]


def test_the_mean_of_equal_values_removes_nobody() -> None:
    for alike in (0.1, 0.173, 0.175, 0.7):
        for order in ("<=", ">="):
            body = f"keep kv_usage {order} mean(kv_usage)\nroute rr_argmin(0)"
            decision = decide(body, snapshot(kv_usage=[alike] * 3))
            assert decision.survivors == ([0, 1, 2],)


def test_a_patience_may_be_computed_and_is_asked_for_behind_the_guards() -> None:
    body = "hold for max(hit_len) / 300 tokens * 1s when req.turn == 0 as wait\nroute argmin(requests)"
    assert decide(body, held=1.9).wait_s == 2.0
    assert decide(body, held=2.1).instance == "b"
    assert asked(body, turn=0) == {"hit_len"}
    assert asked(body, turn=1) == set()


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
        ("route rr_argmin(max(hit_len))", {}, False),
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


@pytest.mark.parametrize("name", ["__debug__", "None", "lambda", "len", "seed", "__builtins__"])
def test_a_name_may_be_one_that_python_keeps_for_itself(name: str) -> None:
    rules = f"let {name} = argmax(requests)\nroute {name} when requests[{name}] > 9\nroute argmin(requests) as {name}"
    assert decide(rules).instance == "b"


def test_a_traceback_points_into_the_policy_file() -> None:
    source = "policy p\nlet l = requests\n\nroute argmin(l\n  * kv_usage)\n"
    loaded = load(source, VOCABULARY, path="some/where.policy")
    with pytest.raises(TypeError) as error:
        loaded.decide(snapshot(kv_usage=[None, None, None]), request(), {}, 1)
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.value.__traceback__)]
    assert ("some/where.policy", 4) in places


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
