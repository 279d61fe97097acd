"""Checked file to plan: resolves names, expands definitions, puts parameters in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from smetric.policy import tree
from smetric.policy.builtin import BUILTINS, Builtin, Family
from smetric.policy.check import Checked
from smetric.policy.diagnostic import Span
from smetric.policy.guard import HELD, conjuncts, label_of
from smetric.policy.parameter import Parameter
from smetric.policy.plan import (
    At,
    Binding,
    Column,
    Const,
    Draw,
    Guard,
    Keyed,
    Pick,
    Plan,
    Provenance,
    Reading,
    Reduce,
    Ref,
    RequestValue,
    Scale,
    Shape,
    StatementKind,
    Step,
    Term,
    Top,
    bound,
    count_uses,
    op,
    set_of,
)
from smetric.policy.vocabulary import Vocabulary


class _Sites:
    """The picks of a file, or its other draws: each has a site, and a key that survives unrelated edits."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def add(self, owner: str) -> int:
        """The site of the next one of *owner*, the `let` or the rule that it stands in."""
        ordinal = 1 + sum(key.partition(".")[0] == owner for key in self.keys)
        self.keys.append(owner if ordinal == 1 else f"{owner}.{ordinal}")
        return len(self.keys) - 1


@dataclass(slots=True)
class _Scope:
    """What names mean: those of one file so far, and the arguments of the definition being expanded.

    `at` is set in the definitions of a library: the call in the policy where their terms stand.
    """

    names: dict[str, Reading] = field(default_factory=dict)
    defs: dict[str, tuple[tree.Def, _Scope]] = field(default_factory=dict)
    arguments: Mapping[str, Reading] = field(default_factory=dict)
    at: Span | None = None


