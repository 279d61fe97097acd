"""Runs `test` blocks of a policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from smetric.policy import tree
from smetric.policy.check import check_text
from smetric.policy.decision import Decision, Need
from smetric.policy.diagnostic import Source, position
from smetric.policy.explain import explain
from smetric.policy.lexer import one_line
from smetric.policy.library import Reader, no_libraries
from smetric.policy.plan import Outcome, Plan
from smetric.policy.policy import Policy, compiled, load
from smetric.policy.snapshot import Snapshot
from smetric.policy.vocabulary import Feature, Kind, RequestField, Vocabulary

# A situation to decide in, written down: what is known of the candidates and of the request, cursors and seed.
#
# Tests of policies, snapshot files, and the search for counterexamples all come to this.


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a decision depends on besides the policy.

    Args:
        ids: the candidates.
        cells: per feature, what each candidate has, None where unknown; a feature left out is unknown everywhere.
        ages: per feature, the age of each cell in seconds, None for never; a feature left out is new.
        request: the fields that are given, None where unknown; the others have their defaults, and one that bounds
            others, as the prompt's length bounds a hit, is at least what these are.
        cursors: the id of the last winner of each pick that rotates; may lack some.
        seed: settles what is drawn.
    """

    ids: Sequence[str]
    cells: Mapping[str, Sequence[Any]]
    ages: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    cursors: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def decide(
        self, policy: Policy, vocabulary: Vocabulary, cursors: Mapping[str, str] | None = None, seed: int | None = None
    ) -> Decision:
        """What *policy* decides here, perhaps with other cursors and another seed.

        Look-ups that nothing is said about are asked for where they are needed, and come back unknown.
        """
        request = self.asking(vocabulary)
        columns: dict[str, list[Any]] = {}
        known: dict[str, list[bool] | None] = {}
        stamps = {name: [None if age is None else -age for age in ages] for name, ages in self.ages.items()}
        wanted = {name for name in policy.reads if name in self.cells or not vocabulary.features[name].lookup}
        while True:
            for name in wanted:
                columns[name], known[name] = self._column(vocabulary, name, request)
            decided = policy.decide(
                Snapshot(self.ids, columns, known, stamps),
                request,
                self.cursors if cursors is None else cursors,
                self.seed if seed is None else seed,
            )
            if not isinstance(decided, Need):
                return decided
            wanted = set(decided.features)  # each is asked for once

    def asking(self, vocabulary: Vocabulary) -> SimpleNamespace:
        """The whole request."""
        words = vocabulary.request
        fields = {name: clamped(self.request.get(name, word.default), word) for name, word in words.items()}
        bounded = [(vocabulary.features[name].at_most, values) for name, values in self.cells.items()]
        bounded += [(words[name].at_most, [value]) for name, value in self.request.items()]
        for bound, values in bounded:
            if bound and bound not in self.request:
                fields[bound] = max([fields[bound], *(value for value in values if value is not None)])
        for name, word in words.items():
            if word.at_most:
                fields[name] = clamped(fields[name], word, fields[word.at_most])
        return SimpleNamespace(**fields)

    def _column(
        self, vocabulary: Vocabulary, name: str, request: SimpleNamespace
    ) -> tuple[list[Any], list[bool] | None]:
        """A feature's values as policies see them, and which of them are known."""
        feature = vocabulary.features[name]
        cells = self.cells.get(name)
        if cells is None:
            cells = self.ids if name == "id" else [None] * len(self.ids)
        highest = getattr(request, feature.at_most) if feature.at_most else None
        instead = self._column(vocabulary, feature.instead, request)[0] if feature.instead else None
        return feature.fill([clamped(cell, feature, highest) for cell in cells], instead)


def clamped(value: Any, word: Feature | RequestField, highest: float | None = None) -> Any:
    """*value*, of a feature or field, within its range and at most *highest*; what is no number stays as it is."""
    if value is None or word.kind is not Kind.NUMBER:
        return value
    return max(word.low, min(value, word.high if highest is None else min(word.high, highest)))


# Which rules, guards and filters of a policy its tests have shown at work, and which never.

#: Something a test can show: a statement's index in the plan; the index of one of its guards, or -1 for the statement
#: itself; and whether it held. An outcome holds when it is taken, a filter when it leaves somebody out.
Mark = tuple[int, int, bool]


def marks_of(decision: Decision) -> Iterator[Mark]:
    """What one decision shows."""
    left_before = len(decision.snapshot.ids)
    survivors = iter(decision.survivors)
    for at, (step, stop) in enumerate(zip(decision.policy.plan.steps, decision.stops, strict=False)):
        held = len(step.guards) if stop < 0 else stop
        yield from ((at, guard, True) for guard in range(held))
        if held < len(step.guards):
            yield (at, held, False)
        if step.kind.is_filter:
            left = len(next(survivors))
            if left < left_before:
                yield (at, -1, True)
            left_before = left
        elif at == decision.step_index:
            yield (at, -1, True)


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the tests of a policy with *plan* have shown."""

    plan: Plan
    shown: frozenset[Mark]

    @property
    def percent(self) -> float:
        """The share of everything that can be shown, in per cent."""
        marks = list(self._marks())
        return 100 * sum(mark in self.shown for mark in marks) / len(marks)

    @property
    def missing(self) -> list[str]:
        """What was never shown, one sentence each, in the order of the file."""
        return [self._sentence(mark) for mark in self._marks() if mark not in self.shown]

    def _marks(self) -> Iterable[Mark]:
        for at, step in enumerate(self.plan.steps):
            for guard in range(len(step.guards)):
                yield from ((at, guard, held) for held in (True, False))
            yield (at, -1, True)

    def _sentence(self, mark: Mark) -> str:
        at, guard, held = mark
        step = self.plan.steps[at]
        if guard >= 0:
            never = "never held" if held else "never failed"
            return f"guard `{step.guards[guard].label}` of `{step.label}` {never}"
        if step.kind.is_filter:
            return f"filter `{step.label}` never left anybody out"
        return f"rule `{step.label}` never taken"


# Runs the `test` blocks of a policy: each table becomes a snapshot, and the decision is held against `expect`.
#
# Where a test gives no `last`, it must hold for every cursor; where anything is drawn, for every one of 64 seeds.

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
