"""Shared context of all requests: router, upstream client, timeouts, retry budget."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

from smetric.fleet.record import DecisionRecord
from smetric.http.headers import Headers
from smetric.http.upstream import Upstream
from smetric.request.request import TokenRatio
from smetric.routing.router import Router
from smetric.telemetry.hit_truth import CacheWatch

# How many requests may be tried on a second instance: a share of all requests, so that an outage is not multiplied.
#
# Which failures are worth it is `forward.py`'s to say. A resend on a fresh connection of the same instance is no retry.

#: Retries there may be per request of the last seconds, and how many there may be however few requests there were. The
#: latter is more than the failures in a row that eject an instance, so that a quiet router loses no request until then.
SHARE = 0.2
LEAST = 10
WINDOW_S = 10


class RetryBudget:
    """Counts requests and retries by the second.

    Requests of the last seconds are those that came then, and those that were under way already: an instance that dies
    takes with it what came long before. What it had burdens nobody any more, so all of that may be tried again: of two
    instances one has half of what is under way.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way = 0
        #: By second modulo the window: which second, requests that came, retries, requests under way when it began.
        self._seconds = [[-WINDOW_S, 0, 0, 0] for _ in range(WINDOW_S)]
        #: The one there is now, and when it ends.
        self._second = self._seconds[0]
        self._ends_at = -inf

    def arrived(self) -> None:
        """A request came."""
        self._now()[1] += 1
        self._under_way += 1

    def ended(self) -> None:
        """A request has ended."""
        self._under_way -= 1

    def take(self, *, has_died: bool = False) -> bool:
        """Whether there may be another retry; it then counts as one.

        Args:
            has_died: the connection to the instance ended under the request, or it takes none.
        """
        now = self._now()
        recent = [second for second in self._seconds if second[0] > now[0] - WINDOW_S]
        requests, retries = min(recent)[3] + sum(second[1] for second in recent), sum(second[2] for second in recent)
        if retries + 1 > max(LEAST, SHARE * requests, self._under_way if has_died else 0):
            return False
        now[2] += 1
        return True

    def _now(self) -> list[int]:
        now = self._clock()
        if now >= self._ends_at:
            number = int(now)
            self._ends_at = number + 1.0
            self._second = self._seconds[number % WINDOW_S]
            self._second[:] = number, 0, 0, self._under_way
        return self._second


# What all requests on the data port share: the way to a decision, the way to instances, and what is learnt.


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds: until the first byte of an answer (queueing and prefill included), and between two pieces of it."""

    first_byte_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class ProxyContext:
    """What requests share.

    Args:
        router: decides.
        upstream: sends.
        tokens: bytes per token of each model.
        caches: learns from answers.
        deadlines: how long an instance may take.
        response_headers: whether answers carry a receipt.
    """

    router: Router
    upstream: Upstream
    tokens: TokenRatio
    caches: CacheWatch
    deadlines: Deadlines
    response_headers: bool
    #: This router, among those that a request may pass.
    id: bytes = field(default_factory=lambda: secrets.token_hex(8).encode())
    retries: RetryBudget = field(default_factory=RetryBudget)

    def receipt(self, record: DecisionRecord) -> Headers:
        """`x-smetric-…`: what a client can quote of the decision on its request."""
        if not self.response_headers:
            return []
        policy, instance = record.policy, record.instance
        told = _told(policy.name, policy.digest, instance.id if instance is not None else "", record.rule)
        return [(b"x-smetric-decision-id", record.id.encode()), *told]


@lru_cache(4096)
def _told(policy: str, digest: str, instance: str, rule: str) -> Headers:
    """What many requests are told alike."""
    told = [(b"x-smetric-policy", f"{policy}@{digest}".encode())]
    if instance:
        told.append((b"x-smetric-instance", instance.encode()))
    if rule:
        told.append((b"x-smetric-rule", rule.encode()))
    return told
