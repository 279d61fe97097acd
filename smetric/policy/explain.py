"""Says why: a decision as one sentence, as a table, and as the full account that `smetric explain` prints.

Numbers, names of the policy and ids of instances only: no string of a request is ever printed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from smetric.policy.builtin import Family
from smetric.policy.candidate_table import rows, score_name, table, term_name
from smetric.policy.figure import figure
from smetric.policy.outcome import Outcome
from smetric.policy.term import Column, Const, Op, Pick, Ref, RequestValue, Shape, Term, fields_of, walk

if TYPE_CHECKING:
    from smetric.policy.decision import Decision

__all__ = ["explain", "guard_numbers", "rules", "summary", "table"]

#: Candidates that the full account lists in their own order; of more, the best.
_ROWS = 32
#: A comparison as the text shows it where it held, and what it turned out to be where it failed.
_SIGNS = {"<=": "≤", ">=": "≥", "<": "<", ">": ">"}
_OPPOSITE = {"<=": ">", ">=": "<", "<": "≥", ">": "≤"}
_TRUE = {"≤": operator.le, "≥": operator.ge, "<": operator.lt, ">": operator.gt}
#: Figures that the numbers of a comparison are tried in.
_DIGITS = (4, 6, 9, 12, 17)
_MARKS = {True: "✓", False: "✗", None: "·"}


def summary(decision: Decision) -> str:
    """The decision in one sentence, with the numbers that settled it."""
    steps = decision.policy.plan.steps[: decision.step_index]
    reasons = [_failure(decision, at) for at, step in enumerate(steps) if not step.kind.is_filter]
    return "; ".join([_result(decision), *reasons])


def explain(decision: Decision) -> str:
    """The rules visited with their guards (✓ held, ✗ failed, · not evaluated), then the candidates."""
    lines = [f"{decision.policy.name}: {_headline(decision)}", *rules(decision)]
    count = len(decision.snapshot.ids)
    if count <= _ROWS:
        lines.append(rows(decision, range(count)))
    else:
        lines.append(table(decision, top=_ROWS, limit_bytes=1 << 16))
    return "\n".join(lines)


def rules(decision: Decision) -> list[str]:
    """A line for each statement visited: what a filter left, or which guards held, with the numbers they compared."""
    lines = []
    width = max((len(step.label) for step in decision.policy.plan.steps[: len(decision.stops)]), default=0)
    filters = iter(decision.filters)
    guards = iter(decision.guards)
    for at in range(len(decision.stops)):
        step = decision.policy.plan.steps[at]
        if step.kind.is_filter:
            narrowed = next(filters)
            if narrowed.ignored:
                account = "ignored: it would leave nobody"
            elif not narrowed.applied:
                account = "does not apply"
            else:
                account = f"left {len(narrowed.left)} of {len(decision.snapshot.ids)}"
        else:
            shown = []
            for place, (label, held) in enumerate(next(guards).guards):
                numbers = guard_numbers(decision, at, place)
                shown.append(f"{_MARKS[held]} {label}{f' ({numbers})' if numbers else ''}")
            account = "   ".join(shown) if shown else "always"
        arrow = "→" if at == decision.step_index else " "
        lines.append(f"  {arrow} {step.label:<{width}}    {account}")
    return lines


def guard_numbers(decision: Decision, at: int, place: int) -> str:
    """Both sides of guard number *place* of rule number *at*, as in `24 > 2 × 9.5`; empty where there are none to tell.

    The sign tells what was the case, so it is the opposite of the policy's where the guard failed.
    """
    guards, stop = decision.policy.plan.steps[at].guards, decision.stops[at]
    if place >= len(guards) or place > stop:
        return ""
    term = guards[place].value
    return _numbers(decision, at, term) if place == stop else _sides(decision, at, term, _SIGNS)


def _headline(decision: Decision) -> str:
    if decision.outcome is Outcome.ROUTE:
        return f"route to {decision.instance}"
    if decision.outcome is Outcome.HOLD:
        return f"hold for {figure(decision.wait_s)} s in all"
    return f"reject {decision.status}, {decision.message}"


# ── the sentence ─────────────────────────────────────────────────────────────


def _result(decision: Decision) -> str:
    if decision.outcome is Outcome.HOLD:
        return f"{decision.rule}: held, for {figure(decision.wait_s)} s in all at most"
    if decision.outcome is Outcome.REJECT:
        return f"{decision.rule}: rejected with {decision.status}"
    if decision.outcome is Outcome.NOBODY:
        return f"{decision.rule}: none of {len(decision.snapshot.ids)} instances is left"
    pick = decision.pick
    assert pick is not None
    tied = decision.tied
    settled = "next in the rotation" if pick.rotates else "drawn"
    if pick.thens:
        lowest = (f"lowest {term_name(decision, then)}" for then in pick.thens)
        settled = f"taken by {', then '.join([*lowest, settled])}"
    if decision.score is None:
        return f"{decision.rule}: {decision.instance} is {settled} among {tied}"
    value = decision.score[decision.index]
    if pick.family is Family.LOTTERY and (pick.named is None or decision.named > 0):
        drawn = f"drawn by {pick.function} among {len(decision.candidates)}"
        return f"{decision.rule}: {decision.instance} is {drawn}, with {score_name(decision)} {figure(value)}"
    nearly = "nearly " if decision.is_behind else ""
    said = f"{decision.rule}: {decision.instance} has {nearly}the {_best(decision, pick)} ({figure(value)})"
    if tied > 1:
        alike = nearly or sum(decision.score[i] == value for i in decision.candidates) == tied
        have = "have" if alike else "nearly have"
        said += f", as {have} {tied - 1} more: {'' if pick.thens else 'it is '}{settled}"
    return said


def _best(decision: Decision, pick: Pick) -> str:
    """`fewest requests`, `highest hit_len`, …."""
    name = score_name(decision)
    if name == "requests":
        return f"{'fewest' if pick.direction == 'min' else 'most'} requests"
    return f"{'lowest' if pick.direction == 'min' else 'highest'} {name}"


def _failure(decision: Decision, at: int) -> str:
    """Why rule number *at*, which was visited, did not fire."""
    step = decision.policy.plan.steps[at]
    stop = decision.stops[at]
    if stop == len(step.guards):
        return f"{step.label} found nobody"
    guard = step.guards[stop]
    numbers = _numbers(decision, at, guard.value)
    return f"{_subject(decision, at, guard.value)} failed {guard.label}{f' ({numbers})' if numbers else ''}"


def _subject(decision: Decision, at: int, term: Term) -> str:
    """The instance that a guard judges, where it judges the one its rule would take; else the rule."""
    step = decision.policy.plan.steps[at]
    route = step.value
    picks = {id(part.binding): part for part in walk(term) if isinstance(part, Ref) and part.shape is Shape.PICK}
    if isinstance(route, Ref) and id(route.binding) in picks and isinstance(route.binding.value, Pick):
        pick = route.binding.value
        index = decision.policy.probe(decision, at, route)
        if index is not None and index >= 0:
            name: str = decision.snapshot.ids[index]
            if pick.value.shape is not Shape.VECTOR:
                return name
            value = term_name(decision, pick.value)
            score = figure(decision.policy.probe(decision, at, pick.value)[index])
            if pick.family is Family.LOTTERY or pick.named is not None:  # whoever was taken need not be the best
                return f"{name}, with {value} {score},"
            return f"{name}, with the {'lowest' if pick.direction == 'min' else 'highest'} {value} ({score}),"
    return step.label


def _numbers(decision: Decision, at: int, term: Term) -> str:
    """Both sides of a comparison that failed."""
    unknown = sorted(name for name in fields_of(term) if getattr(decision.request, name) is None)
    return f"req.{unknown[0]} is unknown" if unknown else _sides(decision, at, term, _OPPOSITE)


def _sides(decision: Decision, at: int, term: Term, signs: Mapping[str, str]) -> str:
    """Both sides of a comparison; what a name was that is compared for equality."""
    while isinstance(term, Ref) and term.shape is Shape.SCALAR:
        term = term.binding.value
    if not isinstance(term, Op) or len(term.operands) != 2:
        return ""
    left, right = term.operands
    if term.op in signs:
        return _comparison(_side(decision, at, left), signs[term.op], _side(decision, at, right))
    if term.op in ("==", "!="):
        value = decision.policy.probe(decision, at, left)
        if isinstance(value, int | float) and isinstance(left, RequestValue | Ref | Column):
            name = f"req.{left.name}" if isinstance(left, RequestValue) else term_name(decision, left)
            return f"{name} is {figure(value)}"
    return ""


def _comparison(left: Sequence[float], sign: str, right: Sequence[float]) -> str:
    """Both sides with their sign, in as many figures as it takes for what is printed to be true."""
    said = ""
    for digits in _DIGITS:
        sides = [[figure(number, digits) for number in side] for side in (left, right)]
        said = f" {sign} ".join(" × ".join(side) for side in sides)
        if _TRUE[sign](*(math.prod(map(float, side)) for side in sides)):
            break
    return said


def _side(decision: Decision, at: int, term: Term) -> tuple[float, ...]:
    """The factors of one side: two of a multiple, those of what `least` or `greatest` took, else the number."""
    while isinstance(term, Ref) and term.shape is Shape.SCALAR:
        term = term.binding.value
    value = decision.policy.probe(decision, at, term)
    if isinstance(term, Op) and term.op in ("least", "greatest"):
        for operand in term.operands:
            if decision.policy.probe(decision, at, operand) == value:
                return _side(decision, at, operand)
    if isinstance(term, Op) and term.op == "*":
        factor, other = term.operands
        if isinstance(factor, Const) and not isinstance(other, Const):
            return factor.value, decision.policy.probe(decision, at, other)
    return (value,)
