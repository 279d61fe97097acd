"""What a policy does: its filters and outcomes in order, with the expressions of `term` in them.

No code is made here (`compiler`) and nothing is checked: a plan is made from a file that the checker accepted.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from smetric.policy.span import Span
from smetric.policy.term import Binding, Keyed, Pick, Term, walk


@dataclass(slots=True)
class Guard:
    """One conjunct of a `when`: its label in traces, and what it computes."""

    label: str
    value: Term


class StatementKind(enum.Enum):
    """What a statement of the plan does."""

    KEEP = "keep"
    PREFER = "prefer"
    ROUTE = "route"
    REJECT = "reject"
    HOLD = "hold"

    @property
    def is_filter(self) -> bool:
        """Whether it narrows the candidates."""
        return self in (StatementKind.KEEP, StatementKind.PREFER)


@dataclass(slots=True)
class Step:
    """One filter or outcome, in the order of the file.

    Args:
        kind: keep, prefer, route, reject or hold.
        label: as written after `as`, else a stable one such as `route_1`.
        span: the statement's place.
        guards: conjuncts of its `when`.
        value: the mask, the pick, or the seconds after `retry` (None without) or `for`.
        status: HTTP status of a reject.
        message: text of a reject.
    """

    kind: StatementKind
    label: str
    span: Span
    guards: tuple[Guard, ...]
    value: Term | None
    status: int = 0
    message: str = ""

    @property
    def terms(self) -> list[Term]:
        """What it computes, in order: its guards, then its value."""
        return [*(guard.value for guard in self.guards), *(() if self.value is None else (self.value,))]


@dataclass(slots=True)
class Plan:
    """All steps of a policy in order, its picks and its other draws by site.

    Args:
        steps: filters and outcomes.
        picks: the picks.
        keys: for each pick, the name of its cursor if it rotates, of its stream if it draws.
        draws: for each `draw`, `top` and `chance`, the name of its stream.
    """

    steps: tuple[Step, ...]
    picks: tuple[Binding, ...]
    keys: tuple[str, ...]
    draws: tuple[str, ...]

    @property
    def terms(self) -> list[Term]:
        """What all steps compute, in order."""
        return [term for step in self.steps for term in step.terms]

    @property
    def keyed(self) -> bool:
        """Whether it places by a key, and so by the seed where the key is empty."""
        return any(isinstance(part, Keyed) for term in self.terms for part in walk(term))

    @property
    def rotating(self) -> list[str]:
        """The names of the cursors."""
        return [key for key, pick in zip(self.keys, self.picks, strict=True) if pick_of(pick).rotates]

    @property
    def random(self) -> bool:
        """Whether the seed may settle something."""
        return bool(self.draws) or self.keyed or any(not pick_of(pick).rotates for pick in self.picks)


def pick_of(binding: Binding) -> Pick:
    """What *binding*, one of `Plan.picks`, is bound to."""
    assert isinstance(binding.value, Pick)
    return binding.value
