"""Predicted hits against reported hits, for each instance and source; and the report on caches.

Only what a policy looked up was predicted: other answers are not compared. A sustained disagreement is logged once when
it begins and once when it ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import structlog

from smetric import names
from smetric.fleet.instance import Instance
from smetric.fleet.record import DecisionRecord
from smetric.request.request import Usage
from smetric.telemetry.cache_breaks import CacheBreaks, client_kind, report_of

#: Answers and seconds that a judgement needs.
MIN_ANSWERS = 50
MIN_SECONDS = 60.0
#: A disagreement begins above this share of the prompts' tokens, and ends below half of it.
DISAGREE_SHARE = 0.2
#: Seconds of answers that are forgotten together.
MARK_S = 5.0
#: Tokens per block if neither the instance nor its source reports it.
BLOCK_TOKENS = 16

log = structlog.get_logger("smetric.hits")


@dataclass(slots=True)
class HitTally:
    """Sums over answers, in tokens.

    Args:
        answers: number of answers.
        exact: answers predicted within one block.
        prompt: tokens of their prompts.
        predicted: tokens of these believed cached.
        actual: tokens of these reported as cached.
        wrong: sum of the absolute differences.
        blocks: sum of one block for each answer.
    """

    answers: int = 0
    exact: int = 0
    prompt: int = 0
    predicted: int = 0
    actual: int = 0
    wrong: int = 0
    blocks: int = 0

    def since(self, before: HitTally) -> HitTally:
        """Return what has come since the tally *before*."""
        return HitTally(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    def report(self) -> dict[str, int]:
        """Return the sums as `/admin/cache` shows them."""
        return {
            "answers": self.answers,
            "prompt_tokens": self.prompt,
            "predicted_tokens": self.predicted,
            "actual_tokens": self.actual,
            "wrong_tokens": self.wrong,
        }


@dataclass(slots=True)
class Agreement:
    """Errors of the predictions of one source for one instance.

    Args:
        incarnation: the process of the instance that the latest answers are of.
        all: tally of all answers.
        disagrees: whether the latest answers disagree.
    """

    incarnation: int
    all: HitTally = field(default_factory=HitTally)
    disagrees: bool = False
    #: When some seconds of answers began, and `all` at that time. The latest answers are those since the first mark.
    marks: deque[tuple[float, HitTally]] = field(default_factory=deque)

    @property
    def latest(self) -> HitTally:
        """Tally of the latest answers, enough for a judgement."""
        return self.all.since(self.marks[0][1])

    def add(self, prompt: int, predicted: int, actual: int, block: int, now: float) -> None:
        """Add an answer, and forget the oldest that a judgement does not need."""
        marks, total = self.marks, self.all
        if not marks or now - marks[-1][0] >= MARK_S:
            marks.append((now, replace(total)))
        wrong = abs(predicted - actual)
        total.answers += 1
        total.exact += wrong <= block
        total.prompt += prompt
        total.predicted += predicted
        total.actual += actual
        total.wrong += wrong
        total.blocks += block
        while len(marks) > 1 and self._is_enough(marks[1], now):
            marks.popleft()

    def judge(self, now: float) -> bool:
        """Return whether the latest answers disagree; as before while there are too few of them."""
        if self._is_enough(self.marks[0], now):
            total, before = self.all, self.marks[0][1]
            wrong = total.wrong - before.wrong
            bound = DISAGREE_SHARE * (total.prompt - before.prompt) * (0.5 if self.disagrees else 1.0)
            self.disagrees = wrong > bound and wrong > total.blocks - before.blocks
        return self.disagrees

    def _is_enough(self, mark: tuple[float, HitTally], now: float) -> bool:
        began, before = mark
        return now - began >= MIN_SECONDS and self.all.answers - before.answers >= MIN_ANSWERS

    def begin_anew(self, incarnation: int) -> None:
        """Forget the latest answers: another process answers."""
        self.incarnation = incarnation
        self.disagrees = False
        self.marks.clear()

    def report(self) -> dict[str, Any]:
        """Return the agreement as `/admin/cache` shows it."""
        about = {"within_a_block": self.all.exact, "disagrees": self.disagrees, "latest": self.latest.report()}
        return self.all.report() | about


class HitTruth:
    """An `Agreement` for each instance and source.

    Args:
        on_checked: called with instance, source, result (one of `names.HIT_RESULTS`) and the tokens it was wrong by.
        grains: tokens in which a source counts, where that is more than a block of the engine.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        on_checked: Callable[[str, str, str, int], None],
        *,
        grains: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_checked = on_checked
        self._grains = grains or {}
        self._clock = clock
        #: By instance id and source; both come from configuration.
        self.agreements: dict[tuple[str, str], Agreement] = {}

    def answered(self, record: DecisionRecord, usage: Usage | None) -> None:
        """Compare the answer to the request of *record*, if a hit was predicted and the instance reports one."""
        predicted, request, instance = record.hit, record.request, record.instance
        if predicted is None or instance is None or usage is None or request.prompts != 1:
            return
        actual, prompt = usage.cached_tokens, usage.prompt_tokens
        if actual is None or not prompt:
            return
        tokens, source = record.as_counted(predicted[0], prompt), predicted[1]
        # Within a block is right: engines compute at least the last token of a prompt, so they never find all of it.
        block = max(instance.cache.block_size or BLOCK_TOKENS, self._grains.get(source, 1))
        over = tokens - actual
        result = names.HIT_EQUAL if abs(over) <= block else names.HIT_OVER if over > 0 else names.HIT_UNDER
        self._on_checked(instance.id, source, result, abs(over))
        agreement = self.agreements.get((instance.id, source))
        if agreement is None:
            agreement = self.agreements[instance.id, source] = Agreement(instance.incarnation)
        elif agreement.incarnation != instance.incarnation:
            agreement.begin_anew(instance.incarnation)
        now, before = self._clock(), agreement.disagrees
        agreement.add(prompt, tokens, actual, block, now)
        if agreement.judge(now) != before:
            _log_change(instance, source, agreement)


