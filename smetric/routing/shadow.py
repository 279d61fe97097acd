"""Policies in shadow: evaluated on what the acting policy saw, once the answer has begun, and never acted on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog
from cachetools import LRUCache

from smetric import names
from smetric.features import ON_DEMAND
from smetric.fleet.exchange import Exchange, Listener
from smetric.fleet.record import DecisionRecord, Shadowed
from smetric.log_limit import LogLimit
from smetric.policy import Decision, Need, Outcome, Snapshot
from smetric.routing.policy_files import PolicyFile

if TYPE_CHECKING:
    from smetric.request.request import InferenceRequest

#: Most conversations per shadow whose divergence is remembered.
MOST_SESSIONS = 16_384

log = structlog.get_logger("smetric.shadow")


class Shadow:
    """A policy in shadow of a route.

    Args:
        file: the policy.
    """

    def __init__(self, file: PolicyFile) -> None:
        self.file = file
        #: Its own rotation.
        self._cursors: dict[str, str] = {}
        self._generation = file.current
        #: By conversation, whether this generation ever chose otherwise.
        self._sessions: LRUCache[int, bool] = LRUCache(MOST_SESSIONS)
        self._limit = LogLimit()

    def judge(self, record: DecisionRecord, snapshot: Snapshot, session: int | None) -> Shadowed:
        """Return what it would have decided in place of the decision of *record*.

        Args:
            record: a decision made by a policy.
            snapshot: the snapshot of that decision, with features gathered for observed policies.
            session: the conversation, None if unknown.
        """
        generation = self.file.current
        policy = generation.policy
        if generation is not self._generation:
            self._generation = generation
            self._sessions.clear()
        live = record.decision
        assert live is not None
        # After a change of its file it may read what was not gathered at the decision.
        missing = [name for name in policy.reads if name not in snapshot.columns and name not in policy.lookups]
        if not record.request.is_described:
            missing += [f"req.{name}" for name in policy.fields & ON_DEMAND]
        if missing:
            return Shadowed(policy, generation.number, names.UNANSWERED, missing=tuple(sorted(missing)))
        started = time.perf_counter()
        try:
            decided = policy.decide(snapshot, record.request, self._cursors, live.seed)
        except Exception:
            if (kept_back := self._limit.passes(policy.name)) is not None:
                log.exception("smetric.shadow.failed", policy=policy.name, hash=policy.digest, kept_back=kept_back)
            return Shadowed(policy, generation.number, names.SHADOW_FAILED)
        seconds = time.perf_counter() - started
        if isinstance(decided, Need):
            return Shadowed(policy, generation.number, names.UNANSWERED, missing=tuple(sorted(decided.features)))
        if decided.outcome is Outcome.ROUTE and decided.cursors:
            self._cursors = {**self._cursors, **decided.cursors}
        agrees = decided.choice == live.choice
        had_diverged = None
        if session is not None:
            had_diverged = self._sessions.get(session)
            self._sessions[session] = not agrees or bool(had_diverged)
        return Shadowed(
            policy,
            generation.number,
            names.AGREES if agrees else names.DIFFERS,
            decision=decided,
            regret=_regret(decided, live.index),
            is_new_session=session is not None and had_diverged is None,
            had_diverged=bool(had_diverged) if session is not None else None,
            evaluate_s=seconds,
        )


class Shadows:
    """The shadows of one route."""

    def __init__(self, shadows: Sequence[Shadow]) -> None:
        self._shadows = shadows

    @property
    def files(self) -> list[PolicyFile]:
        """Their policies."""
        return [shadow.file for shadow in self._shadows]

    def judge(self, record: DecisionRecord) -> tuple[Shadowed, ...]:
        """Return what each would have decided; nothing if no policy ran or the request was held."""
        live = record.decision
        if live is None or live.outcome is Outcome.HOLD:
            return ()
        snapshot = live.snapshot
        for beside, _ in record.beside:
            snapshot = _with(snapshot, beside)
        session = _session_of(record.request)
        return tuple(shadow.judge(record, snapshot, session) for shadow in self._shadows)


class ShadowJudge(Listener):
    """Listener that evaluates shadows once per decision, when the answer has begun or the request has ended."""

    def answering(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Evaluate them while the client reads."""
        if record.judge is not None:
            judge, record.judge = record.judge, None
            record.shadowed = judge(record)

    def ended(self, exchange: Exchange) -> None:
        """Evaluate them if there was no answer."""
        if exchange.record is not None:
            self.answering(exchange, exchange.record)


def _with(snapshot: Snapshot, beside: Snapshot) -> Snapshot:
    """Return both as one; *beside* has other features of the same candidates."""
    return Snapshot(
        snapshot.ids,
        {**snapshot.columns, **beside.columns},
        {**snapshot.known, **beside.known},
        {**snapshot.stamps, **beside.stamps},
        {**snapshot.origins, **beside.origins},
        snapshot.now,
    )


def _session_of(request: InferenceRequest) -> int | None:
    """Return a hash of the conversation in this process; None if it is unknown."""
    if request.session:
        return hash(request.session)
    return request.parts.first_user if request.parts is not None else None


def _regret(decision: Decision, acting: int) -> float | None:
    """Return how much worse the shadow scores the acting choice than its own, 0 (as good or better) to 1.

    It is the difference of the two scores over the larger one; None without scores, or if the acting choice is none of
    the shadow's candidates.
    """
    score = decision.score
    if score is None or acting < 0 or acting not in decision.candidates:
        return None
    return 0.0 if decision.is_better(acting, score) else min(1.0, decision.share_behind(acting, score))
