"""Instances and leases: the ledger of what was sent and has not ended, and the last scrape.

Nothing here does I/O: sources write scrapes, the router charges, the proxy releases.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from smetric.config.credential import Credential

#: Context length in tokens at which attention costs as much as the weights (L_eq): about active parameters / (2 ×
#: layers × query heads × head size). This value is that of the 30B model in the revision of the SMetric paper.
ATTENTION_TOKENS = 6923.0
#: Two start times this close, in seconds, belong to one process; they were only rounded differently.
SAME_START_S = 1.0
#: Tokens of a KV block until the engine reports its own.
BLOCK_SIZE = 16


def twice_attended(new: int, prompt_len: int) -> int:
    """Return twice the number of token pairs that attend when the last *new* tokens of a prompt are computed."""
    return new * (2 * prompt_len - new)


def prefill_cost(new: int, twice_pairs: int, attention_tokens: float) -> float:
    """Return the cost of computing *new* tokens: n + n (L - n / 2) / L_eq, summed over prompts of L tokens."""
    return new + twice_pairs / (2 * attention_tokens)


class AnswerProgress(Protocol):
    """Progress of an answer."""

    #: Events streamed so far, about one per token.
    events: int


class Lease:
    """One request charged to one instance. It holds the instance object and its incarnation, never its name.

    `first_output` and `release` take effect once, however often they are called.

    Args:
        instance: the instance.
        prompts: sequences the engine runs for it (n × prompts).
        prompt_len: tokens of its prompts.
        hit_len: tokens of them in the instance's own cache.
        fetched: further tokens that the instance can fetch from another tier.
        is_hit_known: whether *hit_len* was looked up; otherwise nothing is assumed to be cached.
        blocks: hashes of its prompt's blocks, each of which covers all before it, to find blocks that requests share.
    """

    answer: AnswerProgress | None = None
    _prefilling = True
    _released = False

    def __init__(
        self,
        instance: Instance,
        prompts: int,
        prompt_len: int,
        hit_len: int,
        fetched: int,
        is_hit_known: bool,
        blocks: Sequence[int] = (),
    ) -> None:
        self.instance = instance
        self.incarnation = instance.incarnation
        self.prompts = prompts
        self.prompt_len = prompt_len
        self.is_hit_known = is_hit_known
        #: Tokens outside its own cache: `fetched` from another tier, `computed` by the engine.
        self.new_tokens = prompt_len - hit_len
        self.fetched = fetched
        self.computed = self.new_tokens - fetched
        self._pairs = twice_attended(self.computed, prompt_len)
        self._blocks = blocks
        if blocks:
            instance.enter(blocks)
        instance.own += prompts
        instance.unprefilled += self.new_tokens
        instance.uncomputed += self.computed
        instance.uncomputed_pairs += self._pairs
        instance.sent_tokens += prompt_len
        #: Tokens to prefill before the first output of this request, its own included.
        self.ahead = instance.unprefilled
        self._computed_ahead = instance.uncomputed
        self._pairs_ahead = instance.uncomputed_pairs

    @property
    def cost_ahead(self) -> float:
        """Cost of all prefills ahead of its first token when it was charged, its own included."""
        return prefill_cost(self._computed_ahead, self._pairs_ahead, self.instance.attention_tokens)

    @property
    def cost(self) -> float:
        """Cost of its own prefill: the tokens that no known tier holds."""
        return prefill_cost(self.computed, self._pairs, self.instance.attention_tokens)

    @property
    def is_past(self) -> bool:
        """Whether its process is gone, so that its outcome says nothing about the one that answers now."""
        return self.incarnation != self.instance.incarnation

    def first_output(self) -> None:
        """Record that output has arrived: the prompt has been prefilled."""
        if self._prefilling:
            self._end_prefill()
            instance = self.instance
            instance.decoding.add(self)
            instance.load_changed()

    def release(self) -> None:
        """Record that the request has ended, however it ended."""
        if self._released:
            return
        self._released = True
        instance = self.instance
        if self._prefilling:
            self._end_prefill()
        else:
            instance.decoding.discard(self)
        if self._blocks:
            instance.leave(self._blocks)
        instance.own -= self.prompts
        instance.sent_tokens -= self.prompt_len
        instance.load_changed()

    def _end_prefill(self) -> None:
        self._prefilling = False
        instance = self.instance
        instance.unprefilled -= self.new_tokens
        instance.uncomputed -= self.computed
        instance.uncomputed_pairs -= self._pairs


class State(StrEnum):
    """State of an instance, as `smetric.fleet.health` judges it."""

    WELL = "well"
    #: Recently recovered: in its slow start.
    WARMING = "warming"
    #: Left out for some time: too many requests failed, or it flaps.
    EJECTED = "ejected"
    #: Its health probes fail.
    ILL = "ill"
    #: It accepts no connections.
    REFUSING = "refusing"
    #: Its process is shutting down: it finishes what it has and refuses new requests.
    STOPPING = "stopping"
    #: Its engine sleeps (`POST /sleep`): it has no weights in memory, and a request may kill it.
    ASLEEP = "asleep"
    #: An operator is draining it.
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Scrape:
    """Values of one `/metrics` page.

    Args:
        measured_at: latest time at which the values were true, seconds on the monotonic clock: when the scrape was
            sent or, while a busy engine keeps answering with frozen series, when they last changed.
        running: running requests, summed over the page's engines.
        waiting: waiting requests, summed over the page's engines.
        kv_usage: share of KV blocks in use, 0..1, mean over the page's engines; None without such a series.
        own: the ledger's own requests when the scrape was sent.
        loras: adapters in use by running and waiting requests; None if the page has no such series.
        lora_room: whether there is a slot for another adapter; None if the page has no such series.

    Attributes:
        others: requests of other routers and clients at that time, estimated as running + waiting - own.
    """

    measured_at: float
    running: float
    waiting: float
    kv_usage: float | None
    own: int
    loras: frozenset[str] | None = None
    lora_room: bool | None = None
    others: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "others", max(0.0, self.running + self.waiting - self.own))


@dataclass(frozen=True, slots=True)
class PrefixTokens:
    """Prompt tokens that one engine process has looked up in caches since its start, by where it found them.

    Args:
        local: in its own KV cache.
        external: in a cache its KV connector reads from (LMCache, another engine).
        missed: nowhere; these were computed.
    """

    local: int
    external: int
    missed: int


@dataclass(slots=True)
class CacheConfig:
    """Configuration of an engine's KV cache, from `vllm:cache_config_info`; None while unknown."""

    block_size: int | None = None
    num_blocks: int | None = None
    prefix_caching: bool | None = None
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def capacity_tokens(self) -> int | None:
        """Capacity in tokens, or None while unknown."""
        if self.block_size is None or self.num_blocks is None:
            return None
        return self.block_size * self.num_blocks


