"""Watch for a policy that refuses every request, which no health check of instances shows."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from smetric.fleet.exchange import Exchange, Listener
from smetric.fleet.record import DecisionRecord
from smetric.policy import Outcome

#: Seconds from the first to the latest refusal, without a routed or held request between, from which on a policy is
#: reported.
REFUSING_S = 10.0
#: Seconds without a refusal after which these count anew: an idle router knows nothing of its policy.
PAUSE_S = 60.0

log = structlog.get_logger("smetric.policy")


class RejectionWatch(Listener):
    """Reports each policy whose decisions have all been refusals for `REFUSING_S`, once until it routes again.

    A refusal is a `reject`, or a `keep` that left no candidate. After `PAUSE_S` without one, the time starts anew.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: By route and arm, the times of the first and the latest refusal since it last routed or paused.
        self._refused: dict[tuple[str, str], tuple[float, float]] = {}
        self._reported: set[tuple[str, str]] = set()

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Note a refusal, or the end of refusals."""
        decision = record.decision
        if decision is None or (decision.index >= 0 and not self._refused):
            return
        arm = record.route, record.arm
        if decision.outcome not in (Outcome.REJECT, Outcome.NO_CANDIDATE):
            self._refused.pop(arm, None)
            self._reported.discard(arm)
            return
        now = self._clock()
        first, latest = self._refused.get(arm, (now, now))
        if now - latest >= PAUSE_S:
            first = now
        self._refused[arm] = first, now
        if now - first >= REFUSING_S and arm not in self._reported:
            self._reported.add(arm)
            policy, rule = decision.policy.name, decision.rule
            log.error("smetric.policy.refuses_all", route=":".join(filter(None, arm)), policy=policy, rule=rule)

    def refusing(self) -> dict[tuple[str, str], float]:
        """Return for each route and arm that refuses everything the seconds from its first to its latest refusal.

        It may be called from any thread.
        """
        since = self._clock() - PAUSE_S
        refused = list(self._refused.items())
        spans = {arm: latest - first for arm, (first, latest) in refused if latest > since}
        return {arm: span for arm, span in spans.items() if span >= REFUSING_S}
