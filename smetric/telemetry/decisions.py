"""Last decisions in memory: for `/admin/decisions`, and for the feed of the live page.

Records are kept as references and rendered on request. They hold no body.
"""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import structlog
from msgspec import to_builtins

from smetric.features import VOCABULARY
from smetric.fleet.exchange import Exchange, Listener
from smetric.fleet.fleet import DECODE_BLOCKS, Candidates, Fleet
from smetric.fleet.record import DecisionRecord, safe
from smetric.policy import Snapshot, explain
from smetric.telemetry import decision_text
from smetric.telemetry.decision_text import summary_of

#: Decisions kept, and most bytes of their tables by a rough count: a cell, with its share of scores and of what else is
#: kept for each candidate, takes about 40 bytes.
KEPT = 1000
MAX_TABLES = 64 << 20
_CELL = 40
#: Features that need neither a look-up nor the request; and the least seconds between two samples of them, in all and
#: for each instance. A sample takes 3 µs an instance.
AT_HAND = frozenset(name for name, one in VOCABULARY.features.items() if not one.lookup) - {DECODE_BLOCKS}
SAMPLE_S, SAMPLE_EACH_S = 0.25, 0.001
#: Records of each kind kept between two looks of the feed, which are at most a second apart.
MAX_ACTIVITY = 8192

log = structlog.get_logger("smetric.decisions")


class DecisionLog(Listener):
    """Ring of the last decisions; the oldest leave it.

    Args:
        kept: most decisions.
        max_tables: most bytes of their tables; the latest decision is kept whatever its size.
    """

    def __init__(self, kept: int = KEPT, max_tables: int = MAX_TABLES) -> None:
        self._records: deque[DecisionRecord] = deque()
        #: Bytes of the table of each record, and of all of them.
        self._sizes: deque[int] = deque()
        self._size = 0
        self._kept = kept
        self._max_tables = max_tables
        #: The latest sample, and whether no record has it yet.
        self._at_hand: Snapshot | None = None
        self._is_new = False

    def __len__(self) -> int:
        return len(self._records)

    def sampled(self, at_hand: Snapshot) -> None:
        """Let records from now on refer to the sample *at_hand*."""
        self._at_hand, self._is_new = at_hand, True

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Keep *record*, and let the oldest go."""
        records, size, decision = self._records, 0, record.decision
        if decision is not None:
            snapshot = decision.snapshot
            size = _CELL * (len(snapshot.columns) + 2) * len(snapshot.ids)
            record.at_hand = self._at_hand
            if self._is_new or record.beside:  # later records share the sample
                size += self._size_of_others(record)
        records.append(record)
        self._sizes.append(size)
        self._size += size
        while len(records) > self._kept or (self._size > self._max_tables and len(records) > 1):
            records.popleft()
            self._size -= self._sizes.popleft()

    def _size_of_others(self, record: DecisionRecord) -> int:
        """Return the bytes of what else *record* refers to: what was read beside, and a sample of its own."""
        others = [beside for beside, _ in record.beside]
        if self._is_new and record.at_hand is not None:
            others.append(record.at_hand)
        self._is_new = False
        return sum(_CELL * len(one.columns) * len(one.ids) for one in others)

    def get(self, id: str) -> DecisionRecord | None:
        """Return the decision with this *id*, or None."""
        return next((record for record in self._records if record.id == id), None)

    def recent(self, limit: int) -> list[DecisionRecord]:
        """Return at most *limit* decisions, newest first."""
        return list(islice(reversed(self._records), max(limit, 0)))


class AtHand:
    """Sampler of all features that need no look-up.

    The records of decisions refer to the latest sample, so that a policy that reads more than the acting one can be
    tried on them.

    Args:
        fleet: the instances.
        decisions: the log of the records.
    """

    def __init__(self, fleet: Fleet, decisions: DecisionLog) -> None:
        self._fleet = fleet
        self._decisions = decisions
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to take samples."""
        self._task = asyncio.create_task(self._run(), name="at-hand")

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                self._decisions.sampled(self._fleet.snapshot(Candidates(self._fleet.instances), AT_HAND))
            except Exception:
                log.exception("smetric.sample.failed")
            await asyncio.sleep(max(SAMPLE_S, SAMPLE_EACH_S * len(self._fleet.instances)))


