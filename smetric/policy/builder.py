# ruff: noqa: D102 - a method is named after the grammar rule it builds, which is its documentation
"""From what the grammar reads to the nodes of `tree`: one method for each of its rules.

Nothing is judged here; whatever the grammar lets through is built.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smetric.policy import tree
from smetric.policy.span import Span
from smetric.policy.token import Token
from smetric.policy.unit import canonical
from smetric.policy.vocabulary import LARGEST

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def number_of(token: Token) -> float:
    """The value of a NUMBER or DURATION (in seconds), at most `LARGEST`; the lexer reports what exceeds it."""
    return min(magnitude(token), LARGEST)


def magnitude(token: Token) -> float:
    """The value of a NUMBER or DURATION as written, infinite where no float holds it."""
    digits = token.rstrip("umsh")
    return float(digits) * _SECONDS.get(token[len(digits) :], 1.0)


class Builder:
    """Makes one statement; children are nodes, tokens, or None where an optional part is absent.

    Children are `Any` because they come untyped; the grammar fixes what they are.
    """

    # ── header and declarations ──

    def policy(self, span: Span, parts: list[Any]) -> tree.Name:
        return _name(parts[0])

    library = policy

    def use(self, span: Span, parts: list[Any]) -> tree.Use:
        library, names = parts
        return tree.Use(span=span, library=_name(library), names=names)

    def param(self, span: Span, parts: list[Any]) -> tree.Param:
        name, value, domain = parts
        return tree.Param(span=span, name=str(name), name_span=name.span, value=value, domain=domain)

    def let(self, span: Span, parts: list[Any]) -> tree.Let:
        name, value = parts
        return tree.Let(span=span, name=str(name), name_span=name.span, value=value)

    def definition(self, span: Span, parts: list[Any]) -> tree.Def:
        name, arguments, body = parts
        return tree.Def(span=span, name=str(name), name_span=name.span, arguments=arguments, body=body)

    def names(self, span: Span, parts: list[Any]) -> tuple[tree.Name, ...]:
        return tuple(_name(token) for token in parts)

    def range(self, span: Span, parts: list[Any]) -> tree.Range:
        low, _, high = parts
        return tree.Range(span=span, low=low, high=high)

    def choices(self, span: Span, parts: list[Any]) -> tree.Choices:
        return tree.Choices(span=span, items=tuple(parts))

    # ── filters and outcomes ──

    def keep(self, span: Span, parts: list[Any]) -> tree.Filter:
        return self._filter("keep", span, parts)

    def prefer(self, span: Span, parts: list[Any]) -> tree.Filter:
        return self._filter("prefer", span, parts)

    def _filter(self, word: str, span: Span, parts: list[Any]) -> tree.Filter:
        mask, when, label = parts
        return tree.Filter(span=span, word=word, mask=mask, when=when, label=label and _name(label))

    def route(self, span: Span, parts: list[Any]) -> tree.Route:
        pick, when, label = parts
        return tree.Route(span=span, word="route", pick=pick, when=when, label=label and _name(label))

    def reject(self, span: Span, parts: list[Any]) -> tree.Reject:
        status, message, retry, when, label = parts
        return tree.Reject(
            span=span,
            word="reject",
            status=tree.Number(span=status.span, value=number_of(status)),
            message=tree.Text(span=message.span, value=str(message)[1:-1]),
            retry=retry,
            when=when,
            label=label and _name(label),
        )

    def hold(self, span: Span, parts: list[Any]) -> tree.Hold:
        patience, when, label = parts
        return tree.Hold(span=span, word="hold", patience=patience, when=when, label=label and _name(label))

    # ── literals ──

    def number(self, span: Span, parts: list[Any]) -> tree.Number:
        sign, literal, unit = parts
        made = self._literal(span, literal, unit)
        return replace(made, value=-made.value) if sign else made

    def quantity(self, span: Span, parts: list[Any]) -> tree.Number:
        return self._literal(span, *parts)

    duration = quantity

    def _literal(self, span: Span, literal: Token, unit: Any) -> tree.Number:
        if literal.type == "DURATION":
            name, place = canonical("seconds", unit or ""), unit and unit.span
        else:
            name, place = unit or ("", None)
        return tree.Number(span=span, value=number_of(literal), unit=str(name), unit_span=place)

    def unit(self, span: Span, parts: list[Any]) -> tuple[str, Span]:
        above, below = parts
        return canonical(str(above), str(below or "")), span

    def string(self, span: Span, parts: list[Any]) -> tree.Text:
        return tree.Text(span=span, value=str(parts[0])[1:-1])

    def true(self, span: Span, parts: list[Any]) -> tree.Truth:
        return tree.Truth(span=span, value=True)

    def false(self, span: Span, parts: list[Any]) -> tree.Truth:
        return tree.Truth(span=span, value=False)

    def name(self, span: Span, parts: list[Any]) -> tree.Name:
        return _name(parts[0])

    # ── expressions ──

    def if_(self, span: Span, parts: list[Any]) -> tree.IfElse:
        then, condition, otherwise = parts
        return tree.IfElse(span=span, then=then, condition=condition, otherwise=otherwise)

    def binary(self, span: Span, parts: list[Any]) -> tree.Binary:
        left, *operator, right = parts
        place = Span(operator[0].start, operator[-1].end)
        op = " ".join(operator)
        return tree.Binary(span=span, op=op, left=left, right=right, op_span=place)

    def unary(self, span: Span, parts: list[Any]) -> tree.Unary:
        op, operand = parts
        return tree.Unary(span=span, op=str(op), operand=operand)

    def at(self, span: Span, parts: list[Any]) -> tree.At:
        vector, pick = parts
        return tree.At(span=span, vector=vector, pick=pick)

    def field(self, span: Span, parts: list[Any]) -> tree.Field:
        base, name = parts
        return tree.Field(span=span, base=str(base), name=str(name))

    def set(self, span: Span, parts: list[Any]) -> tree.SetOf:
        return tree.SetOf(span=span, items=tuple(item for item in parts if item is not None))

    def call(self, span: Span, parts: list[Any]) -> tree.Call:
        name, arguments = parts
        return tree.Call(span=span, function=str(name), arguments=arguments or (), name_span=name.span)

    def args(self, span: Span, parts: list[Any]) -> tuple[tree.Argument, ...]:
        return tuple(
            part if isinstance(part, tree.Argument) else tree.Argument(span=part.span, value=part) for part in parts
        )

    def where(self, span: Span, parts: list[Any]) -> tree.Argument:
        value, mask = parts
        return tree.Argument(span=span, value=value, where=mask)

    def named(self, span: Span, parts: list[Any]) -> tree.Argument:
        name, value = parts
        return tree.Argument(span=span, value=value, name=str(name), name_span=name.span)

    # ── tests ──

    def test(self, span: Span, parts: list[Any]) -> tree.Test:
        sentence, settings, given, (columns, rows), expect = parts
        return tree.Test(
            span=span,
            sentence=str(sentence)[1:-1],
            settings=settings or (),
            given=given or (),
            columns=columns,
            rows=rows,
            expect=expect,
        )

    def with_(self, span: Span, parts: list[Any]) -> tuple[tree.Setting, ...]:
        return tuple(parts)

    given = with_

    def setting(self, span: Span, parts: list[Any]) -> tree.Setting:
        name, written = parts
        value, unit = written, ""
        if isinstance(written, tree.Number):
            value, unit = written.value, written.unit
        elif isinstance(written, tree.Text | tree.Truth):
            value = written.value
        elif isinstance(written, Token):
            value = tree.UNKNOWN
        return tree.Setting(span=span, name=str(name), value=value, unit=unit)

    def table(self, span: Span, parts: list[Any]) -> tuple[tuple[tree.Column, ...], tuple[tree.Row, ...]]:
        columns = tuple(part for part in parts if isinstance(part, tree.Column))
        return columns, tuple(part for part in parts if isinstance(part, tree.Row))

    def column(self, span: Span, parts: list[Any]) -> tree.Column:
        name, inner = parts
        if inner is None:
            return tree.Column(span=span, feature=str(name))
        # Only `age` may stand before the bracket; anything else is left as written, which no feature is called.
        feature = str(inner) if name == "age" else f"{name}({inner})"
        return tree.Column(span=span, feature=feature, of_age=name == "age")

    def row(self, span: Span, parts: list[Any]) -> tree.Row:
        name, *cells = parts
        made = (cell if isinstance(cell, tree.Cell) else tree.Cell(span=cell.span, value=cell.value) for cell in cells)
        return tree.Row(span=span, name=str(name), cells=tuple(made))

    def plain(self, span: Span, parts: list[Any]) -> tree.Cell:
        sign, literal = parts
        return tree.Cell(span=span, value=-number_of(literal) if sign else number_of(literal))

    def span(self, span: Span, parts: list[Any]) -> tree.Cell:
        return tree.Cell(span=span, value=number_of(parts[0]), unit="seconds")

    def strings(self, span: Span, parts: list[Any]) -> tree.Cell:
        return tree.Cell(span=span, value=parts[0])

    def set_(self, span: Span, parts: list[Any]) -> frozenset[str]:
        return frozenset(str(token)[1:-1] for token in parts if token is not None)

    def unknown(self, span: Span, parts: list[Any]) -> tree.Cell:
        return tree.Cell(span=span, value=tree.UNKNOWN)

    def expect(self, span: Span, parts: list[Any]) -> tree.Expect:
        outcome, rule, failing = parts
        guard: tree.Name | tree.Text | None = failing and _name(failing)
        if failing is not None and failing.type == "STRING":
            guard = tree.Text(span=failing.span, value=str(failing)[1:-1])
        return tree.Expect(
            span=span,
            kind=outcome.kind,
            instances=outcome.instances,
            status=outcome.status,
            rule=rule and _name(rule),
            failing=guard,
        )

    def expect_route(self, span: Span, parts: list[Any]) -> tree.Expect:
        return tree.Expect(span=span, kind="route", instances=tuple(_name(token) for token in parts))

    def expect_reject(self, span: Span, parts: list[Any]) -> tree.Expect:
        return tree.Expect(span=span, kind="reject", status=number_of(parts[0]))

    def expect_hold(self, span: Span, parts: list[Any]) -> tree.Expect:
        return tree.Expect(span=span, kind="hold")


def _name(token: Token) -> tree.Name:
    return tree.Name(span=token.span, name=str(token))
