"""The outcome of one evaluation: a decision, or the look-ups it needs first."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smetric.policy.policy import Policy
    from smetric.policy.snapshot import Snapshot


class Outcome(enum.Enum):
    """How a decision ends."""

    ROUTE = "route"
    REJECT = "reject"
    HOLD = "hold"
    #: A `keep` left no candidate: 503, named after the filter.
    NOBODY = "nobody"


class Need:
    """Evaluation reached look-up features that the snapshot does not hold: fetch them, then evaluate again."""

    __slots__ = ("features",)

    def __init__(self, features: frozenset[str]) -> None:
        self.features = features


class Decision:
    """What a policy decided on one snapshot; texts and tables are made only when asked for.

    Everything here refers to values that exist anyway, because a decision is made for every request and read for few.
    """

    __slots__ = (
        "cursors",
        "index",
        "policy",
        "request",
        "rule_index",
        "score",
        "seed",
        "snapshot",
        "stops",
        "survivors",
        "used",
    )

    def __init__(
        self,
        policy: Policy,
        snapshot: Snapshot,
        request: Any,
        seed: int,
        used: Mapping[str, str],
        rule_index: int,
        index: int,
        stops: list[int],
        survivors: list[list[int]] | None,
        score: list[float] | None,
        cursors: dict[str, str] | None,
    ) -> None:
        #: The policy that decided.
        self.policy = policy
        #: What it saw of the instances and of the request, its seed, and the cursors it was given.
        self.snapshot = snapshot
        self.request = request
        self.seed = seed
        self.used = used
        #: Which statement fired (index into `policy.outcomes`, or into `policy.filters` for `Outcome.NOBODY`).
        self.rule_index = rule_index
        #: The chosen candidate as an index into `snapshot.ids`; -1 when nobody was chosen.
        self.index = index
        #: For each outcome statement visited, in order: how many of its guards held before one failed.
        self.stops = stops
        #: For each filter, in order: indices of the candidates it left; None when the policy has no filter.
        self.survivors = survivors
        #: The value per candidate that the pick compared, where the pick compares one.
        self.score = score
        #: Cursors to remember if this decision is acted on: pick name to the winner's id.
        self.cursors = cursors
