"""Checker: whether a policy means something, always decides, and what it reads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smetric.policy import tree
from smetric.policy.check_statement import Statements, is_error_status
from smetric.policy.diagnostic import MAX_DIAGNOSTICS, Diagnostic, PolicyError, Source, Span, clip, in_order
from smetric.policy.guard import NOBODY, reads, wasted_lookups
from smetric.policy.lexer import one_line
from smetric.policy.library import Linked, Reader, link, no_libraries, taken
from smetric.policy.parameter import CONFIGURATION, Parameter, Settings, Value
from smetric.policy.parser import read
from smetric.policy.scope import CheckEnded, Findings
from smetric.policy.types import Interval, did_you_mean, exact, parse_unit
from smetric.policy.vocabulary import NEVER, Feature, Kind, RequestField, Vocabulary

# Which feature each parameter of features may stand for, and the combinations that a policy is checked for.
#
# Whether such a parameter is declared well is judged in `check_parameter`.

#: Combinations of features that a policy may be checked for.
MAX_COMBINATIONS = 16

#: The feature that each feature parameter stands for; one of a library is called `library.NAME`.
Choice = Mapping[str, str]


def feature_choices(
    file: tree.File, linked: Linked, vocabulary: Vocabulary, settings: Settings
) -> dict[str, tuple[str, ...]]:
    """The choices of each feature parameter, that of *settings* or else its default first; what is no feature left out.

    Settings reach the parameters of a library that the policy itself takes.
    """
    found: dict[str, tuple[str, ...]] = {}
    own = taken(file)
    for library, statement in _parameters(file, linked):
        if isinstance(statement.value, tree.Name):
            listed = statement.domain.items if isinstance(statement.domain, tree.Choices) else ()
            names = dict.fromkeys(item.name for item in (statement.value, *listed) if isinstance(item, tree.Name))
            features = tuple(
                name for name in names if name in vocabulary.features and vocabulary.features[name].kind is Kind.NUMBER
            )
            chosen = settings.values.get(statement.name) if not library or (library, statement.name) in own else None
            if chosen in features:
                features = (str(chosen), *(name for name in features if name != chosen))
            if features:
                found[f"{library}.{statement.name}" if library else statement.name] = features
    return found


def _parameters(file: tree.File, linked: Linked) -> Iterator[tuple[str, tree.Param]]:
    """The `param`s of a policy and its libraries, each with the name of its library, empty for the policy."""
    for library, each in (("", file), *linked.files.items()):
        yield from ((library, statement) for statement in each.statements if isinstance(statement, tree.Param))


def combinations(choices: Mapping[str, tuple[str, ...]]) -> list[Choice]:
    """All choices of features, those that stand first in all of *choices* first, cut at `MAX_COMBINATIONS`."""
    products = itertools.islice(itertools.product(*choices.values()), MAX_COMBINATIONS)
    return [dict(zip(choices, product, strict=True)) for product in products]


# Test blocks of a policy, before any of them runs: settings, given fields, columns, cells, and what is expected.

_KINDS = {
    Kind.NUMBER: (float, "a number"),
    Kind.BOOL: (bool, "true or false"),
    Kind.STRING: (str, "a string"),
    Kind.SET: (frozenset, 'a set such as {"a"}'),
}
_AGE = Feature(name="age", doc="", unit="seconds", high=NEVER, source="", staleness="")


class Tests:
    """Checks the test blocks of a file whose statements were checked by *statements*."""

    def __init__(self, statements: Statements, vocabulary: Vocabulary, findings: Findings) -> None:
        self._statements = statements
        self._vocabulary = vocabulary
        self._units = statements.units.within(findings)
        self._findings = findings
        self._guards = {one_line(guard.label) for step in statements.steps for guard in step.guards}

    def run(self, tests: Iterable[tree.Test]) -> None:
        """Check each test."""
        sentences: set[str] = set()
        for test in tests:
            if test.sentence in sentences:
                self._findings.error("test", test.span, "another test has this sentence")
            sentences.add(test.sentence)
            names = self._rows(test)
            self._with(test.settings)
            self._given(test.given, names)
            self._expect(test.expect, names)

    def _with(self, settings: Sequence[tree.Setting]) -> None:
        declared = self._statements.parameters.declared
        choices = {each.name: each.value.name for each in settings if isinstance(each.value, tree.Name)}
        self._each_once(settings)
        for setting in settings:
            made = declared.get(setting.name)
            if made is None and setting.name in self._statements.parameters.failed:
                continue
            if made is None:
                message = f"this policy does not declare `{setting.name}`"
                help_text = did_you_mean(setting.name, declared) or f"it declares {', '.join(declared) or 'none'}"
                if setting.name in self._vocabulary.request:
                    help_text = f"request fields go into `given {setting.name} = …`"
                self._findings.error("setting", _name(setting), message, help_text)
                continue
            value = setting.value.name if isinstance(setting.value, tree.Name) else setting.value
            self._statements.parameters.set(
                made, value, "this test", _name(setting), setting.unit, self._units, choices
            )  # fmt: skip

    def _each_once(self, settings: Sequence[tree.Setting]) -> None:
        seen: set[str] = set()
        for setting in settings:
            if setting.name in seen:
                self._findings.error("given", _name(setting), f"`{setting.name}` is given twice", "remove one of them")
            seen.add(setting.name)

    def _given(self, settings: Sequence[tree.Setting], names: set[str]) -> None:
        self._each_once(settings)
        for setting in settings:
            if setting.name == "last":
                if not isinstance(setting.value, tree.Name):
                    message = "`last` is the instance chosen last"
                    self._findings.error("given", _name(setting), message, "e.g. given last = a")
                elif setting.value.name not in names:
                    message = f"`{setting.value.name}` is not in the table"
                    self._findings.error("given", setting.value.span, message, did_you_mean(setting.value.name, names))
                continue
            field = self._vocabulary.request.get(setting.name)
            if field is None:
                help_text = did_you_mean(setting.name, [*self._vocabulary.request, "last"])
                if setting.name in self._vocabulary.features:
                    help_text = f"`{setting.name}` belongs to the instances: make it a column"
                elif setting.name in self._statements.parameters.declared:
                    help_text = f"a parameter is set by `with {setting.name} = …`"
                self._findings.error(
                    "unknown-field", _name(setting), f"a request has no `{setting.name}`", help_text
                )  # fmt: skip
                continue
            self._value(field, setting)

    def _rows(self, test: tree.Test) -> set[str]:
        words = [self._column(column) for column in test.columns]
        seen: set[tuple[str, bool]] = set()
        for column in test.columns:
            key = (column.feature, column.of_age)
            if key in seen:
                self._findings.error("column", column.span, "this column is repeated")
            seen.add(key)
        names: set[str] = set()
        for row in test.rows:
            if row.name in names:
                self._findings.error("row", row.span, f"`{row.name}` is already in the table")
            names.add(row.name)
            if len(row.cells) != len(words):
                message = f"this row has {len(row.cells)} cells for {len(words)} columns"
                self._findings.error("row", row.span, message, "write `?` for an unknown value")
                continue
            for word, cell in zip(words, row.cells, strict=True):
                if word is not None:
                    self._value(word, cell)
        return names

    def _column(self, column: tree.Column) -> Feature | None:
        word = self._vocabulary.features.get(column.feature)
        if word is not None:
            return _AGE if column.of_age else word
        if column.feature in self._vocabulary.request:
            help_text = f"request fields go into `given {column.feature} = …`"
        elif "(" in column.feature:
            help_text = "only `age` takes a feature: age(hit_len)"
        else:
            help_text = did_you_mean(column.feature, self._vocabulary.features)
        self._findings.error("unknown-feature", column.span, f"unknown feature `{clip(column.feature)}`", help_text)
        return None

    def _value(self, word: Feature | RequestField, given: tree.Setting | tree.Cell) -> None:
        """Check one value, and the unit it is written with, against the feature or field it is for."""
        value, span, shown = given.value, given.span, f"`{word.name}`"
        kind, description = _KINDS[word.kind]
        if value is tree.UNKNOWN:
            if isinstance(word, RequestField) and not word.may_be_unknown:
                self._findings.error("value", span, f"{shown} is never unknown")
        elif type(value) is not kind:
            bare = value.name if isinstance(value, tree.Name) and word.kind is Kind.STRING else ""
            self._findings.error("value", span, f"{shown} is {description}", f'quote it: "{bare}"' if bare else "")
        elif isinstance(value, float):
            wanted = parse_unit(word.unit)
            unit = self._units.of_words(given.unit, span) if given.unit else wanted
            if unit not in (wanted, None):
                message = f"{shown} is in {word.unit or 'plain numbers'}, not {unit}"
                self._findings.error("units", span, message, "write it without a unit")
            elif value not in Interval(word.low, word.high):
                self._findings.error("value", span, f"{shown} lies in {word.low:g}..{word.high:g}")

    # ── expect ──

    def _expect(self, expect: tree.Expect, names: set[str]) -> None:
        for instance in expect.instances:
            if instance.name not in names:
                help_text = did_you_mean(instance.name, names)
                self._findings.error("expect", instance.span, f"`{instance.name}` is not in the table", help_text)
        if expect.kind == "reject" and not is_error_status(expect.status):
            self._findings.error("expect", expect.span, f"{exact(expect.status)} is not an error status")
        if not self._statements.complete:
            return
        labels = self._statements.labels
        if expect.rule is not None and expect.rule.name not in labels:
            message = f"there is no rule `{expect.rule.name}`"
            self._findings.error("expect", expect.rule.span, message, did_you_mean(expect.rule.name, labels))
        self._failing(expect.failing)

    def _failing(self, failing: tree.Name | tree.Text | None) -> None:
        if failing is None or any(guard.type.broken for step in self._statements.steps for guard in step.guards):
            return  # what is at fault may be what was meant
        wanted = failing.name if isinstance(failing, tree.Name) else one_line(failing.value)
        known = self._guards if isinstance(failing, tree.Text) else {*self._guards, NOBODY}  # a pick that is nobody
        if wanted in known:
            return
        help_text = did_you_mean(wanted, known)
        self._findings.error("expect", failing.span, f"there is no guard `{clip(wanted)}`", help_text)


def _name(setting: tree.Setting) -> Span:
    return Span(setting.span.start, setting.span.start + len(setting.name))


# One check of a policy with its libraries, for one choice of features; and what all of them found, said once.
#
# Which choices there are is `feature_choice`.


class Pass:
    """One check of a policy with its libraries, for one choice of features."""

    def __init__(
        self,
        file: tree.File,
        linked: Linked,
        vocabulary: Vocabulary,
        settings: Settings,
        choice: Choice,
        beside: Source | None,
        tests: Sequence[tree.Test],
    ) -> None:
        self.choice = choice
        self._tests = tests
        self._beside = Findings("" if beside is None else beside.text, beside)
        self.libraries: dict[str, Statements] = {}
        self._linked = linked
        self._vocabulary = vocabulary
        self._settings = settings
        self._taken = taken(file)
        findings = Findings(file.text)
        own = {name: feature for name, feature in choice.items() if "." not in name}
        self.statements = Statements(file, vocabulary, settings, own, findings, self._library)

    def run(self) -> None:
        """Check statements, then tests."""
        try:
            self.statements.run()
            own = [each for each in self.statements.file.statements if isinstance(each, tree.Test)]
            Tests(self.statements, self._vocabulary, self.statements.findings).run(own)
            Tests(self.statements, self._vocabulary, self._beside).run(self._tests)
        except CheckEnded:
            return

    def takes(self, library: str, name: str) -> bool:
        """Whether the policy takes *name* from *library*."""
        return (library, name) in self._taken

    @property
    def errors(self) -> list[Diagnostic]:
        """The errors of all files."""
        files = [self.statements.findings, self._beside, *(each.findings for each in self.libraries.values())]
        return [error for findings in files for error in findings.errors]

    def _library(self, use: tree.Use) -> Statements | None:
        """The library that *use* means, checked when it is first asked for."""
        name = self._linked.targets.get(id(use))
        if name is None:
            return None
        if name not in self.libraries:
            file = self._linked.files[name]
            features = {key.partition(".")[2]: word for key, word in self.choice.items() if key.startswith(f"{name}.")}
            # Configuration reaches the parameters that the policy itself takes.
            settings = self._settings.only({own for library, own in self._taken if library == name})
            findings = Findings(file.text, Source(file.text, file.path), self.statements.findings.calls)
            made = Statements(file, self._vocabulary, settings, features, findings, self._library)
            self.libraries[name] = made
            made.run()
        return self.libraries[name]


def merged(passes: Sequence[Pass]) -> list[Diagnostic]:
    """The errors of all passes, each once; one that only some choices bring says which."""
    found: dict[tuple[str, int, int, Source | None], list[tuple[Pass, Diagnostic]]] = {}
    for each in passes:
        for error in each.errors:
            key = (error.code, error.span.start, error.span.end, error.source)
            found.setdefault(key, []).append((each, error))
    errors = []
    for hits in found.values():
        first, error = hits[0]
        if len({id(each) for each, _ in hits}) < len(passes) or len({e.message for _, e in hits}) > 1:
            error = _conditional(error, first, [each for each, _ in hits], passes)
        errors.append(error)
        if len(passes) == 1 or all(each is first for each, _ in hits):
            errors += [other for _, other in hits[1:]]
    return errors


def _conditional(error: Diagnostic, first: Pass, hits: Sequence[Pass], passes: Sequence[Pass]) -> Diagnostic:
    """An error of some choices only, with the choice that brings it."""
    free = {id(each) for each in passes} - {id(each) for each in hits}
    sound = [each.choice for each in passes if id(each) in free]
    names = [name for name in first.choice if all(choice[name] != first.choice[name] for choice in sound)]
    named = names or list(first.choice)
    condition = " and ".join(f"{name} = {first.choice[name]}" for name in named)
    help_text = error.help
    if error.code == "units":
        library, _, name = named[0].rpartition(".")
        help_text = f"a unit may be the parameter itself: `0 {name}`"
        if library and not first.takes(library, name):
            help_text += f", once it is taken: use {library} ({name})"
    return replace(error, message=f"{error.message}, if {condition}", help=help_text)


# The checker: whether a policy means something and always decides, and what it reads; all errors in one run.
#
# A policy whose parameter may name one of several features is checked once for each of them, by a `Pass` of
# `check_pass`.


@dataclass(frozen=True, slots=True)
class CheckedLibrary:
    """A library that a policy uses, and its parameters with their values."""

    file: tree.File
    params: Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known of a policy that may be used.

    Args:
        warnings: what does no harm, in the order of the text.
        reads: each feature that a decision may read: `always`, or the guard that may spare it.
        params: each parameter with its value, those taken from libraries included.
        libraries: what it uses, by name.
        tests_beside: those of its tests that stand in a file of their own.
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
    beside: Source | None = None,
    tests: bool = True,
    set_by: str = CONFIGURATION,
) -> tuple[tree.File, Checked]:
    """Parse and check a policy or a library, so that errors of both kinds come in one run.

    Args:
        text: its source.
        vocabulary: the features and request fields it may read.
        settings: configured values of its parameters.
        path: what reports call it.
        libraries: finds the libraries it uses.
        beside: a file with more tests of the policy, where there is one.
        tests: False skips the `test` blocks, and whatever is wrong in them.
        set_by: who gives *settings*, as messages call it.

    Raises:
        PolicyError: with every error of the file, its libraries and its tests.
    """
    file, errors = read(text, path, tests=tests)
    more, further = ([], ()) if beside is None else _tests_beside(file, beside)
    checked = _check(file, vocabulary, Settings(settings or {}, set_by), [*errors, *more], libraries, beside, further)
    _check_settings_of_tests(file, vocabulary, libraries, [*file.tests, *further])
    return file, checked


def _check_settings_of_tests(
    file: tree.File, vocabulary: Vocabulary, libraries: Reader, tests: Sequence[tree.Test]
) -> None:
    """Check a sound policy once more with what its tests set: a parameter without a range may be anything there.

    Raises:
        PolicyError: with what is wrong then, each once.
    """
    bare = replace(file, statements=tuple(each for each in file.statements if not isinstance(each, tree.Test)))
    found: dict[tuple[Source | None, Span], Diagnostic] = {}
    tried: list[dict[str, Any]] = [{}]
    for test in tests:
        if test.configured in tried:
            continue
        tried.append(test.configured)
        try:
            _check(bare, vocabulary, Settings(test.configured), [], libraries, None, ())
        except PolicyError as error:
            said = f'with the settings of the test "{clip(test.sentence)}"'
            for each in error.diagnostics:
                found.setdefault((each.source, each.span), replace(each, message=f"{each.message}, {said}"))
    if found:
        raise PolicyError(list(found.values()), file.text, file.path)


def _tests_beside(policy: tree.File, beside: Source) -> tuple[list[Diagnostic], tuple[tree.Test, ...]]:
    """The tests in the file *beside*, and what is wrong with that file."""
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
    settings: Settings,
    errors: Sequence[Diagnostic],
    libraries: Reader,
    beside: Source | None,
    tests: tuple[tree.Test, ...],
) -> Checked:
    linked = link(file, libraries)
    choices = feature_choices(file, linked, vocabulary, settings)
    done: list[Pass] = []
    for choice in combinations(choices):
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
        # What is written is sound and only goes on too little: what else there is to say of it is no echo.
        raise PolicyError([*found, *warnings], file.text, file.path)
    return Checked(
        in_order(warnings),
        reads(steps, vocabulary),
        dict(chosen.statements.parameters.declared),
        {name: CheckedLibrary(each.file, each.parameters.declared) for name, each in chosen.libraries.items()},
        tests,
    )
