"""The parameters of a file: default, range and choices as declared, and the values given, held against each other.

What the policy computes from them is typed in `check_expression`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from smetric.policy import tree
from smetric.policy.check_unit import Units, describe
from smetric.policy.diagnostic import clip
from smetric.policy.figure import exact
from smetric.policy.findings import Findings
from smetric.policy.parameter import Parameter, Settings, Value
from smetric.policy.parser import read
from smetric.policy.span import Span
from smetric.policy.suggestion import did_you_mean, truth
from smetric.policy.types import BROKEN, Sort, Type
from smetric.policy.unit import PLAIN, Unit
from smetric.policy.vocabulary import LARGEST, Kind, Vocabulary

#: Characters of a configured text that may be a number with its unit.
_LONGEST_QUANTITY = 100


class Parameters:
    """Reads the `param` statements of a file, one after the other.

    Args:
        vocabulary: features that a parameter may name.
        settings: configured values.
        units: for the units of literals.
        findings: where errors go.
        features: the feature that each feature parameter stands for.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        settings: Settings,
        units: Units,
        findings: Findings,
        features: Mapping[str, str],
    ) -> None:
        self._vocabulary = vocabulary
        self._settings = settings
        self._units = units
        self._findings = findings
        self._features = features
        self.declared: dict[str, Parameter] = {}
        #: Parameters whose statement is at fault; nothing more is said of them.
        self.failed: set[str] = set()
        self._of: dict[str, Unit] = {}
        #: The feature that each parameter of features stands for by configuration, whatever this check is for.
        self._acting: dict[str, Value] = {}

    def declare(self, statement: tree.Param) -> Type:
        """The type of a parameter that is no feature, from its statement; `BROKEN` when it is at fault."""
        if isinstance(statement.value, tree.Name):
            return self._declare_feature(statement, statement.value)
        value = _literal(statement.value)
        unit = self._units.of_literal(statement.value) if isinstance(statement.value, tree.Number) else None
        if isinstance(statement.value, tree.Number) and statement.value.unit and unit is None:
            return BROKEN
        unit = unit or PLAIN
        bare = Parameter(name=statement.name, value=value, unit=str(unit), doc=statement.doc)
        made = self._with_domain(bare, statement, unit)
        if made is None or self._default_is_outside(made, statement.value.span):
            return BROKEN
        self._of[made.name] = unit
        self.declared[made.name] = self._configured(made, statement)
        return replace(self.declared[made.name].type, unit=unit)

    def adopt(self, library: Parameters, name: str) -> None:
        """Take a parameter of a library as one of this file, with the value it has there."""
        self.declared[name] = library.declared[name]
        self._of[name] = library._of.get(name, PLAIN)
        if name in library._acting:
            self._acting[name] = library._acting[name]

    def undeclared(self, header: Span) -> None:
        """Report settings that no statement declares."""
        for name in self._settings.values:
            if name not in self.declared and name not in self.failed:
                message = f"{self._settings.by} sets `{clip(name)}`, which this policy does not declare"
                help_text = did_you_mean(name, self.declared) or f"it declares {', '.join(self.declared) or 'none'}"
                self._findings.error("setting", header, message, help_text)

    def set(
        self,
        made: Parameter,
        given: object,
        source: str,
        span: Span,
        unit: str = "",
        judge: Units | None = None,
        choices: Mapping[str, object] | None = None,
    ) -> Value | None:
        """The value that *given* means for a parameter; None, and an error at *span*, when it means none.

        Args:
            made: the parameter.
            given: a number, truth value or string; a string may hold a number with its unit.
            source: who sets it, for the message.
            span: where the message points.
            unit: the unit it was written with, or empty.
            judge: of the text in which it is set, where that is another one.
            choices: the features that are chosen there instead of the configured ones.
        """
        judge = judge or self._units
        value = given
        if isinstance(given, int | float) and not isinstance(given, bool):
            value = float(given) if abs(given) <= LARGEST else math.inf
        if isinstance(made.value, float) and isinstance(given, str):
            literal = _quantity(given)
            if literal is not None:
                value, unit = literal.value, literal.unit
        message = self._objection(made, value, unit, span, judge, choices or {})
        if message is None and isinstance(value, float | str | bool):
            return value
        if message:
            judge.findings.error("setting", span, f"{source} sets `{made.name}` to {_shown(given, unit)}, {message}")
        return None

    def _objection(
        self, made: Parameter, value: object, unit: str, span: Span, judge: Units, choices: Mapping[str, object]
    ) -> str | None:
        """Why *value* does not fit; empty when that is reported already."""
        if type(value) is not type(made.value):
            kinds = {bool: "true or false", float: "a number", str: "a string"}
            kind = "a feature" if made.is_feature else kinds[type(made.value)]
            return f"but it is {kind}"
        if isinstance(value, float) and not math.isfinite(value):
            return "but numbers are at most 1e15"
        if unit:
            given = judge.of_words(unit, span)
            if given is None:
                return ""
            # `0 LOAD` has the unit of the feature that is chosen with this value, not of all that might be.
            acts = all(self.declared[name].value == choices.get(name, word) for name, word in self._acting.items())
            if acts and given != self._of.get(made.name, PLAIN):
                return f"but its unit is {describe(Type(Sort.NUMBER, unit=self._of.get(made.name, PLAIN)))}"
        if isinstance(value, float | str | bool) and made.outside(value):
            return f"outside {made.domain}"
        return None

    def _configured(self, made: Parameter, statement: tree.Param) -> Parameter:
        if made.name not in self._settings.values:
            return made
        value = self.set(made, self._settings.values[made.name], self._settings.by, statement.name_span)
        return made if value is None else replace(made, value=value, configured=True)

    def _with_domain(self, made: Parameter, statement: tree.Param, unit: Unit) -> Parameter | None:
        domain = statement.domain
        if domain is None:
            return made
        if isinstance(domain, tree.Choices):
            choices = [_literal(item) for item in domain.items]
            for item, choice in zip(domain.items, choices, strict=True):
                if isinstance(item, tree.Name) or type(choice) is not type(made.value):
                    message = f"the choices of `{made.name}` are of the kind of its default"
                    self._findings.error("domain", item.span, message)
                    return None
                if not self._bound_fits(made, item, unit):
                    return None
            if self._repeats(domain.items):
                return None
            return replace(made, choices=tuple(choices))
        if not isinstance(made.value, float):
            self._findings.error("domain", domain.span, "only a number has a range", "list the choices: in {…}")
            return None
        for bound in (domain.low, domain.high):
            if bound is not None and not self._bound_fits(made, bound, unit):
                return None
        if domain.high is not None and domain.high.value < domain.low.value:
            self._findings.error("domain", domain.span, "this range is empty", "write the smaller bound first")
            return None
        return replace(made, low=domain.low.value, high=None if domain.high is None else domain.high.value)

    def _default_is_outside(self, made: Parameter, span: Span) -> bool:
        """Report a default that its own range or choices do not allow."""
        outside = made.outside(made.value)
        if outside:
            domain = f"{'choices' if made.choices else 'range'} {made.domain}"
            self._findings.error("default", span, f"the default of `{made.name}` is outside its own {domain}")
        return outside

    def _repeats(self, items: Sequence[tree.Expr]) -> bool:
        """Report the first of *items* that stands there twice, if one does."""
        again = next((item for at, item in enumerate(items) if item in items[:at]), None)
        if again is not None:
            self._findings.error("domain", again.span, "this choice is listed twice", "take one of them out")
        return again is not None

    def _bound_fits(self, made: Parameter, bound: tree.Expr, unit: Unit) -> bool:
        if not isinstance(bound, tree.Number) or not bound.unit:
            return True
        found = self._units.of_literal(bound)
        if found is None or found == unit:
            return found is not None
        wanted = describe(Type(Sort.NUMBER, unit=unit))
        message = f"this has the unit {found}, but `{made.name}` is {wanted}"
        self._findings.error("units", bound.span, message, "bounds carry the parameter's unit or none")
        return False

    def _declare_feature(self, statement: tree.Param, default: tree.Name) -> Type:
        name = statement.name
        chosen = self._features.get(name)
        items = statement.domain.items if isinstance(statement.domain, tree.Choices) else ()
        sound = True
        # The default stands among the choices again; it is judged once.
        for item in (default, *(item for item in items if item != default)):
            feature = self._vocabulary.features.get(item.name) if isinstance(item, tree.Name) else None
            if not sound and isinstance(item, tree.Text):
                break  # the default was meant as a string, too
            if feature is None or feature.kind is not Kind.NUMBER:
                shown = f"`{item.name}` is no feature" if isinstance(item, tree.Name) else "this is no feature"
                known = [word.name for word in self._vocabulary.features.values() if word.kind is Kind.NUMBER]
                help_text = ""
                if isinstance(item, tree.Name):
                    meant = truth(item.name) or did_you_mean(item.name, known)
                    help_text = meant or f'quote it if it is a string: "{item.name}"'
                elif isinstance(item, tree.Text):
                    help_text = "features are written without quotes"
                if feature is not None:
                    shown = f"`{feature.name}` is no number"
                self._findings.error("unknown-feature", item.span, shown, help_text)
                sound = False
        if not sound:
            return BROKEN
        if not items:
            help_text = f"list the choices: `param {name} = {default.name} in {{{default.name}, …}}`"
            self._findings.error("choices", default.span, f"`{name}` may be any feature", help_text)
            return BROKEN
        if self._repeats(items):
            return BROKEN
        choices = tuple(item.name for item in items if isinstance(item, tree.Name))
        made = Parameter(name=name, value=default.name, choices=choices, is_feature=True, doc=statement.doc)
        if self._default_is_outside(made, default.span):
            return BROKEN
        made = self._configured(made, statement)
        self._acting[name] = made.value
        self.declared[name] = made if chosen is None else replace(made, value=chosen)
        return Type(Sort.NUMBER)


def _literal(expr: tree.Expr) -> Value:
    if isinstance(expr, tree.Number | tree.Text | tree.Truth):
        return expr.value
    return expr.name if isinstance(expr, tree.Name) else ""


def _quantity(text: str) -> tree.Number | None:
    """The number that a configured text such as `500ms` or `16 requests` writes; None when it writes none."""
    if len(text) > _LONGEST_QUANTITY:
        return None
    file, errors = read(f"policy p param P = {text}")
    match file.statements:
        case (tree.Param(value=tree.Number() as quantity, domain=None),) if not errors:
            return quantity
    return None


def _shown(given: object, unit: str) -> str:
    if isinstance(given, bool):
        return "true" if given else "false"
    if isinstance(given, int | float):
        return f"{exact(given)} {unit}".rstrip() if abs(given) <= LARGEST or given != given else clip(str(given)[:80])
    return f'"{clip(given)}"' if isinstance(given, str) else f"a {type(given).__name__}"
