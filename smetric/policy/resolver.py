"""Checked file to plan: names are resolved, definitions expanded, parameters inserted, constant operations folded."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from smetric.policy import tree
from smetric.policy.builtin import BUILTINS, Family
from smetric.policy.check import Checked
from smetric.policy.diagnostic import Span
from smetric.policy.guard import HELD, conjuncts, label_of
from smetric.policy.parameter import Parameter
from smetric.policy.plan import (
    At,
    Binding,
    Call,
    Column,
    Const,
    Guard,
    Op,
    Outcome,
    Pick,
    Plan,
    Ref,
    RequestValue,
    Shape,
    Step,
    Term,
)
from smetric.policy.types import SMALLEST_DIVISOR
from smetric.policy.vocabulary import Vocabulary

#: Makes the term that a name stands for, at the place that reads it.
Reading = Callable[[Span], Term]

_FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "in": lambda left, right: left in right,
    "not in": lambda left, right: left not in right,
}
#: The end of a decision by a statement with each keyword; a `keep` ends it if it leaves no candidate.
_OUTCOMES = {
    "keep": Outcome.NO_CANDIDATE,
    "prefer": None,
    "route": Outcome.ROUTE,
    "reject": Outcome.REJECT,
    "hold": Outcome.HOLD,
}
_VECTORS = {Family.SCALE, Family.DRAW, Family.TOP, Family.WEIGHT, Family.KNOWN, Family.AGE}


@dataclass(slots=True)
class _Scope:
    """Names of one file so far, and the arguments of the definition being expanded.

    `at` is set in the definitions of a library: the call in the policy, the place of their terms.
    """

    names: dict[str, Reading] = field(default_factory=dict)
    defs: dict[str, tuple[tree.Def, _Scope]] = field(default_factory=dict)
    arguments: Mapping[str, Reading] = field(default_factory=dict)
    at: Span | None = None


class Resolver:
    """One pass over a file, top to bottom.

    Args:
        file: a file that the checker accepted.
        vocabulary: features and request fields.
        checked: the checker's result: parameters and libraries.
    """

    def __init__(self, file: tree.File, vocabulary: Vocabulary, checked: Checked) -> None:
        self._file = file
        self._features = vocabulary.features
        self._checked = checked
        self._scope = _Scope()
        self._libraries: dict[str, _Scope] = {}
        self._picks: list[Pick] = []
        #: The names of picks and of other draws, by site.
        self._keys: list[str] = []
        self._draws: list[str] = []
        self._level = 0
        self._owner = ""

    def plan(self) -> Plan:
        """The plan of the file."""
        steps: list[Step] = []
        ordinals: Counter[str] = Counter()
        scope = self._scope
        for statement in self._file.statements:
            self._declare(statement, scope, self._checked.params)
            if isinstance(statement, tree.Let):
                self._owner = statement.name
                scope.names[statement.name] = _bound(statement.name, self._term(statement.value, scope))
            elif isinstance(statement, tree.Rule):
                ordinals[statement.word] += 1
                steps.append(self._step(statement, ordinals[statement.word]))
        return Plan(tuple(steps), tuple(self._picks), tuple(self._keys), tuple(self._draws))

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

    def _step(self, statement: tree.Rule, ordinal: int) -> Step:
        label = statement.label.name if statement.label else f"{statement.word}_{ordinal}"
        self._owner = label
        guards = tuple(
            Guard(label_of(part, self._file.text, self._scope.defs), self._term(part, self._scope))
            for part in conjuncts(statement.when)
        )
        outcome, value, message = _OUTCOMES[statement.word], statement.value, statement.message
        term = None if value is None else self._term(value, self._scope)
        made = Step(statement.word, outcome, label, statement.span, guards, term)
        if made.is_filter:
            self._level += 1
        elif outcome is Outcome.HOLD:
            assert made.value is not None
            patience, span = _bound("patience", made.value), made.value.span
            so_far = RequestValue("held", span=span, shape=Shape.SCALAR)
            made.guards += (Guard(HELD, _op("<", span, so_far, patience(span))),)
            made.value = patience(span)
        elif statement.status is not None and message is not None:
            made.status, made.message = int(statement.status.value), message.value
        return made

    # ── expressions ──────────────────────────────────────────────────────────

    def _term(self, expr: tree.Expr, scope: _Scope) -> Term:
        span = scope.at or expr.span
        match expr:
            case tree.Number(value=value) | tree.Text(value=value) | tree.Truth(value=value):
                return Const(value, span=span, shape=Shape.SCALAR)
            case tree.Name(name=name):
                reading = scope.arguments.get(name) or scope.names.get(name)
                return reading(span) if reading else Column(self._features[name].name, span=span, shape=Shape.VECTOR)
            case tree.FieldExpr(name=name):
                return RequestValue(name, span=span, shape=Shape.SCALAR)
            case tree.SetOf(items=items):
                return _op("set", span, *(self._term(item, scope) for item in items))
            case tree.Unary(op=name, operand=operand):
                return _op("neg" if name == "-" else name, span, self._term(operand, scope))
            case tree.Binary(op=name, left=left, right=right):
                return _op(name, span, self._term(left, scope), self._term(right, scope))
            case tree.IfElse(then=then, condition=condition, otherwise=otherwise):
                return _op("if", span, *(self._term(part, scope) for part in (condition, then, otherwise)))
            case tree.AtExpr(vector=vector, pick=pick):
                return At(self._term(vector, scope), self._term(pick, scope), span=span, shape=Shape.SCALAR)
            case tree.CallExpr(function=function) if function in scope.defs:
                return self._expanded(expr, span, scope)
            case tree.CallExpr():
                return self._builtin(expr, span, scope)
        raise AssertionError(f"no such expression: {type(expr).__name__}")

    def _expanded(self, call: tree.CallExpr, span: Span, scope: _Scope) -> Term:
        """The body of a definition with the arguments of *call*."""
        definition, home = scope.defs[call.function]
        given = [self._term(argument.value, scope) for argument in call.arguments]
        arguments = {
            name.name: _bound(name.name, value) for name, value in zip(definition.arguments, given, strict=True)
        }
        at = span if home is not self._scope else None
        return self._term(definition.body, replace(home, arguments=arguments, at=at))

    def _builtin(self, call: tree.CallExpr, span: Span, scope: _Scope) -> Term:
        row = BUILTINS[call.function]
        named = {a.name: self._term(a.value, scope) for a in call.arguments if a.name and a.name != "then"}
        thens = tuple(self._term(a.value, scope) for a in call.arguments if a.name == "then")
        plain = tuple(self._term(a.value, scope) for a in call.arguments if not a.name)
        where = next((self._term(a.where, scope) for a in call.arguments if a.where is not None), None)
        match row.family:
            case Family.ELEMENT:
                return _op(row.name, span, *plain)
            case Family.RATIO:
                divisor = _bound("divisor", plain[1])
                quotient = _op("/", span, plain[0], divisor(span))
                return _op("if", span, _op("divides", span, divisor(span)), quotient, named["default"])
            case Family.FIRST:
                term = plain[-1]
                for better in reversed(plain[:-1]):
                    term = _op("if", span, _op("chosen", better.span, better), better, term)
                return term
            case Family.FRESH:
                known, age = (
                    Call(BUILTINS[name], plain[:1], self._level, span=span, shape=Shape.VECTOR)
                    for name in ("known", "age")
                )
                return _op("and", span, known, _op("<=", span, age, plain[1]))
            case Family.PICK | Family.ROTATION | Family.LOTTERY:
                value, extra = plain[0], next(iter(named.values()), None)
                if value.shape is not Shape.VECTOR:
                    # All candidates tie, so neither the value nor `within:` or `temperature:` is computed.
                    value, extra = Const(0.0, span=value.span, shape=Shape.SCALAR), None
                site = self._site(self._keys)
                pick = Pick(row, value, self._level, where, extra, thens, site, span=span, shape=Shape.PICK)
                self._picks.append(pick)
                return Ref(Binding(self._keys[site], pick), span=span, shape=Shape.PICK)
        site = self._site(self._draws) if row.family in (Family.DRAW, Family.CHANCE, Family.TOP) else -1
        shape = Shape.VECTOR if row.family in _VECTORS else Shape.SCALAR
        if row.family is Family.COUNT and not plain:
            plain = (Const(True, span=span, shape=Shape.SCALAR),)
        return Call(row, plain, self._level, where, named.get("default"), thens, site, span=span, shape=shape)

    def _site(self, keys: list[str]) -> int:
        """The index of a new pick or draw among *keys*; its key names its `let` or rule and survives other edits."""
        ordinal = 1 + sum(key.partition(".")[0] == self._owner for key in keys)
        keys.append(self._owner if ordinal == 1 else f"{self._owner}.{ordinal}")
        return len(keys) - 1


def _bound(name: str, value: Term) -> Reading:
    """Bind *value* to *name*: it is computed once, or copied if it is a constant, a feature or a request field."""
    if isinstance(value, Const | Column | RequestValue):
        return lambda span: replace(value, span=span)
    binding = value.binding if isinstance(value, Ref) else Binding(name, value)
    return lambda span: Ref(binding, span=span, shape=value.shape)


def _op(name: str, span: Span, *operands: Term) -> Term:
    """An operation; its result where constants and parameters determine it."""
    constants = [operand.value for operand in operands if isinstance(operand, Const)]
    first, rest = operands[0], operands[1:]
    if isinstance(first, Const):
        match name:
            case "and":
                return rest[0] if first.value else first
            case "or":
                return first if first.value else rest[0]
            case "if":
                return rest[0] if first.value else rest[1]
    if len(constants) == len(operands):
        result = compute(name, constants)
        if result is not None:
            return Const(result, span=span, shape=Shape.SCALAR)
    if name in ("and", "or") and first.shape is Shape.SCALAR and rest[0].shape is Shape.VECTOR:
        # A single truth value on the left decides whether the other side is computed.
        settled = Const(name == "or", span=span, shape=Shape.SCALAR)
        branches = (rest[0], settled) if name == "and" else (settled, rest[0])
        return Op("if", (first, *branches), span=span, shape=Shape.VECTOR)
    if name == "if" and rest[0].shape is Shape.PICK:
        return Op(name, operands, span=span, shape=Shape.PICK)
    is_vector = any(operand.shape is Shape.VECTOR for operand in operands)
    return Op(name, operands, span=span, shape=Shape.VECTOR if is_vector else Shape.SCALAR)


def compute(name: str, constants: list[Any]) -> Any:
    """The result of an operation on constants; None if it is computed at each decision."""
    match name, constants:
        case "not", [value]:
            return not value
        case "neg", [value]:
            return -value
        case "divides", [value]:
            return abs(value) >= SMALLEST_DIVISOR
        case "set", _:
            return frozenset(constants)
        case "/", [_, 0]:
            return None
        case _, [left, right] if name in _FOLD:
            return _FOLD[name](left, right)
    return None
