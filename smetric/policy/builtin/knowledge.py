"""Built-ins that ask how well a value is known."""

from __future__ import annotations

from collections.abc import Iterable

from smetric.policy.builtin.row import Builtin, Family
from smetric.policy.snapshot import Snapshot


def known(snapshot: Snapshot, features: Iterable[str]) -> list[bool]:
    """Per candidate, whether all *features* are known."""
    cells = [True] * len(snapshot.ids)
    for feature in features:
        cells = [a and b for a, b in zip(cells, snapshot.is_known(feature), strict=True)]
    return cells


def age(snapshot: Snapshot, features: Iterable[str]) -> list[float]:
    """Per candidate, the age in seconds of the oldest of *features*."""
    cells = [0.0] * len(snapshot.ids)
    for feature in features:
        cells = [max(a, b) for a, b in zip(cells, snapshot.age(feature), strict=True)]
    return cells


ROWS = (
    Builtin(
        name="known",
        signature="known(x)",
        doc="Whether every feature it is computed from is known there.",
        family=Family.KNOWN,
        function=known,
    ),
    Builtin(
        name="age",
        signature="age(x)",
        doc="The age of the oldest feature it is computed from; 1e9 seconds where unknown.",
        family=Family.AGE,
        function=age,
    ),
    Builtin(
        name="fresh",
        signature="fresh(x, limit)",
        doc="Short for known(x) and age(x) <= limit.",
        family=Family.FRESH,
        least=2,
        most=2,
    ),
)
