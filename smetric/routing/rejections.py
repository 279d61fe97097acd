"""Watch for a policy that refuses every request, which no health check of instances shows."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from smetric.fleet.exchange import Exchange, Listener
from smetric.fleet.record import DecisionRecord
from smetric.policy import Outcome

#: Seconds of refusals without a routed or held request after which a policy is reported.
REFUSING_S = 10.0

log = structlog.get_logger("smetric.policy")


class RejectionWatch(Listener):
    """Reports each policy whose decisions have all been refusals for `REFUSING_S`, once until it routes again.

    A refusal is a `reject`, or a `keep` that left no candidate.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: By route and arm, the time of the first refusal since it last routed.
        self._since: dict[tuple[str, str], float] = {}
        self._reported: set[tuple[str, str]] = set()

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Note a refusal, or the end of refusals."""
        decision = record.decision
        if decision is None or (decision.index >= 0 and not self._since):
            return
        arm = record.route, record.arm
        if decision.outcome not in (Outcome.REJECT, Outcome.NO_CANDIDATE):
            self._since.pop(arm, None)
            self._reported.discard(arm)
            return
        refused_s = self._clock() - self._since.setdefault(arm, self._clock())
        if refused_s >= REFUSING_S and arm not in self._reported:
            self._reported.add(arm)
            policy, rule = decision.policy.name, decision.rule
            log.error("smetric.policy.refuses_all", route=":".join(filter(None, arm)), policy=policy, rule=rule)

    def refusing(self) -> dict[tuple[str, str], float]:
        """Return for each route and arm that refuses everything the seconds since its first refusal; any thread."""
        now = self._clock()
        return {arm: now - since for arm, since in list(self._since.items()) if now - since >= REFUSING_S}
