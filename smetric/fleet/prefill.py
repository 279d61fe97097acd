"""Cost and time of a prefill.

The unit of cost is a token computed without attention. Attention adds to it with the context (paper's revision).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median

#: Context length in tokens at which attention costs as much as the weights (L_eq): about active parameters / (2 ×
#: layers × query heads × head size). This value is that of the 30B model in the revision of the SMetric paper.
ATTENTION_TOKENS = 6923.0
#: Lower bound of the share of computing in the time of the largest prefills. Small prefills show little but their
#: start; this bounds what they can claim about large ones.
LEAST_COMPUTING = 0.1


def twice_attended(new: int, prompt_len: int) -> int:
    """Return twice the number of token pairs that attend when the last *new* tokens of a prompt are computed."""
    return new * (2 * prompt_len - new)


def prefill_cost(new: int, twice_pairs: int, attention_tokens: float) -> float:
    """Return the cost of computing *new* tokens: n + n (L - n / 2) / L_eq, summed over prompts of L tokens."""
    return new + twice_pairs / (2 * attention_tokens)


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """Time to first token as a linear function of cost.

    Args:
        start_s: constant part in seconds: the round trip and one engine step.
        per_token_s: seconds for each token of cost.
    """

    start_s: float
    per_token_s: float

    def of(self, cost: float) -> float:
        """Return the seconds until the first token behind *cost* tokens of cost."""
        return self.start_s + self.per_token_s * cost


def fitted(groups: Iterable[Collection[tuple[float, float]]]) -> PrefillTime:
    """Return the line with the least relative errors at the median cost and median time of each group.

    Errors are relative so that 10 % of a large prefill counts as much as 10 % of a small one. A line that would start
    below 0, which happens if all samples are about equally large, starts at 0.

    Args:
        groups: samples of about equal cost; each sample is its cost (at least 1) and its time in seconds (above 0).
            There is at least one group, and none is empty.
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
