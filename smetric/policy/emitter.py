"""Code of expressions and picks: columns are lists, and a chain of element-wise operations is one comprehension."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from smetric.policy.builtin import BUILTINS, Family
from smetric.policy.code import Code, call, listed, load, quote
from smetric.policy.plan import At, Binding, Call, Column, Const, Op, Pick, Ref, RequestValue, Shape, Term, features_of
from smetric.policy.types import SMALLEST_DIVISOR
from smetric.policy.vocabulary import Vocabulary


def operation(op: str, operands: Sequence[ast.expr], kept: Callable[[ast.expr], ast.expr]) -> ast.expr:
    """An element-wise operation on one value of each operand; *kept* makes an operand readable twice."""

    def better(order: str, left: ast.expr, right: ast.expr) -> ast.expr:
        """`left if left < right else right`: several times faster than a call of `min`."""
        one, other = kept(left), kept(right)
        return quote(f"a if x {order} y else b", x=one, y=other, a=_again(one), b=_again(other))

    match op, operands:
        case "not" | "neg", [operand]:
            return quote("not x" if op == "not" else "-x", x=operand)
        case "if", [condition, then, otherwise]:
            return quote("a if c else b", c=condition, a=then, b=otherwise)
        case "set", _:
            return ast.Tuple(elts=list(operands), ctx=ast.Load())
        case "chosen", [pick]:
            return quote("x >= 0", x=pick)
        case "divides", [divisor]:
            once = kept(divisor)
            return quote(f"x >= {SMALLEST_DIVISOR} or y <= -{SMALLEST_DIVISOR}", x=once, y=_again(once))
        case "least" | "greatest", _:
            return functools.reduce(functools.partial(better, "<" if op == "least" else ">"), operands)
        case "clamp", [value, low, high]:
            return better("<", better(">", value, low), high)
    if op in BUILTINS:
        return call(op, *operands)
    left, right = operands
    return quote(f"x {op} y", x=left, y=right)


def _again(value: ast.expr) -> ast.expr:
    """A kept value, read a second time."""
    return load(value.target.id) if isinstance(value, ast.NamedExpr) else value


@dataclass(slots=True)
class Element:
    """One element of a vector: an expression over loop variables, each of which runs over a list."""

    value: ast.expr
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def source(self) -> str | None:
        """The variable of the list, if the element is simply an element of one."""
        return self.sources.get(self.value.id) if isinstance(self.value, ast.Name) else None


@dataclass(frozen=True, slots=True)
class Picked:
    """The variables that a pick, or a choice among picks, sets.

    Args:
        index: the candidate, -1 for none.
        score: the list that was compared; None if all tie.
        site: the site of the pick that chose.
    """

    index: str
    score: str
    site: str


class Emitter:
    """Writes expressions into one function.

    An input or a binding is computed at most once, where it is first read; a binding with one use is written in place.
    If the snapshot lacks a look-up, the evaluation ends there.

    Args:
        code: the function.
        vocabulary: features and request fields.
        defaulted: request fields that may be unknown and are read outside guards: their default replaces None there.
        absent: the value to return if a look-up is absent, given the look-ups to ask for.
    """

    def __init__(
        self,
        code: Code,
        vocabulary: Vocabulary,
        defaulted: frozenset[str],
        absent: Callable[[frozenset[str]], ast.expr],
    ) -> None:
        self.code = code
        #: The guard, filter or pick being written: its label in traces, and the look-ups that it may ask for.
        self.asking: tuple[str, frozenset[str]] = ("", frozenset())
        #: For each look-up, the labels of the guards, filters and picks that ask for it.
        self.asked_by: dict[str, list[str]] = {}
        #: The variable of the candidates that the first filters leave; None before any filter.
        self.levels: list[str | None] = [None]
        self._vocabulary = vocabulary
        self._defaulted = defaulted
        self._absent = absent
        #: The variables of features and request fields; a field that is read with its default has another one.
        self._variables: dict[str, str] = {}
        self._columns = code.name("columns")
        self._size = code.name("n")
        self._bindings: dict[int, str] = {}
        self._elements: dict[str, str] = {}
        self._picks: dict[int, Picked] = {}

    # ── inputs ───────────────────────────────────────────────────────────────

    def size(self) -> ast.expr:
        """The number of candidates before any filter."""
        self.code.once(self._size, lambda: self.code.assign(self._size, quote("len(snapshot.ids)")))
        return load(self._size)

    def column(self, feature: str) -> str:
        """The variable of a feature's list."""
        return self._input(feature, feature, lambda name: self._read(feature, name))

    def raw_field(self, name: str) -> str:
        """The variable of a request field; it holds None if the field is unknown."""
        return self._input(f"req.{name}", f"req_{name}", lambda raw: self.code.assign(raw, quote(f"req.{name}")))

    def field(self, name: str) -> str:
        """Return the variable of a request field; an unknown value is replaced by the field's default."""
        raw = self.raw_field(name)
        if name not in self._defaulted:
            return raw
        default = ast.Constant(self._vocabulary.request[name].default)
        value = quote("default if x is None else x", x=raw, default=default)
        return self._input(f"default {name}", f"{name}_or_default", lambda known: self.code.assign(known, value))

    def key(self, key: ast.expr) -> ast.expr:
        """A key; an empty one is replaced by the request's id, if requests have one."""
        return quote("key or own", key=key, own=self.raw_field("id")) if "id" in self._vocabulary.request else key

    def _input(self, key: str, hint: str, write: Callable[[str], None]) -> str:
        if key not in self._variables:
            self._variables[key] = self.code.name(hint)
        name = self._variables[key]
        self.code.once(name, lambda: write(name))
        return name

    def _read(self, feature: str, name: str) -> None:
        code, columns = self.code, self._columns
        code.once(columns, lambda: code.assign(columns, quote("snapshot.columns")))
        if not self._vocabulary.features[feature].lookup:
            code.assign(name, quote(f"columns[{feature!r}]", columns=columns))
            return
        code.assign(name, quote(f"columns.get({feature!r})", columns=columns))
        label, lookups = self.asking
        labels = self.asked_by.setdefault(feature, [])
        if label not in labels:
            labels.append(label)
        code.choose(quote("x is None", x=name), lambda: code.give(self._absent(lookups)))

    def candidates(self, level: int) -> ast.expr:
        """The indices of the candidates that the first *level* filters leave."""
        left = self.levels[level]
        return load(left) if left is not None else quote("range(n)", n=self.size())

    # ── one value ────────────────────────────────────────────────────────────

    def scalar(self, term: Term) -> ast.expr:
        """An expression for one value; the statements that it needs are written before it."""
        with self.code.at(term.span):
            return self._scalar(term)

    def atom(self, term: Term, hint: str = "x") -> ast.expr:
        """One value as a constant or a variable, which can be read twice."""
        return self.code.atomic(self.scalar(term), hint)

    def _scalar(self, term: Term) -> ast.expr:
        if term.shape is Shape.PICK:
            return load(self.picked(term).index)
        match term:
            case Const(value=value):
                return ast.Constant(value)
            case RequestValue(name=name):
                return load(self.field(name))
            case Ref(binding=binding):
                if binding.uses == 1:
                    return self.scalar(binding.value)
                name = self._variable(binding)
                self.code.once(name, lambda: self.code.assign(name, self.scalar(binding.value)))
                return load(name)
            case At(vector=vector, pick=pick):
                index = self.scalar(pick)
                return quote("v[i]", v=self.vector(vector), i=index)
            case Call(builtin=builtin, plain=(value,)) if builtin.family is Family.CHANCE:
                return call(builtin.name, self.scalar(value), "seed", f"draw_{term.site}")
            case Call(builtin=builtin, plain=(value,)) if builtin.family is Family.PLACE:
                return call(builtin.name, self.key(self.scalar(value)), "seed")
            case Call():
                return self._reduced(term)
            case Op(op="if", operands=(condition, then, otherwise)):
                return self.code.lazily(
                    self.scalar(condition), lambda: self.scalar(then), lambda: self.scalar(otherwise)
                )
            case Op(op="and" | "or" as op, operands=(left, right)):
                return self.code.short_circuit(op, self.scalar(left), lambda: self.scalar(right))
            case Op(op=op, operands=operands):
                return operation(op, [self.scalar(operand) for operand in operands], self.code.atomic)
        raise AssertionError(f"{type(term).__name__} is not one value")

    def _variable(self, binding: Binding) -> str:
        if id(binding) not in self._bindings:
            self._bindings[id(binding)] = self.code.name(binding.name)
        return self._bindings[id(binding)]

    def _reduced(self, term: Call) -> ast.expr:
        """A reduction over the candidates; the default is computed only if there is none."""
        value, *more = term.plain
        if term.builtin.family is Family.COUNT and term.where is None and isinstance(value, Const) and value.value:
            left = self.levels[term.level]
            return self.size() if left is None else call("len", left)

        def reduced(values: ast.expr) -> ast.expr:
            return call(term.builtin.name, values, *(self.scalar(each) for each in more))

        values, default = self._over(value, term.level, term.where), term.default
        if default is None:
            return reduced(values)
        values = self.code.atomic(values, "those")
        return self.code.lazily(values, lambda: reduced(values), lambda: self.scalar(default))

    def _over(self, term: Term, level: int, where: Term | None = None) -> ast.expr:
        """The values of *term* for the candidates of *level* that are in the mask *where*."""
        left = self.levels[level]
        if left is not None:
            i, values = self.code.name("i"), self.vector(term)
            condition = None if where is None else quote("mask[i]", mask=self.vector(where), i=i)
            return listed(quote("v[i]", v=values, i=i), {i: left}, condition)
        if where is None:
            return load(self.vector(term))
        value, mask = self.element(term), self.element(where)
        if not value.sources and not mask.sources:
            value = self._each(self.vector(term))
        return listed(value.value, {**value.sources, **mask.sources}, mask.value)

    # ── one value per candidate ──────────────────────────────────────────────

    def vector(self, term: Term, hint: str = "v") -> str:
        """The variable of a list with one value per candidate, also of those that a filter removed."""
        with self.code.at(term.span):
            if isinstance(term, Ref) and term.shape is Shape.VECTOR:
                binding = term.binding
                if binding.uses == 1:
                    return self.vector(binding.value, binding.name)
                name = self._variable(binding)
                self.code.once(name, lambda: self.code.assign(name, self._list(self.element(binding.value))))
                return name
            element = self.element(term)
            return element.source or self._held(element, hint)

    def element(self, term: Term) -> Element:
        """One element of *term*; a single value is the same for all candidates."""
        if term.shape is not Shape.VECTOR:
            return Element(self.atom(term))
        with self.code.at(term.span):
            return self._element(term)

    def _element(self, term: Term) -> Element:
        match term:
            case Column(feature=feature):
                return self._each(self.column(feature))
            case Ref(binding=binding) if binding.uses == 1:
                return self.element(binding.value)
            case Ref():
                return self._each(self.vector(term))
            case Op(op="if", operands=(condition, then, otherwise)) if condition.shape is Shape.SCALAR:
                return self._either(self.atom(condition), then, otherwise)
            case Op(op=op, operands=operands):
                parts = [self.element(operand) for operand in operands]
                sources = {name: source for part in parts for name, source in part.sources.items()}
                return Element(operation(op, [part.value for part in parts], self._kept), sources)
            case Call():
                made = self._called(term)
                name = self.code.name(f"{term.builtin.name}_of")
                self.code.assign(name, made)
                return self._each(name)
        raise AssertionError(f"{type(term).__name__} is not one value per candidate")

    def _called(self, term: Call) -> ast.expr:
        """The list that a built-in returns."""
        function, value, ids = term.builtin.name, term.plain[0], quote("snapshot.ids")
        match term.builtin.family:
            case Family.SCALE:
                return call(function, self.vector(value), self._over(value, term.level))
            case Family.DRAW:
                those, number = self.candidates(term.level), self.scalar(value)
                return call(function, those, number, ids, "seed", f"draw_{term.site}")
            case Family.TOP:
                return self._top(term)
            case Family.WEIGHT:
                return call(function, self.key(self.scalar(value)), ids, "seed")
        features = sorted(features_of(value))
        for feature in features:
            self.column(feature)
        return call(function, "snapshot", quote(repr(tuple(features))))

    def _top(self, term: Call) -> ast.expr:
        """The mask of `top`; a tie breaker is computed only if the last places are tied."""
        code = self.code
        value, amount = term.plain
        values, those, number = self.vector(value), self.candidates(term.level), self.scalar(amount)
        chosen, tied, places = (code.name(name) for name in ("chosen", "tied", "places"))
        code.unpack((chosen, tied, places), call("highest", values, those, number))

        def narrow(then: Term) -> None:
            values, more = self.vector(then), code.name("more")
            code.unpack((more, tied, places), call("lowest", values, tied, places))
            code.assign(chosen, quote("chosen + more", chosen=chosen, more=more))

        for then in term.thens:
            narrower = functools.partial(narrow, then)
            code.choose(quote("len(tied) > places", tied=tied, places=places), narrower)
        drawn = call("drawn_of", tied, places, quote("snapshot.ids"), "seed", f"draw_{term.site}")
        code.assign(chosen, quote("chosen + drawn", chosen=chosen, drawn=drawn))
        return call("marked", chosen, self.size())

    def _each(self, name: str) -> Element:
        if name not in self._elements:
            self._elements[name] = self.code.name(f"{name}_i")
        variable = self._elements[name]
        return Element(load(variable), {variable: name})

    def _kept(self, value: ast.expr) -> ast.expr:
        """*value*, named in place so that the rest of its element can read it again."""
        if isinstance(value, ast.Constant | ast.Name):
            return value
        return ast.NamedExpr(target=ast.Name(id=self.code.name("y"), ctx=ast.Store()), value=value)

    def _either(self, condition: ast.expr, then: Term, otherwise: Term) -> Element:
        """One element of either term; statements of the other one are not executed."""
        first = self.code.capture(lambda: self.element(then))
        second = self.code.capture(lambda: self.element(otherwise))
        if not first.body and not second.body:
            value = quote("a if c else b", c=condition, a=first.result.value, b=second.result.value)
            return Element(value, {**first.result.sources, **second.result.sources})
        name = self.code.name("v")

        def keep(element: Element) -> None:
            self.code.assign(name, self._list(element))

        self.code.join(condition, self.code.resume(first, keep), self.code.resume(second, keep))
        return self._each(name)

    def _held(self, element: Element, hint: str) -> str:
        """A new variable with the list of all elements."""
        name = self.code.name(hint)
        self.code.assign(name, self._list(element))
        return name

    def _list(self, element: Element) -> ast.expr:
        if element.source is not None:
            return load(element.source)
        if element.sources:
            return listed(element.value, element.sources)
        return quote("[x] * n", x=element.value, n=self.size())

    # ── picks ────────────────────────────────────────────────────────────────

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
            self.code.once(picked.index, functools.partial(self._write_pick, term, picked))
        else:
            assert isinstance(term, Op)
            self.code.once(picked.index, functools.partial(self._write_choice, term, picked))
        return picked

    def _write_choice(self, choice: Op, into: Picked) -> None:
        """Set *into* to the variables of the pick that an `if` takes; the other pick is not computed."""
        condition, then, otherwise = choice.operands

        def take(term: Term) -> None:
            taken = self.picked(term)
            for name in Picked.__slots__:
                self.code.assign(getattr(into, name), load(getattr(taken, name)))

        self.code.choose(self.scalar(condition), lambda: take(then), lambda: take(otherwise))

    def _write_pick(self, pick: Pick, into: Picked) -> None:
        code = self.code
        with code.at(pick.span):
            code.assign(into.site, ast.Constant(pick.site))
            scored = pick.value.shape is Shape.VECTOR
            # If the score is a column, this only gives it a second name.
            code.assign(into.score, load(self.vector(pick.value)) if scored else ast.Constant(None))
            left = self.levels[pick.level]
            if pick.where is not None:
                self._pick_where(pick, pick.where, into, left)
            elif left is not None:
                self._pick_among(pick, into, load(left))
            elif not scored or pick.family is Family.LOTTERY or pick.named is not None:
                self._pick_among(pick, into, self.candidates(0))
            else:
                self._pick_of_all(pick, into)

    def _pick_of_all(self, pick: Pick, into: Picked) -> None:
        """Set the index to the best of all candidates; the common case, in which the score is scanned by C code."""
        code, score = self.code, into.score
        best = code.name("best")
        code.assign(best, quote(f"{pick.direction}(score)", score=score))
        code.assign(into.index, quote("score.index(best)", score=score, best=best))

        def tie() -> None:
            if pick.thens:
                tied, i, x = (code.name(name) for name in ("tied", "i", "x"))
                tying = quote("[i for i, x in enumerate(score) if x == best]", i=i, x=x, score=score, best=best)
                code.assign(tied, tying)
                self._break_tie(pick, pick.thens, tied, into.index)
                return
            ids, name, x = (code.name(name) for name in ("ids", "name", "x"))
            code.assign(ids, quote("snapshot.ids"))
            names = listed(load(name), {name: ids, x: score}, quote("x == best", x=x, best=best))
            code.assign(into.index, self._one_of(pick, ids, names))

        code.choose(quote("score.count(best) > 1", score=score, best=best), tie)

    def _pick_where(self, pick: Pick, where: Term, into: Picked, left: str | None) -> None:
        """Set the index to the best of the candidates in a mask, -1 if there is none."""
        code = self.code
        those, i = code.name("those"), code.name("i")
        mask = self.vector(where)
        if left is None:
            code.assign(those, quote("[i for i, x in enumerate(mask) if x]", i=i, x=code.name("x"), mask=mask))
        else:
            code.assign(those, quote("[i for i in left if mask[i]]", i=i, left=left, mask=mask))
        code.choose(
            load(those),
            lambda: self._pick_among(pick, into, load(those)),
            lambda: code.assign(into.index, ast.Constant(-1)),
        )

    def _pick_among(self, pick: Pick, into: Picked, among: ast.expr) -> None:
        """Set the index to one of the candidates *among*, of which there is at least one."""
        code = self.code
        those = code.named(among, "those")
        if pick.value.shape is not Shape.VECTOR:
            self._break_tie(pick, pick.thens, those, into.index)
        elif pick.family is Family.LOTTERY:
            named = [] if pick.named is None else [self.scalar(pick.named)]
            ids, stream = quote("snapshot.ids"), f"stream_{pick.site}"
            code.assign(into.index, call(pick.builtin.name, into.score, those, ids, "seed", stream, *named))
        else:
            within = None if pick.named is None else self.atom(pick.named, "within")
            tied = self._narrowed(into.score, those, pick.direction, within)
            self._break_tie(pick, pick.thens, tied, into.index)

    def _narrowed(self, values: str, those: str, direction: str, within: ast.expr | None = None) -> str:
        """The variable of the indices in *those* with the best value, or one at most *within* from it."""
        code = self.code
        i, best, tied = code.name("i"), code.name("best"), code.name("tied")
        bound: ast.expr = call(direction, quote("[v[i] for i in those]", v=values, i=i, those=those))
        order = "=="
        if within is not None:
            sign, order = ("+", "<=") if direction == "min" else ("-", ">=")
            bound = quote(f"bound {sign} within", bound=bound, within=within)
        code.assign(best, bound)
        tying = quote(f"[i for i in those if v[i] {order} best]", v=values, i=i, those=those, best=best)
        code.assign(tied, tying)
        return tied

    def _break_tie(self, pick: Pick, thens: Sequence[Term], tied: str, index: str) -> None:
        """Set *index* to one of *tied*; a tie breaker is computed only if there are several."""
        code = self.code

        def several() -> None:
            if thens:
                fewer = self._narrowed(self.vector(thens[0]), tied, "min")
                self._break_tie(pick, thens[1:], fewer, index)
                return
            ids, i = code.name("ids"), code.name("i")
            code.assign(ids, quote("snapshot.ids"))
            code.assign(index, self._one_of(pick, ids, quote("[ids[i] for i in tied]", ids=ids, i=i, tied=tied)))

        code.choose(quote("len(tied) > 1", tied=tied), several, lambda: code.assign(index, quote("tied[0]", tied=tied)))

    def _one_of(self, pick: Pick, ids: str, names: ast.expr) -> ast.expr:
        """The index in *ids* of one of the tied *names*: in rotation, or drawn."""
        if pick.rotates:
            return quote("ids.index(rotated(names, used.get(key, '')))", ids=ids, names=names, key=f"key_{pick.site}")
        return quote("ids.index(drawn(names, seed, stream))", ids=ids, names=names, stream=f"stream_{pick.site}")
