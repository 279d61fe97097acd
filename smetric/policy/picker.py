"""Writes the code of picks: the best candidate, then the tie breakers, then a draw, the rotation, or a lottery."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smetric.policy.builtin import Family
from smetric.policy.code import call, compare, item, listed, load, method
from smetric.policy.term import Op, Pick, Shape, Term, Top

if TYPE_CHECKING:
    from smetric.policy.emitter import Emitter


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
