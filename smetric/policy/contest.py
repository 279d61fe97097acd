"""A pick as a contest: who could be chosen, who comes next, and who counts as equal.

What a decision was made on, and how it ended, is `decision.py`'s, which keeps what is found here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smetric.policy.decision import Decision


def candidates_of(decision: Decision) -> Sequence[int]:
    """Indices of those the pick could choose: left by the filters above it and by its `where`."""
    pick = decision.pick
    if pick is None:
        return decision.survivors[-1] if decision.survivors else range(len(decision.snapshot.ids))
    left = decision.survivors[pick.level - 1] if pick.level else range(len(decision.snapshot.ids))
    if pick.where is None:
        return left
    mask = decision.policy.probe(decision, decision.step_index, pick.where)
    return [i for i in left if mask[i]]


def foremost(decision: Decision, most: int) -> list[int]:
    """The first *most* candidates: the chosen one, then the best scores first, ties in order of ids."""
    score, ids, chosen = decision.score, decision.snapshot.ids, decision.index
    others = [i for i in candidates_of(decision) if i != chosen]
    if score is None:
        best = [i for _, i in heapq.nsmallest(most, [(ids[i], i) for i in others])]
    else:
        sign = -1 if decision.direction == "max" else 1
        best = [i for _, _, i in heapq.nsmallest(most, [(sign * score[i], ids[i], i) for i in others])]
    return [chosen, *best][:most] if chosen >= 0 else best


def best_other(decision: Decision) -> int:
    """Index of the best of those not chosen, ties in order of ids; -1 for nobody."""
    chosen, ids = decision.index, decision.snapshot.ids
    candidates = candidates_of(decision)
    if chosen < 0 or len(candidates) < 2:
        return -1
    score = [0.0] * len(ids) if decision.score is None else decision.score
    lowest = decision.direction != "max"
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


def count_tied(decision: Decision) -> int:
    """How many candidates had the best score, or one that counts as such; 0 when there was no pick."""
    pick, score = decision.pick, decision.score
    if pick is None:
        return 0
    candidates = candidates_of(decision)
    if score is None:
        return len(candidates)
    scores = [score[i] for i in candidates]
    best = max(scores) if pick.direction == "max" else min(scores)
    within = 0.0
    if pick.named is not None and pick.rotates:
        within = decision.policy.probe(decision, decision.step_index, pick.named)
    return sum(abs(each - best) <= within for each in scores)
