"""What decisions come to, seen from the paper's side: guards, stickiness, migrations, service levels, savings.

Told of each decision, answer and end by `exchange.py`. What each of them counts is in its own file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smetric.telemetry import names
from smetric.telemetry.forecast import ById, Forecasts, Prefill
from smetric.telemetry.guard_outcomes import GuardOutcomes
from smetric.telemetry.migration import Migrations, migration_of
from smetric.telemetry.savings import Savings
from smetric.telemetry.series import Count, Counts, Histograms, Series
from smetric.telemetry.service_level import ServiceLevel
from smetric.telemetry.sessions import Sessions

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from smetric.telemetry.record import DecisionRecord


class Consequences:
    """Hands what happens to those who count it.

    Args:
        service_level: the objective that streams are measured by.
        prefill: what time a prefill takes on an instance, None while unknown.
        by_id: the instance that has an id, or None.
    """

    def __init__(self, service_level: ServiceLevel, prefill: Prefill, by_id: ById) -> None:
        self.sessions = Sessions()
        self.migrations = Migrations()
        self.savings = Savings()
        self._guards = GuardOutcomes()
        self._level = service_level
        self._forecasts = Forecasts(prefill, by_id)
        self._hit_places = Counts(names.HIT_PLACES)
        self._margins = Histograms(names.SCORE_MARGIN_RATIO)
        places = self._hit_places.series
        #: By policy: tokens held by the chosen instance, elsewhere only, nowhere.
        self._held: Series[tuple[Count, Count, Count]] = Series(
            1,
            lambda policy: (
                places[policy, names.HELD_HERE],
                places[policy, names.HELD_ELSEWHERE],
                places[policy, names.HELD_NOWHERE],
            ),
        )

    def collectors(self) -> list[Collector]:
        """Their series."""
        savings, migrations = self.savings, self.migrations
        return [
            self._guards,
            self._level.tokens,
            self._hit_places,
            self._margins,
            self.sessions.turns,
            migrations.migrations,
            migrations.left_tokens,
            savings.tokens,
            savings.seconds,
            savings.forecasts,
            savings.forecast_seconds,
        ]

    def decided(self, record: DecisionRecord) -> None:
        """A decision was made, in the tick it was made in: what it comes to is noted in *record*."""
        decision = record.decision
        if decision is None:
            return
        self._guards.decided(decision)
        if record.instance is None:
            return
        record.migration = migration_of(record, self.sessions.last(record.request))
        if record.migration is not None:
            self.migrations.note(record, record.migration)
        score = decision.score
        runner_up = None if score is None else decision.runner_up_index
        if score is not None and runner_up is not None:
            self._margins.series[record.policy.name].observe(decision.share_behind(runner_up, score))
        if record.rank == 0:
            self._count_hits(record)
        record.forecast = self._forecasts.of(record, runner_up)

    def answering(self, record: DecisionRecord) -> None:
        """The chosen instance has begun to answer."""
        if record.instance is not None:
            self.sessions.served(record.request, record.instance.id, record.policy.name)

    def ended(self, record: DecisionRecord, gap_s: float | None) -> None:
        """The request has ended, *gap_s* seconds between the events of its stream on average."""
        self._level.ended(record, gap_s)
        self.savings.settle(record)

    def _count_hits(self, record: DecisionRecord) -> None:
        """Where the prompt's tokens are, if the policy looked."""
        best, length = record.best_hit, record.request.prompt_len
        if best is None:
            return
        here = record.hit[0] if record.hit is not None else 0
        on_chosen, elsewhere, nowhere = self._held[record.policy.name]
        on_chosen.value += here
        elsewhere.value += best - here
        if length > best:
            nowhere.value += length - best
