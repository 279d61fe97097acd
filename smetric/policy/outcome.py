"""How a decision ends, by the kind of the statement that fired."""

from __future__ import annotations

import enum

from smetric.policy.plan import StatementKind


class Outcome(enum.Enum):
    """How a decision ends."""

    ROUTE = "route"
    REJECT = "reject"
    #: Not now: the request waits for a change of load, and is decided again.
    HOLD = "hold"
    #: A `keep` left no candidate: 503, named after the filter.
    NOBODY = "nobody"


#: How a decision ends that a statement of this kind made; a `prefer` makes none.
OUTCOMES = {
    StatementKind.ROUTE: Outcome.ROUTE,
    StatementKind.REJECT: Outcome.REJECT,
    StatementKind.HOLD: Outcome.HOLD,
    StatementKind.KEEP: Outcome.NOBODY,
}
