"""Tests of policies: tables, expectations, failures and coverage."""

from __future__ import annotations

from typing import Any

import pytest

from smetric.features import VOCABULARY
from smetric.policy import PolicyError, PolicyText
from smetric.policy.testing import Coverage, Situation, TestResult, suite_of


def run(rules: str, test: str) -> TestResult:
    (result,) = suite_of(f'policy p\n{rules}\ntest "t"\n{test}\n', VOCABULARY).run()
    return result


def test_passing_test_names_its_line_and_the_rules_that_fired() -> None:
    result = run("route argmin(requests) as least", "  instance | requests\n  a | 2\n  b | 1\n  expect b as least")
    assert result.passed
    assert (result.sentence, result.path, result.line) == ("t", "<policy>", 3)
    assert (0, -1, True) in result.shown


def test_failing_test_explains_the_decision() -> None:
    result = run("route argmin(requests) as least", "  instance | requests\n  a | 2\n  b | 1\n  expect a")
    assert not result.passed
    assert result.failure.splitlines()[0] == "expected a, got b (seed 0)"
    assert "  → least    always" in result.failure
    assert "    b                  1  ←" in result.failure


TABLE = "  instance | requests\n  a | 1\n  b | 1\n"


@pytest.mark.parametrize(
    ("rules", "test", "failure"),
    [
        ("route argmin(requests)", TABLE + "  expect a", "expected a, got b"),
        ("route argmin(requests)", TABLE + "  expect a or b", ""),
        ("route rr_argmin(requests)", TABLE + "  expect a", "expected a, got b"),
        ("route rr_argmin(requests)", "  given last = a\n" + TABLE + "  expect b", ""),
        ("route rr_argmin(requests)", "  given last = b\n" + TABLE + "  expect a", ""),
        ("route argmin(requests) as r", "  given last = b\n" + TABLE + "  expect a or b as r", ""),
    ],
)
def test_expectation_must_hold_for_every_draw_and_rotation(rules: str, test: str, failure: str) -> None:
    assert run(rules, test).failure.startswith(failure)
    assert run(rules, test).passed == (not failure)


GUARDED = """
def crowded(l) = min(l) > 5
route argmin(requests) when req.turn != 0 and not crowded(requests) as first_choice
reject 429 "full" when crowded(requests) as shed
route argmax(requests) as rest
"""


@pytest.mark.parametrize(
    ("test", "failure"),
    [
        ("  given turn = 1\n  instance | requests\n  a | 1\n  expect a as first_choice", ""),
        (
            "  given turn = 1\n  instance | requests\n  a | 1\n  expect a as rest",
            "expected rule rest, got first_choice",
        ),
        ('  instance | requests\n  a | 1\n  expect a failing "req.turn   !=  0"', ""),
        ("  given turn = ?\n  instance | requests\n  a | 1\n  expect a as rest failing crowded", ""),
        ("  instance | requests\n  a | 9\n  expect reject 429", ""),
        ("  instance | requests\n  a | 9\n  expect reject 503", "expected reject 503, got 429 by shed"),
        ("  instance | requests\n  a | 9\n  expect a", "expected a, got 429 by shed"),
        ("  instance | requests\n  a | 1\n  expect reject 429", "expected reject 429, got a"),
        (
            '  given turn = 1\n  instance | requests\n  a | 1\n  expect a failing "req.turn != 0"',
            "expected req.turn != 0 to fail, got no guard that failed",
        ),
    ],
)
def test_expectation_covers_rule_guard_and_rejection(test: str, failure: str) -> None:
    result = run(GUARDED, test)
    assert result.failure.startswith(failure)
    assert result.passed == (not failure)