def brief(record: DecisionRecord) -> dict[str, Any]:
    """Return a decision as one row of JSON values."""
    request = record.request
    return {
        "id": record.id,
        "time": datetime.fromtimestamp(record.time_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
        "trace_id": record.trace_id or None,
        "is_traced": record.is_traced,
        "origin": record.origin,
        "outcome": record.outcome,
        "route": record.route,
        "arm": record.arm or None,
        "policy": f"{record.policy.name}@{record.policy.digest}",
        "rule": record.rule or None,
        "instance": record.instance.id if record.instance is not None else None,
        "api": request.api.value,
        "model": safe(request.model),
        "turn": request.turn,
        "prompt_len": request.prompt_len,
        "tokens_source": record.tokens_source,
        "est_hit": request.est_hit,
        "followed_by": record.followed_by or None,
        "status": record.status,
        "ttft_s": record.ttft_s,
        "duration_s": record.duration_s,
    }


def full(record: DecisionRecord, *, top: int = 32) -> dict[str, Any]:
    """Return a decision with its table, explanation and result as JSON values.

    Args:
        record: the decision.
        top: most candidates shown.
    """
    decision, hit = record.decision, record.hit
    result = brief(record)
    result |= {
        "reason": record.reason,
        "generation": record.generation,
        "policy_origin": record.policy_origin,
        "evaluate_s": record.evaluate_s,
        "lookup_s": record.lookup_s,
        "held_s": record.held_s,
        "held_by": record.held_by.rule if record.held_by is not None else None,
        "rank": record.rank,
        "error_type": record.error_type or None,
        "summary": summary_of(record),
        "hit": {"tokens": hit[0], "source": hit[1] or None} if hit is not None else None,
        "migration": to_builtins(record.migration),
        "forecast": {
            "ttft_s": forecast.ttft_s,
            "other": forecast.other or None,
            "other_ttft_s": forecast.other_ttft_s,
            "other_hit": forecast.other_hit,
        }
        if (forecast := record.forecast) is not None
        else None,
        "usage": to_builtins(record.usage),
    }
    if decision is not None:
        result |= {
            "seed": decision.seed,
            "cursors": dict(decision.cursors or {}),
            "guards": [
                {"rule": rule, "guards": [{"guard": label, "held": held} for label, held in guards]}
                for rule, guards in decision.guards
            ],
            "candidates": decision_text.rows(decision, top),
            "candidate_count": len(decision.snapshot.ids),
            "explanation": explain.explain(decision),
            "shadows": [decision_text.row(one, top=top) for one in record.shadowed],
        }
    return result


class Activity(Listener):
    """Decisions made and requests ended since the last look.

    Args:
        most: records of each kind; the latest are kept.
    """

    def __init__(self, most: int = MAX_ACTIVITY) -> None:
        self._decided: deque[DecisionRecord] = deque(maxlen=most)
        self._ended: deque[DecisionRecord] = deque(maxlen=most)

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Note a decision. An earlier decision on the same request has ended, as its attempt has failed."""
        if exchange.previous is not None:
            self._ended.append(exchange.previous)
        self._decided.append(record)

    def ended(self, exchange: Exchange) -> None:
        """Note the end of a decided request."""
        if exchange.record is not None:
            self._ended.append(exchange.record)

    def take(self) -> tuple[list[DecisionRecord], list[DecisionRecord]]:
        """Return the decisions made and the requests ended since the last call, oldest first."""
        taken = list(self._decided), list(self._ended)
        self._decided.clear()
        self._ended.clear()
        return taken
