"""What exchanges (`exchange.py`) write to: spans, metrics, lines, records, and whoever else wants to know."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from smetric.errors import HttpError, RequestError
from smetric.telemetry.access_log import AccessLog
from smetric.telemetry.activity import Activity
from smetric.telemetry.consequences import Consequences
from smetric.telemetry.decisions import DecisionLog
from smetric.telemetry.exchange import Exchange
from smetric.telemetry.log_limit import CHANGES_TOLD, LogLimit
from smetric.telemetry.metrics import Metrics
from smetric.telemetry.model_label import ModelLabels
from smetric.telemetry.record import DecisionRecord
from smetric.telemetry.tracing import Tracing
from smetric.usage import Usage

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance
    from smetric.records.recorder import Recorder
    from smetric.records.traffic import Traffic
    from smetric.request import InferenceRequest

log = structlog.get_logger("smetric.access")


class Watcher(Protocol):
    """Wants to know what becomes of decisions."""

    def decided(self, record: DecisionRecord, previous: DecisionRecord | None) -> None:
        """*record* is the newest decision of a request; *previous*, the one before it, led nowhere."""

    def ended(self, record: DecisionRecord) -> None:
        """The request of *record*, its last decision, has ended."""


class Telemetry:
    """What exchanges write to.

    Args:
        tracing: makes spans, or none.
        metrics: counts.
        decisions: the last decisions.
        consequences: what decisions come to.
        models: model names as labels.
        instances: all instances, for the counts on a `route` span.
        recorder: writes decisions down; None for not at all.
        traffic: writes the traffic down; None for not at all.
        watcher: told of decisions, and of each decided request that has ended.
        answered: called with each request whose prompt an instance counted, before what is known of it is let go.
    """

    def __init__(
        self,
        *,
        tracing: Tracing,
        metrics: Metrics,
        decisions: DecisionLog,
        consequences: Consequences,
        models: ModelLabels,
        instances: Callable[[], Sequence[Instance]],
        recorder: Recorder | None = None,
        traffic: Traffic | None = None,
        watcher: Watcher | None = None,
        answered: Callable[[InferenceRequest, Usage], None] | None = None,
    ) -> None:
        self.tracing = tracing
        self.metrics = metrics
        self.decisions = decisions
        self.consequences = consequences
        for collector in consequences.collectors():
            metrics.register(collector)
        self.models = models
        self.instances = instances
        self.recorder = recorder
        self.traffic = traffic
        self.watcher = watcher
        self.answered = answered
        #: Key of the session hash; a new one each start, so that hashes of two runs cannot be compared.
        self.salt = os.urandom(16)
        self.access = AccessLog()
        self._refusals = LogLimit(lines=CHANGES_TOLD)
        #: What has happened since the live page's feed last looked.
        self.activity = Activity()

    def begin(self, scope: Mapping[str, Any], route: str, *, trusted: bool) -> Exchange:
        """A request arrived.

        Args:
            scope: the ASGI scope.
            route: the matched route template, from a bounded set.
            trusted: the peer may continue its trace here.
        """
        self.metrics.began()
        return Exchange(self, scope, route, trusted)

    def answered_here(
        self, route: str, status: int, *, duration_s: float, bytes_out: int = 0, error_type: str = ""
    ) -> None:
        """A request that concerns no instance was answered: counted and logged, for there is nothing to trace.

        Args:
            route: the matched route template, `OTHER` for none: a path may hold anything.
            status: what the client was sent.
            duration_s: seconds that took.
            bytes_out: bytes of the body sent to it.
            error_type: what went wrong; empty for nothing.
        """
        self.metrics.began()
        self.metrics.ended(route, "", status=status, duration_s=duration_s, ttft_s=None, usage=None, exemplar=None)
        self.access.answered_here(route, status, bytes_out, error_type, duration_s)

    def refused(self, problem: HttpError, scope: Mapping[str, Any], is_seen: bool) -> None:
        """A request was refused for its head, or for how its body was sent; a broken client may send nothing else.

        Args:
            problem: what is wrong with it; told of no more than a few of one kind.
            scope: an ASGI scope that names the client.
            is_seen: an endpoint has seen it, and counts it.
        """
        if not is_seen:
            self.metrics.refused_unseen(problem.status)
        # Others than these say nothing of the request.
        if isinstance(problem, RequestError) and (kept_back := self._refusals.passes(problem.message)) is not None:
            client = scope["client"]
            log.warning(
                "smetric.request.refused",
                status=problem.status,
                reason=problem.message,
                client=client[0] if client else "",
                kept_back=kept_back,
            )
