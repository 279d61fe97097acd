"""Which rules, guards and filters of a policy its tests have shown at work, and which never."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from smetric.policy.decision import Decision
from smetric.policy.plan import Plan

#: Something a test can show: a statement's index in the plan; the index of one of its guards, or -1 for the statement
#: itself; and whether it held. An outcome holds when it is taken, a filter when it leaves somebody out.
Mark = tuple[int, int, bool]


def marks_of(decision: Decision) -> Iterator[Mark]:
    """What one decision shows."""
    left_before = len(decision.snapshot.ids)
    survivors = iter(decision.survivors)
    for at, (step, stop) in enumerate(zip(decision.policy.plan.steps, decision.stops, strict=False)):
        held = len(step.guards) if stop < 0 else stop
        yield from ((at, guard, True) for guard in range(held))
        if held < len(step.guards):
            yield (at, held, False)
        if step.kind.is_filter:
            left = len(next(survivors))
            if left < left_before:
                yield (at, -1, True)
            left_before = left
        elif at == decision.step_index:
            yield (at, -1, True)


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the tests of a policy with *plan* have shown."""

    plan: Plan
    shown: frozenset[Mark]

    @property
    def percent(self) -> float:
        """The share of everything that can be shown, in per cent."""
        marks = list(self._marks())
        return 100 * sum(mark in self.shown for mark in marks) / len(marks)

    @property
    def missing(self) -> list[str]:
        """What was never shown, one sentence each, in the order of the file."""
        return [self._sentence(mark) for mark in self._marks() if mark not in self.shown]

    def _marks(self) -> Iterable[Mark]:
        for at, step in enumerate(self.plan.steps):
            for guard in range(len(step.guards)):
                yield from ((at, guard, held) for held in (True, False))
            yield (at, -1, True)

    def _sentence(self, mark: Mark) -> str:
        at, guard, held = mark
        step = self.plan.steps[at]
        if guard >= 0:
            never = "never held" if held else "never failed"
            return f"guard `{step.guards[guard].label}` of `{step.label}` {never}"
        if step.kind.is_filter:
            return f"filter `{step.label}` never left anybody out"
        return f"rule `{step.label}` never taken"
