"""The listeners of this room, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from smetric.fleet.exchange import Exchanges, Listener
from smetric.telemetry.decisions import Activity, DecisionLog
from smetric.telemetry.logs import AccessLog
from smetric.telemetry.metrics import Metrics, ModelLabels
from smetric.telemetry.outcomes import Outcomes
from smetric.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance


class Telemetry:
    """The listeners of this room and of others, and the exchanges that they listen to.

    Args:
        tracing: makes spans, or none.
        metrics: counts.
        decisions: the last decisions.
        outcomes: what decisions lead to.
        models: model names as labels.
        instances: all instances, for the counts on a `route` span.
        others: listeners of other rooms. They are called after the outcomes of a decision are noted in its record, and
            before spans are made of it.
    """

    def __init__(
        self,
        *,
        tracing: Tracing,
        metrics: Metrics,
        decisions: DecisionLog,
        outcomes: Outcomes,
        models: ModelLabels,
        instances: Callable[[], Sequence[Instance]],
        others: Sequence[Listener] = (),
    ) -> None:
        self.tracing = tracing
        self.metrics = metrics
        self.decisions = decisions
        self.outcomes = outcomes
        #: What has happened since the live page's feed last looked.
        self.activity = Activity()
        self.exchanges = Exchanges(
            (outcomes, *others, tracing.listener(instances), decisions, self.activity, metrics, AccessLog()),
            model_label=models.of,
            on_failure=metrics.listener_failed,
        )
        self.begin = self.exchanges.begin
