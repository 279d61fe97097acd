"""Record of one decision and what became of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from smetric import names
from smetric.request.request import Usage

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance
    from smetric.policy.decision import Decision
    from smetric.policy.policy import Policy
    from smetric.policy.snapshot import Snapshot
    from smetric.request.request import InferenceRequest


# One decision and what became of it: the record that spans, metrics, the access line and `/admin/decisions` read.
#
# Made for every request, so it only refers to what exists anyway; texts are rendered elsewhere, when somebody asks.

_BASE32 = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
#: Two characters for each ten bits, and a character for each value of a byte, by its low five bits.
_BY_TEN_BITS = [high + low for high in _BASE32 for low in _BASE32]
_BY_BYTE = _BASE32.encode() * 8


@lru_cache(1)
def _beginning(seconds: int) -> str:
    """The first eight characters, which the ids of 1,024 milliseconds share."""
    return "".join(_BY_TEN_BITS[seconds >> shift & 0x3FF] for shift in (30, 20, 10, 0))


def decision_id(time_ns: int) -> str:
    """A ULID: 26 characters of Crockford's base 32, 48 bits of Unix milliseconds, then 80 random bits."""
    milliseconds = time_ns // 1_000_000
    chance = random.getrandbits(128).to_bytes(16, "big").translate(_BY_BYTE).decode()
    return _beginning(milliseconds >> 10) + _BY_TEN_BITS[milliseconds & 0x3FF] + chance


class Migration(Struct, frozen=True, rename={"source": "from"}):
    """Where a later turn was taken away from.

    Args:
        source: the instance.
        guard: what took it away: the label of a guard or of a filter, `left out` or `not picked`.
        left_tokens: tokens of its prompt left behind there, at least 1; None where that is not known.
    """

    source: str
    guard: str
    left_tokens: int | None = None


class Forecast(Struct, frozen=True, omit_defaults=True):
    """Times to the first token that were expected; None where unknown.

    Args:
        ttft_s: seconds on the chosen instance.
        other: the instance it is compared with: the one a migration left, else the runner-up; empty where there is
            none.
        other_ttft_s: seconds on that one.
        other_hit: tokens of the prompt believed cached there.
    """

    ttft_s: float | None = None
    other: str = ""
    other_ttft_s: float | None = None
    other_hit: int | None = None


@dataclass(slots=True)  # not frozen: that costs a microsecond, for each shadow of each request
class Shadowed:
    """Answer of a policy in shadow to one decision.

    Args:
        policy: the policy in shadow.
        generation: its reload counter.
        answer: one of `names.ANSWERS`.
        decision: its decision; None without one.
        missing: names that it reads and that had no value in time.
        regret: how much worse than its own choice it scores the acting one, 0..1; None where it cannot tell.
        is_new_session: it sees the first request of this conversation.
        had_diverged: it chose otherwise for an earlier request of this conversation; None if unknown.
        evaluate_s: seconds that it took.
    """

    policy: Policy
    generation: int
    answer: str
    decision: Decision | None = None
    missing: tuple[str, ...] = ()
    regret: float | None = None
    is_new_session: bool = False
    had_diverged: bool | None = None
    evaluate_s: float = 0.0

    @property
    def choice(self) -> str:
        """The instance that it would have chosen, or what else it would have done, or why that is unknown."""
        if self.decision is not None:
            return self.decision.choice
        return f"not answerable: {', '.join(self.missing)} not read" if self.missing else "error"

    @property
    def agrees(self) -> bool | None:
        """Whether it would have chosen the same; None without an answer."""
        return {names.AGREES: True, names.DIFFERS: False}.get(self.answer)


#: Evaluates the policies in shadow on a decision.
Judge = Callable[["DecisionRecord"], tuple[Shadowed, ...]]


