"""What is remembered of one instance to judge it by; who judges is `health.py`."""

from __future__ import annotations

import math

from smetric.fleet.instance import State


class Vitals:
    """What is remembered of one instance."""

    __slots__ = (
        "aborts",
        "answers",
        "doubts",
        "drained",
        "failures",
        "falls",
        "flaps",
        "held_until",
        "misses",
        "refuses",
        "spared_until",
        "stopping_until",
        "successes",
        "warming_since",
        "well_since",
    )

    def __init__(self) -> None:
        #: The probes' verdict; and whether the last that was heard is that it takes no connections.
        self.answers = True
        self.refuses = False
        #: Probes in a row: failed while it answers, succeeded while it does not.
        self.misses = 0
        self.successes = 0
        #: Requests in a row: failed by its fault, failed by whose fault ever, and aborted by the engine.
        self.failures = 0
        self.doubts = 0
        self.aborts = 0
        #: Times it was left out and not forgiven yet; and since when it has not been, None while it is.
        self.falls = 0
        self.well_since: float | None = -math.inf
        #: Ejected until then; because it comes and goes, not because of failed requests.
        self.held_until = -math.inf
        self.flaps = False
        self.stopping_until = -math.inf
        self.spared_until = -math.inf
        self.drained = False
        #: When it came back; None once it has its share.
        self.warming_since: float | None = None

    def state(self, *, held: bool, stopping: bool) -> State:
        """The word for how it stands; what lasts longest comes first.

        Args:
            held: it is ejected.
            stopping: it is taken to be shutting down.
        """
        if self.drained:
            return State.DRAINING
        if self.refuses:
            return State.REFUSING
        if stopping:
            return State.STOPPING
        if not self.answers:
            return State.ILL
        if held:
            return State.EJECTED
        return State.WELL if self.warming_since is None else State.WARMING
