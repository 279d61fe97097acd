"""Outcome of one evaluation: a decision, or the look-ups it needs first."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from smetric.policy.guard import NOBODY
from smetric.policy.plan import Outcome, Shape, Step, features_of

if TYPE_CHECKING:
    from smetric.policy.plan import Pick
    from smetric.policy.policy import Policy
    from smetric.policy.snapshot import Snapshot


# How far the statements of a policy held in one decision: the guards of a rule, the candidates that a filter left.
#
# Made by a `Decision`, which keeps only numbers until somebody asks.


class RuleTrace(NamedTuple):
    """An outcome statement that was visited: its guards with True (held), False (failed) or None (not reached).

    A rule whose guards all held and whose pick was nobody has one more guard, `nobody`, which failed.
    """

    rule: str
    guards: tuple[tuple[str, bool | None], ...]

    @property
    def failed(self) -> str | None:
        """The label of the guard that failed."""
        return next((label for label, held in self.guards if held is False), None)


@dataclass(frozen=True, slots=True)
class FilterTrace:
    """A filter that was visited: which candidates it left, as indices.

    `applied` is False where a guard of its `when` failed; `ignored` is True for a `prefer` that would have left nobody.
    """

    label: str
    left: Sequence[int]
    applied: bool
    ignored: bool


# A pick as a contest: who comes next, and who counts as equal. Everybody is an index; lower ids win ties.
#
# What was decided, and who could be chosen, is `decision.py`'s, which keeps what is found here.


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


# The outcome of one evaluation: a decision, or the look-ups it needs first.
#
# Sentences and tables are `explain.py`.

#: Stands for what nobody asked for yet; an index of -1 is nobody.
_NOT_SOUGHT = -2


class Need:
    """Evaluation reached look-up features that the snapshot does not hold: fetch them, then evaluate again."""

    __slots__ = ("features",)

    def __init__(self, features: frozenset[str]) -> None:
        self.features = features


class Decision:
    """What a policy decided on one snapshot; texts and tables are made only when asked for.

    Everything here refers to values that exist anyway, because a decision is made for every request and read for few.
    """

    __slots__ = (
        "_runner_up",
        "_tied",
        "index",
        "pick",
        "policy",
        "request",
        "retry_after_s",
        "score",
        "seed",
        "site",
        "snapshot",
        "step_index",
        "stops",
        "survivors",
        "used",
        "wait_s",
    )

    def __init__(
        self,
        policy: Policy,
        snapshot: Snapshot,
        request: Any,  # any object with the vocabulary's request fields
        used: Mapping[str, str],
        seed: int,
        step_index: int,
        index: int,
        stops: tuple[int, ...],
        survivors: tuple[Sequence[int], ...],
        score: list[float] | None,
        site: int,
        retry_after_s: float | None,
        wait_s: float = 0.0,
    ) -> None:
        #: The policy that decided.
        self.policy = policy
        #: What it saw of the instances and of the request, the cursors it was given and its seed.
        self.snapshot = snapshot
        self.request = request
        self.used = used
        self.seed = seed
        #: Which statement fired: index into `policy.plan.steps`.
        self.step_index = step_index
        #: The chosen candidate as an index into `snapshot.ids`; -1 when nobody was chosen.
        self.index = index
        #: For each statement visited: how many of its guards held before one failed; -1 for a `prefer` that would have
        #: left nobody.
        self.stops = stops
        #: For each filter visited: indices of the candidates it left.
        self.survivors = survivors
        #: The value per candidate that the pick compared, filtered or not; None where all tie anyway.
        self.score = score
        #: Which pick of the file chose, -1 without; and that pick.
        self.site = site
        self.pick: Pick | None = policy.picks[site] if site >= 0 else None
        #: Seconds a rejected client should wait, if the rule says.
        self.retry_after_s = retry_after_s
        #: Seconds a held request may be held in all, what it has been held already (`req.held`) included.
        self.wait_s = wait_s
        self._runner_up = self._tied = _NOT_SOUGHT

    def __repr__(self) -> str:
        return f"<Decision {self.policy.name}: {self.rule} → {self.instance or self.outcome.value}>"

    @property
    def step(self) -> Step:
        """The statement that fired."""
        return self.policy.plan.steps[self.step_index]

    @property
    def outcome(self) -> Outcome:
        """How it ends."""
        outcome = self.policy.plan.steps[self.step_index].outcome
        assert outcome is not None
        return outcome

    @property
    def rule(self) -> str:
        """The label of the statement that fired."""
        return self.policy.plan.steps[self.step_index].label

    @property
    def instance(self) -> str | None:
        """The id of the chosen instance."""
        return self.snapshot.ids[self.index] if self.index >= 0 else None

    @property
    def choice(self) -> str:
        """The id of the chosen instance; else how it ends, in words."""
        if self.index >= 0:
            return self.snapshot.ids[self.index]
        outcome = self.outcome
        return f"{outcome.value} {self.status}" if outcome is Outcome.REJECT else outcome.value

    @property
    def status(self) -> int:
        """The HTTP status to answer a rejected client with; 0 otherwise."""
        return 503 if self.outcome is Outcome.NOBODY else self.step.status

    @property
    def message(self) -> str:
        """What a rejected client is told; empty otherwise."""
        if self.outcome is Outcome.NOBODY:
            return f"no instance is left after `{self.rule}`"
        return self.step.message

    @property
    def guards(self) -> list[RuleTrace]:
        """The outcome statements visited, in order; the last one fired, unless a filter left nobody."""
        traces = []
        for at, (step, stop) in enumerate(zip(self.policy.plan.steps, self.stops, strict=False)):
            if step.kind.is_filter:
                continue
            guards: list[tuple[str, bool | None]] = [
                (guard.label, True if i < stop else False if i == stop else None) for i, guard in enumerate(step.guards)
            ]
            if at != self.step_index and stop == len(step.guards):
                guards.append((NOBODY, False))
            traces.append(RuleTrace(step.label, tuple(guards)))
        return traces

    @property
    def failed_guard(self) -> str | None:
        """The guard that kept the first rule from firing; None where the first rule fired."""
        return next((rule.failed for rule in self.guards), None)

    @property
    def filters(self) -> list[FilterTrace]:
        """The filters visited, in order."""
        steps = [
            (step, stop) for step, stop in zip(self.policy.plan.steps, self.stops, strict=False) if step.kind.is_filter
        ]
        return [
            FilterTrace(step.label, left, applied=stop < 0 or stop == len(step.guards), ignored=stop < 0)
            for (step, stop), left in zip(steps, self.survivors, strict=True)
        ]

    @property
    def reads(self) -> frozenset[str]:
        """The features that the statements visited ask for, as far as they were visited."""
        features: set[str] = set()
        for step, stop in zip(self.policy.plan.steps, self.stops, strict=False):
            for guard in step.guards[: stop + 1 if stop >= 0 else None]:
                features |= features_of(guard.value)
            if step.value is not None and (stop < 0 or stop == len(step.guards)):
                features |= features_of(step.value)
        return frozenset(features & self.snapshot.columns.keys())

    @property
    def cursors(self) -> dict[str, str]:
        """The cursors to remember if this decision is acted on: the pick's name to the id of its winner."""
        pick = self.pick
        if pick is None or not pick.rotates:
            return {}
        return {self.policy.plan.keys[self.site]: self.snapshot.ids[self.index]}

    # ── the pick ─────────────────────────────────────────────────────────────

    @property
    def direction(self) -> str | None:
        """`min` or `max`: whether a low or a high score wins."""
        pick = self.pick
        return None if pick is None else pick.direction

    @property
    def named(self) -> float:
        """What the pick's `within:` or `temperature:` was; 0 without."""
        if self.pick is None or self.pick.named is None:
            return 0.0
        value: float = self.policy.probe(self, self.step_index, self.pick.named)
        return value

    @property
    def candidates(self) -> Sequence[int]:
        """Indices of those the pick could choose: left by the filters above it and by its `where`."""
        pick = self.pick
        if pick is None:
            return self.survivors[-1] if self.survivors else range(len(self.snapshot.ids))
        left = self.survivors[pick.level - 1] if pick.level else range(len(self.snapshot.ids))
        if pick.where is None or pick.where.shape is Shape.SCALAR:  # one for all is true of all, as somebody was picked
            return left
        mask = self.policy.probe(self, self.step_index, pick.where)
        return [i for i in left if mask[i]]

    @property
    def ranked(self) -> list[int]:
        """`candidates` with the best score first, ties in order of ids; the chosen one first of all."""
        return self.foremost(len(self.snapshot.ids))

    def foremost(self, most: int) -> list[int]:
        """The first *most* of `ranked`."""
        lowest = self.direction != "max"
        return foremost(most, self.candidates, self.index, self.score, self.snapshot.ids, lowest=lowest)

    @property
    def runner_up_index(self) -> int | None:
        """Index of the best of those not chosen, ties in order of ids; found once."""
        if self._runner_up == _NOT_SOUGHT:
            lowest = self.direction != "max"
            self._runner_up = best_other(self.candidates, self.index, self.score, self.snapshot.ids, lowest=lowest)
        return self._runner_up if self._runner_up >= 0 else None

    @property
    def runner_up(self) -> str | None:
        """The id of the best of those not chosen."""
        at = self.runner_up_index
        return None if at is None else self.snapshot.ids[at]

    @property
    def margin(self) -> float | None:
        """How far the score of the runner-up is from that of the chosen."""
        at = self.runner_up_index
        return None if at is None or self.score is None else abs(self.score[at] - self.score[self.index])

    @property
    def is_behind(self) -> bool:
        """Whether the runner-up has the better score: one that is drawn, or has its turn, need not be the best."""
        at = self.runner_up_index
        return at is not None and self.score is not None and self.is_better(at, self.score)

    def is_better(self, index: int, score: Sequence[float]) -> bool:
        """Whether the *score* of candidate *index* is better than that of the chosen."""
        mine, other = score[self.index], score[index]
        return other < mine if self.direction == "min" else other > mine

    @property
    def margin_share(self) -> float | None:
        """`margin` as a share of the larger of both scores; 0 where both are 0."""
        at = self.runner_up_index
        return None if at is None or self.score is None else self.share_behind(at, self.score)

    def share_behind(self, index: int, score: Sequence[float]) -> float:
        """How far the *score* of candidate *index* is from that of the chosen, as a share of the larger one."""
        mine, other = score[self.index], score[index]
        if mine == other:
            return 0.0
        own, its = abs(mine), abs(other)
        return abs(other - mine) / (own if own > its else its)

    @property
    def tied(self) -> int:
        """How many candidates had the best score, or one that counts as such; 0 when there was no pick; found once."""
        if self._tied == _NOT_SOUGHT:
            self._tied = self._count_tied()
        return self._tied

    def _count_tied(self) -> int:
        pick = self.pick
        if pick is None:
            return 0
        within = self.named if pick.rotates else 0.0
        return count_tied(self.candidates, self.score, within, lowest=pick.direction != "max")
