"""Tests of a policy: situations, `test` blocks and their coverage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from smetric.policy import tree
from smetric.policy.check import check_text
from smetric.policy.decision import Decision, Need
from smetric.policy.diagnostic import PolicyText, position
from smetric.policy.explain import explain
from smetric.policy.lexer import one_line
from smetric.policy.library import Reader, no_libraries
from smetric.policy.plan import Outcome, Plan
from smetric.policy.policy import Policy, compiled, load
from smetric.policy.snapshot import Snapshot
from smetric.policy.vocabulary import Feature, Kind, RequestField, Vocabulary

#: The name in `given` for the last winner of every rotation.
LAST = "last"
#: The number of seeds that a test with random draws must hold for.
SEEDS = 64

# ── situations ───────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Situation:
    """The inputs of a decision, written by hand: of a test, a snapshot file, or the search for counterexamples.

    Args:
        ids: the candidates.
        cells: per feature, the value of each candidate, None if unknown; a feature left out is unknown everywhere.
        ages: per feature, the age of each cell in seconds, None for never; a feature left out is new.
        request: the fields that are given, None if unknown. Other fields have their defaults, but a bound of others,
            as the prompt's length is of hits, is at least as large as they are.
        cursors: the id of the last winner of each pick that rotates; may lack some.
        seed: the seed of draws.
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
        """The decision of *policy* here, with other cursors or another seed if they are given.

        A look-up without cells is unknown when the evaluation reaches it.
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
            wanted = set(decided.features)

    def asking(self, vocabulary: Vocabulary) -> SimpleNamespace:
        """The complete request."""
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
        """A feature's values as policies see them, and whether each is known."""
        feature = vocabulary.features[name]
        cells = self.cells.get(name)
        if cells is None:
            cells = self.ids if name == "id" else [None] * len(self.ids)
        highest = getattr(request, feature.at_most) if feature.at_most else None
        instead = self._column(vocabulary, feature.instead, request)[0] if feature.instead else None
        return feature.fill([clamped(cell, feature, highest) for cell in cells], instead)


def clamped(value: Any, word: Feature | RequestField, highest: float | None = None) -> Any:
    """*value* of a feature or field within its range, and at most *highest*; only numbers change."""
    if value is None or word.kind is not Kind.NUMBER:
        return value
    return max(word.low, min(value, word.high if highest is None else min(word.high, highest)))


# ── coverage ─────────────────────────────────────────────────────────────────

#: Something that a test can show: the index of a statement in the plan; the index of one of its guards, or -1 for the
#: statement; and whether it held. An outcome holds if it is taken, a filter if it removes a candidate.
Mark = tuple[int, int, bool]


def marks_of(decision: Decision) -> Iterator[Mark]:
    """The marks of one decision."""
    left_before = len(decision.snapshot.ids)
    survivors = iter(decision.survivors)
    for at, (step, stop) in enumerate(zip(decision.policy.plan.steps, decision.stops, strict=False)):
        held = len(step.guards) if stop < 0 else stop
        yield from ((at, guard, True) for guard in range(held))
        if held < len(step.guards):
            yield (at, held, False)
        if step.is_filter:
            left = len(next(survivors))
            if left < left_before:
                yield (at, -1, True)
            left_before = left
        elif at == decision.step_index:
            yield (at, -1, True)


@dataclass(frozen=True, slots=True)
class Coverage:
    """The marks that the tests of a policy have shown, out of all of its *plan*."""

    plan: Plan
    shown: frozenset[Mark]

    @property
    def percent(self) -> float:
        """The share of all marks that were shown, in per cent."""
        marks = list(self._marks())
        return 100 * sum(mark in self.shown for mark in marks) / len(marks)

    @property
    def missing(self) -> list[str]:
        """A sentence for each mark that was never shown, in the order of the file."""
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
        if step.is_filter:
            return f"filter `{step.label}` never removed a candidate"
        return f"rule `{step.label}` never taken"


# ── tests ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TestResult:
    """Result of one `test` block.

    Args:
        sentence: its name.
        path: its file.
        line: its line, from 1.
        failure: the actual decision and its explanation, empty if it passed.
        shown: the marks of its decisions, over all cursors and seeds.
        seconds: its duration.
    """

    __test__ = False  # it is no test case of pytest

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
    """A `test` block and its file."""

    test: tree.Test
    source: PolicyText

    @property
    def line(self) -> int:
        """Its line, from 1."""
        return position(self.source.text, self.test.span.start)[0]


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of a policy, also those in `NAME.test.policy`."""

    policy: Policy
    cases: tuple[Case, ...]
    vocabulary: Vocabulary

    def run(self, wanted: Callable[[str], bool] = lambda _: True) -> list[TestResult]:
        """Run the tests whose sentence is *wanted*, in order."""
        return [run_test(self.policy, case, self.vocabulary) for case in self.cases if wanted(case.test.sentence)]

    def coverage(self, results: Iterable[TestResult]) -> Coverage:
        """The coverage of the policy by *results*."""
        return Coverage(self.policy.plan, frozenset().union(*(result.shown for result in results)))


def suite_of(
    source: str,
    vocabulary: Vocabulary,
    *,
    path: str = "<policy>",
    libraries: Reader = no_libraries,
    beside: PolicyText | None = None,
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
    own = PolicyText(source, path)
    cases = [Case(test, own) for test in policy.tests]
    if beside is not None:
        cases += [Case(test, beside) for test in checked.tests_beside]
    return Suite(policy, tuple(cases), vocabulary)


def run_test(policy: Policy, case: Case, vocabulary: Vocabulary) -> TestResult:
    """Run one test of *policy*, loaded again if the test sets parameters.

    The test must hold for every cursor, unless it gives `last`, and for each of 64 seeds if anything is drawn.
    """
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
    """The table and the `given` fields of a test, without cursors and seed."""
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
    """The difference between *decision* and the expectation of a test; empty if there is none."""
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
    """The cursors and seeds that the outcome may depend on."""
    rotating = policy.plan.rotating
    if last is not None:
        cursors = [dict.fromkeys(rotating, last.name if isinstance(last, tree.Name) else last)]
    else:
        cursors = [{}, *(dict.fromkeys(rotating, id) for id in ids)] if rotating else [{}]
    for cursor in cursors:
        for seed in range(SEEDS if policy.plan.random else 1):
            yield cursor, seed
