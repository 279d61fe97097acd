"""Check of a policy's tests: settings, given fields, columns, cells, and expectations. A router loads none of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from smetric.policy import tree
from smetric.policy.check_statement import Statements, is_error_status
from smetric.policy.diagnostic import Diagnostic, PolicyError, PolicyText, Span, clip
from smetric.policy.guard import NOBODY
from smetric.policy.lexer import one_line
from smetric.policy.parameter import ParameterValues
from smetric.policy.parser import read
from smetric.policy.scope import Findings
from smetric.policy.types import Interval, closest, did_you_mean, exact, parse_unit
from smetric.policy.vocabulary import NEVER, Feature, Kind, RequestField, Vocabulary

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
                last = value.name if isinstance(value, tree.Name) else value
                if not isinstance(last, str):
                    self._error("given", _name_of(setting), "`last` is the instance chosen last", "e.g. given last = a")
                elif last not in names:
                    place = value.span if isinstance(value, tree.Name) else setting.span
                    self._error("given", place, f"`{clip(last)}` is not in the table", did_you_mean(last, names))
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
            meant = closest(wanted, known)
            quoted = meant if meant.isidentifier() else f'"{meant}"'
            help_text = f"did you mean `{quoted}`?" if meant else ""
            self._error("expect", failing.span, f"there is no guard `{clip(wanted)}`", help_text)


def _name_of(setting: tree.Setting) -> Span:
    return Span(setting.span.start, setting.span.start + len(setting.name))


def check_settings(
    file: tree.File, tests: Sequence[tree.Test], check: Callable[[tree.File, ParameterValues], object]
) -> None:
    """Check a sound policy again with the settings of its tests, as a parameter without a range can have any value.

    Args:
        file: the policy.
        tests: its tests, also those beside it.
        check: checks a file with values of its parameters.

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
            check(bare, ParameterValues(test.configured))
        except PolicyError as error:
            said = f'with the settings of the test "{clip(test.sentence)}"'
            for each in error.diagnostics:
                found.setdefault((each.source, each.span), replace(each, message=f"{each.message}, {said}"))
    if found:
        raise PolicyError(list(found.values()), file.text, file.path)


def tests_beside(policy: tree.File, beside: PolicyText) -> tuple[list[Diagnostic], tuple[tree.Test, ...]]:
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
