"""The type of every expression: kinds, shapes, units and intervals; a definition is typed anew at each call.

Calls of built-ins are in `check_call`, statements in `check_statement`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from smetric.policy import tree
from smetric.policy.builtin import BUILTINS
from smetric.policy.check_call import Calls
from smetric.policy.check_operator import Operators
from smetric.policy.check_unit import Units
from smetric.policy.findings import Findings, Stop
from smetric.policy.interval import FALSE, TRUE, Interval
from smetric.policy.names import Names, looked_up
from smetric.policy.span import Span
from smetric.policy.suggestion import comparison, did_you_mean
from smetric.policy.types import BROKEN, Sort, Type, of_word
from smetric.policy.unit import parse_unit
from smetric.policy.vocabulary import Vocabulary

#: Nodes of a policy, definitions expanded, tests not counted.
MAX_NODES = 500
#: How deep expressions may nest, chains of operators and definitions included.
MAX_DEPTH = 100


@dataclass(slots=True)
class Budget:
    """How large a policy has become so far: nodes counted, and how deep the checker is in an expression."""

    nodes: int = 0
    depth: int = 0


Arguments = Mapping[str, Type]
_NONE: Arguments = {}


class Expressions:
    """Types expressions, one after the other, and reports what is wrong with them.

    Args:
        names: names of the file defined so far.
        vocabulary: features and request fields.
        findings: where errors go.
        features: the feature that each feature parameter stands for.
    """

    def __init__(self, names: Names, vocabulary: Vocabulary, findings: Findings, features: Mapping[str, str]) -> None:
        self._names = names
        self._vocabulary = vocabulary
        self._findings = findings
        self.units = Units(names, vocabulary, findings, features)
        self._operators = Operators(self.units, findings)
        self._calls = Calls(self, findings)
        self._budget = Budget()
        self._expanding: list[tree.Def] = []
        #: Those of the libraries that names are taken from, by name: they type the bodies of what is taken.
        self.libraries: dict[str, Expressions] = {}
        #: What is the same in every decision, outside definitions, which are for more than one call.
        self.constants: list[tuple[Span, Type, str]] = []

    def infer(self, expr: tree.Expr, arguments: Arguments = _NONE) -> Type:
        """The type of *expr*, where *arguments* are those of the definition it stands in.

        Raises:
            Stop: the policy is too large.
        """
        self.count(expr.span)
        self._budget.depth += 1
        if self._budget.depth > MAX_DEPTH:
            self._findings.error(
                "too-deep", expr.span, f"this nests deeper than {MAX_DEPTH} operators", "name its parts with `let`"
            )
            raise Stop
        result = self._infer(expr, arguments)
        self._budget.depth -= 1
        if result.sort is Sort.NUMBER and not result.interval.bounded:
            self._findings.error("overflow", expr.span, "this may grow past 1e300", "bound its parts with clamp(…)")
            return BROKEN
        return result

    def count(self, span: Span) -> None:
        """Count one more node of the policy.

        Raises:
            Stop: there are too many.
        """
        self._budget.nodes += 1
        if self._budget.nodes > MAX_NODES:
            message = f"this file has more than {MAX_NODES} parts, its definitions expanded"
            self._findings.error("too-large", span, message, "name what repeats with `let`; divide a library")
            raise Stop

    def same(self, span: Span, found: Type, message: str) -> None:
        """Keep in mind, for a warning, what is the same in every decision."""
        if not self._expanding:
            self.constants.append((span, found, message))

    def condition(self, expr: tree.Expr, arguments: Arguments = _NONE) -> Type:
        """The type of a condition, which must be one truth value."""
        found = self.infer(expr, arguments)
        if not found.broken and found.sort is not Sort.BOOL:
            message = f"a condition is a truth value, but this is {found}"
            self._findings.error("condition", expr.span, message, comparison(found.sort))
            return BROKEN
        if found.vector:
            message = "a condition is one truth value, but this is bool per instance"
            self._findings.error("condition", expr.span, message, "wrap it in any(...) or all(...)")
            return BROKEN
        return found

    def seconds(self, expr: tree.Expr) -> Type:
        """The type of a single number of seconds."""
        found = self.infer(expr)
        if found.vector and not found.broken:
            help_text = "make one of it: min(…), mean(…) or max(…)"
            self._findings.error("duration", expr.span, f"expected one duration, found {found}", help_text)
            return BROKEN
        return self.units.duration(found, expr.span)

    def _infer(self, expr: tree.Expr, arguments: Arguments) -> Type:
        match expr:
            case tree.Number():
                unit = self.units.of_literal(expr)
                if expr.unit and unit is None:
                    return BROKEN
                return Type(Sort.NUMBER, unit=unit, interval=Interval(expr.value, expr.value))
            case tree.Text():
                return Type(Sort.STRING)
            case tree.Truth(value=value):
                return Type(Sort.BOOL, interval=TRUE if value else FALSE)
            case tree.Name():
                return self._name(expr, arguments)
            case tree.Field():
                return self._field(expr)
            case tree.SetOf():
                return self._set(expr, arguments)
            case tree.Unary():
                return self._operators.unary(expr, self.infer(expr.operand, arguments))
            case tree.Binary():
                left, right = self.infer(expr.left, arguments), self.infer(expr.right, arguments)
                return self._operators.binary(expr, left, right)
            case tree.IfElse():
                parts = [self.infer(part, arguments) for part in (expr.condition, expr.then, expr.otherwise)]
                if parts[0].decided:
                    self.same(expr.condition.span, parts[0], "this condition is the same in every decision")
                return self._operators.if_else(expr, *parts)
            case tree.At():
                return self._at(expr, arguments)
            case tree.Call():
                return self._call(expr, arguments)
        raise AssertionError(f"no such expression: {type(expr).__name__}")

    # ── names ──

    def _name(self, expr: tree.Name, arguments: Arguments) -> Type:
        name = expr.name
        if name in arguments:
            return arguments[name]
        found = self._names.find(name, self._horizon)
        if found is not None:
            if isinstance(found.statement, tree.Def):
                self._findings.error("unknown-name", expr.span, f"`{name}` is a definition", f"call it: {name}(…)")
                return BROKEN
            return found.type
        if name in self._vocabulary.features:
            return self.feature(name)
        self._names.unknown(name, expr.span, arguments)
        return BROKEN

    def feature(self, name: str) -> Type:
        """The type of a feature."""
        word = self._vocabulary.features[name]
        made = of_word(word, parse_unit(word.unit))
        bound = self._vocabulary.request.get(word.at_most)
        if bound is not None:
            made = replace(made, interval=Interval(word.low, min(word.high, bound.high)))
        return replace(made, must=frozenset((name,)), may=frozenset((name,)))

    def _field(self, expr: tree.Field) -> Type:
        word = self._vocabulary.request.get(expr.name)
        place = Span(expr.span.end - len(expr.name), expr.span.end)
        if expr.base != "req":
            base = Span(expr.span.start, expr.span.start + len(expr.base))
            help_text = "only the request has fields: req.turn, req.prompt_len, …"
            if expr.name in self._vocabulary.features:
                help_text = f"a feature of one instance is looked up: `{expr.name}[{expr.base}]`"
            self._findings.error("unknown-name", base, f"`{expr.base}` has no fields", help_text)
            return BROKEN
        if word is None:
            if expr.name in self._vocabulary.features:
                help_text = f"`{expr.name}` belongs to the instances: write it without `req.`"
            else:
                help_text = did_you_mean(expr.name, self._vocabulary.request)
            self._findings.error("unknown-field", place, f"a request has no `{expr.name}`", help_text)
            return BROKEN
        read = frozenset((f"req.{expr.name}",))
        return replace(of_word(word, parse_unit(word.unit)), must=read, may=read)

    # ── sets and look-ups ──

    def _set(self, expr: tree.SetOf, arguments: Arguments) -> Type:
        items = [self.infer(item, arguments) for item in expr.items]
        for item, found in zip(expr.items, items, strict=True):
            if not found.broken and (found.sort is not Sort.STRING or found.vector):
                self._findings.error("set", item.span, f"a set holds strings, not {found}")
        return Type(Sort.SET).reading(*items)

    def _at(self, expr: tree.At, arguments: Arguments) -> Type:
        vector, pick = self.infer(expr.vector, arguments), self.infer(expr.pick, arguments)
        if vector.broken or pick.broken:
            return BROKEN
        if vector.sort is Sort.INSTANCE or not vector.vector:
            message = f"only a value per instance can be looked up, and this is {vector}"
            self._findings.error("lookup", expr.vector.span, message)
            return BROKEN
        if pick.sort is not Sort.INSTANCE:
            message = f"a value is looked up by an instance, not by {pick}"
            self._findings.error("lookup", expr.pick.span, message, "e.g. l[argmin(l)]")
            return BROKEN
        if pick.maybe:
            self._findings.error(
                "maybe", expr.pick.span, "this instance may be absent", "give it a second choice: first(…, …)"
            )
            return BROKEN
        return replace(vector, vector=False).reading(vector, pick)

    # ── calls ──

    @property
    def _horizon(self) -> int | None:
        """Where the definition being expanded starts: its body sees only names above it."""
        return self._expanding[-1].span.start if self._expanding else None

    def _call(self, call: tree.Call, arguments: Arguments) -> Type:
        found = self._names.find(call.function, self._horizon)
        if found is not None and isinstance(found.statement, tree.Def):
            home = self if found.origin is None else self.libraries[found.origin.library]
            return self._expand(call, found.statement, arguments, home)
        builtin = BUILTINS.get(call.function)
        if builtin is not None:
            return self._calls.infer(call, builtin, arguments)
        for argument in call.arguments:
            self.infer(argument.value, arguments)
        if found is None:
            inside = {definition.name for definition in self._expanding}
            self._names.unknown_function(call.function, call.name_span, inside)
        elif found.statement is not None:
            message = f"`{call.function}` is a value, not a function"
            self._findings.error("unknown-function", call.name_span, message, looked_up(call.function))
        return BROKEN

    def _expand(self, call: tree.Call, definition: tree.Def, arguments: Arguments, home: Expressions) -> Type:
        given = [self.infer(argument.value, arguments) for argument in call.arguments]
        for argument in call.arguments:
            if argument.name or argument.where is not None:
                message = f"`{call.function}` is a definition: its arguments have no names and no `where`"
                self._findings.error("arguments", argument.span, message)
                return BROKEN
        wanted = [argument.name for argument in definition.arguments]
        if len(given) != len(wanted):
            listed = f"{len(wanted)} argument(s) ({', '.join(wanted)})"
            message = f"`{call.function}` takes {listed}, not {len(given)}"
            self._findings.error("arguments", call.span, message)
            return BROKEN
        with self._findings.inside(call):
            return home.body(definition, dict(zip(wanted, given, strict=True)), self._budget)

    def body(self, definition: tree.Def, arguments: Arguments, budget: Budget | None = None) -> Type:
        """The type of the body of a definition of this file, counted into *budget* where another file calls it."""
        own = self._budget
        self._budget = budget or own
        self._expanding.append(definition)
        try:
            return self.infer(definition.body, arguments)
        finally:
            self._expanding.pop()
            self._budget = own