@dataclass(slots=True)
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
        route: which of the configured routes it fell under.
        arm: one of `names.ARMS`; empty where the route has no canary, or no policy ran.
        policy_origin: how the policy came to act, as `names.POLICY_ORIGIN` says.
        held_by: the decision by which a rule held the request before; None where none did.
        beside: what observed policies read that the acting one did not: snapshots of the same candidates, each with the
            seconds after the decision at which it was looked up, None for with the decision.
        judge: evaluates the policies in shadow; let go when it has.
        tokens_source: how `request.prompt_len` is known: exact or estimated.
        origin: one of `names.ORIGINS`.
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
    route: str = "default"
    arm: str = ""
    policy_origin: str = "start"
    held_by: Decision | None = None
    beside: tuple[tuple[Snapshot, float | None], ...] = ()
    judge: Judge | None = None
    tokens_source: str = "estimated"
    origin: str = names.LIVE

    id: str = field(init=False)
    #: False where nothing is computed: a count of tokens, a stored answer.
    is_inference: bool = field(default=True, init=False)
    #: Label of the rule that fired, empty where no policy ran.
    rule: str = field(default="", init=False)
    #: Tokens of the prompt believed cached on the chosen instance, and the source; None where not known.
    hit: tuple[int, str] | None = field(default=None, init=False)
    #: Most tokens of it believed cached on any candidate; None where none was looked up and known.
    best_hit: int | None = field(default=None, init=False)
    #: 32 hex digits, empty without a trace.
    trace_id: str = field(default="", init=False)
    #: That trace is recorded.
    is_traced: bool = field(default=False, init=False)
    #: How many decisions of the same request came before this one, and the id of the one that came next: empty for the
    #: last, which alone is told how the request ended.
    rank: int = field(default=0, init=False)
    followed_by: str = field(default="", init=False)
    #: What the policies in shadow would have decided.
    shadowed: tuple[Shadowed, ...] = field(default=(), init=False)
    #: Set where a later turn went elsewhere, and where something could be said of the time it would take.
    migration: Migration | None = field(default=None, init=False)
    forecast: Forecast | None = field(default=None, init=False)
    status: int | None = field(default=None, init=False)
    ttft_s: float | None = field(default=None, init=False)
    #: Seconds from sending the request to the first byte of the answer; `ttft_s` are those from its arrival, and hold
    #: how long its client took to send it.
    ttfc_s: float | None = field(default=None, init=False)
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
            self.rule = self.decision.rule
            self._note_hits(self.decision)

    def _note_hits(self, decision: Decision) -> None:
        snapshot, at = decision.snapshot, decision.index
        hits, known = snapshot.columns.get("hit_len"), snapshot.known.get("hit_len")
        if hits is None:
            return
        if known is None or True in known:
            self.best_hit = int(max(hits))  # an unknown hit stands as 0, which none is below
        if self.instance is not None and (known is None or known[at]):
            self.hit = int(hits[at]), snapshot.origin("hit_len", at)

    @property
    def reason(self) -> str:
        """One of `names.REASONS`."""
        if self.decision is not None:
            return names.ALL_FILTERED if self.outcome == names.NO_CANDIDATE else names.BY_POLICY
        if self.outcome == names.PINNED:
            return names.BY_PIN
        if self.outcome == names.ERROR:
            return names.POLICY_ERROR
        return names.NO_INSTANCE if self.instance is None else names.ANY_CANDIDATE

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

    def as_counted(self, tokens: int, prompt_tokens: int) -> int:
        """*tokens* of the prompt, as the instance counts that counted *prompt_tokens* in all of it.

        Where the router only estimates, shares are right and counts are not: a hit could exceed its prompt.
        """
        if self.tokens_source == "exact":
            return tokens
        return round(tokens * prompt_tokens / (self.request.prompt_len or 1))


# Text that comes from a client, before it stands in a span, a log line or a record.

#: Characters of a value that comes from a client.
CLIENT_TEXT_MAX = 256


def safe(text: str) -> str:
    """*text* bounded, with control characters escaped: it may come from a client."""
    if len(text) <= CLIENT_TEXT_MAX and text.isprintable():
        return text
    text = text[: CLIENT_TEXT_MAX + 1]
    if not text.isprintable():
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= CLIENT_TEXT_MAX else text[: CLIENT_TEXT_MAX - 1] + "…"
