"""Code of expressions and picks."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from smetric.policy.builtin import BUILTINS, Family
from smetric.policy.code import Code, Inputs, call, compare, item, listed, load, method, store
from smetric.policy.plan import (
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
from smetric.policy.types import SMALLEST_DIVISOR

# One element-wise operation of the language on one value of each operand, as code.

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
        case "divides", [divisor]:
            once = kept(divisor)
            above = compare(once, ast.GtE(), ast.Constant(SMALLEST_DIVISOR))
            below = compare(_again(once), ast.LtE(), ast.Constant(-SMALLEST_DIVISOR))
            return ast.BoolOp(op=ast.Or(), values=[above, below])
        case "if", [condition, then, otherwise]:
            return ast.IfExp(test=condition, body=then, orelse=otherwise)
        case "set", _:
            return ast.Tuple(elts=operands, ctx=ast.Load())
        case "least" | "greatest", [first, *others]:
            order = ast.Lt if op == "least" else ast.Gt
            return functools.reduce(lambda left, right: _better(order(), kept(left), kept(right)), others, first)
        case "clamp", [value, low, high]:
            return _better(ast.Lt(), kept(_better(ast.Gt(), kept(value), kept(low))), kept(high))
    assert op in BUILTINS, f"no such operation: {op}"
    return call(op, *operands)


def _better(order: ast.cmpop, left: ast.expr, right: ast.expr) -> ast.expr:
    """`left if left < right else right`: several times faster than a call of `min`; both can be read twice."""
    return ast.IfExp(test=compare(left, order, right), body=_again(left), orelse=_again(right))


def _again(value: ast.expr) -> ast.expr:
    """*value* read a second time."""
    return load(value.target.id) if isinstance(value, ast.NamedExpr) else value


# Writes the code of picks: the best candidate, then the tie breakers, then a draw, the rotation, or a lottery.


@dataclass(frozen=True, slots=True)
class Picked:
    """The variables that a pick, or a choice among picks, sets.

    Args:
        index: the candidate, -1 for nobody.
        score: the list that was compared; None where all tie.
        site: the number of the pick that chose.
    """

    index: str
    score: str
    site: str


def write_choice(emitter: Emitter, choice: Op, into: Picked) -> None:
    """Set the variables *into* to those of the pick that *choice*, an `if`, takes; the other is not computed."""
    code = emitter.code
    condition, then, otherwise = choice.operands

    def take(term: Term) -> None:
        taken = emitter.picked(term)
        code.assign(into.index, load(taken.index))
        code.assign(into.score, load(taken.score))
        code.assign(into.site, load(taken.site))

    code.choose(emitter.scalar(condition), lambda: take(then), lambda: take(otherwise))


def write_pick(emitter: Emitter, pick: Pick, into: Picked) -> None:
    """Set the variables *into* to what *pick* chooses."""
    code = emitter.code
    outer, code.span = code.span, pick.span
    code.assign(into.site, ast.Constant(pick.site))
    scored = pick.value.shape is Shape.VECTOR
    # Where the score is a column, this only gives it a second name.
    code.assign(into.score, load(emitter.vector(pick.value)) if scored else ast.Constant(None))
    left = emitter.levels[pick.level]
    if left is None and pick.where is None:
        _among_all(emitter, pick, into)
    else:
        _among_some(emitter, pick, into, left)
    code.span = outer


def write_top(emitter: Emitter, top: Top, into: str) -> None:
    """Set the variable *into* to the mask of *top*; a tie breaker is asked only where the last places are tied."""
    code = emitter.code
    values = emitter.vector(top.value)
    those, amount = emitter.candidates(top.level), emitter.scalar(top.amount)
    chosen, tied, places = (code.name(name) for name in ("chosen", "tied", "places"))
    code.unpack((chosen, tied, places), call("highest", load(values), those, amount))
    stream = load(f"draw_{top.site}")

    def fill(thens: Sequence[Term]) -> None:
        if not thens:
            taken = call("drawn_of", load(tied), load(places), emitter.inputs.ids(), load("seed"), stream)
            code.assign(chosen, ast.BinOp(left=load(chosen), op=ast.Add(), right=taken))
            return

        def narrow() -> None:
            then = load(emitter.vector(thens[0]))
            more = code.name("more")
            code.unpack((more, tied, places), call("lowest", then, load(tied), load(places)))
            code.assign(chosen, ast.BinOp(left=load(chosen), op=ast.Add(), right=load(more)))

        code.choose(compare(call("len", load(tied)), ast.Gt(), load(places)), narrow)
        fill(thens[1:])

    fill(top.thens)
    code.assign(into, call("marked", load(chosen), emitter.inputs.size()))


def _among_all(emitter: Emitter, pick: Pick, into: Picked) -> None:
    code = emitter.code
    if pick.value.shape is not Shape.VECTOR or pick.family is Family.LOTTERY or pick.named is not None:
        _best_of(emitter, pick, into, call("range", emitter.inputs.size()))
        return
    score = load(into.score)
    best = code.name("best")
    code.assign(best, call(pick.direction, score))
    code.assign(into.index, method(score, "index", load(best)))

    def tie() -> None:
        if pick.thens:
            tied = code.name("tied")
            i, x = code.name("i"), code.name("x")
            code.assign(tied, _enumerated(i, x, score, compare(load(x), ast.Eq(), load(best))))
            _break_tie(emitter, pick, pick.thens, tied, into.index)
            return
        ids, name, x = code.name("ids"), code.name("name"), code.name("x")
        code.assign(ids, emitter.inputs.ids())
        names = listed(load(name), {name: ids, x: into.score}, compare(load(x), ast.Eq(), load(best)))
        code.assign(into.index, _one_of(emitter, pick, load(ids), names))

    code.choose(compare(method(score, "count", load(best)), ast.Gt(), ast.Constant(1)), tie)


def _among_some(emitter: Emitter, pick: Pick, into: Picked, left: str | None) -> None:
    code = emitter.code
    if pick.where is None:
        assert left is not None
        _best_of(emitter, pick, into, load(left))
        return
    those, i = code.name("those"), code.name("i")
    mask = load(emitter.vector(pick.where))
    if left is None:
        x = code.name("x")
        code.assign(those, _enumerated(i, x, mask, load(x)))
    else:
        code.assign(those, listed(load(i), {i: left}, item(mask, load(i))))
    code.choose(
        load(those),
        lambda: _best_of(emitter, pick, into, load(those)),
        lambda: code.assign(into.index, ast.Constant(-1)),
    )


def _best_of(emitter: Emitter, pick: Pick, into: Picked, among: ast.expr) -> None:
    """Set the index of *into* to one of the candidates *among*, of whom there is one at least."""
    code = emitter.code
    those = code.named(among, "those")
    if pick.value.shape is not Shape.VECTOR:
        _break_tie(emitter, pick, pick.thens, those, into.index)
        return
    ids, seed, stream = emitter.inputs.ids(), load("seed"), load(f"stream_{pick.site}")
    if pick.family is Family.LOTTERY:
        told = [] if pick.named is None else [emitter.scalar(pick.named)]
        code.assign(into.index, call(pick.function, load(into.score), load(those), ids, seed, stream, *told))
        return
    within = None if pick.named is None else emitter.atom(pick.named, "within")
    tied = _narrowed(emitter, load(into.score), those, pick.direction, within)
    _break_tie(emitter, pick, pick.thens, tied, into.index)


def _narrowed(
    emitter: Emitter, values: ast.expr, those: str, direction: str, within: ast.expr | None = None
) -> str:  # fmt: skip
    """The variable of the indices in *those* with the best value, or one at most *within* from it."""
    code = emitter.code
    i, best, tied = code.name("i"), code.name("best"), code.name("tied")
    bound: ast.expr = call(direction, listed(item(values, load(i)), {i: those}))
    order: ast.cmpop = ast.Eq()
    if within is not None:
        bound = ast.BinOp(left=bound, op=ast.Add() if direction == "min" else ast.Sub(), right=within)
        order = ast.LtE() if direction == "min" else ast.GtE()
    code.assign(best, bound)
    code.assign(tied, listed(load(i), {i: those}, compare(item(values, load(i)), order, load(best))))
    return tied


def _break_tie(emitter: Emitter, pick: Pick, thens: Sequence[Term], tied: str, index: str) -> None:
    """Set *index* to one of *tied*: by the next tie breaker if there is one, which is asked only now."""
    code = emitter.code

    def several() -> None:
        if thens:
            fewer = _narrowed(emitter, load(emitter.vector(thens[0])), tied, "min")
            _break_tie(emitter, pick, thens[1:], fewer, index)
            return
        ids, i = code.name("ids"), code.name("i")
        code.assign(ids, emitter.inputs.ids())
        names = listed(item(load(ids), load(i)), {i: tied})
        code.assign(index, _one_of(emitter, pick, load(ids), names))

    one = item(load(tied), ast.Constant(0))
    code.choose(compare(call("len", load(tied)), ast.Gt(), ast.Constant(1)), several, lambda: code.assign(index, one))


def _one_of(emitter: Emitter, pick: Pick, ids: ast.expr, names: ast.expr) -> ast.expr:
    """The index of one of *names*, which are still tied, in *ids*: in rotation, or drawn."""
    if pick.rotates:
        last = method(load("used"), "get", load(f"key_{pick.site}"), ast.Constant(""))
        return method(ids, "index", call("rotated", names, last))
    return method(ids, "index", call("drawn", names, load("seed"), load(f"stream_{pick.site}")))


def _enumerated(i: str, x: str, values: ast.expr, condition: ast.expr) -> ast.expr:
    """`[i for i, x in enumerate(values) if condition]`."""
    target = ast.Tuple(elts=[ast.Name(id=i, ctx=ast.Store()), ast.Name(id=x, ctx=ast.Store())], ctx=ast.Store())
    over = call("enumerate", values)
    return ast.ListComp(
        elt=load(i), generators=[ast.comprehension(target=target, iter=over, ifs=[condition], is_async=0)]
    )


# Writes the code of expressions: columns are lists, chains of element-wise operations become one comprehension.
#
# A binding is computed at most once, where something first asks for it; one that is used once is written in place.
# Steps, guards and decisions are `compiler.py`, picks are `picker.py`.


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
