"""Runs the `test` blocks of a policy: each table becomes a snapshot, and the decision is held against `expect`.

Where a test gives no `last`, it must hold for every cursor; where anything is drawn, for every one of 64 seeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from smetric.policy import tree
from smetric.policy.check import check_text
from smetric.policy.coverage import Coverage, Mark, marks_of
from smetric.policy.decision import Decision
from smetric.policy.diagnostic import Source, position
from smetric.policy.explain import explain
from smetric.policy.guard import one_line
from smetric.policy.library import Reader, no_libraries
from smetric.policy.outcome import Outcome
from smetric.policy.policy import Policy, compiled, load
from smetric.policy.situation import Situation
from smetric.policy.vocabulary import Vocabulary

#: What `given` calls the last winner of every rotation.
LAST = "last"
#: Seeds that a test with random draws must hold for.
SEEDS = 64


@dataclass(frozen=True, slots=True)
class TestResult:
    """One `test` block that was run.

    Args:
        sentence: its name.
        path: its file.
        line: where it stands, from 1.
        failure: what was decided instead and why, empty when it passed.
        shown: what its decisions showed of the policy, over all cursors and seeds.
        seconds: how long it took.
    """

    __test__ = False  # this is no test case of pytest

    sentence: str
    path: str
    line: int
    failure: str
    shown: frozenset[Mark]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every decision was as expected."""
        return not self.failure


@dataclass(frozen=True, slots=True)
class Case:
    """A `test` block and the file it stands in."""

    test: tree.Test
    source: Source

    @property
    def line(self) -> int:
        """Where it stands, from 1."""
        return position(self.source.text, self.test.span.start)[0]


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of a policy, those beside its file included."""

    policy: Policy
    cases: tuple[Case, ...]
    vocabulary: Vocabulary

    def run(self, wanted: Callable[[str], bool] = lambda _: True) -> list[TestResult]:
        """Run the tests whose sentence is *wanted*, in order."""
        return [run_test(self.policy, case, self.vocabulary) for case in self.cases if wanted(case.test.sentence)]

    def coverage(self, results: Iterable[TestResult]) -> Coverage:
        """What *results* have shown of the policy."""
        return Coverage(self.policy.plan, frozenset().union(*(result.shown for result in results)))


def suite_of(
    source: str,
    vocabulary: Vocabulary,
    *,
    path: str = "<policy>",
    libraries: Reader = no_libraries,
    beside: Source | None = None,
) -> Suite:
    """The tests of a policy, checked.

    Args:
        source: the text of the policy.
        vocabulary: the features and request fields it may read.
        path: its name in errors.
        libraries: finds the libraries it uses.
        beside: the file with more of its tests, `NAME.test.policy`, where there is one.

    Raises:
        PolicyError: a file, or a setting of a test, is wrong.
    """
    file, checked = check_text(source, vocabulary, path=path, libraries=libraries, beside=beside)
    policy = compiled(file, checked, vocabulary)
    own = Source(source, path)
    cases = [Case(test, own) for test in policy.tests]
    if beside is not None:
        cases += [Case(test, beside) for test in checked.tests_beside]
    return Suite(policy, tuple(cases), vocabulary)


def run_test(policy: Policy, case: Case, vocabulary: Vocabulary) -> TestResult:
    """Run one test of *policy*, loaded anew with the test's own settings if it has any."""
    started = time.perf_counter()
    test = case.test
    if test.settings:
        policy = load(
            policy.source, vocabulary, path=policy.path, settings=test.configured, libraries=policy.libraries.get
        )
    situation = situation_of(test)
    last = next((setting.value for setting in test.given if setting.name == LAST), None)
    shown: set[Mark] = set()
    failure = ""
    for cursors, seed in _cases(policy, situation.ids, last):
        decision = situation.decide(policy, vocabulary, cursors, seed)
        shown.update(marks_of(decision))
        wrong = mismatch(decision, test.expect)
        if wrong:
            where = f"seed {seed}" + "".join(f", last {name} = {id}" for name, id in cursors.items())
            failure = f"{wrong} ({where})\n{explain(decision)}"
            break
    seconds = time.perf_counter() - started
    return TestResult(test.sentence, case.source.path, case.line, failure, frozenset(shown), seconds)


def situation_of(test: tree.Test) -> Situation:
    """The table of a test and what it gives; cursors and seed are left open."""
    cells: dict[str, list[Any]] = {}
    ages: dict[str, list[float | None]] = {}
    for at, column in enumerate(test.columns):
        values: list[Any] = [row.cells[at].value for row in test.rows]
        if column.of_age:
            ages[column.feature] = values
        else:
            cells[column.feature] = values
    request = {setting.name: setting.value for setting in test.given if setting.name != LAST}
    return Situation([row.name for row in test.rows], cells, ages, request)


def mismatch(decision: Decision, expect: tree.Expect) -> str:
    """How *decision* differs from what a test expects; empty when it does not."""
    if expect.kind == "route":
        allowed = [instance.name for instance in expect.instances]
        if decision.instance not in allowed:
            return f"expected {' or '.join(allowed)}, got {_got(decision)}"
    elif expect.kind == "hold":
        if decision.outcome is not Outcome.HOLD:
            return f"expected hold, got {_got(decision)}"
    elif decision.outcome is Outcome.ROUTE or decision.status != expect.status:
        return f"expected reject {expect.status:g}, got {_got(decision)}"
    if expect.rule is not None and decision.rule != expect.rule.name:
        return f"expected rule {expect.rule.name}, got {decision.rule}"
    if expect.failing is not None:
        name = expect.failing.name if isinstance(expect.failing, tree.Name) else one_line(expect.failing.value)
        failed = [rule.failed for rule in decision.guards if rule.failed is not None]
        if name not in failed:
            return f"expected {name} to fail, got {', '.join(failed) or 'no guard that failed'}"
    return ""


def _got(decision: Decision) -> str:
    if decision.outcome is Outcome.HOLD:
        return f"hold by {decision.rule}"
    return decision.instance or f"{decision.status} by {decision.rule}"


def _cases(policy: Policy, ids: Iterable[str], last: Any) -> Iterator[tuple[dict[str, str], int]]:
    """Every cursor and seed that the outcome may depend on."""
    rotating = policy.plan.rotating
    if isinstance(last, tree.Name):
        cursors = [dict.fromkeys(rotating, last.name)]
    else:
        cursors = [{}, *(dict.fromkeys(rotating, id) for id in ids)] if rotating else [{}]
    for cursor in cursors:
        for seed in range(SEEDS if policy.plan.random else 1):
            yield cursor, seed
