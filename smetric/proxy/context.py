"""Shared context of all requests on the data port."""

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

#: Retries allowed per request of the last `WINDOW_S` seconds, and their least number. The latter exceeds the number of
#: failures in a row that eject an instance, so that a router with few requests loses none until then.
SHARE = 0.2
LEAST = 10
WINDOW_S = 10


class RetryBudget:
    """Retry budget: bounds second attempts by a share of recent requests, so that an outage is not multiplied.

    Recent requests are those that arrived in the window, and those that were under way before. An instance that dies
    takes long streams with it that arrived before the window. Their load is gone, so that each may be tried again.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._under_way = 0
        #: By second modulo the window: the second, its requests, its retries, requests under way when it began.
        self._seconds = [[-WINDOW_S, 0, 0, 0] for _ in range(WINDOW_S)]
        self._current = self._seconds[0]
        self._current_ends_at = -inf

    def arrived(self) -> None:
        """Count a request that has arrived."""
        self._now()[1] += 1
        self._under_way += 1

    def ended(self) -> None:
        """Count the end of a request."""
        self._under_way -= 1

    def take(self, *, has_died: bool = False) -> bool:
        """Take one retry from the budget; return False if it is exhausted.

        Args:
            has_died: the connection to the instance ended during the request, or it accepts none.
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
        if now >= self._current_ends_at:
            number = int(now)
            self._current_ends_at = number + 1.0
            self._current = self._seconds[number % WINDOW_S]
            self._current[:] = number, 0, 0, self._under_way
        return self._current


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Timeouts of an instance, in seconds.

    Args:
        first_byte_s: until the first output of a stream, queueing and prefill included.
        answer_s: until the first byte of an answer in one piece, which has to be generated whole before.
        idle_s: between two pieces from then on.
    """

    first_byte_s: float
    answer_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class ProxyContext:
    """Router, upstream client, timeouts and retry budget: shared by all requests.

    Args:
        router: decides.
        upstream: sends requests to instances.
        tokens: bytes per token of each model.
        caches: compares expected with actual cache hits.
        deadlines: timeouts of instances.
        response_headers: whether answers carry `x-smetric-` headers.
        id: identifies this router among those that a request passes.
        retries: retry budget.
    """

    router: Router
    upstream: Upstream
    tokens: TokenRatio
    caches: CacheWatch
    deadlines: Deadlines
    response_headers: bool
    id: bytes = field(default_factory=lambda: secrets.token_hex(8).encode())
    retries: RetryBudget = field(default_factory=RetryBudget)

    def receipt(self, record: DecisionRecord) -> Headers:
        """Return the `x-smetric-` headers that name the decision on a request."""
        if not self.response_headers:
            return []
        policy, instance = record.policy, record.instance
        common = _receipt(policy.name, policy.digest, instance.id if instance is not None else "", record.rule)
        return [(b"x-smetric-decision-id", record.id.encode()), *common]


@lru_cache(4096)
def _receipt(policy: str, digest: str, instance: str, rule: str) -> Headers:
    headers = [(b"x-smetric-policy", f"{policy}@{digest}".encode())]
    if instance:
        headers.append((b"x-smetric-instance", instance.encode()))
    if rule:
        headers.append((b"x-smetric-rule", rule.encode()))
    return headers
