"""When a loop that does something at a steady pace does it next."""

from __future__ import annotations

import math


def next_turn(due: float, interval_s: float, now: float) -> float:
    """The first time after *due* that is a whole number of intervals from it and not past.

    Turns that were missed, while the process was suspended or busy, are left out: were they made up for, the loops of
    all instances, which begin one after the other, would go on at one and the same moment for ever.
    """
    return due + interval_s * max(1, math.ceil((now - due) / interval_s))
