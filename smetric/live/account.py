"""A decision in full, as the live page opens it: the whole table, the rules with their numbers, the policy's text.

Everything comes from the record; nothing is looked up again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smetric.features import VOCABULARY
from smetric.live.row import row, shadow_of
from smetric.policy import NEVER, Decision
from smetric.policy.candidate_table import columns_of, score_name
from smetric.policy.explain import guard_numbers, summary
from smetric.policy.figure import figure
from smetric.telemetry.decisions import full

if TYPE_CHECKING:
    from smetric.telemetry.record import DecisionRecord

#: Candidates in the table at most.
MOST_ROWS = 256


def account(record: DecisionRecord) -> dict[str, Any]:
    """The account."""
    decision, request = record.decision, record.request
    result = row(record) | full(record, top=0)
    result |= {
        "file": record.policy.path.rpartition("/")[2],
        "text": record.policy.source,
        "libraries": sorted(record.policy.libraries),
        "params": {name: figure(param.value) for name, param in record.policy.params.items()},
        "prompts": request.prompts,
        "shadows": [
            {**shadow_of(one), "sentence": summary(one.decision) if one.decision is not None else one.choice}
            for one in record.shadowed
        ],
    }
    if decision is not None:
        source = record.migration.source if record.migration is not None else ""
        result |= {"rules": rules(decision), "table": table(decision, source)}
    return result


def rules(decision: Decision) -> list[dict[str, Any]]:
    """The statements of the policy in order: which lines they stand on, and what came of each."""
    source, visited = decision.policy.source, len(decision.stops)
    filters = iter(decision.filters)
    guards = iter(decision.guards)
    found = []
    for at, step in enumerate(decision.policy.plan.steps):
        first = source.count("\n", 0, step.span.start) + 1
        lines = [first, first + source.count("\n", step.span.start, step.span.end)]
        rule: dict[str, Any] = {"label": step.label, "kind": step.kind.value, "lines": lines}
        if at >= visited:
            rule["result"] = "not reached"
        elif step.kind.is_filter:
            narrowed = next(filters)
            left = f"left {len(narrowed.left)} of {len(decision.snapshot.ids)}"
            rule["result"] = (
                "ignored: it would leave nobody" if narrowed.ignored else left if narrowed.applied else "does not apply"
            )
        else:
            fired = at == decision.step_index
            rule["result"] = "fired" if fired else "passed over"
            rule["guards"] = [
                {"guard": label, "held": held, "numbers": guard_numbers(decision, at, place)}
                for place, (label, held) in enumerate(next(guards).guards)
            ]
        rule["fired"] = at == decision.step_index
        found.append(rule)
    return found


def table(decision: Decision, source: str) -> dict[str, Any]:
    """What the policy saw of each candidate: columns with their meaning, rows with value, age and source of each cell.

    The chosen one first, then *source*, then the best of the others, then those that a filter left out, and which.

    Args:
        decision: the decision.
        source: the instance that the request was taken away from; empty where it was not.
    """
    snapshot, score = decision.snapshot, decision.score
    ranked = decision.ranked
    others = sorted(set(range(len(snapshot.ids))) - set(ranked), key=lambda i: snapshot.ids[i])
    order = [*ranked, *others]
    if source in snapshot.ids and (at := snapshot.ids.index(source)) != decision.index:
        order.remove(at)
        order.insert(1, at)
    shown = order[:MOST_ROWS]
    read = columns_of(decision)
    names = [*read, *(name for name in snapshot.columns if name not in read and name != "id")]
    columns = []
    for name in names:
        feature = VOCABULARY.features[name]
        about = {"name": name, "unit": feature.unit, "doc": feature.doc, "staleness": feature.staleness}
        columns.append({**about, "lookup": feature.lookup, "unread": name not in read})
    ages = {name: snapshot.age(name) for name in names}
    known = {name: snapshot.is_known(name) for name in names}
    places = {index: place for place, index in enumerate(ranked)}
    rows = []
    for i in shown:
        cells = []
        for name in names:
            cell: dict[str, Any] = {"value": figure(snapshot.columns[name][i])}
            if not known[name][i]:
                cell["unknown"] = True
                cells.append(cell)
                continue
            if name in snapshot.stamps and ages[name][i] < NEVER:
                cell["age_s"] = round(ages[name][i], 3)
            if origin := snapshot.origin(name, i):
                cell["source"] = origin
            cells.append(cell)
        found: dict[str, Any] = {"id": snapshot.ids[i], "cells": cells, "rank": places.get(i)}
        if i == decision.index:
            found["chosen"] = True
        if snapshot.ids[i] == source:
            found["left"] = True
        if score is not None:
            found["score"] = figure(score[i])
        left_out = next((step.label for step in decision.filters if i not in step.left), None)
        if left_out is not None:
            found["left_out_by"] = left_out
        rows.append(found)
    pick = decision.pick
    return {
        "columns": columns,
        "rows": rows,
        "more": len(order) - len(shown),
        "score": score_name(decision) if score is not None and pick is not None else None,
        "direction": decision.direction,
    }
