"""Explanations of a decision: one sentence, a table, a full account.

They print numbers, names of the policy and ids of instances. Strings of a request are never printed.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from smetric.policy.builtin import Family
from smetric.policy.lexer import one_line
from smetric.policy.plan import Column, Const, Op, Outcome, Pick, Ref, RequestValue, Shape, Term, fields_of, walk
from smetric.policy.types import clipped, figure

if TYPE_CHECKING:
    from smetric.policy.decision import Decision, FilterTrace


_INDENT = "    "
_GAP = "    "
#: Up to this number, the full account lists all candidates in their own order; beyond it, only the best ones.
_ROWS = 32
#: A comparison as the text shows it if it held, and if it failed.
_SIGNS = {"<=": "≤", ">=": "≥", "<": "<", ">": ">"}
_OPPOSITE = {"<=": ">", ">=": "<", "<": "≥", ">": "≤"}
_TRUE = {"≤": operator.le, "≥": operator.ge, "<": operator.lt, ">": operator.gt}
#: The precisions that are tried for the numbers of a comparison.
_DIGITS = (4, 6, 9, 12, 17)
_MARKS = {True: "✓", False: "✗", None: "·"}

# ── the candidates ───────────────────────────────────────────────────────────


def table(decision: Decision, top: int = 8, limit_bytes: int = 1900) -> str:
    """The chosen candidate, then the best of the others, as aligned text.

    Args:
        decision: the decision.
        top: limit on the rows.
        limit_bytes: limit on the text in UTF-8; rows are left out, never cut.
    """
    order = list(foremost(decision, top))
    if len(order) < top:
        left_out = set(range(len(decision.snapshot.ids))) - set(decision.candidates)
        order += sorted(left_out, key=decision.snapshot.ids.__getitem__)[: top - len(order)]
    shown = len(order)
    while True:
        text = rows(decision, order[:shown], hidden=len(decision.snapshot.ids) - shown)
        if len(text.encode()) <= limit_bytes or shown == 0:
            return text if len(text.encode()) <= limit_bytes else ""
        shown -= 1


@functools.lru_cache(maxsize=1)  # text and JSON of one decision are made one after the other
def foremost(decision: Decision, top: int) -> tuple[int, ...]:
    """`Decision.foremost`, cached for the last decision."""
    return tuple(decision.foremost(top))


def rows(decision: Decision, order: Iterable[int], hidden: int = 0) -> str:
    """The rows of the candidates *order*, the number of others, the sources of look-ups, and the ages of cells."""
    order, snapshot, filters = list(order), decision.snapshot, decision.filters
    columns: dict[str, list[str]] = {}
    for feature in columns_of(decision):
        known, values = snapshot.known.get(feature), snapshot.columns[feature]
        columns[feature] = [f"{'' if known is None or known[i] else '? '}{figure(values[i])}" for i in order]
    if decision.score is not None and decision.pick is not None and not isinstance(decision.pick.value, Column):
        columns[score_name(decision)] = [figure(decision.score[i]) for i in order]
    names = ["instance", *(clipped(snapshot.ids[i]) for i in order)]
    width = max(map(len, names))
    padded = [[name.ljust(width) for name in ("", *names[1:])]]
    for header, cells in columns.items():
        width = max(map(len, (header, *cells)))
        padded.append([cell.rjust(width) for cell in (header, *cells)])
    marks = ["", *(_mark(i, decision.index, filters) for i in order)]
    lines = [(_INDENT + _GAP.join(row) + mark).rstrip() for *row, mark in zip(*padded, marks, strict=True)]
    if not columns or not order:
        del lines[0]
    if hidden:
        lines.append(f"{_INDENT}… and {hidden} more")
    lines += [f"{_INDENT}{note}" for feature in columns if (note := _sources(decision, feature, order))]
    lines += [f"{_INDENT}{note}" for note in _ages(decision, columns, order)]
    return "\n".join(lines)


def _sources(decision: Decision, feature: str, order: Iterable[int]) -> str:
    """`hit_len from prefix_index`; several sources are listed with their candidates."""
    snapshot = decision.snapshot
    origins = snapshot.origins_of(feature)
    if origins is None:
        return ""
    by_source: dict[str, list[str]] = {}
    for i in order:
        if source := origins[i]:
            by_source.setdefault(source, []).append(clipped(snapshot.ids[i]))
    if len(by_source) <= 1:
        return "".join(f"{feature} from {source}" for source in by_source)
    return f"{feature} from " + ", ".join(f"{source} ({', '.join(ids)})" for source, ids in by_source.items())


def _ages(decision: Decision, features: Iterable[str], order: list[int]) -> list[str]:
    """`requests, kv_usage 0.4 s old on gpu-1, 0.1 to 2.5 s on all`: the ages of measured features.

    Features with the same ages share a line. The age on the chosen instance is given if the others differ.
    """
    snapshot, chosen = decision.snapshot, decision.index
    together: dict[str, list[str]] = {}
    for feature in features:
        stamps, known = snapshot.stamps.get(feature), snapshot.known.get(feature)
        if stamps is None:
            continue
        ages = {
            i: max(0.0, snapshot.now - at)
            for i in order
            if (at := stamps[i]) is not None and (known is None or known[i])
        }
        if not ages:
            continue
        youngest, oldest = (figure(round(extreme(ages.values()), 2)) for extreme in (min, max))
        if youngest == oldest:
            span = f"{oldest} s old"
        elif chosen in ages:
            own = f"{figure(round(ages[chosen], 2))} s old on {clipped(snapshot.ids[chosen])}"
            span = f"{own}, {youngest} to {oldest} s on all"
        else:
            span = f"{youngest} to {oldest} s old"
        together.setdefault(span, []).append(feature)
    return [f"{', '.join(names)} {span}" for span, names in together.items()]


def columns_of(decision: Decision) -> list[str]:
    """The features that this decision saw, in the order in which the policy reads them."""
    columns = decision.snapshot.columns
    return [feature for feature in decision.policy.asks if feature in columns]


def score_name(decision: Decision) -> str:
    """The score of the pick, in the policy's own words."""
    pick = decision.pick
    assert pick is not None
    return term_name(decision, pick.value)


