"""Checks of statements and parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from smetric.policy import tree
from smetric.policy.check_expression import Expressions, Units, describe
from smetric.policy.diagnostic import Span, clip, position, quote
from smetric.policy.guard import HELD, CheckedGuard, CheckedStep, conjuncts, label_of
from smetric.policy.parameter import Parameter, Settings, Value
from smetric.policy.parser import read
from smetric.policy.scope import Findings, Imported, Named, Names
from smetric.policy.types import BROKEN, PLAIN, TRUE, Sort, Type, Unit, comparison, did_you_mean, exact, truth
from smetric.policy.vocabulary import LARGEST, Kind, Vocabulary

# The parameters of a file: default, range and choices as declared, and the values given, held against each other.
#
# What the policy computes from them is typed in `check_expression`.

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


# Statements in order: names, filters before picks, outcomes that always decide, and what each step reads.
#
# One pass is for one choice of features; `check` runs it for each.

_END = "end with an unconditional `route …` whose pick has no `where`"

_HELD_SO_FAR = frozenset(("req.held",))


@dataclass(slots=True)
class _Outcomes:
    """What is known of the outcomes so far."""

    last: tree.Rule | None = None
    settled: bool = False
    broken: bool = False
    guarded: bool = False


class Statements:
    """One pass over the statements of a file.

    Args:
        file: a policy or a library.
        vocabulary: features and request fields.
        settings: configured values of its parameters.
        features: the feature that each feature parameter of the file stands for; those that it takes are added.
        findings: where errors go.
        library: the checked library that a `use` means; None where that is at fault.
    """

    def __init__(
        self,
        file: tree.File,
        vocabulary: Vocabulary,
        settings: Settings,
        features: dict[str, str],
        findings: Findings,
        library: Callable[[tree.Use], Statements | None],
    ) -> None:
        self.file = file
        self.findings = findings
        self._features = features
        self._library = library
        self._names = Names(file, vocabulary, findings)
        self.expressions = Expressions(self._names, vocabulary, findings, features)
        self.units = self.expressions.units
        self.parameters = Parameters(vocabulary, settings, self.units, findings, features)
        self._labels: dict[str, Span] = {}
        self._ordinals: Counter[str] = Counter()
        self._picked = ""
        self._outcomes = _Outcomes()
        self.steps: list[CheckedStep] = []

    def run(self) -> None:
        """Check all statements but the tests.

        Raises:
            Stop: the policy has too many errors or is too large.
        """
        is_library = self.file.kind == "library"
        for statement in self.file.statements:
            if is_library and not isinstance(statement, tree.Param | tree.Def | tree.Use | tree.Broken):
                message = "a library holds only `param`, `def` and `use`"
                self.findings.error("library", statement.span, message, "what decides stands in a policy")
            elif not isinstance(statement, tree.Test):
                self.expressions.count(statement.span)
                self._statement(statement)
        if not is_library:
            self.parameters.undeclared(self.file.name_span)
            self._check_end()
        self._check_definitions()

    @property
    def complete(self) -> bool:
        """Whether every outcome could be read, so that a rule that is not found is not there."""
        return not self._outcomes.broken

    @property
    def labels(self) -> set[str]:
        """The labels of all filters and outcomes."""
        return set(self._labels)

    def warn(self) -> None:
        """Warn of what does no harm: names nobody uses, conditions that are always the same."""
        for name, found in self._names.unused():
            word = {tree.Param: "parameter", tree.Let: "value", tree.Def: "definition"}[type(found.statement)]
            word = word if found.origin is None else "import"
            self.findings.warn("unused", found.span, f"{word} `{name}` is never used")
        for span, type_, message in self.expressions.constants:
            if not type_.may & self.parameters.declared.keys():  # it may be a switch
                self.findings.warn("constant", span, message)

    # ── one statement ──

    def _statement(self, statement: tree.Statement) -> None:
        if self._outcomes.settled and not isinstance(statement, tree.Broken):
            message = "nothing can reach this: the rule above always applies"
            self.findings.error("unreachable", statement.span, message)
        match statement:
            case tree.Param():
                type_ = self.parameters.declare(statement)
                if type_ is BROKEN:
                    self.parameters.failed.add(statement.name)
                if statement.name in self._features and type_ is not BROKEN:
                    feature = self.expressions.feature(self._features[statement.name])
                    type_ = replace(feature, must=feature.must | {statement.name}, may=feature.may | {statement.name})
                self._names.define(statement.name, statement.name_span, statement, type_)
            case tree.Let():
                type_ = self.expressions.infer(statement.value).named
                if type_.sort is Sort.INSTANCE and not self._picked:
                    self._picked = statement.name
                self._names.define(statement.name, statement.name_span, statement, type_)
            case tree.Def():
                self._names.define_arguments(statement)
                self._names.define(statement.name, statement.name_span, statement)
            case tree.Filter():
                self._filter(statement)
            case tree.Route():
                self._route(statement)
            case tree.Reject():
                self._reject(statement)
            case tree.Hold():
                self._hold(statement)
            case tree.Use():
                self._use(statement)
            case tree.Broken():
                self._outcomes.broken |= statement.word in ("route", "reject", "hold", "policy", "library", "")
                if not statement.word:  # as `else:` is none of ours, and was to say when the next rule applies
                    self._outcomes.settled, self._outcomes.guarded = False, True
                if statement.word in ("param", "use"):
                    self.parameters.failed |= set(statement.names)
                for name in statement.names:
                    self._names.define(name, statement.span, None)

    def _use(self, statement: tree.Use) -> None:
        library = self._library(statement)
        if library is not None:
            self.expressions.libraries[library.file.name] = library.expressions
        for name in statement.names:
            found = None if library is None else library.exported(name.name)
            if library is None or found is None:
                if library is not None:
                    self._not_exported(statement.library.name, library, name)
                self.parameters.failed.add(name.name)
                self._names.define(name.name, name.span, None)
                continue
            if name.name in library.parameters.declared:
                self.parameters.adopt(library.parameters, name.name)
                if name.name in library._features:
                    self._features[name.name] = library._features[name.name]
            self._names.define(name.name, name.span, found.statement, found.type, Imported(library.file.name, found))

    def exported(self, name: str) -> Named | None:
        """A name that others may take from this library: one that it defines itself."""
        found = self._names.own(name)
        return found if found is not None and (found.origin is None or found.statement is None) else None

    def _not_exported(self, owner: str, library: Statements, name: tree.Name) -> None:
        elsewhere = library._names.own(name.name)
        if elsewhere is not None and elsewhere.origin is not None:
            help_text = f"take it from where it is defined: use {elsewhere.origin.library} ({name.name})"
        else:
            help_text = did_you_mean(name.name, library._names.listed())
        self.findings.error("use", name.span, f"library `{owner}` defines no `{name.name}`", help_text)

    def _filter(self, statement: tree.Filter) -> None:
        if self._picked:
            message = f"filters come before picks, and `{self._picked}` is already picked"
            self.findings.error("filter-order", statement.span, message, "move this line above it")
        guards = self._guards(statement.when)
        mask = self.expressions.infer(statement.mask)
        self._label(statement)
        if not mask.broken and mask.sort is not Sort.BOOL:
            message = f"`{statement.word}` needs a truth value, found {mask}"
            self.findings.error("mask", statement.mask.span, message, comparison(mask.sort))
        elif not mask.broken and not mask.vector:
            message = f"`{statement.word}` needs a truth value per instance, found one for all"
            help_text = "a filter that applies sometimes has a `when`; to turn requests away use `reject`"
            self.findings.error("mask", statement.mask.span, message, help_text)
        elif mask.decided:
            whom = "everybody" if mask.interval == TRUE else "nobody"
            self.expressions.same(statement.mask.span, mask, f"this leaves {whom} in every decision")
        self._add(statement.mask, guards, mask, may_end=statement.word == "keep")

    def _route(self, statement: tree.Route) -> None:
        guards = self._guards(statement.when)
        pick = self.expressions.infer(statement.pick)
        self._label(statement)
        if not pick.broken and pick.sort is not Sort.INSTANCE:
            message = f"`route` needs an instance, found {pick}"
            self.findings.error("route", statement.pick.span, message, "pick one: route argmin(…)")
            pick = BROKEN
        self._add(statement.pick, guards, pick, may_end=True)
        self._outcome(statement, settled=statement.when is None and not pick.maybe, broken=pick.broken)

    def _reject(self, statement: tree.Reject) -> None:
        status = statement.status.value
        if not is_error_status(status):
            message = f"{exact(status)} is not an error status"
            help_text = "use 429 to shed and 503 when nobody can serve"
            self.findings.error("status", statement.status.span, message, help_text)
        retry = Type(Sort.NUMBER) if statement.retry is None else self.expressions.seconds(statement.retry)
        guards = self._guards(statement.when)
        self._label(statement)
        self._add(statement.retry or statement.message, guards, retry, may_end=True)
        self._outcome(statement, settled=statement.when is None, broken=False)

    def _hold(self, statement: tree.Hold) -> None:
        patience = self.expressions.seconds(statement.patience)
        if not patience.broken and patience.interval.high == 0:
            self.expressions.same(statement.patience.span, patience, "this holds nothing: its time is up at once")
        if statement.when is None:
            message = "this would hold every request until its time is up"
            self.findings.error("hold", statement.span, message, "give it a `when`")
        guards = self._guards(statement.when)
        self._label(statement)
        over = Type(Sort.BOOL).reading(patience, Type(Sort.NUMBER, must=_HELD_SO_FAR, may=_HELD_SO_FAR))
        guards.append(CheckedGuard(HELD, statement.patience.span, over, implied=True))
        self._add(statement.patience, guards, Type(Sort.NUMBER), may_end=True)
        self._outcome(statement, settled=False, broken=False)

    def _outcome(self, statement: tree.Rule, *, settled: bool, broken: bool) -> None:
        self._outcomes.last = statement
        self._outcomes.settled |= settled and not broken and not self._outcomes.guarded
        self._outcomes.guarded = False
        self._outcomes.broken |= broken

    def _guards(self, when: tree.Expr | None) -> list[CheckedGuard]:
        definitions = self._names.definitions()
        guards = []
        for part in conjuncts(when):
            found = self.expressions.condition(part)  # which refuses what nests too deep to look for calls in
            if found.decided:
                self.expressions.same(part.span, found, "this condition is the same in every decision")
            guards.append(CheckedGuard(label_of(part, self.findings.text, definitions), part.span, found))
        return guards

    def _add(self, value: tree.Expr, guards: list[CheckedGuard], found: Type, *, may_end: bool) -> None:
        self.steps.append(CheckedStep(guards, found, quote(self.findings.text, value.span), may_end))

    def _label(self, statement: tree.Rule) -> None:
        """Keep the label of a filter or an outcome; without one it has that which the plan gives it, its ordinal."""
        word = statement.word
        self._ordinals[word] += 1
        label = statement.label or tree.Name(span=statement.span, name=f"{word}_{self._ordinals[word]}")
        earlier = self._labels.setdefault(label.name, label.span)
        if earlier is not label.span:
            line = position(self.findings.text, earlier.start)[0]
            self.findings.error("label", label.span, f"`{label.name}` already labels line {line}")

    # ── the whole file ──

    def _check_end(self) -> None:
        if self._outcomes.settled or self._outcomes.broken:
            return
        if self._outcomes.last is None:
            self.findings.error("undecided", self.file.name_span, "this policy decides nothing", _END)
        else:
            self.findings.error("undecided", self._outcomes.last.span, "this may decide nothing", _END)

    def _check_definitions(self) -> None:
        """Look into definitions that nothing calls, and into all of a library; of their arguments nothing is known."""
        for found in self._names.all() if self.file.kind == "library" else [found for _, found in self._names.unused()]:
            if isinstance(found.statement, tree.Def) and found.origin is None:
                definition = found.statement
                self.expressions.body(definition, {argument.name: BROKEN for argument in definition.arguments})


def is_error_status(status: float) -> bool:
    """Whether a request can be turned away with it."""
    return 400 <= status <= 599 and status % 1 == 0
