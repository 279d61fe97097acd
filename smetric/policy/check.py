"""Checker: whether a policy is sound and always decides, and what it reads.

A policy with a parameter that chooses a feature is checked once for each choice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smetric.policy import tree
from smetric.policy.check_statement import Statements, is_error_status
from smetric.policy.diagnostic import MAX_DIAGNOSTICS, Diagnostic, PolicyError, PolicyText, Span, clip, in_order
from smetric.policy.guard import NOBODY, reads, wasted_lookups
from smetric.policy.lexer import one_line
from smetric.policy.library import Linked, Reader, link, no_libraries, taken
from smetric.policy.parameter import CONFIGURATION, Parameter, ParameterValues, Value
from smetric.policy.parser import read
from smetric.policy.scope import CheckEnded, Findings
from smetric.policy.types import Interval, did_you_mean, exact, parse_unit
from smetric.policy.vocabulary import NEVER, Feature, Kind, RequestField, Vocabulary

#: Combinations of features that a policy is checked for.
MAX_COMBINATIONS = 16

#: The feature chosen by each feature parameter; the key of a library's parameter is `library.NAME`.
Choice = Mapping[str, str]


# ── test blocks ──────────────────────────────────────────────────────────────

_KINDS = {
    Kind.NUMBER: (float, "a number"),
    Kind.BOOL: (bool, "true or false"),
    Kind.STRING: (str, "a string"),
    Kind.SET: (frozenset, 'a set such as {"a"}'),
}
_AGE = Feature(name="age", doc="", unit="seconds", high=NEVER, source="", staleness="")


class Tests:
    """Check of test blocks: settings, given fields, columns, cells, and expectations.

    Args:
        statements: the checked statements of the policy.
        vocabulary: features and request fields.
        findings: receives errors.
    """

    def __init__(self, statements: Statements, vocabulary: Vocabulary, findings: Findings) -> None:
        self._statements = statements
        self._vocabulary = vocabulary
        self._units = statements.units.within(findings)
        self._error = findings.error
        self._guards = {one_line(guard.label) for step in statements.steps for guard in step.guards}

    def run(self, tests: Iterable[tree.Test]) -> None:
        """Check each test."""
        sentences: set[str] = set()
        for test in tests:
            if test.sentence in sentences:
                self._error("test", test.span, "another test has this sentence")
            sentences.add(test.sentence)
            names = self._rows(test)
            self._with(test.settings)
            self._given(test.given, names)
            self._expect(test.expect, names)

    def _with(self, settings: Sequence[tree.Setting]) -> None:
        parameters = self._statements.parameters
        choices = {each.name: each.value.name for each in settings if isinstance(each.value, tree.Name)}
        self._each_once(settings)
        for setting in settings:
            name, place = setting.name, _name_of(setting)
            made = parameters.declared.get(name)
            if made is not None:
                value = setting.value.name if isinstance(setting.value, tree.Name) else setting.value
                parameters.set(made, value, "this test", place, setting.unit, self._units, choices)
            elif name not in parameters.failed:
                declared = f"it declares {', '.join(parameters.declared) or 'none'}"
                help_text = did_you_mean(name, parameters.declared) or declared
                if name in self._vocabulary.request:
                    help_text = f"request fields go into `given {name} = …`"
                self._error("setting", place, f"this policy does not declare `{name}`", help_text)

    def _each_once(self, settings: Sequence[tree.Setting]) -> None:
        seen: set[str] = set()
        for setting in settings:
            if setting.name in seen:
                self._error("given", _name_of(setting), f"`{setting.name}` is given twice", "remove one of them")
            seen.add(setting.name)

    def _given(self, settings: Sequence[tree.Setting], names: set[str]) -> None:
        self._each_once(settings)
        for setting in settings:
            name, value = setting.name, setting.value
            field = self._vocabulary.request.get(name)
            if name == "last":
                if not isinstance(value, tree.Name):
                    self._error("given", _name_of(setting), "`last` is the instance chosen last", "e.g. given last = a")
                elif value.name not in names:
                    help_text = did_you_mean(value.name, names)
                    self._error("given", value.span, f"`{value.name}` is not in the table", help_text)
            elif field is not None:
                self._value(field, setting)
            else:
                help_text = did_you_mean(name, [*self._vocabulary.request, "last"])
                if name in self._vocabulary.features:
                    help_text = f"`{name}` belongs to the instances: make it a column"
                elif name in self._statements.parameters.declared:
                    help_text = f"a parameter is set by `with {name} = …`"
                self._error("unknown-field", _name_of(setting), f"a request has no `{name}`", help_text)

    def _rows(self, test: tree.Test) -> set[str]:
        """Check the table of a test and return its instances."""
        words = [self._column(column) for column in test.columns]
        seen: set[tuple[str, bool]] = set()
        for column in test.columns:
            key = (column.feature, column.of_age)
            if key in seen:
                self._error("column", column.span, "this column is repeated")
            seen.add(key)
        names: set[str] = set()
        for row in test.rows:
            if row.name in names:
                self._error("row", row.span, f"`{row.name}` is already in the table")
            names.add(row.name)
            if len(row.cells) != len(words):
                message = f"this row has {len(row.cells)} cells for {len(words)} columns"
                self._error("row", row.span, message, "write `?` for an unknown value")
                continue
            for word, cell in zip(words, row.cells, strict=True):
                if word is not None:
                    self._value(word, cell)
        return names

    def _column(self, column: tree.TestColumn) -> Feature | None:
        word = self._vocabulary.features.get(column.feature)
        if word is not None:
            return _AGE if column.of_age else word
        if column.feature in self._vocabulary.request:
            help_text = f"request fields go into `given {column.feature} = …`"
        elif "(" in column.feature:
            help_text = "only `age` takes a feature: age(hit_len)"
        else:
            help_text = did_you_mean(column.feature, self._vocabulary.features)
        self._error("unknown-feature", column.span, f"unknown feature `{clip(column.feature)}`", help_text)
        return None

    def _value(self, word: Feature | RequestField, given: tree.Setting | tree.Cell) -> None:
        """Check a value and its unit against its feature or field."""
        value, span, shown = given.value, given.span, f"`{word.name}`"
        kind, description = _KINDS[word.kind]
        if value is tree.UNKNOWN:
            if isinstance(word, RequestField) and not word.may_be_unknown:
                self._error("value", span, f"{shown} is never unknown")
        elif type(value) is not kind:
            bare = value.name if isinstance(value, tree.Name) and word.kind is Kind.STRING else ""
            self._error("value", span, f"{shown} is {description}", f'quote it: "{bare}"' if bare else "")
        elif isinstance(value, float):
            wanted = parse_unit(word.unit)
            unit = self._units.of_words(given.unit, span) if given.unit else wanted
            if unit not in (wanted, None):
                message = f"{shown} is in {word.unit or 'plain numbers'}, not {unit}"
                self._error("units", span, message, "write it without a unit")
            elif value not in Interval(word.low, word.high):
                self._error("value", span, f"{shown} lies in {word.low:g}..{word.high:g}")

    def _expect(self, expect: tree.Expect, names: set[str]) -> None:
        for instance in expect.instances:
            if instance.name not in names:
                help_text = did_you_mean(instance.name, names)
                self._error("expect", instance.span, f"`{instance.name}` is not in the table", help_text)
        if expect.kind == "reject" and not is_error_status(expect.status):
            self._error("expect", expect.span, f"{exact(expect.status)} is not an error status")
        if not self._statements.complete:
            return
        labels, rule, failing = self._statements.labels, expect.rule, expect.failing
        if rule is not None and rule.name not in labels:
            self._error("expect", rule.span, f"there is no rule `{rule.name}`", did_you_mean(rule.name, labels))
        if failing is None or any(guard.type.broken for step in self._statements.steps for guard in step.guards):
            return  # the name may be that of a guard with an error
        wanted = failing.name if isinstance(failing, tree.Name) else one_line(failing.value)
        known = self._guards if isinstance(failing, tree.Text) else {*self._guards, NOBODY}
        if wanted not in known:
            help_text = did_you_mean(wanted, known)
            self._error("expect", failing.span, f"there is no guard `{clip(wanted)}`", help_text)


def _name_of(setting: tree.Setting) -> Span:
    return Span(setting.span.start, setting.span.start + len(setting.name))


# ── one check for each choice of features ────────────────────────────────────


class Pass:
    """Check of a policy with its libraries, for one choice of features."""

    def __init__(
        self,
        file: tree.File,
        linked: Linked,
        vocabulary: Vocabulary,
        settings: ParameterValues,
        choice: Choice,
        beside: PolicyText | None,
        tests: Sequence[tree.Test],
    ) -> None:
        self.choice = choice
        self.libraries: dict[str, Statements] = {}
        self._tests = tests
        self._beside = Findings("" if beside is None else beside.text, beside)
        self._linked = linked
        self._vocabulary = vocabulary
        self._settings = settings
        self._taken = taken(file)
        own = {name: feature for name, feature in choice.items() if "." not in name}
        self.statements = Statements(file, vocabulary, settings, own, Findings(file.text), self._library)

    def run(self) -> None:
        """Check statements, then tests."""
        try:
            self.statements.run()
            Tests(self.statements, self._vocabulary, self.statements.findings).run(self.statements.file.tests)
            Tests(self.statements, self._vocabulary, self._beside).run(self._tests)
        except CheckEnded:
            return

    @property
    def errors(self) -> list[Diagnostic]:
        """The errors of all files."""
        files = [self.statements.findings, self._beside, *(each.findings for each in self.libraries.values())]
        return [error for findings in files for error in findings.errors]

    def conditional(self, error: Diagnostic, sound: Sequence[Pass]) -> Diagnostic:
        """Return an error of this choice with the part of the choice that makes it differ from the *sound* ones."""
        names = [name for name in self.choice if all(each.choice[name] != self.choice[name] for each in sound)]
        names = names or list(self.choice)
        condition = " and ".join(f"{name} = {self.choice[name]}" for name in names)
        help_text = error.help
        if error.code == "units":
            library, _, name = names[0].rpartition(".")
            help_text = f"a unit may be the parameter itself: `0 {name}`"
            if library and (library, name) not in self._taken:
                help_text += f", once it is taken: use {library} ({name})"
        return replace(error, message=f"{error.message}, if {condition}", help=help_text)

    def _library(self, use: tree.Use) -> Statements | None:
        """Return the library of a `use`, checked at its first use; None if it has none."""
        name = self._linked.targets.get(id(use))
        if name is None:
            return None
        if name not in self.libraries:
            file = self._linked.files[name]
            features = {key.partition(".")[2]: word for key, word in self.choice.items() if key.startswith(f"{name}.")}
            # Configuration reaches the parameters that the policy itself takes.
            settings = self._settings.only({own for library, own in self._taken if library == name})
            findings = Findings(file.text, PolicyText(file.text, file.path), self.statements.findings.calls)
            made = Statements(file, self._vocabulary, settings, features, findings, self._library)
            self.libraries[name] = made
            made.run()
        return self.libraries[name]


def merged(passes: Sequence[Pass]) -> list[Diagnostic]:
    """Return the errors of all passes, each once. An error of some choices only names the choice."""
    found: dict[tuple[str, Span, PolicyText | None], list[tuple[Pass, Diagnostic]]] = {}
    for each in passes:
        for error in each.errors:
            found.setdefault((error.code, error.span, error.source), []).append((each, error))
    errors = []
    for hits in found.values():
        first, error = hits[0]
        at_fault = [each for each, _ in hits]
        sound = [each for each in passes if each not in at_fault]
        if sound or len({each.message for _, each in hits}) > 1:
            error = first.conditional(error, sound)
        errors.append(error)
        if len(passes) == 1 or all(each is first for each in at_fault):
            errors += [other for _, other in hits[1:]]
    return errors


def feature_choices(
    file: tree.File, linked: Linked, vocabulary: Vocabulary, settings: ParameterValues
) -> dict[str, tuple[str, ...]]:
    """Return the features that each feature parameter can be, the configured one or else the default first.

    ParameterValues reach the parameters of a library that the policy itself takes.
    """
    found: dict[str, tuple[str, ...]] = {}
    own = taken(file)
    for library, each in (("", file), *linked.files.items()):
        for statement in each.statements:
            if not isinstance(statement, tree.Param) or not isinstance(statement.value, tree.Name):
                continue
            listed = statement.domain.items if isinstance(statement.domain, tree.Choices) else ()
            names = dict.fromkeys(item.name for item in (statement.value, *listed) if isinstance(item, tree.Name))
            numbers = (word.name for word in map(vocabulary.features.get, names) if word and word.kind is Kind.NUMBER)
            is_own = not library or (library, statement.name) in own
            chosen = settings.values.get(statement.name) if is_own else None
            features = tuple(sorted(numbers, key=lambda name: name != chosen))
            if features:
                found[f"{library}.{statement.name}" if library else statement.name] = features
    return found


# ── the whole ────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CheckedLibrary:
    """A library that a policy uses, and its parameters with their values."""

    file: tree.File
    params: Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class Checked:
    """Facts about a sound policy.

    Args:
        warnings: in the order of the text.
        reads: each feature that a decision may read: `always`, or the guard that may spare it.
        params: each parameter with its value, those taken from libraries included.
        libraries: the libraries that it uses, by name.
        tests_beside: its tests in a file of their own.
    """

    warnings: tuple[Diagnostic, ...]
    reads: Mapping[str, str]
    params: Mapping[str, Parameter]
    libraries: Mapping[str, CheckedLibrary]
    tests_beside: tuple[tree.Test, ...]


def check_text(
    text: str,
    vocabulary: Vocabulary,
    settings: Mapping[str, Value] | None = None,
    path: str = "<policy>",
    libraries: Reader = no_libraries,
    beside: PolicyText | None = None,
    tests: bool = True,
    set_by: str = CONFIGURATION,
) -> tuple[tree.File, Checked]:
    """Parse and check a policy or a library, with syntax errors and others in one run.

    Args:
        text: its source.
        vocabulary: the features and request fields it may read.
        settings: configured values of its parameters.
        path: its name in reports.
        libraries: reads the libraries it uses.
        beside: a file with more tests of the policy, or None.
        tests: False skips the `test` blocks and their errors.
        set_by: the origin of *settings*, in messages.

    Raises:
        PolicyError: with every error of the file, its libraries and its tests.
    """
    file, errors = read(text, path, tests=tests)
    more, further = ([], ()) if beside is None else _tests_beside(file, beside)
    checked = _check(
        file, vocabulary, ParameterValues(settings or {}, set_by), [*errors, *more], libraries, beside, further
    )
    _check_settings_of_tests(file, vocabulary, libraries, [*file.tests, *further])
    return file, checked


def _check_settings_of_tests(
    file: tree.File, vocabulary: Vocabulary, libraries: Reader, tests: Sequence[tree.Test]
) -> None:
    """Check a sound policy again with the settings of its tests, as a parameter without a range can have any value.

    Raises:
        PolicyError: with each error once.
    """
    bare = replace(file, statements=tuple(each for each in file.statements if not isinstance(each, tree.Test)))
    found: dict[tuple[PolicyText | None, Span], Diagnostic] = {}
    tried: list[dict[str, Any]] = [{}]
    for test in tests:
        if test.configured in tried:
            continue
        tried.append(test.configured)
        try:
            _check(bare, vocabulary, ParameterValues(test.configured), [], libraries, None, ())
        except PolicyError as error:
            said = f'with the settings of the test "{clip(test.sentence)}"'
            for each in error.diagnostics:
                found.setdefault((each.source, each.span), replace(each, message=f"{each.message}, {said}"))
    if found:
        raise PolicyError(list(found.values()), file.text, file.path)


def _tests_beside(policy: tree.File, beside: PolicyText) -> tuple[list[Diagnostic], tuple[tree.Test, ...]]:
    """Return the errors of the file *beside*, and its tests."""
    try:
        file, errors = read(beside.text, beside.path)
    except PolicyError as error:
        return [found.within(beside) for found in error.diagnostics], ()
    found = [each.within(beside) for each in errors]
    if file.name != policy.name and file.name and policy.name:
        message = f"this file has tests of `policy {policy.name}`, but its header names `{file.name}`"
        found.append(Diagnostic("header", message, file.name_span, "repeat the header of the policy", source=beside))
    for statement in file.statements:
        if not isinstance(statement, tree.Test | tree.Broken):
            message = "a file of tests holds `test` blocks only"
            found.append(Diagnostic("test", message, statement.span, "put it into the policy", source=beside))
    return found, tuple(statement for statement in file.statements if isinstance(statement, tree.Test))


def _check(
    file: tree.File,
    vocabulary: Vocabulary,
    settings: ParameterValues,
    errors: Sequence[Diagnostic],
    libraries: Reader,
    beside: PolicyText | None,
    tests: tuple[tree.Test, ...],
) -> Checked:
    linked = link(file, libraries)
    choices = feature_choices(file, linked, vocabulary, settings)
    done: list[Pass] = []
    for features in itertools.islice(itertools.product(*choices.values()), MAX_COMBINATIONS):
        choice = dict(zip(choices, features, strict=True))
        one = Pass(file, linked, vocabulary, settings, choice, beside, tests)
        one.run()
        done.append(one)
        if len(one.errors) >= MAX_DIAGNOSTICS:
            break
    found = [*errors, *linked.errors, *merged(done)]
    if math.prod(len(features) for features in choices.values()) > MAX_COMBINATIONS:
        message = f"the parameters of this policy choose among more than {MAX_COMBINATIONS} combinations of features"
        found.append(Diagnostic("too-large", message, file.name_span, "let one parameter choose the load"))
    chosen = done[0]
    if any(error.code != "undecided" for error in found):
        raise PolicyError(found, file.text, file.path)
    steps = chosen.statements.steps
    warnings = list(file.stray)
    if file.kind == "policy":
        chosen.statements.warn()
        warnings += [*chosen.statements.findings.warnings, *wasted_lookups(steps, vocabulary)]
    if found:
        # The only error is the end of the policy, so the warnings are no consequences of it.
        raise PolicyError([*found, *warnings], file.text, file.path)
    return Checked(
        in_order(warnings),
        reads(steps, vocabulary),
        dict(chosen.statements.parameters.declared),
        {name: CheckedLibrary(each.file, each.parameters.declared) for name, each in chosen.libraries.items()},
        tests,
    )
