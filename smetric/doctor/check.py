"""One check: its name, what it looks at, and when it is done. The checks themselves are in files of their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from smetric.doctor.finding import Finding
from smetric.doctor.site import Site


class Skipped(Exception):
    """There is nothing to check here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check.

    Args:
        name: as reports name it.
        looks_at: what it looks at, in a few words.
        run: finds; raises Skipped where there is nothing to look at.
        deadline_s: seconds after which it is broken off.
    """

    name: str
    looks_at: str
    run: Callable[[Site], Awaitable[list[Finding]]]
    deadline_s: float = 15.0