class Instance:
    """One engine over all its incarnations. Leases hold this object, never its name.

    Args:
        id: as configured, else host:port.
        url: base URL without a trailing slash, such as `http://10.0.0.7:8000`.
        models: configured model names; None: asked of the engine.
        role: prefill, decode or both.
        pool: free label.
        zone: free label.
        key: API key of the engine; None: the client's own is passed on.
        attention_tokens: context length at which attention costs as much as the weights.
    """

    def __init__(
        self,
        id: str,
        url: str,
        *,
        models: Iterable[str] | None = None,
        role: str = "both",
        pool: str = "",
        zone: str = "",
        key: Credential | None = None,
        attention_tokens: float = ATTENTION_TOKENS,
    ) -> None:
        self.id = id
        self.url = url
        self.models_fixed = models is not None
        #: Names it serves (ids, aliases, adapters). None while unknown; it is then assumed to serve any.
        self.models: frozenset[str] | None = frozenset(models) if models is not None else None
        #: Those of them that are adapters, as far as the engine was asked.
        self.adapters: frozenset[str] = frozenset()
        self.role = role
        self.pool = pool
        self.zone = zone
        self.key = key
        self.attention_tokens = attention_tokens
        #: Written by `smetric.fleet.health`. A deprioritized instance is a candidate only if no other one is.
        self.healthy = True
        self.draining = False
        self.deprioritized = False
        self.state = State.WELL
        #: Number of restarts seen. Whatever is known of its cache belongs to one incarnation.
        self.incarnation = 0
        #: Start of this incarnation's process, seconds since the epoch on its own clock; None while unknown.
        self.started_at: float | None = None
        #: Whether this incarnation had computed nothing when it was first seen, so that its cache was empty.
        self.seen_empty = False
        #: Requests sent and not ended (n × prompts each).
        self.own = 0
        #: Prompt tokens sent whose first output has not arrived, minus the hits known when they were sent.
        self.unprefilled = 0
        #: Those of them that no known tier holds, and twice the token pairs that attend when they are computed.
        self.uncomputed = 0
        self.uncomputed_pairs = 0
        #: Prompt tokens of all requests sent and not ended.
        self.sent_tokens = 0
        #: How many of these requests hold each prompt block, as far as a policy asks; and how often one is held again.
        self.active: Counter[int] = Counter()
        self.repeated = 0
        #: Leases whose first output has arrived.
        self.decoding: set[Lease] = set()
        self.scrape: Scrape | None = None
        #: As last scraped; None while this process has not reported any.
        self.prefix_tokens: PrefixTokens | None = None
        self.cache = CacheConfig()
        #: Called when it may have more room: a request ended, a prompt was prefilled, a scrape arrived, or its health
        #: changed.
        self.load_changed: Callable[[], object] = lambda: None

    def __repr__(self) -> str:
        return f"<Instance {self.id} {self.url} own={self.own} healthy={self.healthy}>"

    def charge(
        self,
        prompts: int,
        prompt_len: int,
        hit_len: int | None = None,
        stored: int = 0,
        blocks: Sequence[int] = (),
    ) -> Lease:
        """Count a request as sent here, in the same tick as the decision.

        Args:
            prompts: sequences the engine runs for it (n × prompts).
            prompt_len: tokens of its prompts.
            hit_len: tokens of them known to be in this instance's cache; None, which counts as 0, if unknown.
            stored: tokens of them known to be in some tier that it can fetch from; 0 if not looked up.
            blocks: as of `Lease`.
        """
        hit = (hit_len if hit_len < prompt_len else prompt_len) if hit_len else 0
        fetched = max(0, min(stored, prompt_len) - hit) if stored else 0
        return Lease(self, prompts, prompt_len, hit, fetched, hit_len is not None, blocks)

    def enter(self, blocks: Sequence[int]) -> None:
        """Count the prompt blocks of a request that was sent."""
        known = len(self.active)
        self.active.update(blocks)
        self.repeated += len(blocks) - (len(self.active) - known)

    def leave(self, blocks: Sequence[int]) -> None:
        """Count the prompt blocks of a request that has ended no longer."""
        active = self.active
        for block in blocks:
            if active[block] > 1:
                active[block] -= 1
                self.repeated -= 1
            else:
                del active[block]

    def requests(self) -> float:
        """Return running and waiting requests: own now + max(0, scraped - own when that scrape was sent)."""
        return self.own if self.scrape is None else self.own + self.scrape.others

    def unprefilled_cost(self) -> float:
        """Return the cost of computing all prompts that are not prefilled yet."""
        return prefill_cost(self.uncomputed, self.uncomputed_pairs, self.attention_tokens)

    def generated(self) -> int:
        """Return the tokens that its decoding requests have streamed back, counted as events."""
        return sum([lease.answer.events for lease in self.decoding if lease.answer is not None])

    def inflight_tokens(self) -> int:
        """Return the tokens of the requests sent and not ended, prompts and generated."""
        return self.sent_tokens + self.generated()

    def decode_blocks(self, prompt_len: int = 0, blocks: Sequence[int] = (), grain: float = 0.0) -> float:
        """Return the KV blocks that its requests take, and one more request; blocks that they share count once.

        Args:
            prompt_len: tokens of that request's prompt; 0 for none.
            blocks: hashes of its blocks, as of `Lease`.
            grain: tokens of one of these.
        """
        # A request holds every block before one that it holds, so the leading active blocks end at one place.
        held = bisect_left(blocks, True, key=lambda block: block not in self.active)
        tokens = self.sent_tokens + self.generated() + prompt_len - (self.repeated + held) * grain
        return max(0.0, tokens) / (self.cache.block_size or BLOCK_SIZE)

    @property
    def base_models(self) -> frozenset[str] | None:
        """Names it serves without adapters, which come and go; None while unknown."""
        return None if self.models is None else self.models - self.adapters

    def serves(self, model: str) -> bool:
        """Return whether it serves *model*, as far as is known; an empty name fits all."""
        return self.models is None or not model or model in self.models

    def restarted(self, started_at: float | None = None, *, seen_empty: bool = True) -> None:
        """Begin a new incarnation: a new process answers, with counters of its own and without the old cache.

        Args:
            started_at: when the process started, if it says so.
            seen_empty: whether it had computed nothing yet. Otherwise other routers, or this one, may have sent to it
                before it was seen.
        """
        self.incarnation += 1
        self.started_at = started_at
        self.seen_empty = seen_empty
        self.prefix_tokens = None

    def is_incarnation(self, started_at: float | None) -> bool:
        """Return whether the process that started at *started_at* is the one that answers now, as far as is known."""
        if started_at is None or self.started_at is None:
            return started_at is self.started_at
        return abs(started_at - self.started_at) <= SAME_START_S
