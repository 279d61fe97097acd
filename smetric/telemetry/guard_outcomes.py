"""How often each guard of the acting policies held and failed, counted by statement and summed up when scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from smetric.telemetry import names
from smetric.telemetry.family import family

if TYPE_CHECKING:
    from smetric.policy.decision import Decision
    from smetric.policy.policy import Policy

#: Generations of policies counted apart, and guards shown and remembered: those of the latest generations.
MOST_POLICIES = 32
MOST_GUARDS = 1024


class GuardOutcomes(Collector):
    """Counts them. A decision costs one addition for each statement visited."""

    def __init__(self) -> None:
        #: For each policy and each of its statements, how many decisions stopped at which guard: the last place but one
        #: is for those that passed all, the last for a filter that was ignored.
        self._stops: dict[Policy, list[list[int]]] = {}
        #: What policies that are gone have come to: by policy, rule, guard and whether it held.
        self._past: Counter[tuple[str, str, str, str]] = Counter()

    def decided(self, decision: Decision) -> None:
        """Count the guards of *decision*."""
        rows = self._stops.get(decision.policy)
        if rows is None:
            rows = self._begin(decision.policy)
        for at, stop in enumerate(decision.stops):
            rows[at][stop] += 1

    def _begin(self, policy: Policy) -> list[list[int]]:
        if len(self._stops) == MOST_POLICIES:
            oldest = next(iter(self._stops))
            self._past.update(_summed(oldest, self._stops.pop(oldest)))
            while len(self._past) > 2 * MOST_GUARDS:
                del self._past[next(iter(self._past))]
        rows = self._stops[policy] = [[0] * (len(step.guards) + 2) for step in policy.plan.steps]
        return rows

    def collect(self) -> Iterator[Metric]:
        """All of them, now; may run in another thread."""
        total: Counter[tuple[str, str, str, str]] = Counter()
        stops, past = list(self._stops.items()), dict(self._past)  # at one time: what goes meanwhile is in one of them
        for policy, rows in reversed(stops):
            total.update(_summed(policy, rows))
        total.update(past)
        yield family(names.GUARD_OUTCOMES, dict(list(total.items())[: 2 * MOST_GUARDS]))


def _summed(policy: Policy, rows: list[list[int]]) -> dict[tuple[str, str, str, str], int]:
    """By labels; a guard held in all decisions that stopped behind it."""
    summed: Counter[tuple[str, str, str, str]] = Counter()
    for step, row in zip(policy.plan.steps, rows, strict=True):
        for place, guard in enumerate(step.guards):
            summed[policy.name, step.label, guard.label, "true"] += sum(row[place + 1 :])
            summed[policy.name, step.label, guard.label, "false"] += row[place]
    return summed
