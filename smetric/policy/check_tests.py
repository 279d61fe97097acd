"""Test blocks of a policy, before any of them runs: settings, given fields, columns, cells, and what is expected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smetric.policy import tree
from smetric.policy.check_statement import Statements, is_error_status
from smetric.policy.diagnostic import clip
from smetric.policy.figure import exact
from smetric.policy.findings import Findings
from smetric.policy.guard import NOBODY, one_line
from smetric.policy.interval import Interval
from smetric.policy.span import Span
from smetric.policy.suggestion import did_you_mean
from smetric.policy.unit import parse_unit
from smetric.policy.vocabulary import NEVER, Feature, Kind, RequestField, Vocabulary

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
                message = f"this policy declares no `{setting.name}`"
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
                self._findings.error(
                    "given", _name(setting), f"`{setting.name}` is given twice", "take one of them out"
                )
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
                self._findings.error("column", column.span, "this column is there already")
            seen.add(key)
        names: set[str] = set()
        for row in test.rows:
            if row.name in names:
                self._findings.error("row", row.span, f"`{row.name}` is in the table already")
            names.add(row.name)
            if len(row.cells) != len(words):
                message = f"this row has {len(row.cells)} cells for {len(words)} columns"
                self._findings.error("row", row.span, message, "write `?` where nobody knows the value")
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
            message = f"no rule is labelled `{expect.rule.name}`"
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
        self._findings.error("expect", failing.span, f"no guard is called `{clip(wanted)}`", help_text)


def _name(setting: tree.Setting) -> Span:
    return Span(setting.span.start, setting.span.start + len(setting.name))
