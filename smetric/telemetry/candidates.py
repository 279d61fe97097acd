"""The foremost candidates of a decision as JSON rows and as text, both bounded by construction.

Tracing backends cut long attributes (Tempo at 2,048 bytes); a row is left out before anything is cut in half. The
words of the summary, the rules and the table are `smetric.policy.explain`'s.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from smetric.policy import explain
from smetric.policy.candidate_table import foremost
from smetric.policy.flip import lead

if TYPE_CHECKING:
    from smetric.policy.decision import Decision

#: Bytes of one attribute at most.
LIMIT = 2000
_ID_MAX = 200
_SUMMARY_MAX = 480
#: From here on JSON readers do not hold every whole number.
_MOST_WHOLE = 2.0**53
#: Characters of a line that tracing UIs show without breaking it.
_WIDE = 76
#: The gap before a guard's mark.
_BETWEEN_GUARDS = re.compile(r"   (?=[✓✗·] )")
#: Of the rules: characters of one, how many, and bytes of all; of more the last ones are shown, among them the one that
#: fired. One with three guards and both sides of each comparison has some 130 characters, and must not be cut.
_RULE_MAX = 240
_RULES_MAX = 8
_RULES_BYTES = 1100


def rows(decision: Decision, top: int) -> list[dict[str, Any]]:
    """One object per candidate: id, rank, score, the features the policy read, and which of them were unknown.

    Beside a feature that was looked up stands who knew it, as in `"hit_len_source": "lmcache:host"`; beside one that
    was measured how long ago, in seconds, as in `"requests_age": 0.4`. Those that a filter left out come last, with its
    label as `filtered_by` instead of a rank.
    """
    snapshot = decision.snapshot
    score = decision.score
    now = snapshot.now
    columns = [
        (name, column, snapshot.origins_of(name), snapshot.stamps.get(name))
        for name, column in snapshot.columns.items()
    ]
    gaps = [(name, known) for name, known in snapshot.known.items() if known is not None]
    ranked = foremost(decision, top)
    left_out = _left_out(decision) if len(ranked) < top else {}
    result = []
    for rank, index in enumerate([*ranked, *list(left_out)[: top - len(ranked)]]):
        row: dict[str, Any] = {"id": snapshot.ids[index][:_ID_MAX]}
        if index == decision.index:
            row["chosen"] = True
        if index in left_out:
            row["filtered_by"] = left_out[index][:_ID_MAX]
        else:
            row["rank"] = rank
        if score is not None:
            row["score"] = _short(score[index])
        for name, column, origins, stamps in columns:
            row[name] = _short(column[index])
            if origins is not None and origins[index]:
                row[f"{name}_source"] = origins[index]
            if stamps is not None and (at := stamps[index]) is not None:
                row[f"{name}_age"] = round(max(0.0, now - at), 3)
        if gaps:
            unknown = [name for name, known in gaps if not known[index]]
            if unknown:
                row["unknown"] = unknown
        result.append(row)
    return result


def as_json(decision: Decision, top: int, limit: int = LIMIT) -> str:
    """The rows as compact JSON of at most *limit* bytes; fewer rows where they are long."""
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
    """The decision in one sentence of bounded length."""
    text = explain.summary(decision)
    return text if len(text) <= _SUMMARY_MAX else text[: _SUMMARY_MAX - 1] + "…"


def as_text(decision: Decision, head: str, top: int, limit: int = LIMIT, notes: Sequence[str] = ()) -> str:
    """*head*, the rules with their guards, what is to be noted, and the aligned table; at most *limit* bytes.

    What does not fit is left out from the end; of the table, its last rows.
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
    """The rules that led to the outcome, the last of which fired; each bounded, and no wider than UIs show."""
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
    """A rule with its guards; those that do not fit go on below the first one."""
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


def _left_out(decision: Decision) -> dict[int, str]:
    """Candidates that filters left out, in order of ids, and which filter did first."""
    ids = decision.snapshot.ids
    found: dict[int, str] = {}
    for narrowed in decision.filters:
        left = set(narrowed.left)
        for i in range(len(ids)):
            if i not in left:
                found.setdefault(i, narrowed.label)
    return dict(sorted(found.items(), key=lambda one: ids[one[0]]))


def _short(value: Any) -> Any:
    """A cell as JSON shows it: whole numbers without a point, others to six digits, sets as sorted lists."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _MOST_WHOLE else float(f"{value:.6g}")
    if isinstance(value, frozenset):
        return sorted(value)[:8]
    return value[:_ID_MAX] if isinstance(value, str) else value
