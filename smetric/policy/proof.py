"""Searches small fleets for a counterexample to a property, and writes the smallest as a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smetric.policy.figure import written
from smetric.policy.policy import Policy
from smetric.policy.properties import Broken, Property
from smetric.policy.situation import Situation
from smetric.policy.small_fleet import SmallFleets, smaller
from smetric.policy.testing import LAST
from smetric.policy.vocabulary import Vocabulary

#: Situations tried for each property.
SITUATIONS = 4000
#: Steps in which a counterexample is made smaller at most.
_STEPS = 200


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A property that does not hold, and the smallest situation found that shows it."""

    property: Property
    broken: Broken

    def as_test(self) -> str:
        """The situation as a `test` block, which fails until the policy is mended."""
        return test_of(f"{self.property.name}: {self.broken.why}", self.broken.situation, self.broken.instead)


def counterexample(
    policy: Policy, vocabulary: Vocabulary, promise: Property, *, situations: int = SITUATIONS
) -> Counterexample | None:
    """Search for a situation that breaks *promise*, the smallest fleets first; None where none is found.

    The search is the same each time. What it does not find may still be there.
    """
    for situation in SmallFleets(policy, vocabulary).draw(situations):
        broken = promise.broken(policy, vocabulary, situation)
        if broken is not None:
            return Counterexample(promise, _smallest(policy, vocabulary, promise, broken))
    return None


def _smallest(policy: Policy, vocabulary: Vocabulary, promise: Property, broken: Broken) -> Broken:
    """Make the situation smaller as long as it still breaks the promise."""
    for _ in range(_STEPS):
        found = None
        for candidate in smaller(broken.situation, vocabulary):
            found = promise.broken(policy, vocabulary, candidate)
            if found is not None and _size(found.situation) < _size(broken.situation):
                break
            found = None
        if found is None:
            break
        broken = found
    return broken


def _size(situation: Situation) -> tuple[Any, ...]:
    """What is compared to tell the smaller of two situations."""
    cells = [cell for column in situation.cells.values() for cell in column]
    values = [*cells, *situation.request.values()]
    return (
        len(situation.ids),
        len(situation.cells) + len(situation.request) + len(situation.cursors) + bool(situation.seed),
        sum(value is None for value in values),
        list(situation.ids) != sorted(situation.ids),
        sum(float(value) for value in values if isinstance(value, float)),
    )


# ── as a test ────────────────────────────────────────────────────────────────


def test_of(sentence: str, situation: Situation, instead: Sequence[str]) -> str:
    """A `test` block of *situation*, in which one of *instead* is expected."""
    lines = [f'test "{sentence}"']
    given = [f"{name} = {written(value)}" for name, value in situation.request.items()]
    given += [f"{LAST} = {last}" for last in set(situation.cursors.values())]
    if given:
        lines.append(f"  given {', '.join(given)}")
    columns = {name: [written(cell) for cell in column] for name, column in situation.cells.items()}
    head = ["instance", *columns]
    rows = [[str(ident), *(column[i] for column in columns.values())] for i, ident in enumerate(situation.ids)]
    if not columns:
        head, rows = ["instance", "healthy"], [[*row, "?"] for row in rows]
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    for row in (head, *rows):
        first, *others = (f"{cell:{'<' if at == 0 else '>'}{widths[at]}}" for at, cell in enumerate(row))
        lines.append("  " + " | ".join([first, *others]).rstrip())
    lines.append(f"  expect {' or '.join(instead)}" if instead else "  expect reject 503")
    return "\n".join(lines)


test_of.__test__ = False  # type: ignore[attr-defined]  # this is no test case of pytest
