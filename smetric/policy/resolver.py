"""Turns a checked file into a plan: resolves names, expands definitions, puts parameters in, folds constants.

Nothing is judged here: what the checker refuses never comes this far.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from smetric.policy import tree
from smetric.policy.guard import HELD, conjuncts, label_of
from smetric.policy.parameter import Parameter
from smetric.policy.plan import (
    At,
    Binding,
    Column,
    Const,
    Guard,
    Norm,
    Op,
    Pick,
    Plan,
    Provenance,
    Reduce,
    Ref,
    RequestValue,
    Shape,
    StatementKind,
    Step,
    Term,
    count_uses,
)
from smetric.policy.vocabulary import Vocabulary

_REDUCTIONS = frozenset({"mean", "min", "max", "sum", "any", "all", "count"})
_PICKS = frozenset({"argmin", "argmax", "rr_argmin", "rr_argmax"})
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
}


class _Picks:
    """The picks of a file: each has a site, and a key that survives unrelated edits."""

    def __init__(self) -> None:
        self.bindings: list[Binding] = []
        self.keys: list[str] = []

    def add(self, owner: str) -> tuple[int, str]:
        """Site and key of the next pick of *owner*, the `let` or the rule that it stands in."""
        ordinal = 1 + sum(key.partition(".")[0] == owner for key in self.keys)
        key = owner if ordinal == 1 else f"{owner}.{ordinal}"
        self.keys.append(key)
        return len(self.keys) - 1, key


class Resolver:
    """One pass over a file, top to bottom.

    Args:
        file: a file that the checker accepted.
        vocabulary: the words it may read.
        parameters: the checker's account of each `param`.
    """

    def __init__(self, file: tree.File, vocabulary: Vocabulary, parameters: Mapping[str, Parameter]) -> None:
        self._file = file
        self._features = vocabulary.features
        self._parameters = parameters
        self._names: dict[str, Callable[[tree.Span], Term]] = {}
        self._defs: dict[str, tree.Def] = {}
        self._picks = _Picks()
        self._level = 0
        self._owner = ""

    def plan(self) -> Plan:
        """The plan of the file."""
        steps: list[Step] = []
        for statement in self._file.statements:
            if isinstance(statement, tree.Param):
                self._names[statement.name] = self._parameter(statement.name)
            elif isinstance(statement, tree.Let):
                self._owner = statement.name
                self._names[statement.name] = _bound(statement.name, self._term(statement.value, {}))
            elif isinstance(statement, tree.Def):
                self._defs[statement.name] = statement
            elif isinstance(statement, tree.Filter | tree.Route | tree.Reject | tree.Hold):
                steps.append(self._step(statement, steps))
        count_uses(
            [guard.value for step in steps for guard in step.guards]
            + [step.value for step in steps if step.value is not None]
        )
        return Plan(tuple(steps), tuple(self._picks.bindings), tuple(self._picks.keys))

    def _parameter(self, name: str) -> Callable[[tree.Span], Term]:
        parameter = self._parameters[name]
        if parameter.is_feature:
            return lambda span: Column(str(parameter.value), span=span, shape=Shape.VECTOR)
        return lambda span: Const(parameter.value, span=span, shape=Shape.SCALAR)

    def _step(self, statement: tree.Filter | tree.Route | tree.Reject | tree.Hold, before: list[Step]) -> Step:
        value: Term | None
        status, message = 0, ""
        if isinstance(statement, tree.Filter):
            kind = StatementKind(statement.word)
        elif isinstance(statement, tree.Route):
            kind = StatementKind.ROUTE
        elif isinstance(statement, tree.Hold):
            kind = StatementKind.HOLD
        else:
            kind = StatementKind.REJECT
        if statement.label is not None:
            label = statement.label.name
        else:
            label = f"{kind.value}_{1 + sum(step.kind is kind for step in before)}"
        self._owner = label
        guards = tuple(
            Guard(label_of(part, self._file.text, self._defs), self._term(part, {}))
            for part in conjuncts(statement.when)
        )
        if isinstance(statement, tree.Filter):
            value = self._term(statement.mask, {})
            self._level += 1
        elif isinstance(statement, tree.Route):
            value = self._term(statement.pick, {})
        elif isinstance(statement, tree.Hold):
            patience = _bound("patience", self._term(statement.patience, {}))
            held = RequestValue("held", span=statement.patience.span, shape=Shape.SCALAR)
            value = patience(statement.patience.span)
            guards += (Guard(HELD, _op("<", statement.patience.span, held, patience(statement.patience.span))),)
        else:
            value = None if statement.retry is None else self._term(statement.retry, {})
            status, message = int(statement.status.value), statement.message.value
        return Step(kind, label, statement.span, guards, value, status, message)

    # ── expressions ──────────────────────────────────────────────────────────

    def _term(self, expr: tree.Expr, arguments: Mapping[str, Callable[[tree.Span], Term]]) -> Term:
        span = expr.span
        match expr:
            case tree.Number(value=value) | tree.Text(value=value) | tree.Truth(value=value):
                return Const(value, span=span, shape=Shape.SCALAR)
            case tree.Name(name=name):
                return self._named(name, span, arguments)
            case tree.Field(name=name):
                return RequestValue(name, span=span, shape=Shape.SCALAR)
            case tree.SetOf(items=items):
                return _set([self._term(item, arguments) for item in items], span)
            case tree.Unary(op=op, operand=operand):
                return _op("neg" if op == "-" else op, span, self._term(operand, arguments))
            case tree.Binary(op=op, left=left, right=right):
                return _op(op, span, self._term(left, arguments), self._term(right, arguments))
            case tree.IfElse(then=then, condition=condition, otherwise=otherwise):
                return _op("if", span, *(self._term(part, arguments) for part in (condition, then, otherwise)))
            case tree.At(vector=vector, pick=pick):
                return At(self._term(vector, arguments), self._term(pick, arguments), span=span, shape=Shape.SCALAR)
            case tree.Call():
                return self._call(expr, arguments)
        raise AssertionError(f"no such expression: {type(expr).__name__}")

    def _named(self, name: str, span: tree.Span, arguments: Mapping[str, Callable[[tree.Span], Term]]) -> Term:
        if name in arguments:
            return arguments[name](span)
        if name in self._names:
            return self._names[name](span)
        return Column(self._features[name].name, span=span, shape=Shape.VECTOR)

    def _call(self, call: tree.Call, arguments: Mapping[str, Callable[[tree.Span], Term]]) -> Term:
        definition = self._defs.get(call.function)
        if definition is not None:
            given = [self._term(argument.value, arguments) for argument in call.arguments]
            scope = {
                name.name: _bound(name.name, value) for name, value in zip(definition.arguments, given, strict=True)
            }
            return self._term(definition.body, scope)
        named = {a.name: self._term(a.value, arguments) for a in call.arguments if a.name and a.name != "then"}
        thens = tuple(self._term(a.value, arguments) for a in call.arguments if a.name == "then")
        plain = [self._term(argument.value, arguments) for argument in call.arguments if not argument.name]
        masks = [self._term(argument.where, arguments) for argument in call.arguments if argument.where is not None]
        where = masks[0] if masks else None
        return self._built_in(call.function, call.span, plain, where, named.get("default"), thens)

    def _built_in(
        self,
        function: str,
        span: tree.Span,
        plain: list[Term],
        where: Term | None,
        default: Term | None,
        thens: tuple[Term, ...],
    ) -> Term:
        if function in _REDUCTIONS:
            value = plain[0] if plain else Const(True, span=span, shape=Shape.SCALAR)
            return Reduce(function, value, where, default, self._level, span=span, shape=Shape.SCALAR)
        if function in _PICKS:
            site, key = self._picks.add(self._owner)
            pick = Pick(function, plain[0], thens, where, self._level, site, span=span, shape=Shape.PICK)
            binding = Binding(key, pick)
            self._picks.bindings.append(binding)
            return Ref(binding, span=span, shape=Shape.PICK)
        match function:
            case "least" | "greatest":
                term = plain[0]
                for other in plain[1:]:
                    term = _op(function, span, term, other)
                return term
            case "clamp":
                value, low, high = plain
                return _op("least", span, _op("greatest", span, value, low), high)
            case "abs":
                return _op("abs", span, *plain)
            case "ratio":
                assert default is not None
                dividend, divisor = plain
                shared = _bound("divisor", divisor)
                zero = Const(0, span=span, shape=Shape.SCALAR)
                return _op(
                    "if", span, _op("!=", span, shared(span), zero), _op("/", span, dividend, shared(span)), default
                )
            case "norm":
                return Norm(plain[0], self._level, span=span, shape=Shape.VECTOR)
            case "known" | "age":
                return Provenance(function, plain[0], span=span, shape=Shape.VECTOR)
            case "fresh":
                age = Provenance("age", plain[0], span=span, shape=Shape.VECTOR)
                known = Provenance("known", plain[0], span=span, shape=Shape.VECTOR)
                return _op("and", span, known, _op("<=", span, age, plain[1]))
            case "first":
                term = plain[-1]
                for better in reversed(plain[:-1]):
                    somebody = Op("somebody", (better,), span=better.span, shape=Shape.SCALAR)
                    term = Op("if", (somebody, better, term), span=span, shape=Shape.PICK)
                return term
        raise AssertionError(f"no such built-in: {function}")


def _bound(name: str, value: Term) -> Callable[[tree.Span], Term]:
    """How *name* reads from now on: constants, features and references pass through, all else is computed once."""
    if isinstance(value, Const):
        return lambda span: Const(value.value, span=span, shape=value.shape)
    if isinstance(value, Column):
        return lambda span: Column(value.feature, span=span, shape=value.shape)
    if isinstance(value, RequestValue):
        return lambda span: RequestValue(value.name, span=span, shape=value.shape)
    binding = value.binding if isinstance(value, Ref) else Binding(name, value)
    return lambda span: Ref(binding, span=span, shape=value.shape)


def _set(items: list[Term], span: tree.Span) -> Term:
    if all(isinstance(item, Const) for item in items):
        members = frozenset(item.value for item in items if isinstance(item, Const))
        return Const(members, span=span, shape=Shape.SCALAR)
    return Op("set", tuple(items), span=span, shape=_widest(items))


def _widest(terms: list[Term]) -> Shape:
    return Shape.VECTOR if any(term.shape is Shape.VECTOR for term in terms) else Shape.SCALAR


def _op(op: str, span: tree.Span, *operands: Term) -> Term:
    """An operation; one whose result is plain already, because a parameter settles it, becomes that result."""
    first = operands[0]
    if isinstance(first, Const):
        settled = _settled(op, first.value, operands)
        if settled is not None:
            return settled
        if op == "not":
            return Const(not first.value, span=span, shape=Shape.SCALAR)
        if op == "neg":
            return Const(-first.value, span=span, shape=Shape.SCALAR)
        if op in _FOLD and isinstance(operands[1], Const) and (op != "/" or operands[1].value):
            return Const(_FOLD[op](first.value, operands[1].value), span=span, shape=Shape.SCALAR)
    if op == "if" and operands[1].shape is Shape.PICK:
        return Op(op, operands, span=span, shape=Shape.PICK)
    if op in ("and", "or") and first.shape is Shape.SCALAR and operands[1].shape is Shape.VECTOR:
        # One truth value on the left decides whether the other side is looked at.
        settled = Const(op == "or", span=span, shape=Shape.SCALAR)
        branches = (operands[1], settled) if op == "and" else (settled, operands[1])
        return Op("if", (first, *branches), span=span, shape=Shape.VECTOR)
    return Op(op, operands, span=span, shape=_widest(list(operands)))


def _settled(op: str, first: Any, operands: tuple[Term, ...]) -> Term | None:
    """What a constant first operand makes of `and`, `or` and `if`: one of the operands, or None."""
    match op:
        case "and":
            return operands[1] if first else operands[0]
        case "or":
            return operands[0] if first else operands[1]
        case "if":
            return operands[1] if first else operands[2]
    return None
