"""One engine as the router knows it: its ledger (what was sent there and has not ended) and its last scrape.

No I/O here: sources write scrapes, the router charges and releases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from smetric.config.credential import Credential
from smetric.fleet.lease import Lease
from smetric.fleet.prefill_cost import ATTENTION_TOKENS, prefill_cost

#: Two start times this close, in seconds, are those of one process, told with different rounding.
SAME_START_S = 1.0
#: Tokens of a block of KV cache, until the engine says.
BLOCK_SIZE = 16


class State(StrEnum):
    """How an instance stands, as `smetric.fleet.health` judges it."""

    WELL = "well"
    #: Well again since a short time: a phantom load keeps the crowd away.
    WARMING = "warming"
    #: Too many of its requests failed, or it comes and goes: left out for some time.
    EJECTED = "ejected"
    #: Its health probes fail.
    ILL = "ill"
    #: It takes no connections.
    REFUSING = "refusing"
    #: Its process is ending: it finishes what it has and refuses what is new.
    STOPPING = "stopping"
    #: An operator is draining it.
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one `/metrics` page said.

    Args:
        measured_at: when the values were true at the latest, seconds on the monotonic clock: when the scrape was sent,
            or, while a busy engine keeps answering with frozen series, when they last changed.
        running: requests running, summed over the page's engines.
        waiting: requests waiting, summed over the page's engines.
        kv_usage: share of KV blocks in use, 0..1, mean over the page's engines; None when the page has no such series.
        own: the ledger's own requests when the scrape was sent.
        loras: adapters in use by running and waiting requests; None when the page does not say.
        lora_room: whether there is a slot for one more; None when the page does not say.

    Attributes:
        others: the requests that others than this router had sent by then, as far as can be told.
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
    """Prompt tokens that one engine process looked up in caches since it started, by where they were found.

    Args:
        local: in its own KV cache.
        external: in a cache its KV connector reads from (LMCache, another engine).
        missed: nowhere, and so computed.
    """

    local: int
    external: int
    missed: int


class Instance:
    """One engine, this incarnation and all before it; leases hold this object, never its name.

    Args:
        id: as configured, else host:port.
        url: base address without a trailing slash, e.g. `http://10.0.0.7:8000`.
        models: names it serves by configuration; None: asked of the engine.
        role: prefill, decode or both.
        pool: free label.
        zone: free label.
        key: what it wants to be shown; None: what the client shows is passed on.
        attention_tokens: tokens of context at which attention costs as much as the weights.
    """

    __slots__ = (
        "adapters",
        "attention_tokens",
        "cache",
        "decoding",
        "decoding_tokens",
        "draining",
        "healthy",
        "id",
        "incarnation",
        "key",
        "load_changed",
        "models",
        "models_fixed",
        "own",
        "pool",
        "prefix_tokens",
        "role",
        "scrape",
        "seen_empty",
        "sent_tokens",
        "spared",
        "started_at",
        "state",
        "uncomputed",
        "uncomputed_pairs",
        "unprefilled",
        "url",
        "zone",
    )

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
        #: Names it serves (ids, aliases, adapters); None while unknown, which serves any.
        self.models: frozenset[str] | None = frozenset(models) if models is not None else None
        #: Those of them that are adapters, as far as the engine was asked.
        self.adapters: frozenset[str] = frozenset()
        self.role = role
        self.pool = pool
        self.zone = zone
        self.key = key
        self.attention_tokens = attention_tokens
        #: These four are what `smetric.fleet.health` says of it.
        self.healthy = True
        self.draining = False
        self.spared = False
        self.state = State.WELL
        #: Counts restarts seen; whatever was known of its cache belongs to one incarnation.
        self.incarnation = 0
        #: When this incarnation's process started, seconds since the epoch, by its own clock; None while unknown.
        self.started_at: float | None = None
        #: Whether this incarnation had computed nothing yet when it was first seen, so that its cache was empty.
        self.seen_empty = False
        #: Requests sent and not ended (n × prompts each).
        self.own = 0
        #: Prompt tokens sent whose first body byte has not come back, minus the hits known when they were sent.
        self.unprefilled = 0
        #: Those of them that no tier was known to hold, and twice the pairs of tokens that attend in computing them.
        self.uncomputed = 0
        self.uncomputed_pairs = 0
        #: Prompt tokens of the requests sent and not ended, and of those of them whose first body byte has come.
        self.sent_tokens = 0
        self.decoding_tokens = 0
        #: Those whose first body byte has come, for what they have generated since.
        self.decoding: set[Lease] = set()
        self.scrape: Scrape | None = None
        #: As last scraped; None while this process has not said.
        self.prefix_tokens: PrefixTokens | None = None
        self.cache = CacheConfig()
        #: Called when it may have more room than before: a request ended, a prompt was prefilled, a scrape or its
        #: health says so.
        self.load_changed: Callable[[], object] = lambda: None

    def __repr__(self) -> str:
        return f"<Instance {self.id} {self.url} own={self.own} healthy={self.healthy}>"

    def charge(self, prompts: int, prompt_len: int, hit_len: int | None = None, stored: int = 0) -> Lease:
        """Count a request as sent here, in the same tick as the decision.

        Args:
            prompts: how many sequences the engine will run for it (n × prompts).
            prompt_len: tokens of its prompts.
            hit_len: tokens of them known to be in this instance's cache; None, which counts as 0, where nobody knows.
            stored: tokens of them known to be in some tier that it can fetch from, 0 if not looked up.
        """
        hit = (hit_len if hit_len < prompt_len else prompt_len) if hit_len else 0
        fetched = max(0, min(stored, prompt_len) - hit) if stored else 0
        return Lease(self, prompts, prompt_len, hit, fetched, hit_len is not None)

    def requests(self) -> float:
        """Running and waiting requests: own now + max(0, scraped - own when that scrape was sent)."""
        return self.own if self.scrape is None else self.own + self.scrape.others

    def unprefilled_cost(self) -> float:
        """Cost of what it has to compute before all of its prompts are prefilled, in tokens without attention."""
        return prefill_cost(self.uncomputed, self.uncomputed_pairs, self.attention_tokens)

    def generated(self) -> int:
        """Tokens that its decoding requests have streamed back: counted when asked, as their events."""
        return sum([lease.answer.events for lease in self.decoding if lease.answer is not None])

    def inflight_tokens(self) -> int:
        """Tokens of the requests sent and not ended, prompts and what was generated."""
        return self.sent_tokens + self.generated()

    def decode_blocks(self) -> float:
        """Blocks of KV cache that its decoding requests take."""
        return (self.decoding_tokens + self.generated()) / (self.cache.block_size or BLOCK_SIZE)

    @property
    def base_models(self) -> frozenset[str] | None:
        """The names it serves without those of adapters, which come and go; None while unknown."""
        return None if self.models is None else self.models - self.adapters

    def serves(self, model: str) -> bool:
        """Whether it serves *model*, as far as is known; an empty name fits all."""
        return self.models is None or not model or model in self.models

    def restarted(self, started_at: float | None = None, *, seen_empty: bool = True) -> None:
        """A new process answers, since *started_at* if it says so: its counters started again.

        Its cache holds nothing of before. Whether it holds anything is known only of one that is *seen_empty*: others,
        and this router itself, may have sent to it before it was seen.
        """
        self.incarnation += 1
        self.started_at = started_at
        self.seen_empty = seen_empty
        self.prefix_tokens = None

    def is_incarnation(self, started_at: float | None) -> bool:
        """Whether the process that started at *started_at* is the one that answers now, as far as both are known."""
        if started_at is None or self.started_at is None:
            return started_at is self.started_at
        return abs(started_at - self.started_at) <= SAME_START_S


@dataclass(slots=True)
class CacheConfig:
    """What an engine says of its KV cache, from `vllm:cache_config_info`; None while it has not said."""

    block_size: int | None = None
    num_blocks: int | None = None
    prefix_caching: bool | None = None
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens the cache holds, or None while unknown."""
        if self.block_size is None or self.num_blocks is None:
            return None
        return self.block_size * self.num_blocks
