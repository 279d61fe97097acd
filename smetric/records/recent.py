"""Decides a decision in memory again by another policy, on what was seen then; those on disk are `situation.py`'s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smetric.policy import Decision, Policy, Snapshot
from smetric.records.situation import Columns, NotRecorded, Unread

if TYPE_CHECKING:
    from smetric.telemetry.record import DecisionRecord


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What another policy would have chosen.

    Args:
        decision: its decision.
        lag_s: how much later than the recorded one what it rests on was looked up; None where nothing was.
    """

    decision: Decision
    lag_s: float | None


def what_if(record: DecisionRecord, policy: Policy) -> WhatIf | NotRecorded:
    """What *policy* would have chosen where *record* was decided, or what was not read that it needs.

    Picks that rotate go on from the winner of the acting policy's pick of the same name, else from none.
    """
    acting = record.decision
    if acting is None:
        return NotRecorded(frozenset({"instances"}))
    seen = acting.snapshot
    columns = Columns(seen.columns)
    known = dict(seen.known)
    stamps: dict[str, Any] = dict(seen.stamps)
    origins = dict(seen.origins)
    lags: dict[str, float] = {}
    for snapshot, lag in record.beside:
        for name, column in snapshot.columns.items():
            if name in columns:
                continue
            columns[name] = column
            known[name] = snapshot.known.get(name)
            if name in snapshot.stamps:
                # Ages are told from the decision's moment, so what came later is as old as it was when it came.
                shift = seen.now - snapshot.now
                stamps[name] = [None if at is None else at + shift for at in snapshot.stamps[name]]
            if name in snapshot.origins:
                origins[name] = snapshot.origins[name]
            if lag is not None:
                lags[name] = lag
    try:
        decided = policy.decide(
            Snapshot(seen.ids, columns, known, stamps, origins, seen.now), acting.request, acting.used, acting.seed
        )
    except Unread as unread:
        return NotRecorded(frozenset(unread.args))
    if not isinstance(decided, Decision):
        return NotRecorded(decided.features)
    lag = max((lags[name] for name in decided.reads if name in lags), default=None)
    return WhatIf(decided, lag)
