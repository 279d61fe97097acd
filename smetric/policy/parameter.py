"""Parameters of a policy: their declarations, and the values given to them."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace

from smetric.policy import tree
from smetric.policy.diagnostic import Span, clip
from smetric.policy.parser import read
from smetric.policy.scope import Findings, Units, describe
from smetric.policy.types import BROKEN, PLAIN, Interval, Sort, Type, Unit, did_you_mean, exact, truth, written
from smetric.policy.vocabulary import LARGEST, Kind, Vocabulary

Value = float | str | bool
#: The default name of the origin of values, in messages.
CONFIGURATION = "configuration"
_SORTS: dict[type, Sort] = {float: Sort.NUMBER, bool: Sort.BOOL, str: Sort.STRING}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Parameter with its value.

    Args:
        name: as declared.
        value: as configured, else the default; numbers in base units; a feature's name where `is_feature`.
        unit: of a number, as the language writes it; empty for a plain one and all else.
        low: smallest value of a range, or None.
        high: largest value of a range, or None.
        choices: the values allowed, or empty.
        configured: whether the value comes from the configuration.
        is_feature: whether it names a feature.
        doc: its `##` lines.
    """

    name: str
    value: Value
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[Value, ...] = ()
    configured: bool = False
    is_feature: bool = False
    doc: str = ""

    @property
    def domain(self) -> str:
        """The allowed values, as the language writes them; empty for any."""
        if self.choices:
            return "{" + ", ".join(self.show(choice) for choice in self.choices) + "}"
        if self.low is None:
            return ""
        return f"{exact(self.low)}.." if self.high is None else f"{exact(self.low)}..{exact(self.high)}"

    def show(self, value: Value) -> str:
        """Return a value of this parameter, as the language writes it."""
        shown = clip(value) if isinstance(value, str) else value
        return str(shown) if self.is_feature else written(shown)

    def outside(self, value: Value) -> bool:
        """Whether *value*, which has the right kind, is not allowed."""
        if self.choices:
            return value not in self.choices
        if isinstance(value, str) or self.low is None:
            return False
        return value < self.low or (self.high is not None and value > self.high)

    @property
    def type(self) -> Type:
        """Its type in an expression, unless it names a feature."""
        made = Type(_SORTS[type(self.value)])
        if isinstance(self.value, bool):
            made = replace(made, interval=Interval(float(self.value), float(self.value)))
        elif isinstance(self.value, float):
            made = replace(made, interval=self._interval(self.value))
        return replace(made, may=frozenset((self.name,)))

    def _interval(self, value: float) -> Interval:
        if self.low is None:
            return Interval(value, value)
        return Interval(self.low, LARGEST if self.high is None else self.high)


@dataclass(frozen=True, slots=True)
class ParameterValues:
    """Values of parameters by name, and the name of their origin in messages."""

    values: Mapping[str, object]
    by: str = CONFIGURATION

    def only(self, names: Container[str]) -> ParameterValues:
        """Return the values of *names*."""
        return replace(self, values={name: value for name, value in self.values.items() if name in names})


#: Characters of a configured text that can be a number with its unit.
_LONGEST_QUANTITY = 100


class Parameters:
    """Declared parameters of a file, with the values given to them.

    Args:
        vocabulary: features that a parameter may name.
        settings: configured values.
        units: for the units of literals.
        findings: receives errors.
        features: the feature chosen by each feature parameter.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        settings: ParameterValues,
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
        #: Parameters whose statement has an error, about which nothing more is reported.
        self.failed: set[str] = set()
        self._of: dict[str, Unit] = {}
        #: The configured feature of each feature parameter, whichever feature this check is for.
        self._acting: dict[str, Value] = {}

    def declare(self, statement: tree.Param) -> Type:
        """Declare a parameter and return its type; `BROKEN` if its statement has an error."""
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
        """Take a parameter of a library with its value there."""
        self.declared[name] = library.declared[name]
        self._of[name] = library._of.get(name, PLAIN)
        if name in library._acting:
            self._acting[name] = library._acting[name]

    def undeclared(self, header: Span) -> None:
        """Report settings of undeclared parameters."""
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
        """Return the value that *given* sets a parameter to; None, and an error at *span*, if it does not fit.

        Args:
            made: the parameter.
            given: a number, truth value or string; a string may hold a number with its unit.
            source: its origin, for the message.
            span: the place of the message.
            unit: the unit that it is written with, or empty.
            judge: the units of the text that sets it, if it is another text.
            choices: the features chosen there in place of the configured ones.
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
        """Return why *value* does not fit; empty if that is reported already, None if it fits."""
        if type(value) is not type(made.value):
            kinds = {bool: "true or false", float: "a number", str: "a string"}
            kind = "a feature" if made.is_feature else kinds[type(made.value)]
            return f"but it must be {kind}"
        if isinstance(value, float) and not math.isfinite(value):
            return "but numbers are at most 1e15"
        if unit:
            given = judge.of_words(unit, span)
            if given is None:
                return ""
            # `0 LOAD` has the unit of the feature that is chosen with this value.
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
                    message = f"the choices of `{made.name}` must have the kind of its default"
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
        """Report a default outside of its own range or choices."""
        outside = made.outside(made.value)
        if outside:
            domain = f"{'choices' if made.choices else 'range'} {made.domain}"
            self._findings.error("default", span, f"the default of `{made.name}` is outside its own {domain}")
        return outside

    def _repeats(self, items: Sequence[tree.Expr]) -> bool:
        """Report the first of *items* that is listed twice."""
        again = next((item for at, item in enumerate(items) if item in items[:at]), None)
        if again is not None:
            self._findings.error("domain", again.span, "this choice is listed twice", "remove one of them")
        return again is not None

    def _bound_fits(self, made: Parameter, bound: tree.Expr, unit: Unit) -> bool:
        if not isinstance(bound, tree.Number) or not bound.unit:
            return True
        found = self._units.of_literal(bound)
        if found is None or found == unit:
            return found is not None
        wanted = describe(Type(Sort.NUMBER, unit=unit))
        message = f"this has the unit {found}, but `{made.name}` is {wanted}"
        self._findings.error("units", bound.span, message, "bounds have the unit of the parameter, or none")
        return False

    def _declare_feature(self, statement: tree.Param, default: tree.Name) -> Type:
        name = statement.name
        chosen = self._features.get(name)
        items = statement.domain.items if isinstance(statement.domain, tree.Choices) else ()
        sound = True
        # The default is one of the choices too, and is checked once.
        for item in (default, *(item for item in items if item != default)):
            feature = self._vocabulary.features.get(item.name) if isinstance(item, tree.Name) else None
            if not sound and isinstance(item, tree.Text):
                break  # the default was meant as a string, too
            if feature is None or feature.kind is not Kind.NUMBER:
                shown = f"`{item.name}` is not a feature" if isinstance(item, tree.Name) else "this is not a feature"
                known = [word.name for word in self._vocabulary.features.values() if word.kind is Kind.NUMBER]
                help_text = ""
                if isinstance(item, tree.Name):
                    meant = truth(item.name) or did_you_mean(item.name, known)
                    help_text = meant or f'quote it if it is a string: "{item.name}"'
                elif isinstance(item, tree.Text):
                    help_text = "features are written without quotes"
                if feature is not None:
                    shown = f"`{feature.name}` is not a number"
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
    """Return the number in a configured text such as `500ms` or `16 requests`; None if there is none."""
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
