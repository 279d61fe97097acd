"""Policies in shadow."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from smetric import names
from smetric.fleet.exchange import Exchange, Listener
from smetric.fleet.record import DecisionRecord, Shadowed
from smetric.log_limit import LogLimit
from smetric.policy import Decision, Need, Outcome, Snapshot
from smetric.records.format import ON_DEMAND
from smetric.request.parts import Kind
from smetric.routing.policy_files import PolicyFile

if TYPE_CHECKING:
    from smetric.request.request import InferenceRequest


#: Conversations of which it is remembered whether the shadow would have sent one of their requests elsewhere.
MOST_SESSIONS = 16_384

log = structlog.get_logger("smetric.shadow")


class Shadow:
    """One policy in shadow of a route.

    Args:
        file: the policy.
    """

    def __init__(self, file: PolicyFile) -> None:
        self.file = file
        #: Its own rotation: what it would have chosen last.
        self._cursors: dict[str, str] = {}
        self._generation = file.current
        #: By conversation, whether the policy of this generation ever chose otherwise; the oldest goes first.
        self._sessions: OrderedDict[int, bool] = OrderedDict()
        self._limit = LogLimit()

    def judge(self, record: DecisionRecord, snapshot: Snapshot, session: int | None) -> Shadowed:
        """What it would have decided in place of the decision of *record*.

        Args:
            record: a decision made by a policy.
            snapshot: what that policy saw, with what was gathered besides.
            session: the conversation; None where it is not known.
        """
        generation = self.file.current
        policy = generation.policy
        if generation is not self._generation:
            self._generation = generation
            self._sessions.clear()
        live = record.decision
        assert live is not None
        # What it reads has changed since the decision, where its file has.
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
        is_new, had_diverged = self._session(session, diverges=not agrees)
        return Shadowed(
            policy,
            generation.number,
            names.AGREES if agrees else names.DIFFERS,
            decision=decided,
            regret=_regret(decided, live.index),
            is_new_session=is_new,
            had_diverged=had_diverged,
            evaluate_s=seconds,
        )

    def _session(self, session: int | None, *, diverges: bool) -> tuple[bool, bool | None]:
        """Whether the conversation was not seen before, and whether it had diverged before; None where not known."""
        if session is None:
            return False, None
        had_diverged = self._sessions.get(session)
        self._sessions[session] = diverges or bool(had_diverged)
        self._sessions.move_to_end(session)
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return had_diverged is None, bool(had_diverged)


class Shadows:
    """The shadows of one route.

    Args:
        shadows: them.
    """

    def __init__(self, shadows: Sequence[Shadow]) -> None:
        self._shadows = shadows

    @property
    def files(self) -> list[PolicyFile]:
        """Their policies."""
        return [shadow.file for shadow in self._shadows]

    def judge(self, record: DecisionRecord) -> tuple[Shadowed, ...]:
        """What each of them would have decided; nothing where no policy ran, or the request was held."""
        live = record.decision
        if live is None or live.outcome is Outcome.HOLD:
            return ()
        snapshot = live.snapshot
        for beside, _ in record.beside:
            snapshot = _with(snapshot, beside)
        session = _session_of(record.request)
        return tuple(shadow.judge(record, snapshot, session) for shadow in self._shadows)


class ShadowJudge(Listener):
    """Evaluates the policies in shadow, once a decision, when the answer has begun or the request has ended."""

    def answering(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Evaluate them while the client reads."""
        if record.judge is not None:
            judge, record.judge = record.judge, None
            record.shadowed = judge(record)

    def ended(self, exchange: Exchange) -> None:
        """Evaluate them where there was no answer."""
        if exchange.record is not None:
            self.answering(exchange, exchange.record)


def _with(snapshot: Snapshot, beside: Snapshot) -> Snapshot:
    """Both in one; *beside* holds other features of the same candidates."""
    return Snapshot(
        snapshot.ids,
        {**snapshot.columns, **beside.columns},
        {**snapshot.known, **beside.known},
        {**snapshot.stamps, **beside.stamps},
        {**snapshot.origins, **beside.origins},
        snapshot.now,
    )


def _session_of(request: InferenceRequest) -> int | None:
    """What the conversation is told by in this process; None where it is not known."""
    if request.session:
        return hash(request.session)
    return request.parts.first(Kind.USER) if request.parts is not None else None


def _regret(decision: Decision, acting: int) -> float | None:
    """How much worse than its own choice the shadow finds what was chosen: 0 as good or better, 1 as bad as can be.

    The difference of the two scores, over the larger of them; None where it has no scores, or what was chosen was no
    choice of its own.
    """
    score = decision.score
    if score is None or acting < 0 or acting not in decision.candidates:
        return None
    return 0.0 if decision.is_better(acting, score) else min(1.0, decision.share_behind(acting, score))