def _log_change(instance: Instance, source: str, agreement: Agreement) -> None:
    """Log that a disagreement has begun, or ended."""
    latest = agreement.latest.report()
    del latest["wrong_tokens"]
    about = {"instance": instance.id, "source": source, **latest}
    if agreement.disagrees:
        log.warning("smetric.hits.disagree", **about, remedy="run `smetric doctor`; see /admin/cache")
    else:
        log.info("smetric.hits.agree", **about)


class CacheWatch:
    """Cache hits reported by answers: compared with predictions, and searched for broken prefixes.

    Args:
        truth: compares predicted hits with reported ones.
        breaks: finds what broke a prefix.
        instances: all instances.
        clock: monotonic seconds, that of *breaks*.
    """

    def __init__(
        self,
        truth: HitTruth,
        breaks: CacheBreaks,
        instances: Callable[[], Sequence[Instance]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._truth = truth
        self._breaks = breaks
        self._instances = instances
        self._clock = clock

    def answered(self, record: DecisionRecord, usage: Usage | None, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Learn from an answer with status 200, complete or with usage; the request of *record* came with *headers*."""
        self._truth.answered(record, usage)
        if record.instance is not None and record.request.parts is not None:
            share = _hit_share(record, usage)
            self._breaks.answered(record.request, record.instance, share, client_kind(headers))

    def disagreements(self) -> dict[tuple[str, str], bool]:
        """Return by instance id and source whether predictions and reports disagree; any thread may call this."""
        return {key: agreement.disagrees for key, agreement in self._truth.agreements.copy().items()}

    def report(self) -> dict[str, Any]:
        """Return the report of `/admin/cache`; `breaks` are the costliest first, `summary` is a sentence for people."""
        now = self._clock()
        return {
            "instances": [_tokens(instance) for instance in self._instances()],
            "predictions": [
                {"instance": id, "source": source, **agreement.report()}
                for (id, source), agreement in self._truth.agreements.items()
            ],
            "follow_ups": {
                "compared": self._breaks.follow_ups,
                "short": self._breaks.short,
                "short_though_unbroken": self._breaks.unbroken,
            },
            "breaks": [report_of(cause, breaks, now) for cause, breaks in self._breaks.causes],
        }


def _hit_share(record: DecisionRecord, usage: Usage | None) -> float | None:
    """Return the share of the prompt that was cached, or would have been on the best instance, if either is known."""
    known: list[float] = []
    if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens:
        known.append(usage.cached_tokens / usage.prompt_tokens)
    best = record.best_hit
    if best is not None:
        known.append(best / max(1, record.request.prompt_len))
    return max(known, default=None)


def _tokens(instance: Instance) -> dict[str, Any]:
    return {"id": instance.id} | {
        at: getattr(instance.prefix_tokens, at, None) for at in ("local", "external", "missed")
    }
