"""The candidates of a decision as aligned plain text: what was read of each, its score, and who was chosen."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from smetric.policy.figure import clipped, figure
from smetric.policy.guard import one_line
from smetric.policy.term import Column, Ref, Term

if TYPE_CHECKING:
    from smetric.policy.decision import Decision
    from smetric.policy.trace import FilterTrace

_INDENT = "    "
_GAP = "    "
#: The width of the word `instance`, which stands above the ids in a policy's tests.
_ID_WIDTH = 8


def table(decision: Decision, top: int = 8, limit_bytes: int = 1900) -> str:
    """The chosen candidate first, then the best of the others.

    Args:
        decision: what was decided.
        top: rows at most.
        limit_bytes: size of the text in UTF-8 at most; rows are left out, never cut.
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
    """Indices of at most *top* of those the pick could choose: the chosen first, then the best scores, ties by id."""
    return tuple(decision.foremost(top))


def rows(decision: Decision, order: Iterable[int], hidden: int = 0) -> str:
    """The rows of the candidates *order*, how many more there are, and who said what was looked up."""
    order = list(order)
    snapshot = decision.snapshot
    named = [(clipped(snapshot.ids[i]), i) for i in order]
    columns: list[tuple[str, list[str]]] = []
    for feature in columns_of(decision):
        known = snapshot.known.get(feature)
        values = snapshot.columns[feature]
        cells = [figure(values[i]) if known is None or known[i] else f"? {figure(values[i])}" for i in order]
        columns.append((feature, cells))
    pick = decision.pick
    if decision.score is not None and pick is not None and not isinstance(pick.value, Column):
        columns.append((score_name(decision), [figure(decision.score[i]) for i in order]))
    ids_width = max([_ID_WIDTH, *(len(name) for name, _ in named)])
    widths = [max(len(header), *(len(cell) for cell in cells), 0) for header, cells in columns if cells]
    filters = decision.filters
    lines = []
    if columns and order:
        heads = "".join(f"{_GAP}{header:>{w}}" for (header, _), w in zip(columns, widths, strict=True))
        lines.append(f"{_INDENT}{'':<{ids_width}}{heads}")
    for row, (name, i) in enumerate(named):
        cells_text = "".join(f"{_GAP}{cells[row]:>{w}}" for (_, cells), w in zip(columns, widths, strict=True))
        lines.append(f"{_INDENT}{name:<{ids_width}}{cells_text}{_mark(i, decision.index, filters)}".rstrip())
    if hidden:
        lines.append(f"{_INDENT}… and {hidden} more")
    lines += [f"{_INDENT}{said}" for feature, _ in columns if (said := _sources(decision, feature, order))]
    lines += [f"{_INDENT}{said}" for said in _ages(decision, [feature for feature, _ in columns], order)]
    return "\n".join(lines)


def _sources(decision: Decision, feature: str, order: Iterable[int]) -> str:
    """`hit_len from prefix_index`; where there are several, with the candidates that each gave the cell of."""
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
    """`requests, kv_usage 0.4 s old on gpu-1, 0.1 to 2.5 s on all`, of what was measured earlier.

    What was measured together is told together; the chosen instance is named where the others' ages differ from its.
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
    """The features this decision saw, in the order in which the policy asks for them."""
    columns = decision.snapshot.columns
    return [feature for feature in decision.policy.asks if feature in columns]


def score_name(decision: Decision) -> str:
    """What the pick compared, in the policy's own words."""
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
    """`←` for the chosen one; for one a filter left out, which."""
    if i == chosen:
        return "  ←"
    return next((f"  ✗ {step.label}" for step in filters if i not in step.left), "")
