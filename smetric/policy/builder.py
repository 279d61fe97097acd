# ruff: noqa: D102 - a method is named after the grammar rule it builds, which is its documentation
"""From Lark's parse tree to the nodes of `tree`: one method for each rule of the grammar.

Nothing is judged here; whatever the grammar lets through is built.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lark import Token, Transformer_NonRecursive, v_args
from lark.tree import Meta

from smetric.policy import tree
from smetric.policy.tree import Span
from smetric.policy.unit import canonical
from smetric.policy.vocabulary import LARGEST

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def span_of(token: Token) -> Span:
    """The place of a token."""
    start = token.start_pos or 0
    return Span(start, start + len(token))


def number_of(token: Token) -> float:
    """The value of a NUMBER or DURATION (in seconds), at most `LARGEST`; the lexer reports what exceeds it."""
    return min(magnitude(token), LARGEST)


def magnitude(token: Token) -> float:
    """The value of a NUMBER or DURATION as written, infinite where no float holds it."""
    digits = token.rstrip("umsh")
    return float(digits) * _SECONDS.get(token[len(digits) :], 1.0)


@v_args(meta=True)
class Builder(Transformer_NonRecursive):  # type: ignore[type-arg]  # Lark's own generics are incomplete
    """Makes one statement; children are nodes, tokens, or None where an optional part is absent.

    Children are `Any` because Lark hands them over untyped; the grammar fixes what they are.
    """

    # ── header and declarations ──

    def policy(self, meta: Meta, parts: list[Any]) -> tree.Name:
        return _name(parts[0])

    library = policy

    def use(self, meta: Meta, parts: list[Any]) -> tree.Use:
        library, names = parts
        return tree.Use(span=_span(meta), library=_name(library), names=names)

    def param(self, meta: Meta, parts: list[Any]) -> tree.Param:
        name, value, domain = parts
        return tree.Param(span=_span(meta), name=str(name), name_span=span_of(name), value=value, domain=domain)

    def let(self, meta: Meta, parts: list[Any]) -> tree.Let:
        name, value = parts
        return tree.Let(span=_span(meta), name=str(name), name_span=span_of(name), value=value)

    def definition(self, meta: Meta, parts: list[Any]) -> tree.Def:
        name, arguments, body = parts
        return tree.Def(span=_span(meta), name=str(name), name_span=span_of(name), arguments=arguments, body=body)

    def names(self, meta: Meta, parts: list[Any]) -> tuple[tree.Name, ...]:
        return tuple(_name(token) for token in parts)

    def range(self, meta: Meta, parts: list[Any]) -> tree.Range:
        low, _, high = parts
        return tree.Range(span=_span(meta), low=low, high=high)

    def choices(self, meta: Meta, parts: list[Any]) -> tree.Choices:
        return tree.Choices(span=_span(meta), items=tuple(parts))

    # ── filters and outcomes ──

    def keep(self, meta: Meta, parts: list[Any]) -> tree.Filter:
        return self._filter("keep", meta, parts)

    def prefer(self, meta: Meta, parts: list[Any]) -> tree.Filter:
        return self._filter("prefer", meta, parts)

    def _filter(self, word: str, meta: Meta, parts: list[Any]) -> tree.Filter:
        mask, when, label = parts
        return tree.Filter(span=_span(meta), word=word, mask=mask, when=when, label=label and _name(label))

    def route(self, meta: Meta, parts: list[Any]) -> tree.Route:
        pick, when, label = parts
        return tree.Route(span=_span(meta), pick=pick, when=when, label=label and _name(label))

    def reject(self, meta: Meta, parts: list[Any]) -> tree.Reject:
        status, message, retry, when, label = parts
        return tree.Reject(
            span=_span(meta),
            status=tree.Number(span=span_of(status), value=number_of(status)),
            message=tree.Text(span=span_of(message), value=str(message)[1:-1]),
            retry=retry,
            when=when,
            label=label and _name(label),
        )

    def hold(self, meta: Meta, parts: list[Any]) -> tree.Hold:
        patience, when, label = parts
        return tree.Hold(span=_span(meta), patience=patience, when=when, label=label and _name(label))

    # ── literals ──

    def number(self, meta: Meta, parts: list[Any]) -> tree.Number:
        sign, literal, unit = parts
        made = self._literal(meta, literal, unit)
        return replace(made, value=-made.value) if sign else made

    def quantity(self, meta: Meta, parts: list[Any]) -> tree.Number:
        return self._literal(meta, *parts)

    duration = quantity

    def _literal(self, meta: Meta, literal: Token, unit: Any) -> tree.Number:
        if literal.type == "DURATION":
            name, place = canonical("seconds", unit or ""), unit and span_of(unit)
        else:
            name, place = unit or ("", None)
        return tree.Number(span=_span(meta), value=number_of(literal), unit=str(name), unit_span=place)

    def unit(self, meta: Meta, parts: list[Any]) -> tuple[str, Span]:
        above, below = parts
        return canonical(str(above), str(below or "")), _span(meta)

    def string(self, meta: Meta, parts: list[Any]) -> tree.Text:
        return tree.Text(span=_span(meta), value=str(parts[0])[1:-1])

    def true(self, meta: Meta, parts: list[Any]) -> tree.Truth:
        return tree.Truth(span=_span(meta), value=True)

    def false(self, meta: Meta, parts: list[Any]) -> tree.Truth:
        return tree.Truth(span=_span(meta), value=False)

    def name(self, meta: Meta, parts: list[Any]) -> tree.Name:
        return _name(parts[0])

    # ── expressions ──

    def if_(self, meta: Meta, parts: list[Any]) -> tree.IfElse:
        then, condition, otherwise = parts
        return tree.IfElse(span=_span(meta), then=then, condition=condition, otherwise=otherwise)

    def binary(self, meta: Meta, parts: list[Any]) -> tree.Binary:
        left, *operator, right = parts
        place = Span(span_of(operator[0]).start, span_of(operator[-1]).end)
        op = " ".join(operator)
        return tree.Binary(span=_span(meta), op=op, left=left, right=right, op_span=place)

    def unary(self, meta: Meta, parts: list[Any]) -> tree.Unary:
        op, operand = parts
        return tree.Unary(span=_span(meta), op=str(op), operand=operand)

    def at(self, meta: Meta, parts: list[Any]) -> tree.At:
        vector, pick = parts
        return tree.At(span=_span(meta), vector=vector, pick=pick)

    def field(self, meta: Meta, parts: list[Any]) -> tree.Field:
        base, name = parts
        return tree.Field(span=_span(meta), base=str(base), name=str(name))

    def set(self, meta: Meta, parts: list[Any]) -> tree.SetOf:
        return tree.SetOf(span=_span(meta), items=tuple(item for item in parts if item is not None))

    def call(self, meta: Meta, parts: list[Any]) -> tree.Call:
        name, arguments = parts
        return tree.Call(span=_span(meta), function=str(name), arguments=arguments or (), name_span=span_of(name))

    def args(self, meta: Meta, parts: list[Any]) -> tuple[tree.Argument, ...]:
        return tuple(
            part if isinstance(part, tree.Argument) else tree.Argument(span=part.span, value=part) for part in parts
        )

    def where(self, meta: Meta, parts: list[Any]) -> tree.Argument:
        value, mask = parts
        return tree.Argument(span=_span(meta), value=value, where=mask)

    def named(self, meta: Meta, parts: list[Any]) -> tree.Argument:
        name, value = parts
        return tree.Argument(span=_span(meta), value=value, name=str(name), name_span=span_of(name))

    # ── tests ──

    def test(self, meta: Meta, parts: list[Any]) -> tree.Test:
        sentence, settings, given, (columns, rows), expect = parts
        return tree.Test(
            span=_span(meta),
            sentence=str(sentence)[1:-1],
            settings=settings or (),
            given=given or (),
            columns=columns,
            rows=rows,
            expect=expect,
        )

    def with_(self, meta: Meta, parts: list[Any]) -> tuple[tree.Setting, ...]:
        return tuple(parts)

    given = with_

    def setting(self, meta: Meta, parts: list[Any]) -> tree.Setting:
        name, written = parts
        value, unit = written, ""
        if isinstance(written, tree.Number):
            value, unit = written.value, written.unit
        elif isinstance(written, tree.Text | tree.Truth):
            value = written.value
        elif isinstance(written, Token):
            value = tree.UNKNOWN
        return tree.Setting(span=_span(meta), name=str(name), value=value, unit=unit)

    def table(self, meta: Meta, parts: list[Any]) -> tuple[tuple[tree.Column, ...], tuple[tree.Row, ...]]:
        columns = tuple(part for part in parts if isinstance(part, tree.Column))
        return columns, tuple(part for part in parts if isinstance(part, tree.Row))

    def column(self, meta: Meta, parts: list[Any]) -> tree.Column:
        name, inner = parts
        if inner is None:
            return tree.Column(span=_span(meta), feature=str(name))
        # Only `age` may stand before the bracket; anything else is left as written, which no feature is called.
        feature = str(inner) if name == "age" else f"{name}({inner})"
        return tree.Column(span=_span(meta), feature=feature, of_age=name == "age")

    def row(self, meta: Meta, parts: list[Any]) -> tree.Row:
        name, *cells = parts
        values = tuple(cell.value if isinstance(cell, tree.Text | tree.Truth) else cell for cell in cells)
        return tree.Row(span=_span(meta), name=str(name), cells=values)

    def plain(self, meta: Meta, parts: list[Any]) -> float:
        sign, literal = parts
        return -number_of(literal) if sign else number_of(literal)

    def span(self, meta: Meta, parts: list[Any]) -> float:
        return number_of(parts[0])

    def strings(self, meta: Meta, parts: list[Any]) -> frozenset[str]:
        found: frozenset[str] = parts[0]
        return found

    def set_(self, meta: Meta, parts: list[Any]) -> frozenset[str]:
        return frozenset(str(token)[1:-1] for token in parts if token is not None)

    def unknown(self, meta: Meta, parts: list[Any]) -> None:
        return tree.UNKNOWN

    def expect(self, meta: Meta, parts: list[Any]) -> tree.Expect:
        outcome, rule, failing = parts
        guard: tree.Name | tree.Text | None = failing and _name(failing)
        if failing is not None and failing.type == "STRING":
            guard = tree.Text(span=span_of(failing), value=str(failing)[1:-1])
        return tree.Expect(
            span=_span(meta),
            kind=outcome.kind,
            instances=outcome.instances,
            status=outcome.status,
            rule=rule and _name(rule),
            failing=guard,
        )

    def expect_route(self, meta: Meta, parts: list[Any]) -> tree.Expect:
        return tree.Expect(span=_span(meta), kind="route", instances=tuple(_name(token) for token in parts))

    def expect_reject(self, meta: Meta, parts: list[Any]) -> tree.Expect:
        return tree.Expect(span=_span(meta), kind="reject", status=int(number_of(parts[0])))

    def expect_hold(self, meta: Meta, parts: list[Any]) -> tree.Expect:
        return tree.Expect(span=_span(meta), kind="hold")


def _span(meta: Meta) -> Span:
    return Span(meta.start_pos, meta.end_pos)


def _name(token: Token) -> tree.Name:
    return tree.Name(span=span_of(token), name=str(token))
