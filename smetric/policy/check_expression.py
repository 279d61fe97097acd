"""Types of expressions: kind, unit, interval, one value or one per instance, and what is read.

A definition is typed anew at each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from smetric.policy import tree
from smetric.policy.builtin import BUILTINS
from smetric.policy.check_call import Calls
from smetric.policy.diagnostic import Span, quote
from smetric.policy.scope import CheckEnded, Findings, Names, Units, describe
from smetric.policy.types import (
    BROKEN,
    FALSE,
    PLAIN,
    TRUE,
    TRUTH,
    ZERO,
    Interval,
    Sort,
    Type,
    comparison,
    did_you_mean,
    exact,
    greatest,
    hull,
    least,
    looked_up,
    of_word,
    parse_unit,
)
from smetric.policy.vocabulary import Vocabulary

_SCALE = "put both on one scale first, e.g. norm(…) of each, or divide by a rate"
_ORDER = frozenset({"<", "<=", ">", ">="})
_PLURALS = {Sort.SET: "sets", Sort.STRING: "strings", Sort.BOOL: "truth values"}


class Operators:
    """Types of operations from the types of their operands."""

    def __init__(self, units: Units, findings: Findings) -> None:
        self._units = units
        self._findings = findings
        #: By the place of a comparison that is the same in every decision, what to do about it.
        self.advice: dict[Span, str] = {}

    def unary(self, expr: tree.Unary, found: Type) -> Type:
        """Return the type of `-x` or `not x`."""
        if found.broken:
            return BROKEN
        if expr.op == "not" and found.sort is not Sort.BOOL:
            message = f"`not` takes a truth value, found {found}"
            return self._findings.error("operand", expr.operand.span, message, comparison(found.sort))
        if expr.op == "-" and found.sort is not Sort.NUMBER:
            return self._findings.error("operand", expr.operand.span, f"`-` takes a number, found {found}")
        return replace(found, interval=TRUE - found.interval if expr.op == "not" else -found.interval)

    def binary(self, expr: tree.Binary, left: Type, right: Type) -> Type:
        """Return the type of an operation with two operands."""
        if expr.op in ("and", "or"):
            return self._logic(expr, left, right)
        if left.broken or right.broken:
            return BROKEN
        if expr.op in ("in", "not in"):
            return self._member(expr, left, right)
        if expr.op in ("==", "!=") or expr.op in _ORDER:
            return self._compare(expr, left, right)
        return self._arithmetic(expr, left, right)

    def _logic(self, expr: tree.Binary, left: Type, right: Type) -> Type:
        if left.sort is Sort.INSTANCE and right.sort is Sort.INSTANCE:
            message = f"`{expr.op}` takes truth values, found two instances"
            return self._findings.error(
                "operand", expr.span, message, "to take the first that is present write first(…, …)"
            )
        for side, found in ((expr.left, left), (expr.right, right)):
            if not found.broken and found.sort is not Sort.BOOL:
                message = f"`{expr.op}` takes truth values, found {found}"
                self._findings.error("operand", side.span, message, comparison(found.sort))
        if left.sort is not Sort.BOOL or right.sort is not Sort.BOOL:
            return BROKEN
        both = (least if expr.op == "and" else greatest)([left.interval, right.interval])
        made = Type(Sort.BOOL, left.vector or right.vector, interval=both)
        if left.vector:
            return made.reading(left, right)
        if left.decided:
            # The other side is read always, or never.
            is_read = left.interval == (TRUE if expr.op == "and" else FALSE)
            return made.reading(left, right) if is_read else made.reading(left)
        return made.reading(left).perhaps(right)

    def _member(self, expr: tree.Binary, left: Type, right: Type) -> Type:
        if left.sort is not Sort.STRING:
            return self._findings.error("operand", expr.left.span, f"`{expr.op}` looks for a string, not {left}")
        if right.sort is not Sort.SET:
            message = f"`{expr.op}` looks in a set, not in {right}"
            return self._findings.error("operand", expr.right.span, message, 'e.g. {"a", "b"}')
        made = Type(Sort.BOOL, left.vector or right.vector).reading(left, right)
        if isinstance(expr.right, tree.SetOf) and not expr.right.items:
            return replace(made, interval=FALSE if expr.op == "in" else TRUE)
        return made

    def _compare(self, expr: tree.Binary, left: Type, right: Type) -> Type:
        for found, other in ((left, right), (right, left)):
            if found.sort is Sort.INSTANCE:
                help_text = "compare its id: `id[s]`" if other.sort is Sort.STRING else "compare its values: `l[s]`"
                return self._findings.error("operand", expr.span, f"`{expr.op}` does not compare instances", help_text)
            if found.sort is Sort.SET or (expr.op in _ORDER and found.sort is not Sort.NUMBER):
                message = f"`{expr.op}` does not compare {_PLURALS[found.sort]}"
                help_text = 'ask for a member: "a" in …' if found.sort is Sort.SET else ""
                return self._findings.error("operand", expr.span, message, help_text)
        if left.sort is not right.sort:
            return self._findings.error("operand", expr.span, f"cannot compare {left} with {right}")
        made = Type(Sort.BOOL, left.vector or right.vector).reading(left, right)
        if left.sort is not Sort.NUMBER:
            return made
        if not self._units.agree(left, right):
            return self._mismatch(expr, left, right)
        made = replace(made, interval=_decide(expr.op, left.interval, right.interval))
        if made.decided:
            self.advice[expr.span] = self._advice(expr.left, left, right) or self._advice(expr.right, right, left)
        return made

    def _advice(self, side: tree.Expr, found: Type, other: Type) -> str:
        """Return what to do about *side*, whose range does not reach the *other* one; empty if it has no range."""
        if not found.may or found.interval.low == found.interval.high:
            return ""
        shown, number = quote(self._findings.text, side.span), other.interval.high
        advice = f"`{shown}` {found.interval.place}"
        is_percent = found.interval == TRUTH and other.interval.low == number and 2 <= number <= 100
        return f"{advice}: write {exact(number / 100)} for {exact(number)} %" if is_percent else advice

    def _arithmetic(self, expr: tree.Binary, left: Type, right: Type) -> Type:
        for side, found in ((expr.left, left), (expr.right, right)):
            if found.sort is not Sort.NUMBER:
                return self._findings.error("operand", side.span, f"`{expr.op}` takes numbers, found {found}")
        made = Type(Sort.NUMBER, left.vector or right.vector).reading(left, right)
        a, b = left.interval, right.interval
        if expr.op in ("+", "-"):
            if not self._units.agree(left, right):
                return self._mismatch(expr, left, right)
            unit = left.unit if left.unit is not None else right.unit
            return replace(made, unit=unit, interval=a + b if expr.op == "+" else a - b)
        both = left.unit is None and right.unit is None
        above, below = left.unit or PLAIN, right.unit or PLAIN
        if expr.op == "*":
            return replace(made, unit=None if both else above * below, interval=a * b)
        if 0.0 in b:
            return self._divisor(expr.right, right)
        return replace(made, unit=None if both else above / below, interval=a / b)

    def _mismatch(self, expr: tree.Binary, left: Type, right: Type) -> Type:
        """Report an addition, subtraction or comparison of different units."""
        a, b = describe(left), describe(right)
        messages = {"+": f"cannot add {a} and {b}", "-": f"cannot subtract {b} from {a}"}
        unit_of_name = self._units.unit_of_name
        help_text = unit_of_name(expr.left, left, right) or unit_of_name(expr.right, right, left) or _SCALE
        message = messages.get(expr.op, f"cannot compare {a} with {b}")
        return self._findings.error("units", expr.span, message, help_text)

    def _divisor(self, expr: tree.Expr, found: Type) -> Type:
        """Report a divisor that may be 0."""
        if found.interval == ZERO and not found.may:
            return self._findings.error("divisor", expr.span, "this divisor is always 0", "divide by something else")
        shown = quote(self._findings.text, expr.span)
        floor = "0.01" if found.unit is None or found.unit.plain else "1"
        help_text = (
            f"keep it above 0: greatest({shown}, {floor}); or give a value for x / 0: ratio(x, {shown}, default: …)"
        )
        return self._findings.error("divisor", expr.span, "this divisor may be 0", help_text)

    def if_else(self, expr: tree.IfElse, condition: Type, then: Type, otherwise: Type) -> Type:
        """Return the type of `then if condition else otherwise`."""
        instance = Sort.INSTANCE in (then.sort, otherwise.sort)
        if not condition.broken and condition.sort is not Sort.BOOL:
            message = f"a condition is a truth value, but this is {condition}"
            return self._findings.error("condition", expr.condition.span, message, comparison(condition.sort))
        if condition.vector and instance:
            message = "an instance is chosen by one truth value, but this is bool per instance"
            return self._findings.error("condition", expr.condition.span, message, "wrap it in any(…) or all(…)")
        if condition.broken or then.broken or otherwise.broken:
            return BROKEN
        if then.sort is not otherwise.sort or not self._units.agree(then, otherwise):
            message = f"both sides of `if` are of one kind, not {then} and {otherwise}"
            help_text = self._units.unit_of_name(expr.then, then, otherwise)
            help_text = help_text or self._units.unit_of_name(expr.otherwise, otherwise, then)
            return self._findings.error("branches", expr.span, message, help_text)
        made = replace(
            then,
            vector=condition.vector or then.vector or otherwise.vector,
            unit=then.unit if then.unit is not None else otherwise.unit,
            interval=hull([then.interval, otherwise.interval]),
            maybe=then.maybe or otherwise.maybe,
        )
        if condition.vector:
            return made.reading(condition, then, otherwise)
        if condition.decided:
            taken = then if condition.interval == TRUE else otherwise
            return made.reading(condition, taken)
        both = replace(made, must=condition.must | (then.must & otherwise.must), may=condition.may)
        return both.perhaps(then, otherwise)


def _decide(op: str, a: Interval, b: Interval) -> Interval:
    """Return the result of a comparison over all values of both intervals: 1..1, 0..0, or 0..1."""
    match op:
        case "<":
            always, never = a.high < b.low, a.low >= b.high
        case "<=":
            always, never = a.high <= b.low, a.low > b.high
        case ">" | ">=":
            return _decide("<" if op == ">" else "<=", b, a)
        case _:
            always, never = a == b and a.low == a.high, a.high < b.low or b.high < a.low
            if op == "!=":
                always, never = never, always
    return TRUE if always else FALSE if never else TRUTH


#: Nodes of a policy with its definitions expanded, without tests.
MAX_NODES = 500
#: Nesting of expressions, chains of operators and definitions included.
MAX_DEPTH = 100


@dataclass(slots=True)
class Budget:
    """Size of a policy so far: the nodes counted, and the depth of the current expression."""

    nodes: int = 0
    depth: int = 0


Arguments = Mapping[str, Type]
_NONE: Arguments = {}


class Expressions:
    """Types of expressions, and the errors in them.

    Args:
        names: names of the file defined so far.
        vocabulary: features and request fields.
        findings: receives errors.
        features: the feature chosen by each feature parameter.
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
        #: Those of the libraries by name, which type the bodies of imported definitions.
        self.libraries: dict[str, Expressions] = {}
        #: Values that are the same in every decision, outside of definitions.
        self.constants: list[tuple[Span, Type, str]] = []

    def advice(self, span: Span) -> str:
        """Return what to do about the first comparison within *span* that is the same in every decision, or empty."""
        each = self._operators.advice.items()
        return next((text for at, text in each if span.start <= at.start and at.end <= span.end), "")

    def infer(self, expr: tree.Expr, arguments: Arguments = _NONE) -> Type:
        """Return the type of *expr*, given the *arguments* of the definition that it stands in.

        Raises:
            CheckEnded: the policy is too large.
        """
        self.count(expr.span)
        self._budget.depth += 1
        if self._budget.depth > MAX_DEPTH:
            message = f"this nests deeper than {MAX_DEPTH} operators"
            self._findings.error("too-deep", expr.span, message, "name its parts with `let`")
            raise CheckEnded
        result = self._infer(expr, arguments)
        self._budget.depth -= 1
        if result.sort is Sort.NUMBER and not result.interval.bounded:
            return self._findings.error(
                "overflow", expr.span, "this may grow past 1e300", "bound its parts with clamp(…)"
            )
        return result

    def count(self, span: Span) -> None:
        """Count one more node of the policy.

        Raises:
            CheckEnded: there are too many.
        """
        self._budget.nodes += 1
        if self._budget.nodes > MAX_NODES:
            message = f"this file has more than {MAX_NODES} parts, its definitions expanded"
            self._findings.error("too-large", span, message, "name what repeats with `let`; divide a library")
            raise CheckEnded

    def same(self, span: Span, found: Type, message: str) -> None:
        """Keep a value that is the same in every decision, for a warning."""
        if not self._expanding:
            self.constants.append((span, found, message))

    def condition(self, expr: tree.Expr, arguments: Arguments = _NONE) -> Type:
        """Return the type of a condition, which must be one truth value."""
        found = self.infer(expr, arguments)
        if not found.broken and found.sort is not Sort.BOOL:
            message = f"a condition is a truth value, but this is {found}"
            return self._findings.error("condition", expr.span, message, comparison(found.sort))
        if found.vector:
            message = "a condition is one truth value, but this is bool per instance"
            return self._findings.error("condition", expr.span, message, "wrap it in any(…) or all(…)")
        return found

    def seconds(self, expr: tree.Expr) -> Type:
        """Return the type of a single number of seconds."""
        found = self.infer(expr)
        if found.vector and not found.broken:
            help_text = "make one of it: min(…), mean(…) or max(…)"
            return self._findings.error("duration", expr.span, f"expected one duration, found {found}", help_text)
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
            case tree.FieldExpr():
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
            case tree.AtExpr():
                return self._at(expr, arguments)
            case tree.CallExpr():
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
                return self._findings.error(
                    "unknown-name", expr.span, f"`{name}` is a definition", f"call it: {name}(…)"
                )
            return found.type
        if name in self._vocabulary.features:
            return self.feature(name)
        return self._names.unknown(name, expr.span, arguments)

    def feature(self, name: str) -> Type:
        """Return the type of a feature."""
        word = self._vocabulary.features[name]
        made = of_word(word, parse_unit(word.unit))
        bound = self._vocabulary.request.get(word.at_most)
        if bound is not None:
            made = replace(made, interval=Interval(word.low, min(word.high, bound.high)))
        return replace(made, must=frozenset((name,)), may=frozenset((name,)))

    def _field(self, expr: tree.FieldExpr) -> Type:
        word = self._vocabulary.request.get(expr.name)
        place = Span(expr.span.end - len(expr.name), expr.span.end)
        if expr.base != "req":
            base = Span(expr.span.start, expr.span.start + len(expr.base))
            help_text = "only the request has fields: req.turn, req.prompt_len, …"
            if expr.name in self._vocabulary.features:
                help_text = f"a feature of one instance is looked up: `{expr.name}[{expr.base}]`"
            return self._findings.error("unknown-name", base, f"`{expr.base}` has no fields", help_text)
        if word is None:
            if expr.name in self._vocabulary.features:
                help_text = f"`{expr.name}` belongs to the instances: write it without `req.`"
            else:
                help_text = did_you_mean(expr.name, self._vocabulary.request)
            return self._findings.error("unknown-field", place, f"a request has no `{expr.name}`", help_text)
        read = frozenset((f"req.{expr.name}",))
        return replace(of_word(word, parse_unit(word.unit)), must=read, may=read)

    # ── sets and look-ups ──

    def _set(self, expr: tree.SetOf, arguments: Arguments) -> Type:
        items = [self.infer(item, arguments) for item in expr.items]
        for item, found in zip(expr.items, items, strict=True):
            if not found.broken and (found.sort is not Sort.STRING or found.vector):
                self._findings.error("set", item.span, f"a set holds strings, not {found}")
        return Type(Sort.SET).reading(*items)

    def _at(self, expr: tree.AtExpr, arguments: Arguments) -> Type:
        vector, pick = self.infer(expr.vector, arguments), self.infer(expr.pick, arguments)
        if vector.broken or pick.broken:
            return BROKEN
        if vector.sort is Sort.INSTANCE or not vector.vector:
            message = f"only a value per instance can be looked up, and this is {vector}"
            return self._findings.error("lookup", expr.vector.span, message)
        if pick.sort is not Sort.INSTANCE:
            message = f"a value is looked up by an instance, not by {pick}"
            return self._findings.error("lookup", expr.pick.span, message, "e.g. l[argmin(l)]")
        if pick.maybe:
            help_text = "give it a second choice: first(…, …)"
            return self._findings.error("maybe", expr.pick.span, "this instance may be absent", help_text)
        return replace(vector, vector=False).reading(vector, pick)

    # ── calls ──

    @property
    def _horizon(self) -> int | None:
        """Start of the definition being expanded, whose body sees only names above it."""
        return self._expanding[-1].span.start if self._expanding else None

    def _call(self, call: tree.CallExpr, arguments: Arguments) -> Type:
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
            return self._names.unknown_function(call.function, call.name_span, inside)
        if found.statement is None:
            return BROKEN  # its definition is reported already
        message = f"`{call.function}` is a value, not a function"
        return self._findings.error("unknown-function", call.name_span, message, looked_up(call.function))

    def _expand(self, call: tree.CallExpr, definition: tree.Def, arguments: Arguments, home: Expressions) -> Type:
        given = [self.infer(argument.value, arguments) for argument in call.arguments]
        for argument in call.arguments:
            if argument.name or argument.where is not None:
                message = f"`{call.function}` is a definition: its arguments have no names and no `where`"
                return self._findings.error("arguments", argument.span, message)
        wanted = [argument.name for argument in definition.arguments]
        if len(given) != len(wanted):
            listed = f"{len(wanted)} argument(s) ({', '.join(wanted)})"
            message = f"`{call.function}` takes {listed}, not {len(given)}"
            return self._findings.error("arguments", call.span, message)
        with self._findings.inside(call):
            return home.body(definition, dict(zip(wanted, given, strict=True)), self._budget)

    def body(self, definition: tree.Def, arguments: Arguments, budget: Budget | None = None) -> Type:
        """Return the type of a definition's body. It counts towards *budget* if another file calls it."""
        own = self._budget
        self._budget = budget or own
        self._expanding.append(definition)
        try:
            return self.infer(definition.body, arguments)
        finally:
            self._expanding.pop()
            self._budget = own