class Resolver:
    """One pass over a file, top to bottom.

    Args:
        file: a file that the checker accepted.
        vocabulary: the words it may read.
        checked: the checker's account of its parameters and libraries.
    """

    def __init__(self, file: tree.File, vocabulary: Vocabulary, checked: Checked) -> None:
        self._file = file
        self._features = vocabulary.features
        self._checked = checked
        self._scope = _Scope()
        self._libraries: dict[str, _Scope] = {}
        self._picks = _Sites()
        self._bindings: list[Binding] = []
        self._draws = _Sites()
        self._level = 0
        self._owner = ""

    def plan(self) -> Plan:
        """The plan of the file."""
        steps: list[Step] = []
        scope = self._scope
        for statement in self._file.statements:
            self._declare(statement, scope, self._checked.params)
            if isinstance(statement, tree.Let):
                self._owner = statement.name
                scope.names[statement.name] = bound(statement.name, self._term(statement.value, scope))
            elif isinstance(statement, tree.Rule):
                steps.append(self._step(statement, steps))
        plan = Plan(tuple(steps), tuple(self._bindings), tuple(self._picks.keys), tuple(self._draws.keys))
        count_uses(plan.terms)
        return plan

    def _declare(self, statement: tree.Statement, scope: _Scope, parameters: Mapping[str, Parameter]) -> None:
        """Put the names of a `param`, `def` or `use` into *scope*."""
        match statement:
            case tree.Param(name=name):
                scope.names[name] = self._parameter(parameters[name])
            case tree.Def(name=name):
                scope.defs[name] = (statement, scope)
            case tree.Use(library=library, names=names):
                taken = self._library(library.name)
                for name in (each.name for each in names):
                    if name in taken.defs:
                        scope.defs[name] = taken.defs[name]
                    else:
                        scope.names[name] = taken.names[name]

    def _library(self, name: str) -> _Scope:
        if name not in self._libraries:
            library = self._checked.libraries[name]
            scope = self._libraries[name] = _Scope()
            for statement in library.file.statements:
                self._declare(statement, scope, library.params)
        return self._libraries[name]

    def _parameter(self, parameter: Parameter) -> Reading:
        if parameter.is_feature:
            return lambda span: Column(str(parameter.value), span=span, shape=Shape.VECTOR)
        return lambda span: Const(parameter.value, span=span, shape=Shape.SCALAR)

    # ── statements ───────────────────────────────────────────────────────────

    def _step(self, statement: tree.Rule, before: Sequence[Step]) -> Step:
        kind = StatementKind(statement.word)
        if statement.label is not None:
            label = statement.label.name
        else:
            label = f"{kind.value}_{1 + sum(step.kind is kind for step in before)}"
        self._owner = label
        guards = tuple(
            Guard(label_of(part, self._file.text, self._scope.defs), self._term(part, self._scope))
            for part in conjuncts(statement.when)
        )
        made = Step(kind, label, statement.span, guards, None)
        match statement:
            case tree.Filter(mask=mask):
                made.value = self._term(mask, self._scope)
                self._level += 1
            case tree.Route(pick=pick):
                made.value = self._term(pick, self._scope)
            case tree.Hold(patience=patience):
                reading, span = bound("patience", self._term(patience, self._scope)), patience.span
                so_far = RequestValue("held", span=span, shape=Shape.SCALAR)
                made.guards += (Guard(HELD, op("<", span, so_far, reading(span))),)
                made.value = reading(span)
            case tree.Reject(status=status, message=message, retry=retry):
                made.value = None if retry is None else self._term(retry, self._scope)
                made.status, made.message = int(status.value), message.value
        return made

    # ── expressions ──────────────────────────────────────────────────────────

    def _term(self, expr: tree.Expr, scope: _Scope) -> Term:
        span = scope.at or expr.span
        match expr:
            case tree.Number(value=value) | tree.Text(value=value) | tree.Truth(value=value):
                return Const(value, span=span, shape=Shape.SCALAR)
            case tree.Name(name=name):
                return self._named(name, span, scope)
            case tree.Field(name=name):
                return RequestValue(name, span=span, shape=Shape.SCALAR)
            case tree.SetOf(items=items):
                return set_of([self._term(item, scope) for item in items], span)
            case tree.Unary(op=name, operand=operand):
                return op("neg" if name == "-" else name, span, self._term(operand, scope))
            case tree.Binary(op=name, left=left, right=right):
                return op(name, span, self._term(left, scope), self._term(right, scope))
            case tree.IfElse(then=then, condition=condition, otherwise=otherwise):
                return op("if", span, *(self._term(part, scope) for part in (condition, then, otherwise)))
            case tree.At(vector=vector, pick=pick):
                return At(self._term(vector, scope), self._term(pick, scope), span=span, shape=Shape.SCALAR)
            case tree.Call():
                return self._call(expr, span, scope)
        raise AssertionError(f"no such expression: {type(expr).__name__}")

    def _named(self, name: str, span: Span, scope: _Scope) -> Term:
        if name in scope.arguments:
            return scope.arguments[name](span)
        if name in scope.names:
            return scope.names[name](span)
        return Column(self._features[name].name, span=span, shape=Shape.VECTOR)

    def _call(self, call: tree.Call, span: Span, scope: _Scope) -> Term:
        if call.function in scope.defs:
            definition, home = scope.defs[call.function]
            given = [self._term(argument.value, scope) for argument in call.arguments]
            arguments = {
                name.name: bound(name.name, value) for name, value in zip(definition.arguments, given, strict=True)
            }
            at = span if home is not self._scope else None
            return self._term(definition.body, replace(home, arguments=arguments, at=at))
        named = {a.name: self._term(a.value, scope) for a in call.arguments if a.name and a.name != "then"}
        thens = tuple(self._term(a.value, scope) for a in call.arguments if a.name == "then")
        plain = [self._term(argument.value, scope) for argument in call.arguments if not argument.name]
        masks = [self._term(argument.where, scope) for argument in call.arguments if argument.where is not None]
        return self._built_in(BUILTINS[call.function], span, plain, masks[0] if masks else None, named, thens)

    def _built_in(
        self,
        row: Builtin,
        span: Span,
        plain: list[Term],
        where: Term | None,
        named: Mapping[str, Term],
        thens: tuple[Term, ...],
    ) -> Term:
        name = row.name
        match row.family:
            case Family.REDUCTION | Family.TEST | Family.COUNT:
                value = plain[0] if plain else Const(True, span=span, shape=Shape.SCALAR)
                more = tuple(plain[1:])
                return Reduce(
                    name, value, more, where, named.get("default"), self._level, span=span, shape=Shape.SCALAR
                )  # fmt: skip
            case Family.SCALE:
                return Scale(name, plain[0], self._level, span=span, shape=Shape.VECTOR)
            case Family.ELEMENT:
                return op(name, span, *plain)
            case Family.RATIO:
                dividend, divisor = plain
                shared = bound("divisor", divisor)
                quotient = op("/", span, dividend, shared(span))
                return op("if", span, op("divides", span, shared(span)), quotient, named["default"])
            case Family.PICK | Family.ROTATION | Family.LOTTERY:
                value, extra = plain[0], next(iter(named.values()), None)
                if value.shape is not Shape.VECTOR:
                    # All tie: neither what they have nor `within:` or `temperature:` is looked at.
                    value, extra = Const(0.0, span=value.span, shape=Shape.SCALAR), None
                site = self._picks.add(self._owner)
                pick = Pick(name, value, thens, extra, where, self._level, site, span=span, shape=Shape.PICK)
                binding = Binding(self._picks.keys[site], pick)
                self._bindings.append(binding)
                return Ref(binding, span=span, shape=Shape.PICK)
            case Family.FIRST:
                term = plain[-1]
                for better in reversed(plain[:-1]):
                    somebody = op("somebody", better.span, better)
                    term = op("if", span, somebody, better, term)
                return term
            case Family.DRAW | Family.CHANCE:
                shape = Shape.VECTOR if row.family is Family.DRAW else Shape.SCALAR
                return Draw(name, plain[0], self._level, self._draws.add(self._owner), span=span, shape=shape)
            case Family.TOP:
                value, amount = plain
                site = self._draws.add(self._owner)
                return Top(value, amount, thens, self._level, site, span=span, shape=Shape.VECTOR)
            case Family.WEIGHT | Family.PLACE:
                shape = Shape.VECTOR if row.family is Family.WEIGHT else Shape.SCALAR
                return Keyed(name, plain[0], span=span, shape=shape)
            case Family.KNOWN | Family.AGE:
                return Provenance(name, plain[0], span=span, shape=Shape.VECTOR)
            case Family.FRESH:
                known = Provenance("known", plain[0], span=span, shape=Shape.VECTOR)
                age = Provenance("age", plain[0], span=span, shape=Shape.VECTOR)
                return op("and", span, known, op("<=", span, age, plain[1]))
