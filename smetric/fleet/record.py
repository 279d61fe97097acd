"""Record of one decision and its result, read by spans, metrics, the access log and the admin port.

It refers to objects that exist anyway; texts are rendered by its readers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
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

_BASE32 = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
#: Two characters for ten bits; and a character for each value of a byte, by its low five bits.
_PAIRS = [high + low for high in _BASE32 for low in _BASE32]
_BY_BYTE = _BASE32.encode() * 8
#: Characters of a value that comes from a client.
CLIENT_TEXT_MAX = 256


def decision_id(time_ns: int) -> str:
    """Return a new ULID: 48 bits of Unix milliseconds and 80 random bits in Crockford's base 32."""
    milliseconds = time_ns // 1_000_000
    chance = random.randbytes(16).translate(_BY_BYTE).decode()
    return f"{_second(milliseconds >> 10)}{_PAIRS[milliseconds & 0x3FF]}{chance}"


@lru_cache(1)
def _second(number: int) -> str:
    """Return the first eight characters, which the ids of 1,024 milliseconds share."""
    return "".join([_PAIRS[number >> shift & 0x3FF] for shift in (30, 20, 10, 0)])


def safe(text: str) -> str:
    """Return *text*, which may come from a client, bounded and with control characters escaped."""
    if len(text) <= CLIENT_TEXT_MAX and text.isprintable():
        return text
    text = text[: CLIENT_TEXT_MAX + 1]
    if not text.isprintable():
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= CLIENT_TEXT_MAX else text[: CLIENT_TEXT_MAX - 1] + "…"


class Migration(Struct, frozen=True, rename={"source": "from"}):
    """Move of a later turn to another instance.

    Args:
        source: the instance that it left.
        guard: the reason: the label of a guard or of a filter, `left out` or `not picked`.
        left_tokens: tokens of its prompt left behind there, at least 1; None if unknown.
    """

    source: str
    guard: str
    left_tokens: int | None = None


class Forecast(Struct, frozen=True, omit_defaults=True):
    """Expected times to the first token; None if unknown.

    Args:
        ttft_s: seconds on the chosen instance.
        other: the instance it is compared with: the one a migration left, else the runner-up; empty without one.
        other_ttft_s: seconds on that one.
        other_hit: tokens of the prompt believed cached there.
    """

    ttft_s: float | None = None
    other: str = ""
    other_ttft_s: float | None = None
    other_hit: int | None = None


