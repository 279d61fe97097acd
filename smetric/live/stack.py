"""The live page's parts, put together: the feed, and the policies that decisions can be held against."""

from __future__ import annotations

import time
from typing import Any

from smetric import __version__
from smetric.fleet.fleet import Fleet
from smetric.live.feed import Feed
from smetric.live.figures import Figures
from smetric.live.others import Others
from smetric.resources import shipped_policies
from smetric.routes import Routes
from smetric.telemetry.telemetry import Telemetry


class LiveStack:
    """What the page of one router shows.

    Args:
        telemetry: where decisions come from.
        fleet: the instances.
        routes: the policies that the settings name.
        trace_url: where a trace is shown, with `{trace_id}` in it; empty for nowhere.
    """

    def __init__(self, telemetry: Telemetry, fleet: Fleet, routes: Routes, trace_url: str) -> None:
        self._routes = routes
        self._trace_url = trace_url
        figures = Figures(lambda: fleet.instances, fleet.clock, lambda: time.time_ns() // 1_000_000)
        #: Where decisions are looked up.
        self.decisions = telemetry.decisions
        self.feed = Feed(telemetry.activity, figures, telemetry.decisions, self._about)
        self.others = Others(lambda: {file.name: file.current.policy for file in routes.files()}, shipped_policies())

    def _about(self) -> dict[str, Any]:
        policies = []
        for _, arm in self._routes.acting():
            file, current = arm.file, arm.file.current
            about = {"route": file.name, "name": current.policy.name, "hash": current.policy.digest}
            policies.append({**about, "generation": current.number, "kept_because": file.problem})
        return {
            "version": __version__,
            "policies": policies,
            "what_if": self.others.names(),
            "trace_url": self._trace_url or None,
        }
