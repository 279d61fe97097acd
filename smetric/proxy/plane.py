"""What all requests on the data port share: the way to a decision, the way to instances, and what is learnt."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import lru_cache

from smetric.caches.watch import CacheWatch
from smetric.proxy.headers import Headers
from smetric.proxy.retry_budget import RetryBudget
from smetric.proxy.upstream import Upstream
from smetric.router import Router
from smetric.telemetry.record import DecisionRecord
from smetric.tokens import TokenRatio


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds: until the first byte of an answer (queueing and prefill included), and between two pieces of it."""

    first_byte_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class Plane:
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
