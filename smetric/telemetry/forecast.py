"""What times to first token a decision could expect: of the chosen instance, and of the other one it might have been.

The estimate is the time that the prompts' cost which stands before the first token takes on the instance
(`smetric.fleet.prefill_cost`, `smetric.fleet.prefill_time`). What came of it is settled in `savings.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from smetric.fleet.prefill_cost import prefill_cost, twice_attended
from smetric.telemetry.record import DecisionRecord, Forecast

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance
    from smetric.fleet.prefill_time import PrefillTime

#: What time a prefill takes on an instance, None while unknown; and the instance that has an id.
Prefill = Callable[["Instance"], "PrefillTime | None"]
ById = Callable[[str], "Instance | None"]


class Forecasts:
    """Makes them, in the tick of the decision, after the chosen instance was charged.

    Args:
        prefill: of instances.
        by_id: finds them.
    """

    def __init__(self, prefill: Prefill, by_id: ById) -> None:
        self._prefill = prefill
        self._by_id = by_id

    def of(self, record: DecisionRecord, runner_up: int | None) -> Forecast | None:
        """The forecast of *record*; None where nothing can be said, as no hit was looked up.

        Args:
            record: the decision.
            runner_up: index of the best of the others by score, None without one.
        """
        decision, instance = record.decision, record.instance
        if decision is None or instance is None or record.request.prompts != 1:
            return None
        if record.hit is None and record.hit_at(decision.index) is None:
            return None
        prefill = self._prefill(instance)
        ttft_s = prefill.of(instance.unprefilled_cost()) if prefill is not None else None
        ids, migration = decision.snapshot.ids, record.migration
        at = ids.index(migration.source) if migration is not None and migration.source in ids else runner_up
        if at is None:
            return Forecast(ttft_s)
        id, hit = ids[at], record.hit_at(at)
        other, other_ttft_s = self._by_id(id), None
        if other is not None and hit is not None and (prefill := self._prefill(other)) is not None:
            length = record.request.prompt_len
            new = length - hit if hit < length else 0
            own = prefill_cost(new, twice_attended(new, length), other.attention_tokens)
            other_ttft_s = prefill.of(other.unprefilled_cost() + own)
        return Forecast(ttft_s, id, other_ttft_s, hit)
