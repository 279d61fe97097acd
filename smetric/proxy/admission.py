"""Who is let in, before a body is kept: by the bytes of the bodies there are, by free places, by how the router is.

What is watched of the router is in `overload.py`; what a request that was let in takes, and its waits, in `permit.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from smetric.config import Settings
from smetric.errors import Overloaded
from smetric.fleet.fleet import Fleet
from smetric.proxy.overload import Level, Overload, Thresholds
from smetric.proxy.permit import STEP_BYTES, Permit
from smetric.proxy.queue import Queue
from smetric.proxy.slots import Slots
from smetric.telemetry.metrics import Metrics

#: What the clients of OpenAI and Anthropic call a request that they send again, with how many times they have.
RETRY_COUNT = b"x-stainless-retry-count"
#: Where a request says before its body how urgent it is: the lower the number the more, as for the engines.
PRIORITY = b"x-vllm-priority"
LENGTH = b"content-length"
_READ = frozenset({LENGTH, RETRY_COUNT, PRIORITY})


class Admission:
    """Lets requests in.

    Args:
        most_bytes: bytes of bodies that may be kept at once.
        queue: where requests wait.
        overload: how the router itself is.
        slots: places for requests under way; None: as many as come.
        on_refused: told the reason of each refusal (`names.REFUSALS`).
        on_retry: told of each request that a client sends again, and whether it was let in.
        on_waited: told the seconds of each wait in the queue that has ended.
        rng: spreads the times at which refused clients come back.
    """

    def __init__(
        self,
        *,
        most_bytes: int,
        queue: Queue,
        overload: Overload,
        slots: Slots | None = None,
        on_refused: Callable[[str], object] = lambda _: None,
        on_retry: Callable[[bool], object] = lambda _: None,
        on_waited: Callable[[float], object] = lambda _: None,
        rng: random.Random | None = None,
    ) -> None:
        self.most_bytes = most_bytes
        self.queue = queue
        self.overload = overload
        self.slots = slots
        self._on_refused = on_refused
        self._on_retry = on_retry
        self.on_waited = on_waited
        self._rng = rng or random.Random()
        #: Requests let in and not ended, and bytes of their bodies.
        self.under_way = 0
        self.bytes = 0
        #: The overload for which `_most` holds: as many as were under way when it began.
        self._time = 0
        self._most = 0

    def admit(self, headers: Iterable[tuple[bytes, bytes]], *, leased: bool = True) -> Permit:
        """Let a request in.

        Args:
            headers: its head's.
            leased: it will count as load, and need a place.

        Raises:
            Overloaded: there is no room for it.
        """
        length, retry, priority = 0, False, 0.0
        for name, value in headers:
            if name in _READ:
                if name == LENGTH:
                    length = int(value)
                elif name == RETRY_COUNT:
                    retry = value.strip() not in (b"", b"0")
                else:
                    priority = _priority(value)
        try:
            if self.overload.level:
                self._spare(retry=retry)
            if self.bytes + length > self.most_bytes:
                raise self.refusal("bytes")
            if leased and self.slots is not None and not self.slots.is_worth_waiting(length, priority):
                raise self.refusal("in_flight")
        except Overloaded:
            if retry:
                self._on_retry(False)
            raise
        if retry:
            self._on_retry(True)
        return Permit(self, length if length < STEP_BYTES else STEP_BYTES)

    def _spare(self, *, retry: bool) -> None:
        """Refuse what the router's own state forbids. Where nothing is under way one is let in, come what may."""
        overload = self.overload
        if self._time != overload.times:
            self._time, self._most = overload.times, self.under_way
        most = 1 if overload.level is Level.HARD else max(1, self._most)
        if self.under_way >= most or (retry and self.under_way):
            raise self.refusal(overload.resource)

    def refusal(self, reason: str) -> Overloaded:
        """The answer to a request that is refused for *reason*, one of `names.REFUSALS`; it is counted."""
        self._on_refused(reason)
        wait_s = self.slots.expected_wait_s() if self.slots is not None else 0.0
        # Not all at the same time again.
        retry_after_s = (1.0 + wait_s) * self._rng.uniform(1.0, 3.0)
        return Overloaded(_TOLD[reason], reason=reason, retry_after_s=retry_after_s)


def _priority(text: bytes) -> float:
    """As the queue has it, higher first; what is no number is refused when the request is read."""
    try:
        return -float(text) if len(text) <= 32 else 0.0
    except ValueError:
        return 0.0


def admission_of(settings: Settings, fleet: Fleet, metrics: Metrics) -> Admission:
    """What the settings say; whoever is held is woken as the load of *fleet* changes."""
    most, wait_s = settings.overload.in_flight, settings.overload.wait
    queue = Queue(settings.overload.queue, settings.overload.queue_bytes)
    fleet.watch_load(queue.changed)
    overload = Overload(
        Thresholds(settings.overload.soft_lag, settings.overload.hard_lag),
        Thresholds(settings.overload.soft_percent / 100, settings.overload.hard_percent / 100),
        memory_bytes=settings.overload.memory or None,
        on_lag=metrics.lagged,
    )
    return Admission(
        most_bytes=settings.overload.bodies,
        queue=queue,
        overload=overload,
        slots=Slots(most, wait_s, queue) if most else None,
        on_refused=metrics.refused,
        on_retry=metrics.client_retried,
        on_waited=metrics.held,
    )


_TOLD = {
    "in_flight": "as many requests are under way as there may be (setting overload.in_flight), and too many wait",
    "queue": "too many requests wait (settings overload.queue, overload.queue_bytes)",
    "bytes": "the bodies of the requests under way take all the memory for them (setting overload.bodies)",
    "lag": "the router is overloaded",
    "memory": "the router is short of memory",
    "files": "the router is short of file descriptors",
}
