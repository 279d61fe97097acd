"""Decisions as text and as JSON rows, bounded by construction.

Tracing backends cut long attributes (Tempo at 2,048 bytes). A row is left out before one is cut. The words of the
summary, the rules and the table are those of `policy.explain`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from smetric import names
from smetric.policy import explain
from smetric.policy.explain import foremost, lead
from smetric.policy.types import clipped, figure

if TYPE_CHECKING:
    from smetric.fleet.record import DecisionRecord, Shadowed
    from smetric.policy.decision import Decision

#: Bytes of one attribute at most.
LIMIT = 2000
_ID_MAX = 200
_SUMMARY_MAX = 480
#: JSON readers may round whole numbers above this.
_MOST_WHOLE = 2.0**53
#: Characters of a line that tracing UIs show without a break.
_WIDE = 76
#: The gap before a guard's mark.
_BETWEEN_GUARDS = re.compile(r"   (?=[✓✗·] )")
#: Characters of a rule, number of rules, and bytes of all of them; the last ones are shown. A rule with three guards
#: and both sides of each comparison has some 130 characters.
_RULE_MAX = 240
_RULES_MAX = 8
_RULES_BYTES = 1100


def rows(decision: Decision, top: int) -> list[dict[str, Any]]:
    """Return one object per candidate: id, rank, score, the features that the policy read, and the unknown ones.

    A feature that was looked up has its source beside it, as in `"hit_len_source": "lmcache:host"`; one that was
    measured its age in seconds, as in `"requests_age": 0.4`. Candidates that a filter removed come last, with its label
    as `filtered_by` instead of a rank.
    """
    snapshot, score = decision.snapshot, decision.score
    columns = [
        (name, column, snapshot.origins_of(name), snapshot.stamps.get(name))
        for name, column in snapshot.columns.items()
    ]
    gaps = [(name, known) for name, known in snapshot.known.items() if known is not None]
    ranked = foremost(decision, top)
    removed = _removed(decision) if len(ranked) < top else {}
    result = []
    for rank, index in enumerate([*ranked, *removed][:top]):
        row: dict[str, Any] = {"id": snapshot.ids[index][:_ID_MAX]}
        if index == decision.index:
            row["chosen"] = True
        if index in removed:
            row["filtered_by"] = removed[index][:_ID_MAX]
        else:
            row["rank"] = rank
        if score is not None:
            row["score"] = _short(score[index])
        for name, column, origins, stamps in columns:
            row[name] = _short(column[index])
            if origins is not None and origins[index]:
                row[f"{name}_source"] = origins[index]
            if stamps is not None and (at := stamps[index]) is not None:
                row[f"{name}_age"] = round(max(0.0, snapshot.now - at), 3)
        if unknown := [name for name, known in gaps if not known[index]]:
            row["unknown"] = unknown
        result.append(row)
    return result


def _removed(decision: Decision) -> dict[int, str]:
    """Return the candidates that filters removed, in order of ids, each with the first filter's label."""
    ids = decision.snapshot.ids
    removed: dict[int, str] = {}
    for narrowed in decision.filters:
        for index in set(range(len(ids))).difference(narrowed.left, removed):
            removed[index] = narrowed.label
    return {index: removed[index] for index in sorted(removed, key=ids.__getitem__)}


def as_json(decision: Decision, top: int, limit: int = LIMIT) -> str:
    """Return the rows as compact JSON of at most *limit* bytes; fewer rows if they are long."""
    size = 2
    kept: list[bytes] = []
    for row in rows(decision, top):
        encoded = orjson.dumps(row)
        size += len(encoded) + 1
        if size > limit:
            break
        kept.append(encoded)
    return (b"[" + b",".join(kept) + b"]").decode()


def summary(decision: Decision) -> str:
    """Return the decision in one sentence of bounded length."""
    text = explain.summary(decision)
    return text if len(text) <= _SUMMARY_MAX else text[: _SUMMARY_MAX - 1] + "…"


def as_text(decision: Decision, head: str, top: int, limit: int = LIMIT, notes: Sequence[str] = ()) -> str:
    """Return *head*, the rules with their guards, *notes* and the aligned table, in at most *limit* bytes.

    Rows of the table are left out first.
    """
    if top == 0:
        return head
    lines = _rules(decision)
    if margin := lead(decision):
        lines.append(f"  lead     {margin}")
    lines += [f"  {note}" for note in notes]
    room = limit - len(head.encode())
    text = head
    body = "\n\n" + "\n".join(lines)
    if lines and len(body.encode()) < room:
        text += body
    room = limit - len(text.encode()) - 2
    table = explain.table(decision, top=top, limit_bytes=room) if room > 0 else ""
    return f"{text}\n\n{table}" if table else text


