"""One element-wise operation of the language on one value of each operand, as code."""

from __future__ import annotations

import ast
from collections.abc import Callable

from smetric.policy.code import call, compare, load

_ARITHMETIC: dict[str, type[ast.operator]] = {"+": ast.Add, "-": ast.Sub, "*": ast.Mult, "/": ast.Div}
_COMPARISONS: dict[str, type[ast.cmpop]] = {
    "==": ast.Eq,
    "!=": ast.NotEq,
    "<=": ast.LtE,
    ">=": ast.GtE,
    "<": ast.Lt,
    ">": ast.Gt,
    "in": ast.In,
    "not in": ast.NotIn,
}


def operation(op: str, operands: list[ast.expr], kept: Callable[[ast.expr], ast.expr]) -> ast.expr:
    """One operation on one value of each operand; *kept* makes an operand readable twice."""
    if op in _ARITHMETIC:
        left, right = operands
        return ast.BinOp(left=left, op=_ARITHMETIC[op](), right=right)
    if op in _COMPARISONS:
        left, right = operands
        return compare(left, _COMPARISONS[op](), right)
    match op, operands:
        case "and" | "or", _:
            return ast.BoolOp(op=ast.And() if op == "and" else ast.Or(), values=operands)
        case "not", [operand]:
            return ast.UnaryOp(op=ast.Not(), operand=operand)
        case "neg", [operand]:
            return ast.UnaryOp(op=ast.USub(), operand=operand)
        case "if", [condition, then, otherwise]:
            return ast.IfExp(test=condition, body=then, orelse=otherwise)
        case "abs", [operand]:
            return call("abs", operand)
        case "set", _:
            return ast.Tuple(elts=operands, ctx=ast.Load())
        case "least" | "greatest", [left, right]:
            left, right = kept(left), kept(right)
            order = ast.Lt() if op == "least" else ast.Gt()
            return ast.IfExp(test=compare(left, order, right), body=_again(left), orelse=_again(right))
    raise AssertionError(f"no such operation: {op}")


def _again(value: ast.expr) -> ast.expr:
    """*value* read a second time."""
    return load(value.target.id) if isinstance(value, ast.NamedExpr) else value
