"""Compares the hits that were predicted with those that instances report, for each instance and source.

Only what a policy looked up was predicted; for other answers nothing is made up. A sustained disagreement is said once
when it begins and once when it ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from smetric.fleet.instance import Instance
from smetric.telemetry import names
from smetric.telemetry.record import DecisionRecord
from smetric.usage import Usage

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
