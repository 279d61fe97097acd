"""A place in the text of a policy; lines and columns are `position` in `diagnostic`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of the source text: offsets `start` (included) to `end` (excluded)."""

    start: int
    end: int
