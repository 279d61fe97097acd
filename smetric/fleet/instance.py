"""One engine as the router knows it: its ledger (what was sent there and has not ended) and its last scrape.

No I/O here: sources write scrapes, the router charges and releases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from smetric.config.credential import Credential

#: Two start times this close, in seconds, are those of one process, told with different rounding.
SAME_START_S = 1.0


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
    """

    measured_at: float
    running: float
    waiting: float
    kv_usage: float | None
    own: int


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
    """

    __slots__ = (
        "adapters",
        "cache",
        "draining",
        "healthy",
        "id",
        "incarnation",
        "key",
        "models",
        "models_fixed",
        "on_load_changed",
        "own",
        "pool",
        "prefix_tokens",
        "role",
        "scrape",
        "seen_empty",
        "sent_tokens",
        "started_at",
        "state",
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
        #: These three are what `smetric.fleet.health` says of it.
        self.healthy = True
        self.draining = False
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
        #: Prompt tokens of the requests sent and not ended.
        self.sent_tokens = 0
        self.scrape: Scrape | None = None
        #: As last scraped; None while this process has not said.
        self.prefix_tokens: PrefixTokens | None = None
        self.cache = CacheConfig()
        #: Told when it may have more room than before: a request ended, a prompt was prefilled, a scrape or its health
        #: says so.
        self.on_load_changed: Callable[[], object] | None = None

    def __repr__(self) -> str:
        return f"<Instance {self.id} {self.url} own={self.own} healthy={self.healthy}>"

    def charge(self, prompts: int, prompt_len: int, hit_len: int = 0) -> Lease:
        """Count a request as sent here, in the same tick as the decision.

        Args:
            prompts: how many sequences the engine will run for it (n × prompts).
            prompt_len: tokens of its prompts.
            hit_len: tokens of them known to be in this instance's cache, 0 if not looked up.
        """
        return Lease(self, prompts, prompt_len, max(0, prompt_len - hit_len))

    def load_changed(self) -> None:
        """It may have more room than before."""
        if self.on_load_changed is not None:
            self.on_load_changed()

    def requests(self) -> float:
        """Running and waiting requests: own now + max(0, scraped - own when that scrape was sent)."""
        scrape = self.scrape
        if scrape is None:
            return self.own
        return self.own + max(0.0, scrape.running + scrape.waiting - scrape.own)

    def serves(self, model: str) -> bool:
        """Whether it serves *model*, as far as is known; an empty name fits all."""
        return self.models is None or not model or model in self.models

    def restarted(self, started_at: float | None = None) -> None:
        """A new process answers, since *started_at* if it says so: its cache is empty, its counters started again."""
        self.incarnation += 1
        self.started_at = started_at
        self.seen_empty = True
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


class Lease:
    """One request charged to one instance; `first_byte` and `release` take effect once, whoever calls them."""

    __slots__ = ("_prefilling", "_released", "ahead", "incarnation", "instance", "new_tokens", "prompt_len", "prompts")

    def __init__(self, instance: Instance, prompts: int, prompt_len: int, new_tokens: int) -> None:
        self.instance = instance
        self.incarnation = instance.incarnation
        self.prompts = prompts
        self.prompt_len = prompt_len
        self.new_tokens = new_tokens
        self._prefilling = True
        self._released = False
        instance.own += prompts
        instance.unprefilled += new_tokens
        instance.sent_tokens += prompt_len
        #: Tokens that stand before the first byte, this request's own included.
        self.ahead = instance.unprefilled

    def first_byte(self) -> None:
        """The prompt has been prefilled."""
        if self._prefilling:
            self._prefilling = False
            self.instance.unprefilled -= self.new_tokens
            self.instance.load_changed()

    def release(self) -> None:
        """The request has ended, however it ended."""
        if self._released:
            return
        self._released = True
        self.instance.own -= self.prompts
        self.instance.sent_tokens -= self.prompt_len
        self.first_byte()
        self.instance.load_changed()
