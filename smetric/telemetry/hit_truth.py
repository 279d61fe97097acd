"""Predicted hits against reported hits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from smetric import names
from smetric.fleet.instance import Instance
from smetric.fleet.record import DecisionRecord
from smetric.request.request import Usage
from smetric.telemetry.cache_breaks import Breaks, CacheBreaks, Cause, client_kind

# Compares the hits that were predicted with those that instances report, for each instance and source.
#
# Only what a policy looked up was predicted; for other answers nothing is made up. A sustained disagreement is said
# once when it begins and once when it ends.

#: Answers and seconds that a judgement rests on, at least.
LEAST_ANSWERS = 50
LEAST_SECONDS = 60.0
#: A disagreement begins above this share of the prompts' tokens, and ends below half of it.
DISAGREE_SHARE = 0.2
#: Seconds of answers that are let go together.
MARK_S = 5.0
#: Tokens per block where neither the instance nor its source says.
BLOCK_TOKENS = 16

log = structlog.get_logger("smetric.hits")


@dataclass(slots=True)
class Tally:
    """Answers summed up; tokens.

    Args:
        answers: how many.
        exact: those predicted within one block.
        prompt: tokens of their prompts.
        predicted: of these, believed cached.
        actual: of these, reported as cached.
        wrong: sum of the differences, whichever their sign.
        blocks: sum of one block for each answer.
    """

    answers: int = 0
    exact: int = 0
    prompt: int = 0
    predicted: int = 0
    actual: int = 0
    wrong: int = 0
    blocks: int = 0

    def count(self, prompt: int, predicted: int, actual: int, wrong: int, block: int) -> None:
        """One answer more."""
        self.answers += 1
        self.exact += wrong <= block
        self.prompt += prompt
        self.predicted += predicted
        self.actual += actual
        self.wrong += wrong
        self.blocks += block

    def since(self, before: Tally) -> Tally:
        """What has come since it was *before*."""
        return Tally(
            self.answers - before.answers,
            self.exact - before.exact,
            self.prompt - before.prompt,
            self.predicted - before.predicted,
            self.actual - before.actual,
            self.wrong - before.wrong,
            self.blocks - before.blocks,
        )


@dataclass(slots=True)
class Agreement:
    """How one source's predictions for one instance have turned out.

    Args:
        incarnation: the process of the instance that the latest answers are of.
        all: all answers.
        disagrees: whether the latest disagree.
    """

    incarnation: int
    all: Tally = field(default_factory=Tally)
    disagrees: bool = False
    #: When a few seconds of answers began, and what `all` was then; the latest, enough for a judgement, are all since.
    marks: deque[tuple[float, Tally]] = field(default_factory=deque)

    @property
    def latest(self) -> Tally:
        """The last answers."""
        return self.all.since(self.marks[0][1])

    def add(self, prompt: int, predicted: int, actual: int, wrong: int, block: int, now: float) -> None:
        """Take one answer in, and let go of the oldest that a judgement can do without."""
        marks, total = self.marks, self.all
        if not marks or now - marks[-1][0] >= MARK_S:
            marks.append((now, replace(total)))
        total.count(prompt, predicted, actual, wrong, block)
        while (
            len(marks) > 1
            and now - marks[1][0] >= LEAST_SECONDS
            and total.answers - marks[1][1].answers >= LEAST_ANSWERS
        ):
            marks.popleft()

    def judge(self, now: float) -> bool:
        """Whether the latest answers disagree; as before while there are too few of them."""
        began, before = self.marks[0]
        total = self.all
        if now - began >= LEAST_SECONDS and total.answers - before.answers >= LEAST_ANSWERS:
            wrong = total.wrong - before.wrong
            bound = DISAGREE_SHARE * (total.prompt - before.prompt) * (0.5 if self.disagrees else 1.0)
            self.disagrees = wrong > bound and wrong > total.blocks - before.blocks
        return self.disagrees

    def begin_anew(self, incarnation: int) -> None:
        """Another process answers: what the last one reported says nothing of it."""
        self.incarnation = incarnation
        self.disagrees = False
        self.marks.clear()


class HitTruth:
    """Keeps one `Agreement` for each instance and source.

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
        """The request of *record* was answered; judged if a hit was predicted and the instance reports one."""
        predicted, request, instance = record.hit, record.request, record.instance
        if predicted is None or instance is None or usage is None or request.prompts != 1:
            return
        if usage.cached_tokens is None or not usage.prompt_tokens:
            return
        tokens, source = record.as_counted(predicted[0], usage.prompt_tokens), predicted[1]
        block, grain = instance.cache.block_size or BLOCK_TOKENS, self._grains.get(source, 1)
        if grain > block:
            block = grain
        # A block: engines compute at least the last token of a prompt, so they never find the whole of it.
        over = tokens - usage.cached_tokens
        wrong = abs(over)
        result = names.HIT_EQUAL if wrong <= block else names.HIT_OVER if over > 0 else names.HIT_UNDER
        self._on_checked(instance.id, source, result, wrong)
        agreement = self.agreements.get((instance.id, source))
        if agreement is None:
            agreement = self.agreements[instance.id, source] = Agreement(instance.incarnation)
        elif agreement.incarnation != instance.incarnation:
            agreement.begin_anew(instance.incarnation)
        now, before = self._clock(), agreement.disagrees
        agreement.add(usage.prompt_tokens, tokens, usage.cached_tokens, wrong, block, now)
        if agreement.judge(now) != before:
            _tell(instance, source, agreement)


