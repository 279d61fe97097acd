"""The mean, of what a policy asks it of and in place of what nobody knows: never beside values that are all alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: How far, as a share of a value, rounding can carry the mean of values that are alike from them.
_ROUNDING = 1e-15


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value. `fsum` is exact, so the order of the candidates plays no part."""
    middle, one = math.fsum(values) / len(values), values[0]
    if middle != one and abs(middle - one) <= abs(one) * _ROUNDING:
        # All may be alike, and rounding must not put the mean beside all of them: `v >= mean(v)` holds for somebody.
        return min(max(middle, min(values)), max(values))
    return middle