def term_name(decision: Decision, term: Term) -> str:
    """The name of a feature or a `let`, else the source text."""
    if isinstance(term, Column):
        return term.feature
    if isinstance(term, Ref):
        return term.binding.name
    return clipped(one_line(decision.policy.source[term.span.start : term.span.end]))


def _mark(i: int, chosen: int, filters: Sequence[FilterTrace]) -> str:
    """`←` for the chosen candidate, the filter for one that was removed."""
    if i == chosen:
        return "  ←"
    return next((f"  ✗ {step.label}" for step in filters if i not in step.left), "")


# ── the account ──────────────────────────────────────────────────────────────


def explain(decision: Decision) -> str:
    """The full account: rules visited with their guards (✓ held, ✗ failed, · not evaluated), then the candidates."""
    lines = [f"{decision.policy.name}: {_headline(decision)}", *rules(decision)]
    count = len(decision.snapshot.ids)
    if count <= _ROWS:
        lines.append(rows(decision, range(count)))
    else:
        lines.append(table(decision, top=_ROWS, limit_bytes=1 << 16))
    return "\n".join(lines)


def rules(decision: Decision) -> list[str]:
    """A line for each statement visited: the candidates that a filter left, or the guards with their numbers."""
    lines = []
    width = max((len(step.label) for step in decision.policy.plan.steps[: len(decision.stops)]), default=0)
    filters = iter(decision.filters)
    guards = iter(decision.guards)
    for at in range(len(decision.stops)):
        step = decision.policy.plan.steps[at]
        if step.is_filter:
            narrowed = next(filters)
            if narrowed.ignored:
                account = "ignored: it would leave no candidate"
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
    """Both sides of guard number *place* of rule number *at*, as in `24 > 2 × 9.5`; empty if it is no comparison.

    The sign is the true one: the opposite of the policy's if the guard failed.
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


def summary(decision: Decision) -> str:
    """The decision in one sentence, with the numbers that settled it."""
    steps = decision.policy.plan.steps[: decision.step_index]
    reasons = [_failure(decision, at) for at, step in enumerate(steps) if not step.is_filter]
    return "; ".join([_result(decision), *reasons])


def lead(decision: Decision) -> str:
    """The margin between the chosen instance and the runner-up in words; empty without a comparison."""
    margin, runner_up = decision.margin, decision.runner_up
    if margin is None or runner_up is None:
        return ""
    if margin == 0:
        return f"{clipped(runner_up)} ties by {score_name(decision)}"
    where = "behind" if decision.is_behind else "ahead of"
    return f"{figure(margin)} of {score_name(decision)} {where} {clipped(runner_up)}"


def _result(decision: Decision) -> str:
    if decision.outcome is Outcome.HOLD:
        return f"{decision.rule}: held, for {figure(decision.wait_s)} s in all at most"
    if decision.outcome is Outcome.REJECT:
        return f"{decision.rule}: rejected with {decision.status}"
    if decision.outcome is Outcome.NO_CANDIDATE:
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
        drawn = f"drawn by {pick.builtin.name} among {len(decision.candidates)}"
        return f"{decision.rule}: {decision.instance} is {drawn}, with {score_name(decision)} {figure(value)}"
    nearly = "nearly " if decision.is_behind else ""
    text = f"{decision.rule}: {decision.instance} has {nearly}the {_best(decision, pick)} ({figure(value)})"
    if tied > 1:
        alike = nearly or sum(decision.score[i] == value for i in decision.candidates) == tied
        have = "have" if alike else "nearly have"
        text += f", as {have} {tied - 1} more: {'' if pick.thens else 'it is '}{settled}"
    return text


def _best(decision: Decision, pick: Pick) -> str:
    """`fewest requests`, `highest hit_len`, …."""
    name = score_name(decision)
    if name == "requests":
        return f"{'fewest' if pick.direction == 'min' else 'most'} requests"
    return f"{'lowest' if pick.direction == 'min' else 'highest'} {name}"


def _failure(decision: Decision, at: int) -> str:
    """The reason why rule number *at* did not fire."""
    step = decision.policy.plan.steps[at]
    stop = decision.stops[at]
    if stop == len(step.guards):
        return f"{step.label} found no candidate"
    guard = step.guards[stop]
    numbers = _numbers(decision, at, guard.value)
    return f"{_subject(decision, at, guard.value)} failed {guard.label}{f' ({numbers})' if numbers else ''}"


def _subject(decision: Decision, at: int, term: Term) -> str:
    """The instance that a guard is about, if it is the one that its rule would take; else the rule."""
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
            if pick.family is Family.LOTTERY or pick.named is not None:  # it need not be the best
                return f"{name}, with {value} {score},"
            return f"{name}, with the {'lowest' if pick.direction == 'min' else 'highest'} {value} ({score}),"
    return step.label


def _numbers(decision: Decision, at: int, term: Term) -> str:
    """Both sides of a comparison that failed, or the field that is unknown."""
    unknown = sorted(name for name in fields_of(term) if getattr(decision.request, name) is None)
    return f"req.{unknown[0]} is unknown" if unknown else _sides(decision, at, term, _OPPOSITE)


def _sides(decision: Decision, at: int, term: Term, signs: Mapping[str, str]) -> str:
    """Both sides of a comparison; the value of a name that is compared for equality."""
    term = _unbound(term)
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
    """Both sides with their sign, with as many digits as make the text true."""
    text = ""
    for digits in _DIGITS:
        sides = [[figure(number, digits) for number in side] for side in (left, right)]
        text = f" {sign} ".join(" × ".join(side) for side in sides)
        if _TRUE[sign](*(math.prod(map(float, side)) for side in sides)):
            break
    return text


def _side(decision: Decision, at: int, term: Term) -> tuple[float, ...]:
    """The factors of one side: two of a multiple, those of the operand that `least` or `greatest` took, or one."""
    term = _unbound(term)
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


def _unbound(term: Term) -> Term:
    """The expression behind names of single values."""
    while isinstance(term, Ref) and term.shape is Shape.SCALAR:
        term = term.binding.value
    return term