@pytest.mark.parametrize(
    ("test", "failure"),
    [
        ("  given turn = 1\n" + TABLE + "  expect hold as wait", ""),
        ("  given turn = 1, held = 0.4\n" + TABLE + "  expect hold", ""),
        ("  given turn = 1, held = 0.5\n" + TABLE + "  expect a or b failing held", ""),
        ("  given turn = 1\n" + TABLE + "  expect a", "expected a, got hold by wait"),
        ("  given turn = 1\n" + TABLE + "  expect reject 429", "expected reject 429, got hold by wait"),
        (TABLE + "  expect hold", "expected hold, got a (seed 0)"),
    ],
)
def test_expectation_of_hold(test: str, failure: str) -> None:
    result = run("hold for 500ms when req.turn != 0 as wait\nroute argmin(requests) as rest", test)
    assert result.failure.startswith(failure[:22])
    assert result.passed == (not failure)


def test_expectation_of_a_keep_without_survivors_is_503() -> None:
    assert run("keep healthy\nroute argmin(requests)", "  instance | healthy\n  a | false\n  expect reject 503").passed


@pytest.mark.parametrize("quote", ["", '"'])
@pytest.mark.parametrize("id", ["gpu-6", "10.0.0.1:8000", "test-1", "vllm/a100-80g.local:8000", "hold.2s"])
def test_table_takes_ids_of_real_instances(id: str, quote: str) -> None:
    id = f"{quote}{id}{quote}"
    table = f"  given last = {id}\n  instance | requests | waiting\n  {id} | 1 | 2\n  b | 1 | 0\n"
    assert run("route rr_argmin(requests)", table + "  expect b").passed
    assert run("route argmax(waiting)", f"{table}  expect b or {id}").passed


def test_cell_left_out_or_marked_is_unknown() -> None:
    rules = "route argmin(requests) when all(known(requests)) and not any(known(hit_len)) as known_load\n"
    rules += "route argmax(requests + hit_len / 1 token * 1 request) as rest"
    assert run(rules, "  instance | requests\n  a | 5\n  b | 4\n  expect b as known_load").passed
    assert run(rules, "  instance | requests\n  a | 5\n  b | ?\n  c | 2\n  expect a as rest").passed


def test_age_has_a_column_of_its_own() -> None:
    rules = "route argmin(requests where fresh(requests, 2s)) as seen\nroute argmin(requests)"
    table = "  instance | requests | age(requests)\n  a | 1 | 5s\n  b | 3 | 500ms\n"
    assert run(rules, table + "  expect b as seen").passed


def test_cell_is_clamped_as_in_snapshots() -> None:
    rules = "route argmin(requests) when max(hit_len) > 100 tokens\nroute argmax(requests)"
    table = "  instance | hit_len | requests\n  a | 900 | 1\n  b | 0 | 2\n"
    assert run(rules, "  given prompt_len = 50\n" + table + "  expect b").passed
    assert run(rules, table + "  expect a").passed


def test_with_clause_sets_parameters_for_one_test() -> None:
    rules = "param LOAD = requests in {requests, unprefilled}\nparam UP = false\nroute argmax(LOAD if UP else -LOAD)"
    table = "  instance | requests | unprefilled\n  a | 1 | 9\n  b | 2 | 8\n"
    assert run(rules, table + "  expect a").passed
    assert run(rules, "  with LOAD = unprefilled\n" + table + "  expect b").passed
    assert run(rules, "  with LOAD = unprefilled, UP = true\n" + table + "  expect a").passed


def test_wrong_policy_is_refused_before_any_test_runs() -> None:
    with pytest.raises(PolicyError):
        suite_of('policy p\nroute argmin(requets)\ntest "t"\n  instance | requests\n  a | 1\n  expect a', VOCABULARY)


@pytest.mark.parametrize(
    ("hits", "given", "asked"),
    [
        ([None], {}, (1.0, 0.0)),
        ([600.0], {}, (600.0, 0.0)),
        ([600.0], {"est_hit": 900.0}, (900.0, 900.0)),
        ([600.0], {"est_hit": None}, (600.0, None)),
        ([600.0], {"est_hit": 900.0, "prompt_len": 500.0}, (500.0, 500.0)),
    ],
)
def test_situation_makes_the_prompt_as_long_as_its_parts(
    hits: list[float | None], given: dict[str, Any], asked: tuple[float, float | None]
) -> None:
    request = Situation(["a"], {"hit_len": hits}, request=given).asking(VOCABULARY)
    assert (request.prompt_len, request.est_hit) == asked


