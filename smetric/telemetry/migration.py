"""A later turn that went elsewhere: found when it is decided, counted, and said in the log.

Where each conversation was served last is remembered in `sessions.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from smetric.policy.guard import NOBODY
from smetric.policy.plan import StatementKind
from smetric.telemetry import names
from smetric.telemetry.log_limit import LogLimit
from smetric.telemetry.record import DecisionRecord, Migration
from smetric.telemetry.series import Counts

if TYPE_CHECKING:
    from smetric.policy.decision import Decision

log = structlog.get_logger("smetric.migration")


def migration_of(record: DecisionRecord, last: str | None) -> Migration | None:
    """Whom the request of *record* was taken away from; None for a first turn, and for one that was not.

    Where hits were looked up they settle it: it is the instance that holds at least a token more of the prompt than the
    chosen one, and most of all. Otherwise it is the one of the last turn. One that was no candidate has no known hit.

    Args:
        record: its decision.
        last: where the conversation was served last, None where that is not known.
    """
    decision = record.decision
    if decision is None or decision.index < 0 or not record.request.turn:
        return None
    snapshot, chosen = decision.snapshot, decision.index
    hits, known = snapshot.columns.get("hit_len"), snapshot.known.get("hit_len")
    if hits is not None and max(hits) >= hits[chosen] + 1:
        best = max(range(len(hits)), key=lambda i: hits[i] if known is None or known[i] else -1.0)
        if hits[best] >= hits[chosen] + 1 and (known is None or known[best]):
            is_known = known is None or known[chosen]
            left = int(hits[best] - hits[chosen]) if is_known else None
            return Migration(snapshot.ids[best], _guard(decision, best), left)
    if last is None or last == snapshot.ids[chosen]:
        return None
    if last not in snapshot.ids:
        return Migration(last, names.LEFT_OUT, None)
    if hits is not None:
        return None
    return Migration(last, _guard(decision, snapshot.ids.index(last)), None)


def _guard(decision: Decision, source: int) -> str:
    """What kept the decision from *source*: a filter that left it out, else what failed in the first rule to route."""
    steps = decision.policy.plan.steps
    for narrowed in decision.filters:
        if narrowed.applied and not narrowed.ignored and source not in narrowed.left:
            return narrowed.label
    for at, stop in enumerate(decision.stops):
        step = steps[at]
        if step.kind is StatementKind.ROUTE and at != decision.step_index and stop >= 0:
            return step.guards[stop].label if stop < len(step.guards) else NOBODY
    return names.NOT_PICKED


class Migrations:
    """Counts migrations, and says them in the log, once a minute for each source, rule and guard."""

    def __init__(self) -> None:
        self.migrations = Counts(names.MIGRATIONS)
        self.left_tokens = Counts(names.MIGRATION_LEFT_TOKENS)
        self._limit = LogLimit()

    def note(self, record: DecisionRecord, migration: Migration) -> None:
        """The request of *record* has migrated."""
        policy, rule = record.policy.name, record.rule
        self.migrations.series[policy, rule, migration.guard].value += 1
        if migration.left_tokens is not None:
            self.left_tokens.series[policy, rule].value += migration.left_tokens
        kept_back = self._limit.passes((migration.source, policy, rule, migration.guard))
        if kept_back is None:
            return
        assert record.instance is not None
        about = {
            "from": migration.source,
            "to": record.instance.id,
            "policy": policy,
            "rule": rule,
            "guard": migration.guard,
            "left_tokens": migration.left_tokens,
            "decision_id": record.id,
            "kept_back": kept_back,
        }
        if record.trace_id:
            about["trace_id"] = record.trace_id
        log.info("smetric.migration", **about)
