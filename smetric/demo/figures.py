"""What the answers of one play add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from smetric.demo.agent import Answer

#: Imbalance is judged in windows this long, seconds.
WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over the answers of one policy.

    Args:
        requests: how many were sent.
        failed: how many were not answered wholly.
        hit_rate: cached tokens ÷ prompt tokens, over all of them.
        imbalance: see `imbalance`.
        ttft_p50_s: median time to the first event.
        ttft_p90_s: its 90th percentile.
        followups: requests after the first of their session.
        returned: how many of those went to the instance that had answered before.
    """

    requests: int
    failed: int
    hit_rate: float
    imbalance: float
    ttft_p50_s: float
    ttft_p90_s: float
    followups: int
    returned: int

    @classmethod
    def of(cls, answers: Sequence[Answer], instances: int) -> Figures:
        """The figures of *answers* on so many *instances*."""
        whole = [answer for answer in answers if answer.is_whole]
        prompt = sum(answer.prompt_tokens for answer in whole)
        waits = sorted(answer.ttft_s for answer in whole)
        followups = [answer for answer in whole if answer.turn > 0]
        return cls(
            requests=len(answers),
            failed=len(answers) - len(whole),
            hit_rate=sum(answer.cached_tokens for answer in whole) / prompt if prompt else 0.0,
            imbalance=imbalance(whole, instances),
            ttft_p50_s=_percentile(waits, 0.5),
            ttft_p90_s=_percentile(waits, 0.9),
            followups=len(followups),
            returned=sum(answer.instance == home for answer, home in with_homes(whole) if home),
        )


def with_homes(answers: Sequence[Answer]) -> list[tuple[Answer, str]]:
    """Each answer with the instance that gave its session's answer before; empty for a first turn."""
    at = {(answer.session, answer.turn): answer.instance for answer in answers}
    return [(answer, at.get((answer.session, answer.turn - 1), "")) for answer in answers]


def imbalance(answers: Sequence[Answer], instances: int) -> float:
    """Requests in flight on the fullest instance ÷ the mean of all, in windows of `WINDOW_S`, weighted by that mean.

    1 is even; the number of instances is everything on one. An empty window weighs nothing.
    """
    if not answers:
        return 1.0
    start = min(answer.sent_s for answer in answers)
    busy: dict[int, dict[str, float]] = {}
    for answer in answers:
        first = int((answer.sent_s - start) / WINDOW_S)
        last = int((answer.ended_s - start) / WINDOW_S)
        for window in range(first, last + 1):
            opens = start + window * WINDOW_S
            share = min(answer.ended_s, opens + WINDOW_S) - max(answer.sent_s, opens)
            seconds = busy.setdefault(window, {})
            seconds[answer.instance] = seconds.get(answer.instance, 0.0) + max(0.0, share)
    total = sum(sum(seconds.values()) for seconds in busy.values())
    fullest = sum(max(seconds.values()) for seconds in busy.values())
    return fullest * instances / total if total else 1.0


def _percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least *share* of *ordered* do not exceed; 0 of none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