def _rules(decision: Decision) -> list[str]:
    """Return the rules that led to the outcome, bounded and folded; the last one fired."""
    lines = [line if len(line) <= _RULE_MAX else line[: _RULE_MAX - 1] + "…" for line in explain.rules(decision)]
    kept: list[list[str]] = []
    room = _RULES_BYTES
    for line in reversed(lines[-_RULES_MAX:]):
        folded = _folded(line)
        room -= sum(len(part.encode()) + 1 for part in folded)
        if room < 0 and kept:
            break
        kept.append(folded)
    hidden = len(lines) - len(kept)
    more = [f"    … {hidden} more before"] if hidden else []
    return [*more, *(part for folded in reversed(kept) for part in folded)]


def _folded(line: str) -> list[str]:
    """Return a rule as lines: guards that do not fit go below the first one."""
    if len(line) <= _WIDE:
        return [line]
    label, *guards = _BETWEEN_GUARDS.split(line)
    indent = " " * (len(label) + 3)
    lines = [label]
    for place, guard in enumerate(guards):
        if place and len(lines[-1]) + len(guard) + 3 > _WIDE:
            lines.append(indent + guard)
        else:
            lines[-1] += f"   {guard}"
    return lines


def _short(value: Any) -> Any:
    """Return a cell for JSON: whole numbers without a point, others to six digits, sets as sorted lists."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _MOST_WHOLE else float(f"{value:.6g}")
    if isinstance(value, frozenset):
        return sorted(value)[:8]
    return value[:_ID_MAX] if isinstance(value, str) else value


def row(shadowed: Shadowed, *, top: int) -> dict[str, Any]:
    """Return the answer of a policy in shadow for JSON, with at most *top* candidates."""
    decision, policy = shadowed.decision, shadowed.policy
    result: dict[str, Any] = {
        "origin": names.SHADOW,
        "policy": f"{policy.name}@{policy.digest}",
        "generation": shadowed.generation,
        "agrees": shadowed.agrees,
        "choice": shadowed.choice,
        "regret": shadowed.regret,
        "session_had_diverged": shadowed.had_diverged,
        "evaluate_s": shadowed.evaluate_s,
    }
    if decision is not None:
        result |= {
            "rule": decision.rule,
            "instance": decision.instance,
            "margin": decision.margin,
            "summary": summary(decision),
            "candidates": rows(decision, top),
            "explanation": explain.explain(decision),
        }
    return result


def note_of(shadowed: Shadowed) -> str:
    """Return what a policy in shadow would have chosen, in half a line."""
    name, choice = clipped(shadowed.policy.name), clipped(shadowed.choice)
    if shadowed.answer == names.AGREES:
        return f"{name} would choose {choice} too"
    if shadowed.answer != names.DIFFERS:
        return f"{name}: {choice}"
    regret = "" if shadowed.regret is None else f", regret {figure(shadowed.regret)}"
    return f"{name} would choose {choice}{regret}"


def summary_of(record: DecisionRecord) -> str:
    """Return a decision in one sentence, also if no policy ran."""
    if record.decision is not None:
        return summary(record.decision)
    if record.outcome == names.PINNED and record.instance is not None:
        return f"pinned: {record.instance.id} holds the response this request continues"
    if record.outcome == names.ERROR:
        return "the policy failed to evaluate"
    if record.instance is not None:
        return f"{record.instance.id}: no inference, so any instance serves it and no policy ran"
    return "no instance may serve this request"


def notes_of(record: DecisionRecord) -> list[str]:
    """Return a line each for the migration, the expected time to first token, and the policies in shadow."""
    notes = []
    migration, forecast = record.migration, record.forecast
    if migration is not None:
        left = "" if migration.left_tokens is None else f", which keeps {migration.left_tokens} tokens more"
        notes.append(f"moved    from {clipped(migration.source)}{left}: {clipped(migration.guard)}")
    if forecast is not None and forecast.ttft_s is not None:
        other = ""
        if forecast.other_ttft_s is not None:
            other = f", {figure(forecast.other_ttft_s)} s on {clipped(forecast.other)}"
        notes.append(f"expected {figure(forecast.ttft_s)} s to the first token{other}")
    return notes + [f"shadow   {note_of(one)}" for one in record.shadowed]
