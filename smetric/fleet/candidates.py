"""The instances that may serve a request, with what of them stays as it is from one request to the next.

Who they are is found in `smetric.fleet.fleet`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from smetric.fleet.instance import Instance


class Candidates(list[Instance]):
    """Instances in the order of their ids. Several requests share them, so nobody changes them.

    Args:
        instances: those.

    Attributes:
        ids: theirs.
        measured_at: when each one's scrape was true, None where there is none; and the earliest of these, -inf for
            None.
        others: each with the requests on it that others sent, as of its scrape.
    """

    __slots__ = ("earliest", "ids", "measured_at", "others")

    def __init__(self, instances: Iterable[Instance]) -> None:
        super().__init__(instances)
        self.ids = [one.id for one in self]
        scrapes = [one.scrape for one in self]
        self.measured_at = [None if scrape is None else scrape.measured_at for scrape in scrapes]
        self.earliest = min([-math.inf if at is None else at for at in self.measured_at], default=-math.inf)
        self.others = [(one, 0 if one.scrape is None else one.scrape.others) for one in self]
