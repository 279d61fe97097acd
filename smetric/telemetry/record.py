"""One decision and what became of it: the record that spans, metrics, the access line and `/admin/decisions` read.

Made for every request, so it only refers to what exists anyway; texts are rendered elsewhere, when somebody asks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

from smetric.telemetry import names

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance
    from smetric.policy.decision import Decision
    from smetric.policy.policy import Policy
    from smetric.policy.snapshot import Snapshot
    from smetric.request import InferenceRequest
    from smetric.telemetry.forecast import Forecast
    from smetric.telemetry.migration import Migration
    from smetric.telemetry.shadowed import Shadowed

_BASE32 = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ"
#: A character for each value of a byte, by its low five bits: all are as likely.
_BY_BYTE = _BASE32 * 8


@lru_cache(1)
def _milliseconds(value: int) -> str:
    """The first ten characters, which the ids of one millisecond share."""
    return bytes(_BASE32[value >> shift & 0x1F] for shift in range(45, -1, -5)).decode()


def decision_id(time_ns: int) -> str:
    """A ULID: 26 characters of Crockford's base 32, 48 bits of Unix milliseconds, then 80 random bits."""
    return _milliseconds(time_ns // 1_000_000) + random.randbytes(16).translate(_BY_BYTE).decode()


class Usage(NamedTuple):
    """Tokens as the instance counted them; None where it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(slots=True, kw_only=True)
class DecisionRecord:
    """A decision, and the result of acting on it.

    Args:
        time_ns: when it was made, Unix nanoseconds.
        outcome: one of `names.OUTCOMES`.
        request: what was to be routed. Its prompt is let go when the request ends.
        policy: the acting policy.
        generation: its reload counter.
        decision: what the policy decided; None where none ran (pinned) or none could (no candidate).
        instance: where the request goes, None for nowhere.
        evaluate_s: seconds the policy took.
        lookup_s: seconds spent on look-ups before.
        held_s: seconds in the queue before that.
        tokens_source: how `request.prompt_len` is known: exact or estimated.
        beside: what observed policies read that the acting one did not: snapshots of the same candidates, each with the
            seconds after the decision at which it was looked up, None for with the decision.
        route: which of the configured routes it fell under.
        arm: one of `names.ARMS`; empty where the route has no canary, or no policy ran.
        origin: one of `names.ORIGINS`.
        policy_origin: how the policy came to act, as `names.POLICY_ORIGIN` says.
        judge: evaluates the policies in shadow; let go when it has.
        held_by: the decision by which a rule held the request before; None where none did.
    """

    time_ns: int
    outcome: str
    request: InferenceRequest
    policy: Policy
    generation: int
    decision: Decision | None = None
    instance: Instance | None = None
    evaluate_s: float = 0.0
    lookup_s: float = 0.0
    held_s: float = 0.0
    tokens_source: str = "estimated"
    beside: tuple[tuple[Snapshot, float | None], ...] = ()
    route: str = "default"
    arm: str = ""
    origin: str = names.LIVE
    policy_origin: str = "start"
    judge: Callable[[DecisionRecord], tuple[Shadowed, ...]] | None = None
    held_by: Decision | None = None

    id: str = field(init=False)
    #: Tokens of the prompt believed cached on the chosen instance, and the source; None where not known.
    hit: tuple[int, str] | None = field(default=None, init=False)
    #: Most tokens of it believed cached on any candidate; None where none was looked up and known.
    best_hit: int | None = field(default=None, init=False)
    #: 32 hex digits, empty without a trace.
    trace_id: str = field(default="", init=False)
    #: How many decisions of the same request came before this one.
    rank: int = field(default=0, init=False)
    #: What the policies in shadow would have decided.
    shadowed: tuple[Shadowed, ...] = field(default=(), init=False)
    #: Set where a later turn went elsewhere, and where something could be said of the time it would take.
    migration: Migration | None = field(default=None, init=False)
    forecast: Forecast | None = field(default=None, init=False)
    status: int | None = field(default=None, init=False)
    ttft_s: float | None = field(default=None, init=False)
    duration_s: float | None = field(default=None, init=False)
    error_type: str = field(default="", init=False)
    usage: Usage | None = field(default=None, init=False)
    #: What policies may read of the request, as it stood then, in the order of the vocabulary; kept for a record only.
    asked: tuple[Any, ...] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.id = decision_id(self.time_ns)
        prompt = self.request.prompt
        if prompt is not None and prompt.counted:
            self.tokens_source = "exact"
        if self.decision is not None:
            self.best_hit = _best_hit(self.decision.snapshot)
            if self.instance is not None:
                self.hit = _hit(self.decision)

    @property
    def rule(self) -> str:
        """Label of the rule that fired, empty where no policy ran."""
        return self.decision.rule if self.decision is not None else ""

    @property
    def reason(self) -> str:
        """One of `names.REASONS`."""
        if self.outcome == names.PINNED:
            return names.BY_PIN
        if self.outcome == names.ERROR:
            return names.POLICY_ERROR
        if self.decision is None:
            return names.NO_INSTANCE if self.instance is None else names.ANY_CANDIDATE
        return names.ALL_FILTERED if self.outcome == names.NO_CANDIDATE else names.BY_POLICY

    @property
    def is_odd(self) -> bool:
        """Whether it is out of the ordinary, so that its trace is kept whatever the sampler says."""
        return self.outcome not in names.ORDINARY or self.migration is not None

    @property
    def kinds(self) -> tuple[str, ...]:
        """What it is, among what traces are kept for (`names.KEPT`), or ordinary."""
        return (self.outcome,) if self.migration is None else (self.outcome, names.MIGRATION)

    def hit_at(self, index: int) -> int | None:
        """Tokens of the prompt believed cached on candidate *index*, also where it was looked up for another policy."""
        assert self.decision is not None
        hit = self.decision.snapshot.cell("hit_len", index)
        for snapshot, _ in self.beside if hit is None else ():
            if (hit := snapshot.cell("hit_len", index)) is not None:
                break
        return None if hit is None else int(hit)


def _hit(decision: Decision) -> tuple[int, str] | None:
    snapshot, index = decision.snapshot, decision.index
    tokens = snapshot.cell("hit_len", index)
    return None if tokens is None else (int(tokens), snapshot.origin("hit_len", index))


def _best_hit(snapshot: Snapshot) -> int | None:
    hits, known = snapshot.columns.get("hit_len"), snapshot.known.get("hit_len")
    if hits is None:
        return None
    best = max(hits if known is None else compress(hits, known), default=None)
    return None if best is None else int(best)
