"""Model names as metric labels and span names: only names this router serves, so that clients cannot make up series."""

from __future__ import annotations

from collections.abc import Callable, Iterable

#: What every other name becomes.
OTHER = "other"
#: Names remembered at most; the rest are `other` too.
MOST = 100


class ModelLabels:
    """Maps what a client asked for to a label from a bounded set.

    Args:
        served: the names the instances serve and the aliases configured, asked anew for a name not seen before.
    """

    def __init__(self, served: Callable[[], Iterable[str]]) -> None:
        self._served = served
        self._known: set[str] = set()

    def of(self, model: str) -> str:
        """*model* if it is served here, else `other`; empty stays empty."""
        if model in self._known or not model:
            return model
        if len(self._known) < MOST and model in self._served():
            self._known.add(model)
            return model
        return OTHER