@dataclass(slots=True)
class Shadowed:
    """Answer of a policy in shadow to one decision.

    Args:
        policy: the policy in shadow.
        generation: its reload counter.
        answer: one of `names.ANSWERS`.
        decision: its decision; None without one.
        missing: names that it reads and that had no value in time.
        regret: how much worse than its own choice it scores the acting one, 0..1; None if unknown.
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


class DecisionRecord(Struct, eq=False):
    """A decision, and the result of acting on it.

    The fields from `id` on are noted later.

    Args:
        time_ns: its time, Unix nanoseconds.
        outcome: one of `names.OUTCOMES`.
        request: the request. Its prompt is released when the request ends.
        policy: the acting policy.
        generation: its reload counter.
        decision: the decision of the policy; None if none ran (pinned) or none could (no candidate).
        instance: the chosen instance.
        evaluate_s: seconds the policy took.
        lookup_s: seconds spent on look-ups before.
        held_s: seconds in the queue before that.
        route: the configured route that the request matched.
        arm: one of `names.ARMS`; empty if the route has no canary, or no policy ran.
        policy_origin: how the policy came to act, as `names.POLICY_ORIGIN` says.
        held_by: the decision by which a rule held the request before.
        beside: features that observed policies read and the acting one did not: snapshots of the same candidates, each
            with the seconds from the decision to its look-up, None if it was taken with the decision.
        judge: evaluates the policies in shadow; None once it has.
        tokens_source: source of `request.prompt_len`: exact or estimated.
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

    id: str = ""
    #: One of `names.REASONS`.
    reason: str = ""
    #: False where nothing is computed: a count of tokens, a stored answer.
    is_inference: bool = True
    #: The answer is generated whole before its first byte: the client asked for inference, and not for a stream.
    is_in_one_piece: bool = False
    #: Label of the rule that fired, empty if no policy ran.
    rule: str = ""
    #: Tokens of the prompt believed cached on the chosen instance, and the source; None if unknown.
    hit: tuple[int, str] | None = None
    #: Most tokens of it believed cached on any candidate; None if unknown.
    best_hit: int | None = None
    #: 32 hex digits, empty without a trace.
    trace_id: str = ""
    #: The trace is recorded.
    is_traced: bool = False
    #: Number of earlier decisions on the same request, and the id of the next one: empty for the last one, which alone
    #: has the fields on the end of the request.
    rank: int = 0
    followed_by: str = ""
    #: The answers of the policies in shadow.
    shadowed: tuple[Shadowed, ...] = ()
    #: None unless a later turn went elsewhere, and unless times could be estimated.
    migration: Migration | None = None
    forecast: Forecast | None = None
    status: int | None = None
    ttft_s: float | None = None
    #: Seconds from sending the request to the first output of the answer; `ttft_s` counts from its arrival, with the
    #: time that its client took to send it.
    ttfc_s: float | None = None
    duration_s: float | None = None
    error_type: str = ""
    usage: Usage | None = None
    #: A sample of all instances shortly before, with the features that need no look-up.
    at_hand: Snapshot | None = None
    #: The request's fields as policies read them then, in the order of the vocabulary; set by the recorder.
    asked: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        self.id = decision_id(self.time_ns)
        prompt, decision = self.request.prompt, self.decision
        if prompt is not None and prompt.counted:
            self.tokens_source = "exact"
        if decision is None:
            self.reason = self._reason()
        else:
            self.reason = names.ALL_FILTERED if self.outcome == names.NO_CANDIDATE else names.BY_POLICY
            self.rule = decision.rule
            self._note_hits(decision)

    def _reason(self) -> str:
        """Return the reason of an outcome without a decision."""
        if self.outcome == names.PINNED:
            return names.BY_PIN
        if self.outcome == names.ERROR:
            return names.POLICY_ERROR
        return names.NO_INSTANCE if self.instance is None else names.ANY_CANDIDATE

    def _note_hits(self, decision: Decision) -> None:
        snapshot, at = decision.snapshot, decision.index
        hits, known = snapshot.columns.get("hit_len"), snapshot.known.get("hit_len")
        if hits is None:
            return
        if known is None or True in known:
            self.best_hit = int(max(hits))  # an unknown hit is 0 here
        if self.instance is not None and (known is None or known[at]):
            self.hit = int(hits[at]), snapshot.origin("hit_len", at)

    @property
    def is_odd(self) -> bool:
        """Whether its trace may be kept whatever the sampler says."""
        return self.outcome not in names.ORDINARY or self.migration is not None

    def hit_at(self, index: int) -> int | None:
        """Return the tokens of the prompt believed cached on candidate *index*, by any policy's look-up."""
        assert self.decision is not None
        hit = self.decision.snapshot.cell("hit_len", index)
        for snapshot, _ in self.beside if hit is None else ():
            if (hit := snapshot.cell("hit_len", index)) is not None:
                break
        return None if hit is None else int(hit)

    def as_counted(self, tokens: int, prompt_tokens: int) -> int:
        """Scale *tokens*, a part of the prompt as the router estimates it, to a prompt of *prompt_tokens*.

        *prompt_tokens* is the instance's own count. The router's estimates have right shares and wrong counts: without
        scaling, a hit could exceed its prompt.
        """
        if self.tokens_source == "exact":
            return tokens
        return round(tokens * prompt_tokens / (self.request.prompt_len or 1))
