"""Snapshot of the candidates as a decision sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smetric.policy.vocabulary import NEVER

#: The source of all known cells of a feature, or of each cell, empty if it is unknown.
Origins = str | Sequence[str]


class Snapshot:
    """The candidates of one decision at one moment.

    Args:
        ids: the candidates' ids; every column has their length and order.
        columns: the values of each feature, unknown cells filled by the feature's rule. A look-up feature that was not
            fetched is absent.
        known: whether each cell of a feature was known; absent or None if all were.
        stamps: the time at which each cell was measured, in seconds on the clock of `now`; None for never. A feature
            without stamps is as old as the snapshot.
        origins: the source of each feature's cells, for the trace.
        now: the time of the snapshot, in seconds on a monotonic clock.
    """

    __slots__ = ("columns", "ids", "known", "now", "origins", "stamps")

    def __init__(
        self,
        ids: Sequence[str],
        columns: dict[str, list[Any]],
        known: dict[str, list[bool] | None] | None = None,
        stamps: Mapping[str, Sequence[float | None]] | None = None,
        origins: dict[str, Origins] | None = None,
        now: float = 0.0,
    ) -> None:
        self.ids = ids
        self.columns = columns
        self.known = {} if known is None else known
        self.stamps = {} if stamps is None else stamps
        self.origins = {} if origins is None else origins
        self.now = now

    def is_known(self, feature: str) -> list[bool]:
        """Whether each cell of *feature* was known."""
        known = self.known.get(feature)
        return [True] * len(self.ids) if known is None else known

    def cell(self, feature: str, index: int) -> Any | None:
        """A cell of *feature*; None if it is unknown or was not read."""
        column, known = self.columns.get(feature), self.known.get(feature)
        return None if column is None or (known is not None and not known[index]) else column[index]

    def origin(self, feature: str, index: int) -> str:
        """The source of a cell of *feature*; empty if it is unknown or no look-up."""
        origins = self.origins.get(feature, "")
        if not isinstance(origins, str):
            return origins[index]
        known = self.known.get(feature)
        return origins if known is None or known[index] else ""

    def origins_of(self, feature: str) -> Sequence[str] | None:
        """The source of each cell of *feature*, empty if the cell is unknown; None if it is no look-up."""
        origins = self.origins.get(feature)
        if isinstance(origins, str):
            return [origins if known else "" for known in self.is_known(feature)]
        return origins

    def age(self, feature: str) -> list[float]:
        """The age of each cell of *feature* in seconds; `NEVER` if unknown."""
        known = self.is_known(feature)
        stamps = self.stamps.get(feature)
        if stamps is None:
            return [0.0 if k else NEVER for k in known]
        return [
            max(0.0, self.now - stamp) if k and stamp is not None else NEVER
            for k, stamp in zip(known, stamps, strict=True)
        ]
