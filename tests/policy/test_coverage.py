"""What the tests of a policy have shown, and what never."""

from __future__ import annotations

from smetric.features import VOCABULARY
from smetric.policy import Source
from smetric.policy.testing import Coverage, suite_of

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


def test_without_tests_everything_is_missing() -> None:
    nothing = covered()
    assert nothing.percent == 0
    assert nothing.missing == [
        "filter `well` never left anybody out",
        "guard `req.turn > 3` of `calm` never held",
        "guard `req.turn > 3` of `calm` never failed",
        "filter `calm` never left anybody out",
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


def test_a_test_shows_the_rule_taken_and_the_guards_that_were_asked() -> None:
    shown = covered("  instance | requests | healthy\n  a | 2 | true\n  b | 9 | false\n  expect a as rest")
    assert shown.missing == [
        "guard `req.turn > 3` of `calm` never held",
        "filter `calm` never left anybody out",
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


def test_a_filter_that_is_ignored_or_leaves_all_has_shown_nothing() -> None:
    table = "  instance | requests | healthy\n  a | 2 | {}\n  expect a"
    for healthy in ("true", "false"):
        assert "filter `well` never left anybody out" in covered(table.format(healthy)).missing


def test_a_keep_that_leaves_nobody_has_left_somebody_out() -> None:
    shown = covered(
        "  instance | requests\n  a | 2\n  expect reject 503", rules="policy p\nkeep healthy\nroute rr_argmin(0)\n"
    )
    assert shown.missing == ["rule `route_1` never taken"]


def test_all_of_it_can_be_shown() -> None:
    assert covered(
        "  instance | requests | healthy\n  a | 2 | true\n  b | 9 | false\n  expect a as rest",
        "  given turn = 4\n  instance | requests | running\n  a | 2 | 3\n  b | 9 | 3\n  expect a as stick",
        "  given turn = 2\n  instance | requests | running\n  a | 2 | 1\n  expect a as rest",
        "  instance | requests\n  a | 6\n  expect hold",
        "  given held = 1\n  instance | requests\n  a | 6\n  expect a failing held",
    ).missing == []  # fmt: skip


def test_tests_in_a_file_beside_count_too() -> None:
    beside = Source('policy p\ntest "more"\n  instance | requests\n  a | 2\n  expect a as only', "p.test.policy")
    suite = suite_of("policy p\nroute rr_argmin(0) as only\n", VOCABULARY, beside=beside)
    (result,) = suite.run()
    assert (result.path, result.line, result.failure) == ("p.test.policy", 2, "")
    assert suite.coverage([result]).percent == 100
