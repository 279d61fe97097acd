"""Whether the model that a request asks for is an adapter, by what the instances say of their models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from smetric.fleet.instance import Instance
from smetric.request import InferenceRequest
from smetric.sources.follower import Follower

#: Seconds for which the names are kept; instances are asked less often.
RENEWED_S = 1.0


class Adapters(Follower):
    """Fills `req.lora`.

    Args:
        instances: whose adapters count.
        clock: monotonic seconds.
    """

    name = "adapters"
    describes = frozenset({"lora"})

    def __init__(self, instances: Sequence[Instance], clock: Callable[[], float] = time.monotonic) -> None:
        self._instances = instances
        self._clock = clock
        self._names: frozenset[str] = frozenset()
        self._due = float("-inf")

    def describe(self, request: InferenceRequest) -> None:
        """Name the adapter, where it asks for one."""
        now = self._clock()
        if now >= self._due:
            self._due = now + RENEWED_S
            self._names = frozenset[str]().union(*(instance.adapters for instance in self._instances))
        served = request.served or request.model
        request.lora = served if served in self._names else ""
