"""What time to first token a prefill takes: a start, whatever is computed, and so much for each token of its cost.

Where the samples come from is in `smetric.sources.prefill_times`, what is counted as cost in `prefill_cost.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median

#: Of the time of the largest prefills seen, the share that at least was spent on computing: it bounds what small ones,
#: in whose times little else shows than the start, can be taken to say of large ones.
LEAST_COMPUTING = 0.1


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """A line.

    Args:
        start_s: seconds that pass whatever is computed: the way there and back, a step of the engine.
        per_token_s: seconds for each token of cost.
    """

    start_s: float
    per_token_s: float

    def of(self, cost: float) -> float:
        """Seconds until the first token, where *cost* tokens of cost stand before it."""
        return self.start_s + self.per_token_s * cost


def fitted(groups: Iterable[Collection[tuple[float, float]]]) -> PrefillTime:
    """The line that errs least, relatively, from the median cost and the median time of each group.

    Relative errors: ten per cent of a large prefill count as much as ten per cent of a small one. Where the line would
    begin below 0, as it may if all samples are about as large, the start is 0.

    Args:
        groups: of samples that cost about the same: cost, at least 1, and seconds, more than 0. None is empty, and
            there is one at least.
    """
    points = [
        (len(group), median(cost for cost, _ in group), median(seconds for _, seconds in group)) for group in groups
    ]
    # Minimises Σ n (start/t + per_token·c/t - 1)².
    uu = sum(n / t**2 for n, _, t in points)
    uv = sum(n * c / t**2 for n, c, t in points)
    vv = sum(n * (c / t) ** 2 for n, c, t in points)
    u = sum(n / t for n, _, t in points)
    v = sum(n * c / t for n, c, t in points)
    _, most, longest = max(points, key=lambda point: point[1])
    determinant = uu * vv - uv * uv
    if len(points) == 1 or determinant <= 1e-9 * uu * vv:
        return PrefillTime(0.0, v / vv)
    per_token = max((uu * v - uv * u) / determinant, LEAST_COMPUTING * longest / most)
    start = (u - per_token * uv) / uu
    return PrefillTime(start, per_token) if start > 0 else PrefillTime(0.0, v / vv)