def _tell(instance: Instance, source: str, agreement: Agreement) -> None:
    """Say in the log that a disagreement has begun, or ended."""
    latest = agreement.latest
    told = {
        "instance": instance.id,
        "source": source,
        "answers": latest.answers,
        "prompt_tokens": latest.prompt,
        "predicted_tokens": latest.predicted,
        "actual_tokens": latest.actual,
    }
    if agreement.disagrees:
        log.warning("smetric.hits.disagree", **told, remedy="run `smetric doctor`; see /admin/cache")
    else:
        log.info("smetric.hits.agree", **told)


# What every answer says about caches, put together: predictions against reports, and what breaks prefixes.
#
# `report` is what `/admin/cache` shows and the doctor reads; what it is made of is in `smetric.caches.truth` and
# `smetric.caches.breaks`.


class CacheWatch:
    """Hands each answer to those who learn from it, after its last byte has gone out.

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
        """An instance has answered the request of *record*, which came with *headers*, with status 200 to the end."""
        self._truth.answered(record, usage)
        if record.instance is not None and record.request.parts is not None:
            share = _hit_share(record, usage)
            self._breaks.answered(record.request, record.instance, share, client_kind(headers))

    def disagreements(self) -> dict[tuple[str, str], bool]:
        """By instance id and source, whether predictions and reports disagree; may be called from any thread."""
        return {key: agreement.disagrees for key, agreement in self._truth.agreements.copy().items()}

    def report(self) -> dict[str, Any]:
        """All of it as JSON values. `breaks` are the costliest first; their `summary` is a sentence for people."""
        now = self._clock()
        return {
            "instances": [_tokens(instance) for instance in self._instances()],
            "predictions": [
                {"instance": id, "source": source, **_agreement(agreement)}
                for (id, source), agreement in self._truth.agreements.items()
            ],
            "follow_ups": {
                "compared": self._breaks.follow_ups,
                "short": self._breaks.short,
                "short_though_unbroken": self._breaks.unbroken,
            },
            "breaks": [_break(cause, breaks, now) for cause, breaks in self._breaks.causes],
        }


def _hit_share(record: DecisionRecord, usage: Usage | None) -> float | None:
    """Share of the prompt that was cached, or would have been on the best instance, as far as either is known."""
    known: list[float] = []
    if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens:
        known.append(usage.cached_tokens / usage.prompt_tokens)
    best = record.best_hit
    if best is not None:
        known.append(best / max(1, record.request.prompt_len))
    return max(known, default=None)


def _tokens(instance: Instance) -> dict[str, Any]:
    tokens = instance.prefix_tokens
    if tokens is None:
        return {"id": instance.id, "local": None, "external": None, "missed": None}
    return {"id": instance.id, "local": tokens.local, "external": tokens.external, "missed": tokens.missed}


def _agreement(agreement: Agreement) -> dict[str, Any]:
    total, latest = agreement.all, agreement.latest
    return {
        "answers": total.answers,
        "within_a_block": total.exact,
        "prompt_tokens": total.prompt,
        "predicted_tokens": total.predicted,
        "actual_tokens": total.actual,
        "wrong_tokens": total.wrong,
        "disagrees": agreement.disagrees,
        "latest": {
            "answers": latest.answers,
            "prompt_tokens": latest.prompt,
            "predicted_tokens": latest.predicted,
            "actual_tokens": latest.actual,
            "wrong_tokens": latest.wrong,
        },
    }


def _break(cause: Cause, breaks: Breaks, now: float) -> dict[str, Any]:
    return {
        "summary": summary(cause, breaks),
        "client": cause.client,
        "part": cause.part,
        "place": cause.place,
        "change": cause.change,
        "count": breaks.count,
        "follow_ups": breaks.follow_ups,
        "sessions": breaks.sessions,
        "lost_tokens": breaks.lost_tokens,
        "age_s": round(now - breaks.last_at, 1),
    }


def summary(cause: Cause, breaks: Breaks) -> str:
    """One line for people, e.g. `claude-code: system[0] changes each request, 14 sessions`."""
    is_each = breaks.each_request
    if cause.change == "changed":
        done = "changes" if is_each else "changed"
    else:
        done = f"{'is' if is_each else 'was'} {cause.change}"
    often = "each request" if is_each else f"{breaks.count} time{'s' if breaks.count != 1 else ''}"
    kind = f" ({cause.part})" if cause.place.endswith("]") and cause.part not in cause.place else ""
    sessions = f"{breaks.sessions} session{'s' if breaks.sessions != 1 else ''}"
    return f"{cause.client}: {cause.place}{kind} {done} {often}, {sessions}"
