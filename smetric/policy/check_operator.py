"""The type of an operation from the types of its operands: kinds, shapes, units, intervals, and what it reads.

How operands get their types is in `check_expression`.
"""

from __future__ import annotations

from dataclasses import replace

from smetric.policy import tree
from smetric.policy.check_unit import Units
from smetric.policy.diagnostic import quote
from smetric.policy.findings import Findings
from smetric.policy.interval import FALSE, TRUE, TRUTH, ZERO, Interval, hull
from smetric.policy.suggestion import comparison
from smetric.policy.types import BROKEN, Sort, Type
from smetric.policy.unit import PLAIN

_ORDER = frozenset({"<", "<=", ">", ">="})
_PLURALS = {Sort.SET: "sets", Sort.STRING: "strings", Sort.BOOL: "truth values"}


class Operators:
    """Types operations and reports operands that do not fit."""

    def __init__(self, units: Units, findings: Findings) -> None:
        self._units = units
        self._findings = findings

    def unary(self, expr: tree.Unary, found: Type) -> Type:
        """`-x` or `not x`."""
        wanted = Sort.BOOL if expr.op == "not" else Sort.NUMBER
        if found.broken:
            return BROKEN
        if found.sort is not wanted:
            word, help_text = ("a truth value", comparison(found.sort)) if wanted is Sort.BOOL else ("a number", "")
            self._findings.error("operand", expr.operand.span, f"`{expr.op}` takes {word}, found {found}", help_text)
            return BROKEN
        if wanted is Sort.BOOL:
            return replace(found, interval=TRUE - found.interval)
        return replace(found, interval=-found.interval)

    def binary(self, expr: tree.Binary, left: Type, right: Type) -> Type:
        """Any operation with two operands."""
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
            self._findings.error("operand", expr.span, message, "the first that is somebody: first(…, …)")
            return BROKEN
        for side, found in ((expr.left, left), (expr.right, right)):
            if not found.broken and found.sort is not Sort.BOOL:
                message = f"`{expr.op}` takes truth values, found {found}"
                self._findings.error("operand", side.span, message, comparison(found.sort))
        if left.sort is not Sort.BOOL or right.sort is not Sort.BOOL:
            return BROKEN
        pick = min if expr.op == "and" else max
        interval = Interval(
            pick(left.interval.low, right.interval.low), pick(left.interval.high, right.interval.high)
        )  # fmt: skip
        made = Type(Sort.BOOL, left.vector or right.vector, interval=interval)
        if left.vector:
            return made.reading(left, right)
        if left.decided:
            # The other side is looked at always, or never.
            looked_at = left.interval == (TRUE if expr.op == "and" else FALSE)
            return made.reading(left, right) if looked_at else made.reading(left)
        return made.reading(left).perhaps(right)

    def _member(self, expr: tree.Binary, left: Type, right: Type) -> Type:
        if left.sort is not Sort.STRING:
            self._findings.error("operand", expr.left.span, f"`{expr.op}` looks for a string, not {left}")
            return BROKEN
        if right.sort is not Sort.SET:
            self._findings.error(
                "operand", expr.right.span, f"`{expr.op}` looks in a set, not in {right}", 'e.g. {"a", "b"}'
            )
            return BROKEN
        made = Type(Sort.BOOL, left.vector or right.vector).reading(left, right)
        if isinstance(expr.right, tree.SetOf) and not expr.right.items:
            return replace(made, interval=FALSE if expr.op == "in" else TRUE)
        return made

    def _compare(self, expr: tree.Binary, left: Type, right: Type) -> Type:
        for found, other in ((left, right), (right, left)):
            if found.sort is Sort.INSTANCE:
                help_text = "compare its id: `id[s]`" if other.sort is Sort.STRING else "compare its values: `l[s]`"
                self._findings.error("operand", expr.span, f"`{expr.op}` does not compare instances", help_text)
                return BROKEN
            if found.sort is Sort.SET or (expr.op in _ORDER and found.sort is not Sort.NUMBER):
                message = f"`{expr.op}` does not compare {_PLURALS[found.sort]}"
                help_text = 'ask for a member: "a" in …' if found.sort is Sort.SET else ""
                self._findings.error("operand", expr.span, message, help_text)
                return BROKEN
        if left.sort is not right.sort:
            self._findings.error("operand", expr.span, f"cannot compare {left} with {right}")
            return BROKEN
        made = Type(Sort.BOOL, left.vector or right.vector).reading(left, right)
        if left.sort is not Sort.NUMBER:
            return made
        if not self._units.agree(left, right):
            self._units.mismatch(expr, left, right)
            return BROKEN
        return replace(made, interval=_decide(expr.op, left.interval, right.interval))

    def _arithmetic(self, expr: tree.Binary, left: Type, right: Type) -> Type:
        for side, found in ((expr.left, left), (expr.right, right)):
            if found.sort is not Sort.NUMBER:
                self._findings.error("operand", side.span, f"`{expr.op}` takes numbers, found {found}")
                return BROKEN
        made = Type(Sort.NUMBER, left.vector or right.vector).reading(left, right)
        a, b = left.interval, right.interval
        if expr.op in ("+", "-"):
            if not self._units.agree(left, right):
                self._units.mismatch(expr, left, right)
                return BROKEN
            unit = left.unit if left.unit is not None else right.unit
            return replace(made, unit=unit, interval=a + b if expr.op == "+" else a - b)
        both = left.unit is None and right.unit is None
        above, below = left.unit or PLAIN, right.unit or PLAIN
        if expr.op == "*":
            return replace(made, unit=None if both else above * below, interval=a * b)
        if 0.0 in b:
            self._divisor(expr.right, right)
            return BROKEN
        return replace(made, unit=None if both else above / below, interval=a / b)

    def _divisor(self, expr: tree.Expr, found: Type) -> None:
        if found.interval == ZERO and not found.may:
            self._findings.error("divisor", expr.span, "this divisor is always 0", "divide by something else")
            return
        shown = quote(self._findings.text, expr.span)
        floor = "0.01" if found.unit is None or found.unit.plain else "1"
        self._findings.error(
            "divisor",
            expr.span,
            "this divisor may be 0",
            f"keep it above 0: greatest({shown}, {floor}); or say what x / 0 is: ratio(x, {shown}, default: …)",
        )

    def if_else(self, expr: tree.IfElse, condition: Type, then: Type, otherwise: Type) -> Type:
        """`then if condition else otherwise`."""
        instance = Sort.INSTANCE in (then.sort, otherwise.sort)
        if not condition.broken and condition.sort is not Sort.BOOL:
            message = f"a condition is a truth value, but this is {condition}"
            self._findings.error("condition", expr.condition.span, message, comparison(condition.sort))
            return BROKEN
        if condition.vector and instance:
            message = "an instance is chosen by one truth value, but this is bool per instance"
            self._findings.error("condition", expr.condition.span, message, "wrap it in any(...) or all(...)")
            return BROKEN
        if condition.broken or then.broken or otherwise.broken:
            return BROKEN
        if then.sort is not otherwise.sort or not self._units.agree(then, otherwise):
            message = f"both sides of `if` are of one kind, not {then} and {otherwise}"
            help_text = self._units.unit_of_name(expr.then, then, otherwise)
            help_text = help_text or self._units.unit_of_name(expr.otherwise, otherwise, then)
            self._findings.error("branches", expr.span, message, help_text)
            return BROKEN
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
    """What a comparison gives for all values of both intervals: 1..1, 0..0, or 0..1."""
    match op:
        case "<":
            return _verdict(a.high < b.low, a.low >= b.high)
        case "<=":
            return _verdict(a.high <= b.low, a.low > b.high)
        case ">":
            return _verdict(a.low > b.high, a.high <= b.low)
        case ">=":
            return _verdict(a.low >= b.high, a.high < b.low)
    apart = a.high < b.low or b.high < a.low
    same = a == b and a.low == a.high
    return _verdict(same, apart) if op == "==" else _verdict(apart, same)


def _verdict(always: bool, never: bool) -> Interval:
    if always:
        return TRUE
    return FALSE if never else TRUTH
