"""How far the statements of a policy held in one decision: the guards of a rule, the candidates that a filter left.

Made by a `Decision`, which keeps only numbers until somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class RuleTrace(NamedTuple):
    """An outcome statement that was visited: its guards with True (held), False (failed) or None (not reached).

    A rule whose guards all held and whose pick was nobody has one more guard, `nobody`, which failed.
    """

    rule: str
    guards: tuple[tuple[str, bool | None], ...]

    @property
    def failed(self) -> str | None:
        """The label of the guard that failed."""
        return next((label for label, held in self.guards if held is False), None)


@dataclass(frozen=True, slots=True)
class FilterTrace:
    """A filter that was visited: which candidates it left, as indices.

    `applied` is False where a guard of its `when` failed; `ignored` is True for a `prefer` that would have left nobody.
    """

    label: str
    left: Sequence[int]
    applied: bool
    ignored: bool
