"""When a loop that does something at a steady pace does it next."""

from __future__ import annotations

import math


def next_turn(due: float, interval_s: float, now: float) -> float:
    """When the turn after that of *due* is: whole intervals later, so that loops stay as far apart as they were.

    One that is late by less than an interval is taken at once: what waits for an answer for as long as an interval must
    not miss every other turn. Those missed by more, while the process was suspended or busy, are left out: were they
    made up for, the loops of all instances, which begin one after the other, would go on at one moment for ever.
    """
    turns = (now - due) / interval_s
    return due + interval_s * (1 if turns < 2 else math.ceil(turns))
