"""The protocol of what knows something of instances by what has passed: rates, windows, sizes.

The ledger and the last scrape are the instances' own (`instance.py`); who measures what is in `smetric.sources`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from smetric.fleet.instance import Instance

#: One value per instance, None where unknown; and when each was true, seconds on the fleet's clock, None for now.
Measured = tuple[list[float | None], list[float | None] | None]


class Measure(Protocol):
    """Fills features of instances at once, without a look-up."""

    #: The features it fills.
    measures: frozenset[str]

    def measure(self, feature: str, instances: Sequence[Instance]) -> Measured:
        """One of its features, over *instances*, now."""
