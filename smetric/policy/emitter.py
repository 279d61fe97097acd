"""Writes the code of expressions: columns are lists, chains of element-wise operations become one comprehension.

A binding is computed at most once, where something first asks for it; one that is used once is written in place.
Steps, guards and decisions are `compiler.py`, picks are `picker.py`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from smetric.policy.code import Code, call, compare, item, listed, load, store
from smetric.policy.inputs import Inputs
from smetric.policy.operation import operation
from smetric.policy.picker import Picked, write_choice, write_pick, write_top
from smetric.policy.term import (
    At,
    Binding,
    Column,
    Const,
    Draw,
    Keyed,
    Op,
    Pick,
    Provenance,
    Reduce,
    Ref,
    RequestValue,
    Scale,
    Shape,
    Term,
    Top,
    features_of,
)


@dataclass(slots=True)
class Element:
    """One element of a vector: an expression over loop variables, each of which runs over a list."""

    value: ast.expr
    sources: dict[str, str] = field(default_factory=dict)


class Emitter:
    """Writes expressions into one function.

    Args:
        code: the function.
        inputs: what it reads.
    """

    def __init__(self, code: Code, inputs: Inputs) -> None:
        self.code = code
        self.inputs = inputs
        #: The variable of the candidates left by the first filters; None before any.
        self.levels: list[str | None] = [None]
        self._bindings: dict[int, str] = {}
        self._elements: dict[str, str] = {}
        self._picks: dict[int, Picked] = {}

    # ── one value ────────────────────────────────────────────────────────────

    def scalar(self, term: Term) -> ast.expr:
        """An expression for one value; what it needs is written before it."""
        outer, self.code.span = self.code.span, term.span
        try:
            return self._scalar(term)
        finally:
            self.code.span = outer

    def atom(self, term: Term, hint: str = "x") -> ast.expr:
        """The same as a constant or a variable, so that it can stand in a loop or be read twice."""
        return self.code.atomic(self.scalar(term), hint)

    def _scalar(self, term: Term) -> ast.expr:
        if term.shape is Shape.PICK:
            return load(self.picked(term).index)
        match term:
            case Const(value=value):
                return ast.Constant(value)
            case RequestValue(name=name):
                return load(self.inputs.field(name))
            case Ref(binding=binding):
                return self._reference(binding)
            case At(vector=vector, pick=pick):
                index = self.scalar(pick)
                return item(load(self.vector(vector)), index)
            case Reduce():
                return self._reduce(term)
            case Draw(function=function, amount=amount, site=site):
                return call(function, self.scalar(amount), load("seed"), load(f"draw_{site}"))
            case Keyed(function=function, key=key):
                return call(function, self._key(key), load("seed"))
            case Op(op="if", operands=(condition, then, otherwise)):
                return self.code.lazily(
                    self.scalar(condition), lambda: self.scalar(then), lambda: self.scalar(otherwise)
                )
            case Op(op="and" | "or" as op, operands=(left, right)):
                return self.code.short_circuit(op, self.scalar(left), lambda: self.scalar(right))
            case Op(op="somebody", operands=(pick,)):
                return compare(self.scalar(pick), ast.GtE(), ast.Constant(0))
            case Op(op=op, operands=operands):
                return operation(op, [self.scalar(operand) for operand in operands], self.code.atomic)
        raise AssertionError(f"{type(term).__name__} is not one value")

    def _reference(self, binding: Binding) -> ast.expr:
        if binding.uses == 1:
            return self.scalar(binding.value)
        name = self._variable(binding)
        self.code.once(name, lambda: self.code.assign(name, self.scalar(binding.value)))
        return load(name)

    def picked(self, term: Term) -> Picked:
        """The variables of a pick, or of a choice among picks."""
        hint = "pick"
        while isinstance(term, Ref):
            hint, term = term.binding.name, term.binding.value
        if id(term) not in self._picks:
            names = (self.code.name(name) for name in (hint, f"{hint}_score", f"{hint}_site"))
            self._picks[id(term)] = Picked(*names)
        picked = self._picks[id(term)]
        if isinstance(term, Pick):
            pick = term
            self.code.once(picked.index, lambda: write_pick(self, pick, picked))
        else:
            assert isinstance(term, Op)
            choice = term
            self.code.once(picked.index, lambda: write_choice(self, choice, picked))
        return picked

    # ── one value per candidate ──────────────────────────────────────────────

    def vector(self, term: Term, hint: str = "v") -> str:
        """The variable of a list with one value per candidate, all of them, filtered or not."""
        outer, self.code.span = self.code.span, term.span
        try:
            if isinstance(term, Ref) and term.shape is Shape.VECTOR:
                binding = term.binding
                if binding.uses == 1:
                    return self.vector(binding.value, binding.name)
                name = self._variable(binding)
                self.code.once(name, lambda: self.code.assign(name, self._list(self.element(binding.value))))
                return name
            element = self.element(term)
            if isinstance(element.value, ast.Name) and element.value.id in element.sources:
                return element.sources[element.value.id]
            name = self.code.name(hint)
            self.code.assign(name, self._list(element))
            return name
        finally:
            self.code.span = outer

    def element(self, term: Term) -> Element:
        """One element of *term*; single values spread."""
        if term.shape is not Shape.VECTOR:
            return Element(self.atom(term))
        outer, self.code.span = self.code.span, term.span
        try:
            return self._element(term)
        finally:
            self.code.span = outer

    def _element(self, term: Term) -> Element:
        match term:
            case Column(feature=feature):
                return self._each(self.inputs.column(feature))
            case Ref(binding=binding) if binding.uses == 1:
                return self.element(binding.value)
            case Ref():
                return self._each(self.vector(term))
            case Op(op="if", operands=(condition, then, otherwise)) if condition.shape is Shape.SCALAR:
                return self._choice(self.atom(condition), then, otherwise)
            case Op(op=op, operands=operands):
                parts = [self.element(operand) for operand in operands]
                sources = {name: source for part in parts for name, source in part.sources.items()}
                return Element(operation(op, [part.value for part in parts], self._kept), sources)
            case Scale(function=function, value=value, level=level):
                values = self.vector(value)
                return self._made(function, load(values), self.over(value, level, None))
            case Draw(function=function, amount=amount, level=level, site=site):
                those, number = self.candidates(level), self.scalar(amount)
                return self._made(function, those, number, self.inputs.ids(), load("seed"), load(f"draw_{site}"))
            case Top():
                name = self.code.name("top_of")
                write_top(self, term, name)
                return self._each(name)
            case Keyed(function=function, key=key):
                return self._made(function, self._key(key), self.inputs.ids(), load("seed"))
            case Provenance(function=function, value=value):
                features = features_of(value)
                for feature in sorted(features):
                    self.inputs.column(feature)
                names = ast.Tuple(elts=[ast.Constant(feature) for feature in sorted(features)], ctx=ast.Load())
                return self._made(function, load("snapshot"), names)
        raise AssertionError(f"{type(term).__name__} is not one value per candidate")

    def _made(self, function: str, *arguments: ast.expr) -> Element:
        """One element of the list that a call gives."""
        name = self.code.name(f"{function}_of")
        self.code.assign(name, call(function, *arguments))
        return self._each(name)

    def _key(self, term: Term) -> ast.expr:
        """A key; where it is empty, that of the request itself."""
        key = self.scalar(term)
        own = self.inputs.identity()
        return key if own is None else ast.BoolOp(op=ast.Or(), values=[key, own])

    def _each(self, name: str) -> Element:
        if name not in self._elements:
            self._elements[name] = self.code.name(f"{name}_i")
        variable = self._elements[name]
        return Element(load(variable), {variable: name})

    def _kept(self, value: ast.expr) -> ast.expr:
        """*value*, named where it stands so that the rest of its element can read it again."""
        if isinstance(value, ast.Constant | ast.Name):
            return value
        return ast.NamedExpr(target=store(self.code.name("y")), value=value)

    def _choice(self, condition: ast.expr, then: Term, otherwise: Term) -> Element:
        first = self.code.capture(lambda: self.element(then))
        second = self.code.capture(lambda: self.element(otherwise))
        if not first.body and not second.body:
            return Element(
                ast.IfExp(test=condition, body=first.result.value, orelse=second.result.value),
                {**first.result.sources, **second.result.sources},
            )
        name = self.code.name("v")

        def keep(element: Element) -> None:
            self.code.assign(name, self._list(element))

        self.code.join(condition, self.code.resume(first, keep), self.code.resume(second, keep))
        return self._each(name)

    def _list(self, element: Element) -> ast.expr:
        if isinstance(element.value, ast.Name) and element.value.id in element.sources:
            return load(element.sources[element.value.id])
        if element.sources:
            return listed(element.value, element.sources)
        return ast.BinOp(left=ast.List(elts=[element.value], ctx=ast.Load()), op=ast.Mult(), right=self.inputs.size())

    # ── reductions ───────────────────────────────────────────────────────────

    def candidates(self, level: int) -> ast.expr:
        """The candidates left by the first *level* filters, as indices."""
        left = self.levels[level]
        return load(left) if left is not None else call("range", self.inputs.size())

    def size(self, level: int) -> ast.expr:
        """The number of candidates left by the first *level* filters."""
        left = self.levels[level]
        if left is not None:
            return call("len", load(left))
        return self.inputs.size()

    def _variable(self, binding: Binding) -> str:
        if id(binding) not in self._bindings:
            self._bindings[id(binding)] = self.code.name(binding.name)
        return self._bindings[id(binding)]

    def over(self, term: Term, level: int, where: Term | None) -> ast.expr:
        """The values of *term* for the candidates of *level* for which *where* holds."""
        left = self.levels[level]
        if left is None:
            if where is None:
                return load(self.vector(term))
            value, mask = self.element(term), self.element(where)
            sources = {**value.sources, **mask.sources}
            if not sources:
                value = self._each(self.vector(term))
                sources = value.sources
            return listed(value.value, sources, mask.value)
        i = self.code.name("i")
        values = load(self.vector(term))
        mask_i = None if where is None else item(load(self.vector(where)), load(i))
        return listed(item(values, load(i)), {i: left}, mask_i)

    def _reduce(self, term: Reduce) -> ast.expr:
        function, where, default = term.function, term.where, term.default
        if function == "count" and where is None and isinstance(term.value, Const) and term.value.value:
            return self.size(term.level)
        values = self.over(term.value, term.level, where)
        if default is None:
            return self._reduced(function, values, term)
        values = self.code.atomic(values, "those")
        return self.code.lazily(values, lambda: self._reduced(function, values, term), lambda: self.scalar(default))

    def _reduced(self, function: str, values: ast.expr, term: Reduce) -> ast.expr:
        return call(function, values, *(self.scalar(more) for more in term.more))
