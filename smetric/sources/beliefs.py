"""What is believed of several instances at once, kept for as long as the same ones are asked about.

What is believed of one of them, and what teaches it, is in `belief.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from smetric.sources.belief import Belief
from smetric.sources.holdings import Holdings


class Beliefs:
    """One for each of some instances.

    Args:
        each: in the order of the instances.
        table: where their blocks are.
    """

    __slots__ = ("_misses", "_surprises", "_table", "_until", "each", "place")

    def __init__(self, each: Sequence[Belief], table: Holdings) -> None:
        self.each = each
        #: Where each is, by its bit.
        self.place = {known.held.bit: at for at, known in enumerate(each)}
        self._table = table
        self._misses: Sequence[float | None] = ()
        self._surprises = -1
        self._until = -math.inf

    def misses(self, now: float, warm_up_s: float) -> Sequence[float | None]:
        """What is to be said of each if nothing is known to be held: 0 where that means that nothing is, else None."""
        if self._surprises != self._table.surprises or now >= self._until:
            self._misses = [0 if known.misses_are_known(now, warm_up_s) else None for known in self.each]
            self._surprises = self._table.surprises
            self._until = min([known.sure_at for known in self.each if known.sure_at > now], default=math.inf)
        return self._misses
