"""Whether a model's ids may be believed: their number is compared with the prompt tokens that answers report.

Equal numbers prove little, unequal ones prove that something differs (another chat template, a flag, a renderer of the
engine's own); then ids are worse than none, because every hit counted by them is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from cachetools import LRUCache

#: Unequal numbers in a row after which a model's ids are not used, and seconds until they are tried again.
MOST_DIFFERENT = 3
DISTRUST_S = 60.0

log = structlog.get_logger("smetric.tokenize")


class Trust:
    """Keeps score for each model.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Unequal numbers in a row, and until when the model is distrusted.
        self._different: LRUCache[str, tuple[int, float]] = LRUCache(256)

    def believes(self, model: str) -> bool:
        """Whether *model*'s ids may be used now."""
        _, until = self._different.get(model, (0, 0.0))
        return self._clock() >= until

    def compare(self, model: str, tokenised: int, counted: int) -> bool:
        """Take in that a prompt of *tokenised* ids was *counted* by its engine; returns whether they are equal."""
        if tokenised == counted:
            self._different.pop(model, None)
            return True
        times, until = self._different.get(model, (0, 0.0))
        times += 1
        now = self._clock()
        if times >= MOST_DIFFERENT and now >= until:
            until = now + DISTRUST_S
            log.warning("smetric.tokenize.distrusted", model=model, tokenised=tokenised, counted=counted)
        self._different[model] = times, until
        return False
