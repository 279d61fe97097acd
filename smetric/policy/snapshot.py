"""Snapshot of the candidates as a decision sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smetric.policy.vocabulary import NEVER

#: The source of all known cells of a feature, or of each cell, empty where none knew it.
Origins = str | Sequence[str]


class Snapshot:
    """The candidates of one decision at one moment.

    Args:
        ids: the candidates' ids; every column has their length and order.
        columns: feature name to values, unknown cells already filled by the feature's rule. A look-up feature that
            was not fetched is absent.
        known: feature name to which cells were known; absent or None when all were.
        stamps: feature name to when each cell was measured, seconds on the clock of `now`; None for never. A feature
            without stamps is as old as the snapshot.
        origins: feature name to who gave its cells, for the trace: one for all that are known, or one for each, empty
            where nobody knew it.
        now: when the snapshot was taken, seconds on a monotonic clock.
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
        """Which cells of *feature* were known."""
        known = self.known.get(feature)
        return [True] * len(self.ids) if known is None else known

    def cell(self, feature: str, index: int) -> Any | None:
        """This cell of *feature*; None where nobody knows it, or it was not read."""
        column, known = self.columns.get(feature), self.known.get(feature)
        return None if column is None or (known is not None and not known[index]) else column[index]

    def origin(self, feature: str, index: int) -> str:
        """The source that gave this cell of *feature*; empty where none did, or it is no look-up."""
        origins = self.origins.get(feature)
        if not isinstance(origins, str):
            return "" if origins is None else origins[index]
        known = self.known.get(feature)
        return origins if known is None or known[index] else ""

    def origins_of(self, feature: str) -> Sequence[str] | None:
        """The source of each cell of *feature*, empty where none knew it; None where it is no look-up."""
        origins = self.origins.get(feature)
        return [origins if known else "" for known in self.is_known(feature)] if isinstance(origins, str) else origins

    def age(self, feature: str) -> list[float]:
        """Age of each cell of *feature* in seconds; `NEVER` where unknown."""
        known = self.is_known(feature)
        stamps = self.stamps.get(feature)
        if stamps is None:
            return [0.0 if k else NEVER for k in known]
        return [
            max(0.0, self.now - stamp) if k and stamp is not None else NEVER
            for k, stamp in zip(known, stamps, strict=True)
        ]