# ── coverage ─────────────────────────────────────────────────────────────────

RULES = """policy p
prefer healthy                          as well
keep requests < 9 when req.turn > 3     as calm
hold for 1s when all(requests > 5)      as wait
route argmin(requests) when req.turn > 1 and any(running > 2) as stick
route argmax(requests)                  as rest
"""


def covered(*tests: str, rules: str = RULES) -> Coverage:
    blocks = [f'test "{i}"\n{test}\n' for i, test in enumerate(tests)]
    suite = suite_of(rules + "\n".join(blocks), VOCABULARY)
    results = suite.run()
    assert [result.failure for result in results if not result.passed] == []
    return suite.coverage(results)


def test_coverage_without_tests_is_0_and_lists_everything() -> None:
    nothing = covered()
    assert nothing.percent == 0
    assert nothing.missing == [
        "filter `well` never removed a candidate",
        "guard `req.turn > 3` of `calm` never held",
        "guard `req.turn > 3` of `calm` never failed",
        "filter `calm` never removed a candidate",
        "guard `all(requests > 5)` of `wait` never held",
        "guard `all(requests > 5)` of `wait` never failed",
        "guard `held` of `wait` never held",
        "guard `held` of `wait` never failed",
        "rule `wait` never taken",
        "guard `req.turn > 1` of `stick` never held",
        "guard `req.turn > 1` of `stick` never failed",
        "guard `any(running > 2)` of `stick` never held",
        "guard `any(running > 2)` of `stick` never failed",
        "rule `stick` never taken",
        "rule `rest` never taken",
    ]


def test_coverage_counts_the_rule_taken_and_the_guards_evaluated() -> None:
    shown = covered("  instance | requests | healthy\n  a | 2 | true\n  b | 9 | false\n  expect a as rest")
    assert shown.missing == [
        "guard `req.turn > 3` of `calm` never held",
        "filter `calm` never removed a candidate",
        "guard `all(requests > 5)` of `wait` never held",
        "guard `held` of `wait` never held",
        "guard `held` of `wait` never failed",
        "rule `wait` never taken",
        "guard `req.turn > 1` of `stick` never held",
        "guard `any(running > 2)` of `stick` never held",
        "guard `any(running > 2)` of `stick` never failed",
        "rule `stick` never taken",
    ]
    assert round(shown.percent) == round(100 * 5 / 15)


def test_coverage_does_not_count_a_filter_that_removes_nothing() -> None:
    table = "  instance | requests | healthy\n  a | 2 | {}\n  expect a"
    for healthy in ("true", "false"):
        assert "filter `well` never removed a candidate" in covered(table.format(healthy)).missing


def test_coverage_counts_a_keep_without_survivors() -> None:
    shown = covered(
        "  instance | requests\n  a | 2\n  expect reject 503", rules="policy p\nkeep healthy\nroute rr_argmin(0)\n"
    )
    assert shown.missing == ["rule `route_1` never taken"]


def test_coverage_can_be_complete() -> None:
    assert covered(
        "  instance | requests | healthy\n  a | 2 | true\n  b | 9 | false\n  expect a as rest",
        "  given turn = 4\n  instance | requests | running\n  a | 2 | 3\n  b | 9 | 3\n  expect a as stick",
        "  given turn = 2\n  instance | requests | running\n  a | 2 | 1\n  expect a as rest",
        "  instance | requests\n  a | 6\n  expect hold",
        "  given held = 1\n  instance | requests\n  a | 6\n  expect a failing held",
    ).missing == []  # fmt: skip


def test_coverage_counts_tests_in_a_file_beside() -> None:
    beside = PolicyText('policy p\ntest "more"\n  instance | requests\n  a | 2\n  expect a as only', "p.test.policy")
    suite = suite_of("policy p\nroute rr_argmin(0) as only\n", VOCABULARY, beside=beside)
    (result,) = suite.run()
    assert (result.path, result.line, result.failure) == ("p.test.policy", 2, "")
    assert suite.coverage([result]).percent == 100
