"""Plain reference implementation of the language: every statement, in order, eagerly, over trees.

Compiled policies must agree with it. It takes the names of picks and draws from the plan, so that ties break alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from smetric.policy import Policy, Snapshot, Vocabulary, tree
from smetric.policy.builtin import drawn, drawn_of, fraction, rotated, stream_of
from smetric.policy.guard import conjuncts
from smetric.policy.plan import Call, walk
from smetric.policy.vocabulary import key_of

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "in": lambda a, b: a in b,
    "not in": lambda a, b: a not in b,
}
_REDUCE: dict[str, Callable[..., Any]] = {
    "mean": lambda values: min(max(math.fsum(values) / len(values), min(values)), max(values)),
    "min": min,
    "max": max,
    "sum": math.fsum,
    "std": lambda values: statistics.pstdev(values) if values else 0.0,
    "any": any,
    "all": all,
}


@dataclass
class Value:
    """One value, or a list with one per candidate, and the inputs it was computed from."""

    data: Any
    fields: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()

    def at(self, i: int) -> Any:
        return self.data[i] if isinstance(self.data, list) else self.data


class Reference:
    """One policy file on one snapshot."""

    def __init__(
        self,
        policy: Policy,
        file: tree.File,
        vocabulary: Vocabulary,
        snapshot: Snapshot,
        request: Any,
        cursors: Mapping[str, str],
        seed: int,
    ) -> None:
        self.vocabulary, self.snapshot, self.request = vocabulary, snapshot, request
        self.cursors, self.seed, self.file = cursors, seed, file
        self.n = len(snapshot.ids)
        self.left = list(range(self.n))
        self.names: dict[str, Value] = {}
        self.defs: dict[str, tree.Def] = {}
        self.keys = {pick.span.start: key for pick, key in zip(policy.plan.picks, policy.plan.keys, strict=True)}
        self.draws = {
            term.span.start: stream_of(f"draw {policy.plan.draws[term.site]}")
            for root in policy.plan.terms
            for term in walk(root)
            if isinstance(term, Call) and term.site >= 0
        }

    def decide(self) -> tuple[str, str | None]:
        """The index of the statement that fires, and the instance."""
        number = -1
        for statement in self.file.statements:
            match statement:
                case tree.Param(name=name, value=value):
                    self.names[name] = self.value(value, {})
                case tree.Let(name=name, value=value):
                    self.names[name] = self.value(value, {})
                case tree.Def(name=name):
                    self.defs[name] = statement
                case tree.Rule(word="keep" | "prefer" as word, value=tree.Expr() as mask, when=when):
                    number += 1
                    if self.holds(when):
                        kept = self.value(mask, {})
                        left = [i for i in self.left if kept.at(i)]
                        if not left and word == "keep":
                            return str(number), None
                        self.left = left or self.left
                case tree.Rule(word="route", value=tree.Expr() as pick, when=when):
                    number += 1
                    index = self.value(pick, {}).data
                    if self.holds(when) and index >= 0:
                        return str(number), self.snapshot.ids[index]
                case tree.Rule(word="hold", value=tree.Expr() as patience, when=when):
                    number += 1
                    if self.holds(when) and self.request.held < self.value(patience, {}).data:
                        return str(number), None
                case tree.Rule(when=when):
                    number += 1
                    if self.holds(when):
                        return str(number), None
        raise AssertionError("nothing decided")

    def holds(self, when: tree.Expr | None) -> bool:
        guards = [self.value(guard, {}) for guard in conjuncts(when)]
        return all(
            guard.data and not any(getattr(self.request, name) is None for name in guard.fields) for guard in guards
        )

    def value(self, expr: tree.Expr, scope: Mapping[str, Value]) -> Value:
        match expr:
            case tree.Number(value=value) | tree.Text(value=value) | tree.Truth(value=value):
                return Value(value)
            case tree.Name(name=name):
                if name in scope:
                    return scope[name]
                if name in self.names:
                    return self.names[name]
                return Value(self.snapshot.columns[name], features=frozenset({name}))
            case tree.FieldExpr(name=name):
                value = getattr(self.request, name)
                return Value(self.vocabulary.request[name].default if value is None else value, frozenset({name}))
            case tree.SetOf(items=items):
                return self.each(lambda *xs: set(xs), *(self.value(item, scope) for item in items))
            case tree.Unary(op=op, operand=operand):
                return self.each(lambda x: not x if op == "not" else -x, self.value(operand, scope))
            case tree.Binary(op=op, left=left, right=right):
                return self.each(_BINARY[op], self.value(left, scope), self.value(right, scope))
            case tree.IfElse(then=then, condition=condition, otherwise=otherwise):
                parts = [self.value(part, scope) for part in (condition, then, otherwise)]
                return self.each(lambda c, a, b: a if c else b, *parts)
            case tree.AtExpr(vector=vector, pick=pick):
                return self.each(lambda v: v, self.value(vector, scope), at=self.value(pick, scope))
            case tree.CallExpr():
                return self.call(expr, scope)
        raise AssertionError(expr)

    def each(self, function: Callable[..., Any], *operands: Value, at: Value | None = None) -> Value:
        fields = frozenset().union(*(o.fields for o in (*operands, *((at,) if at else ()))))
        features = frozenset().union(*(o.features for o in operands))
        if at is not None:
            return Value(operands[0].at(at.data), fields, features)
        if any(isinstance(operand.data, list) for operand in operands):
            return Value([function(*(o.at(i) for o in operands)) for i in range(self.n)], fields, features)
        return Value(function(*(operand.data for operand in operands)), fields, features)

    def call(self, call: tree.CallExpr, scope: Mapping[str, Value]) -> Value:
        if call.function in self.defs:
            definition = self.defs[call.function]
            given = [self.value(argument.value, scope) for argument in call.arguments]
            return self.value(definition.body, dict(zip((a.name for a in definition.arguments), given, strict=True)))
        plain = [self.value(a.value, scope) for a in call.arguments if not a.name]
        where = next((self.value(a.where, scope) for a in call.arguments if a.where is not None), Value(True))
        thens = [self.value(a.value, scope) for a in call.arguments if a.name == "then"]
        default = next((self.value(a.value, scope) for a in call.arguments if a.name == "default"), Value(None))
        fields = frozenset().union(*(value.fields for value in (*plain, where, *thens, default)))
        features = frozenset().union(*(value.features for value in (*plain, where, *thens, default)))
        those = [i for i in self.left if where.at(i)]
        over = [plain[0].at(i) for i in those] if plain else [True] * len(those)
        name = call.function
        result: Any
        if name in ("mean", "min", "max"):
            reduce = _REDUCE[name]
            result = reduce(over) if over else default.data
        elif name == "quantile":
            result = _quantile(over, plain[1].data) if over else default.data
        elif name in ("sum", "std", "any", "all"):
            result = _REDUCE[name](over)
        elif name == "count":
            result = over.count(True)
        elif name in ("least", "greatest"):
            return self.each(_REDUCE["min" if name == "least" else "max"], *plain)
        elif name == "clamp":
            return self.each(lambda x, low, high: min(max(x, low), high), *plain)
        elif name == "abs":
            return self.each(abs, *plain)
        elif name == "ratio":
            return self.each(lambda a, b, d: a / b if abs(b) >= 1e-9 else d, *plain, default)
        elif name == "norm":
            low, high = min(over), max(over)
            return self.each(lambda v: min(max(0.0, (v - low) / (high - low)), 1.0) if high > low else 0.0, plain[0])
        elif name == "share":
            total = math.fsum(over)
            return self.each(lambda v: min(v / total, 1.0) if total else 1 / len(over), plain[0])
        elif name == "rank":
            return self.each(lambda v: 1 + sum(other < v for other in over), plain[0])
        elif name == "draw":
            chosen = drawn_of(those, plain[0].data, self.snapshot.ids, self.seed, self.draw(call))
            result = [i in chosen for i in range(self.n)]
        elif name == "top":
            chosen = self.top(call, plain[0], int(plain[1].data), thens, those)
            result = [i in chosen for i in range(self.n)]
        elif name == "chance":
            result = fraction(self.seed, self.draw(call)) < plain[0].data
        elif name == "hrw":
            own = key_of(plain[0].data or "") if plain[0].data else self.seed
            result = [fraction(own, key_of(ident)) for ident in self.snapshot.ids]
        elif name == "bucket":
            result = fraction(key_of(plain[0].data) if plain[0].data else self.seed, key_of("bucket"))
        elif name in ("softmin", "softmax", "sample"):
            temperature = next((self.value(a.value, scope).data for a in call.arguments if a.name), None)
            result = self.lottery(call, plain[0], temperature, those)
        elif name in ("known", "fresh", "age"):
            known = [all(self.snapshot.is_known(f)[i] for f in plain[0].features) for i in range(self.n)]
            age = [max([0.0, *(self.snapshot.age(f)[i] for f in plain[0].features)]) for i in range(self.n)]
            result = {"known": known, "age": age}.get(name) or [
                k and a <= plain[1].data for k, a in zip(known, age, strict=True)
            ]
        elif name == "first":
            result = next((pick.data for pick in plain if pick.data >= 0), -1)
        else:
            within = next((self.value(a.value, scope).data for a in call.arguments if a.name == "within"), 0)
            result = self.pick(call, plain[0], thens, within, those)
        return Value(result, fields, features)

    def draw(self, call: tree.CallExpr) -> int:
        return self.draws.get(call.span.start, 0)

    def top(self, call: tree.CallExpr, value: Value, number: int, thens: list[Value], those: list[int]) -> list[int]:
        def place(i: int) -> tuple[Any, ...]:
            return (-value.at(i), *(then.at(i) for then in thens))

        order = sorted(those, key=place)
        wanted = min(max(1, number), len(order))
        certain = [i for i in order if place(i) < place(order[wanted - 1])]
        tied = [i for i in order if place(i) == place(order[wanted - 1])]
        return certain + drawn_of(tied, wanted - len(certain), self.snapshot.ids, self.seed, self.draw(call))

    def lottery(self, call: tree.CallExpr, value: Value, temperature: float | None, those: list[int]) -> int:
        if not those:
            return -1
        ids, stream = self.snapshot.ids, stream_of(self.keys[call.span.start])
        weights = {i: max(0.0, float(value.at(i))) for i in those}
        if temperature is not None:
            sign = 1 if call.function == "softmin" else -1
            best = min(sign * value.at(i) for i in those)
            far = {i: sign * value.at(i) - best for i in those}
            weights = {i: math.exp(-far[i] / temperature) if temperature else float(far[i] == 0) for i in those}
            if not temperature:
                return self.among([i for i in those if weights[i]], stream)
        if not any(weights.values()) or not isinstance(value.data, list):
            return self.among(those, stream)
        left = fraction(self.seed, stream) * sum(weights.values())
        for i in sorted(those, key=lambda i: ids[i]):
            left -= weights[i]
            if left < 0 and weights[i]:
                return i
        return max((i for i in those if weights[i]), key=lambda i: ids[i])

    def pick(self, call: tree.CallExpr, value: Value, thens: list[Value], within: float, those: list[int]) -> int:
        if not those:
            return -1
        high = call.function.endswith("max")
        best = (max if high else min)(value.at(i) for i in those)
        tied = [i for i in those if (value.at(i) >= best - within if high else value.at(i) <= best + within)]
        for criterion in thens:
            target = min(criterion.at(i) for i in tied)
            tied = [i for i in tied if criterion.at(i) == target]
        key = self.keys[call.span.start]
        if call.function.startswith("rr_"):
            ids = self.snapshot.ids
            return ids.index(rotated([ids[i] for i in tied], self.cursors.get(key, "")))
        return self.among(tied, stream_of(key))

    def among(self, tied: list[int], stream: int) -> int:
        ids = self.snapshot.ids
        return ids.index(drawn([ids[i] for i in tied], self.seed, stream))


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return float(low + (high - low) * (place - math.floor(place)))
