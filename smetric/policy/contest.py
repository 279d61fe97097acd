"""A pick as a contest: who comes next, and who counts as equal. Everybody is an index; lower ids win ties.

What was decided, and who could be chosen, is `decision.py`'s, which keeps what is found here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def foremost(
    most: int,
    candidates: Sequence[int],
    chosen: int,
    score: Sequence[float] | None,
    ids: Sequence[str],
    *,
    lowest: bool,
) -> list[int]:
    """The first *most* of *candidates*: the *chosen* one, then the best scores first, ties in order of ids.

    Args:
        most: how many.
        candidates: who could be chosen.
        chosen: who was; -1 for nobody.
        score: of everybody; None where all tie.
        ids: of everybody.
        lowest: whether a low score is a good one.
    """
    others = [i for i in candidates if i != chosen]
    if score is None:
        best = [i for _, i in heapq.nsmallest(most, [(ids[i], i) for i in others])]
    else:
        sign = 1 if lowest else -1
        best = [i for _, _, i in heapq.nsmallest(most, [(sign * score[i], ids[i], i) for i in others])]
    return [chosen, *best][:most] if chosen >= 0 else best


def best_other(
    candidates: Sequence[int], chosen: int, score: list[float] | None, ids: Sequence[str], *, lowest: bool
) -> int:
    """The best of *candidates* but for the *chosen* one; -1 for nobody. Arguments as of `foremost`."""
    if chosen < 0 or len(candidates) < 2:
        return -1
    if score is None:
        score = [0.0] * len(ids)
    worst = math.inf if lowest else -math.inf
    if len(candidates) == len(score):  # no loop of our own: it is asked of every decision
        values = score.copy()
        values[chosen] = worst
    else:
        values = [worst] * len(score)
        for i in candidates:
            values[i] = score[i] if i != chosen else worst
    best = min(values) if lowest else max(values)
    if best == worst:  # as bad as a score can be
        return min((i for i in candidates if i != chosen), key=ids.__getitem__)
    first = values.index(best)
    if values.count(best) > 1:
        for i in range(first + 1, len(values)):
            if values[i] == best and ids[i] < ids[first]:
                first = i
    return first


def count_tied(candidates: Sequence[int], score: Sequence[float] | None, within: float, *, lowest: bool) -> int:
    """How many of *candidates* have the best score, or one no more than *within* from it."""
    if score is None:
        return len(candidates)
    scores = [score[i] for i in candidates]
    if lowest:
        bound = min(scores) + within  # as the pick computes it
        return sum(each <= bound for each in scores)
    bound = max(scores) - within
    return sum(each >= bound for each in scores)
