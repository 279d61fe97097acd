"""Instances and leases: the ledger."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Protocol

from smetric.config.credential import Credential

# What a prefill costs: its tokens, and the attention they pay to all before them, in tokens without attention.

#: Tokens of context at which attention costs as much as the weights (L_eq): about active parameters / (2 × layers ×
#: query heads × head size). This one is of the 30B model of the SMetric paper's revision.
ATTENTION_TOKENS = 6923.0


def twice_attended(new: int, prompt_len: int) -> int:
    """Twice the pairs of tokens that attend to each other when the last *new* tokens of a prompt are computed."""
    return new * (2 * prompt_len - new)


def prefill_cost(new: int, twice_pairs: int, attention_tokens: float) -> float:
    """Tokens without attention that cost as much as *new* ones with it: n + n (L - n / 2) / L_eq, over all prompts."""
    return new + twice_pairs / (2 * attention_tokens)


# One request as the ledger counts it: charged to an instance with its decision, released once when it ends.
#
# What an instance makes of all its leases is in `instance.py`.


class Answer(Protocol):
    """What of an answer has passed."""

    events: int


class Lease:
    """One request charged to one instance; `first_byte` and `release` take effect once, whoever calls them."""

    __slots__ = (
        "_computed_ahead",
        "_pairs",
        "_pairs_ahead",
        "_prefilling",
        "_released",
        "ahead",
        "answer",
        "computed",
        "fetched",
        "incarnation",
        "instance",
        "is_hit_known",
        "new_tokens",
        "prompt_len",
        "prompts",
    )

    def __init__(
        self, instance: Instance, prompts: int, prompt_len: int, hit_len: int, fetched: int, is_hit_known: bool
    ) -> None:
        self.instance = instance
        self.incarnation = instance.incarnation
        self.prompts = prompts
        self.prompt_len = prompt_len
        #: Whether it is known what its cache held of the prompt; where it is not, nothing is said to be held.
        self.is_hit_known = is_hit_known
        #: Tokens that its cache did not hold; those of them that it can fetch, and those that it has to compute.
        self.new_tokens = prompt_len - hit_len
        self.fetched = fetched
        self.computed = self.new_tokens - fetched
        self._pairs = twice_attended(self.computed, prompt_len)
        self._prefilling = True
        self._released = False
        #: What of its answer has passed, once there is one.
        self.answer: Answer | None = None
        instance.own += prompts
        instance.unprefilled += self.new_tokens
        instance.uncomputed += self.computed
        instance.uncomputed_pairs += self._pairs
        instance.sent_tokens += prompt_len
        #: Tokens that stand before the first byte, this request's own included.
        self.ahead = instance.unprefilled
        self._computed_ahead = instance.uncomputed
        self._pairs_ahead = instance.uncomputed_pairs

    @property
    def cost_ahead(self) -> float:
        """The cost of computing what stood before it when it was charged, its own included."""
        return prefill_cost(self._computed_ahead, self._pairs_ahead, self.instance.attention_tokens)

    @property
    def cost(self) -> float:
        """The cost of computing what neither its cache nor another tier was known to hold."""
        return prefill_cost(self.computed, self._pairs, self.instance.attention_tokens)

    @property
    def is_past(self) -> bool:
        """The process that it was charged to is gone: what comes of it says nothing of the one that answers now."""
        return self.incarnation != self.instance.incarnation

    def first_byte(self) -> None:
        """The prompt has been prefilled."""
        if self._prefilling:
            self._end_prefill()
            instance = self.instance
            instance.decoding_tokens += self.prompt_len
            instance.decoding.add(self)
            instance.load_changed()

    def release(self) -> None:
        """The request has ended, however it ended."""
        if self._released:
            return
        self._released = True
        instance = self.instance
        if self._prefilling:
            self._end_prefill()
        else:
            instance.decoding_tokens -= self.prompt_len
            instance.decoding.discard(self)
        instance.own -= self.prompts
        instance.sent_tokens -= self.prompt_len
        instance.load_changed()

    def _end_prefill(self) -> None:
        self._prefilling = False
        instance = self.instance
        instance.unprefilled -= self.new_tokens
        instance.uncomputed -= self.computed
        instance.uncomputed_pairs -= self._pairs


# One engine as the router knows it: its ledger (what was sent there and has not ended) and its last scrape.
#
# No I/O here: sources write scrapes, the router charges and releases.

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


# What time to first token a prefill takes: a start, whatever is computed, and so much for each token of its cost.
#
# Where the samples come from is in `smetric.sources.prefill_times`, what is counted as cost in `prefill_cost.py`.

#: Of the time of the largest prefills seen, the share that at least was spent on computing: it bounds what small ones,
#: in whose times little else shows than the start, can be taken to say of large ones.
LEAST_COMPUTING = 0.1


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """A line.

    Args:
        start_s: seconds that pass whatever is computed: the way there and back, a step of the engine.
        per_token_s: seconds for each token of cost.
    """

    start_s: float
    per_token_s: float

    def of(self, cost: float) -> float:
        """Seconds until the first token, where *cost* tokens of cost stand before it."""
        return self.start_s + self.per_token_s * cost


def fitted(groups: Iterable[Collection[tuple[float, float]]]) -> PrefillTime:
    """The line that errs least, relatively, from the median cost and the median time of each group.

    Relative errors: ten per cent of a large prefill count as much as ten per cent of a small one. Where the line would
    begin below 0, as it may if all samples are about as large, the start is 0.

    Args:
        groups: of samples that cost about the same: cost, at least 1, and seconds, more than 0. None is empty, and
            there is one at least.
    """
    points = [
        (len(group), median(cost for cost, _ in group), median(seconds for _, seconds in group)) for group in groups
    ]
    # Minimises Σ n (start/t + per_token·c/t - 1)².
    uu = sum(n / t**2 for n, _, t in points)
    uv = sum(n * c / t**2 for n, c, t in points)
    vv = sum(n * (c / t) ** 2 for n, c, t in points)
    u = sum(n / t for n, _, t in points)
    v = sum(n * c / t for n, c, t in points)
    _, most, longest = max(points, key=lambda point: point[1])
    determinant = uu * vv - uv * uv
    if len(points) == 1 or determinant <= 1e-9 * uu * vv:
        return PrefillTime(0.0, v / vv)
    per_token = max((uu * v - uv * u) / determinant, LEAST_COMPUTING * longest / most)
    start = (u - per_token * uv) / uu
    return PrefillTime(start, per_token) if start > 0 else PrefillTime(0.0, v / vv)
