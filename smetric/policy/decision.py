"""Outcome of one evaluation: a decision, or the look-ups it needs first."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import eq
from typing import TYPE_CHECKING, Any, NamedTuple

from smetric.policy.guard import NOBODY
from smetric.policy.plan import Outcome, Shape, Step, features_of

if TYPE_CHECKING:
    from smetric.policy.plan import Pick
    from smetric.policy.policy import Policy
    from smetric.policy.snapshot import Snapshot


class RuleTrace(NamedTuple):
    """An outcome statement that was visited: each guard with True (held), False (failed) or None (not evaluated).

    A rule whose guards all held and whose pick had no candidate has one more guard, `nobody`, which failed.
    """

    rule: str
    guards: tuple[tuple[str, bool | None], ...]

    @property
    def failed(self) -> str | None:
        """The label of the guard that failed."""
        return next((label for label, held in self.guards if held is False), None)


@dataclass(frozen=True, slots=True)
class FilterTrace:
    """A filter that was visited, and the indices of the candidates that it left.

    `applied` is False if a guard of its `when` failed; `ignored` is True for a `prefer` that would leave no candidate.
    """

    label: str
    left: Sequence[int]
    applied: bool
    ignored: bool


class Need:
    """Look-up features that the evaluation reached and the snapshot lacks: fetch them, then decide again."""

    __slots__ = ("features",)

    def __init__(self, features: frozenset[str]) -> None:
        self.features = features


class Decision:
    """The decision of a policy on one snapshot.

    It holds references only; traces, ranks and margins are computed when they are read, because a decision is made for
    every request and read for few. An index of -1 is no candidate.
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
        wait_s: float,
    ) -> None:
        self.policy = policy
        #: The inputs: instances, request, cursors and seed.
        self.snapshot = snapshot
        self.request = request
        self.used = used
        self.seed = seed
        #: The statement that fired, as an index into `policy.plan.steps`.
        self.step_index = step_index
        #: The chosen candidate, as an index into `snapshot.ids`.
        self.index = index
        #: For each statement visited: the number of guards that held before one failed; -1 for a `prefer` that would
        #: leave no candidate.
        self.stops = stops
        #: For each filter visited: indices of the candidates it left.
        self.survivors = survivors
        #: The value per candidate that the pick compared, also for candidates that a filter removed; None if all tie.
        self.score = score
        #: The pick that chose, and its index among the picks of the file, -1 without one.
        self.site = site
        self.pick: Pick | None = policy.plan.picks[site] if site >= 0 else None
        #: Seconds that a rejected client should wait, if the rule says.
        self.retry_after_s = retry_after_s
        #: Seconds that a request may be held in total, including those so far (`req.held`).
        self.wait_s = wait_s
        self._runner_up: int | None = None
        self._tied: int | None = None

    def __repr__(self) -> str:
        return f"<Decision {self.policy.name}: {self.rule} → {self.instance or self.outcome.value}>"

    @property
    def step(self) -> Step:
        """The statement that fired."""
        return self.policy.plan.steps[self.step_index]

    @property
    def outcome(self) -> Outcome:
        """The end of the decision."""
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
        """The id of the chosen instance, or the outcome in words."""
        if self.index >= 0:
            return self.snapshot.ids[self.index]
        outcome = self.outcome
        return f"{outcome.value} {self.status}" if outcome is Outcome.REJECT else outcome.value

    @property
    def status(self) -> int:
        """The HTTP status to answer a rejected client with; 0 otherwise."""
        return 503 if self.outcome is Outcome.NO_CANDIDATE else self.step.status

    @property
    def message(self) -> str:
        """The message for a rejected client; empty otherwise."""
        if self.outcome is Outcome.NO_CANDIDATE:
            return f"no instance is left after `{self.rule}`"
        return self.step.message

    @property
    def guards(self) -> list[RuleTrace]:
        """The outcome statements visited, in order; the last one fired, unless a filter left no candidate."""
        traces = []
        for at, (step, stop) in enumerate(zip(self.policy.plan.steps, self.stops, strict=False)):
            if step.is_filter:
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
        """The guard that kept the first rule from firing; None if the first rule fired."""
        return next((rule.failed for rule in self.guards), None)

    @property
    def filters(self) -> list[FilterTrace]:
        """The filters visited, in order."""
        steps = [(step, stop) for step, stop in zip(self.policy.plan.steps, self.stops, strict=False) if step.is_filter]
        return [
            FilterTrace(step.label, left, applied=stop < 0 or stop == len(step.guards), ignored=stop < 0)
            for (step, stop), left in zip(steps, self.survivors, strict=True)
        ]

    @property
    def reads(self) -> frozenset[str]:
        """The features that the visited statements read, as far as they were evaluated."""
        features: set[str] = set()
        for step, stop in zip(self.policy.plan.steps, self.stops, strict=False):
            for guard in step.guards[: stop + 1 if stop >= 0 else None]:
                features |= features_of(guard.value)
            if step.value is not None and (stop < 0 or stop == len(step.guards)):
                features |= features_of(step.value)
        return frozenset(features & self.snapshot.columns.keys())

    @property
    def cursors(self) -> dict[str, str]:
        """The cursors to store if this decision is acted on: the pick's name to the id of its winner."""
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
        """The value of the pick's `within:` or `temperature:`; 0 without."""
        if self.pick is None or self.pick.named is None:
            return 0.0
        value: float = self.policy.probe(self, self.step_index, self.pick.named)
        return value

    @property
    def candidates(self) -> Sequence[int]:
        """Indices of the candidates of the pick: left by the filters above it, and in its `where`."""
        pick = self.pick
        if pick is None:
            return self.survivors[-1] if self.survivors else range(len(self.snapshot.ids))
        left = self.survivors[pick.level - 1] if pick.level else range(len(self.snapshot.ids))
        if pick.where is None or pick.where.shape is Shape.SCALAR:  # a single value was true
            return left
        mask = self.policy.probe(self, self.step_index, pick.where)
        return [i for i in left if mask[i]]

    @property
    def ranked(self) -> list[int]:
        """The chosen one, then the other candidates, the best score first, ties in order of ids."""
        return self.foremost(len(self.snapshot.ids))

    def foremost(self, most: int) -> list[int]:
        """The first *most* of `ranked`."""
        ids, score, sign = self.snapshot.ids, self.score, -1 if self.direction == "max" else 1
        others = (i for i in self.candidates if i != self.index)
        best = heapq.nsmallest(most, [(0 if score is None else sign * score[i], ids[i], i) for i in others])
        chosen = [self.index] if self.index >= 0 else []
        return [*chosen, *(i for _, _, i in best)][:most]

    @property
    def runner_up_index(self) -> int | None:
        """Index of the best candidate that was not chosen, ties in order of ids."""
        if self._runner_up is None:
            self._runner_up = self._best_other()
        return self._runner_up if self._runner_up >= 0 else None

    def _best_other(self) -> int:
        others = list(self.candidates)
        if self.index < 0 or len(others) < 2:
            return -1
        others.remove(self.index)
        if self.score is not None:
            # Telemetry asks this of every decision: scans in C are several times faster than a minimum by key.
            scores = list(map(self.score.__getitem__, others))
            best = max(scores) if self.direction == "max" else min(scores)
            if scores.count(best) == 1:
                return others[scores.index(best)]
            others = list(compress(others, map(eq, scores, repeat(best))))
        return min(others, key=self.snapshot.ids.__getitem__)

    @property
    def runner_up(self) -> str | None:
        """The id of the best candidate that was not chosen."""
        at = self.runner_up_index
        return None if at is None else self.snapshot.ids[at]

    @property
    def margin(self) -> float | None:
        """The distance between the scores of the runner-up and of the chosen one."""
        at = self.runner_up_index
        return None if at is None or self.score is None else abs(self.score[at] - self.score[self.index])

    @property
    def is_behind(self) -> bool:
        """Whether the runner-up has the better score: a drawn or rotated candidate need not be the best."""
        at = self.runner_up_index
        return at is not None and self.score is not None and self.is_better(at, self.score)

    def is_better(self, index: int, score: Sequence[float]) -> bool:
        """Whether the *score* of candidate *index* is better than that of the chosen one."""
        mine, other = score[self.index], score[index]
        return other < mine if self.direction == "min" else other > mine

    @property
    def margin_share(self) -> float | None:
        """`margin` as a share of the larger of both scores; 0 where both are 0."""
        at = self.runner_up_index
        return None if at is None or self.score is None else self.share_behind(at, self.score)

    def share_behind(self, index: int, score: Sequence[float]) -> float:
        """The difference between the *score* of candidate *index* and the chosen one's, over the larger of both."""
        mine, other = score[self.index], score[index]
        return 0.0 if mine == other else abs(other - mine) / max(abs(mine), abs(other))

    @property
    def tied(self) -> int:
        """The number of candidates with the best score, or one that counts as such; 0 without a pick."""
        if self._tied is None:
            self._tied = self._count_tied()
        return self._tied

    def _count_tied(self) -> int:
        pick, candidates = self.pick, self.candidates
        if pick is None:
            return 0
        if self.score is None:
            return len(candidates)
        within = self.named if pick.rotates else 0.0
        scores = [self.score[i] for i in candidates]
        # The bound is computed as the pick computes it, or rounding could make a difference.
        if pick.direction == "max":
            bound = max(scores) - within
            return sum(score >= bound for score in scores)
        bound = min(scores) + within
        return sum(score <= bound for score in scores)
