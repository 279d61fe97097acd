"""Makes terms, and settles at once what constants and parameters settle.

What a term stands for in the file is `resolver`'s business.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from smetric.policy.interval import SMALLEST_DIVISOR
from smetric.policy.span import Span
from smetric.policy.term import Binding, Column, Const, Op, Ref, RequestValue, Shape, Term

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

#: Makes the term that a name stands for, at the place where it is read.
Reading = Callable[[Span], Term]


def bound(name: str, value: Term) -> Reading:
    """How *name* reads from now on: constants, features and references pass through, all else is computed once."""
    if isinstance(value, Const):
        return lambda span: Const(value.value, span=span, shape=value.shape)
    if isinstance(value, Column):
        return lambda span: Column(value.feature, span=span, shape=value.shape)
    if isinstance(value, RequestValue):
        return lambda span: RequestValue(value.name, span=span, shape=value.shape)
    binding = value.binding if isinstance(value, Ref) else Binding(name, value)
    return lambda span: Ref(binding, span=span, shape=value.shape)


def set_of(items: Sequence[Term], span: Span) -> Term:
    """`{a, b}`."""
    if all(isinstance(item, Const) for item in items):
        members = frozenset(item.value for item in items if isinstance(item, Const))
        return Const(members, span=span, shape=Shape.SCALAR)
    return Op("set", tuple(items), span=span, shape=_widest(items))


def op(name: str, span: Span, *operands: Term) -> Term:
    """An operation; one whose result is plain already, because a parameter settles it, becomes that result."""
    first = operands[0]
    if isinstance(first, Const):
        settled = _settled(name, first.value, operands)
        if settled is not None:
            return settled
        if name == "not":
            return Const(not first.value, span=span, shape=Shape.SCALAR)
        if name == "neg":
            return Const(-first.value, span=span, shape=Shape.SCALAR)
        if name == "divides":
            return Const(abs(first.value) >= SMALLEST_DIVISOR, span=span, shape=Shape.SCALAR)
        if name in _FOLD and isinstance(operands[1], Const) and (name != "/" or operands[1].value):
            return Const(_FOLD[name](first.value, operands[1].value), span=span, shape=Shape.SCALAR)
    if name == "if" and operands[1].shape is Shape.PICK:
        return Op(name, operands, span=span, shape=Shape.PICK)
    if name in ("and", "or") and first.shape is Shape.SCALAR and operands[1].shape is Shape.VECTOR:
        # One truth value on the left decides whether the other side is looked at.
        settled = Const(name == "or", span=span, shape=Shape.SCALAR)
        branches = (operands[1], settled) if name == "and" else (settled, operands[1])
        return Op("if", (first, *branches), span=span, shape=Shape.VECTOR)
    return Op(name, operands, span=span, shape=_widest(operands))


def _widest(terms: Sequence[Term]) -> Shape:
    return Shape.VECTOR if any(term.shape is Shape.VECTOR for term in terms) else Shape.SCALAR


def _settled(name: str, first: Any, operands: tuple[Term, ...]) -> Term | None:
    """What a constant first operand makes of `and`, `or` and `if`: one of the operands, or None."""
    match name:
        case "and":
            return operands[1] if first else operands[0]
        case "or":
            return operands[0] if first else operands[1]
        case "if":
            return operands[1] if first else operands[2]
    return None
