"""The foremost candidates of a decision as JSON rows and as text, both bounded by construction.

Tracing backends cut long attributes (Tempo at 2,048 bytes); a row is left out before anything is cut in half. The
words of the summary and the table are `smetric.policy.explain`'s.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import orjson

from smetric.policy import explain

if TYPE_CHECKING:
    from smetric.policy.decision import Decision

#: Bytes of one attribute at most.
LIMIT = 2000
_ID_MAX = 200
_SUMMARY_MAX = 480


def foremost(decision: Decision, top: int) -> list[int]:
    """Indices of at most *top* of those the pick could choose: the chosen first, then the best scores, ties by id."""
    score, ids, chosen = decision.score, decision.snapshot.ids, decision.index
    sign = -1 if decision.direction == "max" else 1

    def place(index: int) -> tuple[bool, float, str]:
        return index != chosen, 0.0 if score is None else sign * score[index], ids[index]

    return heapq.nsmallest(top, decision.candidates, key=place)


def rows(decision: Decision, top: int) -> list[dict[str, Any]]:
    """One object per candidate: id, score, the features the policy read, and which of them were unknown.

    Beside a feature that was looked up stands who knew it, as in `"hit_len_source": "lmcache:host"`.
    """
    snapshot = decision.snapshot
    score = decision.score
    columns = list(snapshot.columns.items())
    gaps = {name: known for name, known in snapshot.known.items() if known is not None}
    result = []
    for index in foremost(decision, top):
        row: dict[str, Any] = {"id": snapshot.ids[index][:_ID_MAX]}
        if index == decision.index:
            row["chosen"] = True
        if score is not None:
            row["score"] = _short(score[index])
        for name, column in columns:
            row[name] = _short(column[index])
            if source := snapshot.origin(name, index):
                row[f"{name}_source"] = source
        unknown = [name for name, known in gaps.items() if not known[index]]
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


def as_text(decision: Decision, head: str, top: int, limit: int = LIMIT) -> str:
    """*head*, a blank line, and the aligned table; at most *limit* bytes."""
    if top == 0:
        return head
    room = limit - len(head.encode()) - 2
    if room <= 0:
        return head
    return f"{head}\n\n{explain.table(decision, top=top, limit_bytes=room)}"


def _short(value: Any) -> Any:
    """A cell as JSON shows it: whole numbers without a point, others to six digits, sets as sorted lists."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.6g}")
    if isinstance(value, frozenset):
        return sorted(value)[:8]
    return value[:_ID_MAX] if isinstance(value, str) else value
