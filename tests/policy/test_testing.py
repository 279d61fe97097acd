"""`test` blocks: what their tables mean, what makes them fail, and what they say then."""

from __future__ import annotations

import pytest

from smetric.features import VOCABULARY
from smetric.policy import PolicyError
from smetric.policy.testing import TestResult, suite_of


def run(rules: str, test: str) -> TestResult:
    (result,) = suite_of(f'policy p\n{rules}\ntest "t"\n{test}\n', VOCABULARY).run()
    return result


def test_a_passing_test_names_its_line_and_the_rules_that_fired() -> None:
    result = run("route argmin(requests) as least", "  instance | requests\n  a | 2\n  b | 1\n  expect b as least")
    assert result.passed
    assert (result.sentence, result.path, result.line) == ("t", "<policy>", 3)
    assert (0, -1, True) in result.shown


def test_a_failing_test_says_what_was_decided_and_explains_it() -> None:
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
def test_what_depends_on_a_draw_or_a_rotation_must_hold_for_all_of_them(rules: str, test: str, failure: str) -> None:
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
def test_rule_guard_and_rejection_are_held_against_the_decision(test: str, failure: str) -> None:
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
def test_a_hold_is_expected_by_its_word(test: str, failure: str) -> None:
    result = run("hold for 500ms when req.turn != 0 as wait\nroute argmin(requests) as rest", test)
    assert result.failure.startswith(failure[:22])
    assert result.passed == (not failure)


def test_a_keep_that_leaves_nobody_is_expected_as_503() -> None:
    assert run("keep healthy\nroute argmin(requests)", "  instance | healthy\n  a | false\n  expect reject 503").passed


def test_features_left_out_and_question_marks_have_their_value_for_unknown() -> None:
    rules = "route argmin(requests) when all(known(requests)) and not any(known(hit_len)) as known_load\n"
    rules += "route argmax(requests + hit_len / 1 token * 1 request) as rest"
    assert run(rules, "  instance | requests\n  a | 5\n  b | 4\n  expect b as known_load").passed
    assert run(rules, "  instance | requests\n  a | 5\n  b | ?\n  c | 2\n  expect a as rest").passed


def test_ages_are_given_in_a_column_of_their_own() -> None:
    rules = "route argmin(requests where fresh(requests, 2s)) as seen\nroute argmin(requests)"
    table = "  instance | requests | age(requests)\n  a | 1 | 5s\n  b | 3 | 500ms\n"
    assert run(rules, table + "  expect b as seen").passed


def test_cells_are_clamped_as_snapshots_are() -> None:
    rules = "route argmin(requests) when max(hit_len) > 100 tokens\nroute argmax(requests)"
    table = "  instance | hit_len | requests\n  a | 900 | 1\n  b | 0 | 2\n"
    assert run(rules, "  given prompt_len = 50\n" + table + "  expect b").passed
    assert run(rules, table + "  expect a").passed


def test_with_sets_parameters_for_one_test() -> None:
    rules = "param LOAD = requests in {requests, unprefilled}\nparam UP = false\nroute argmax(LOAD if UP else -LOAD)"
    table = "  instance | requests | unprefilled\n  a | 1 | 9\n  b | 2 | 8\n"
    assert run(rules, table + "  expect a").passed
    assert run(rules, "  with LOAD = unprefilled\n" + table + "  expect b").passed
    assert run(rules, "  with LOAD = unprefilled, UP = true\n" + table + "  expect a").passed


def test_a_policy_that_is_wrong_is_refused_before_any_test_runs() -> None:
    with pytest.raises(PolicyError):
        suite_of('policy p\nroute argmin(requets)\ntest "t"\n  instance | requests\n  a | 1\n  expect a', VOCABULARY)
