"""The feature table: every number a policy may read, with unit, range, source, staleness and rule for unknown.

The checker, the manual, the trace and the snapshot read this table; how values are read off an instance is in
`smetric.fleet.fleet`.
"""

from __future__ import annotations

from smetric.policy.vocabulary import Feature, Kind, RequestField, Unknown, Vocabulary

_SCRAPED = "every second; the last value corrected by the ledger up to 30 s, then unknown"
_NOW = "none: read with the decision"

_FEATURES = (
    Feature(
        name="hit_len",
        doc="Leading prompt tokens that the instance holds in its own KV cache.",
        unit="tokens",
        at_most="prompt_len",
        lookup=True,
        source="the engines' KV events, else the prefix index: what the router sent there, else LMCache",
        staleness="none: looked up with the decision",
    ),
    Feature(
        name="host_hit_len",
        doc="Leading prompt tokens that the instance holds in its host memory, those in its KV cache included or not.",
        unit="tokens",
        at_most="prompt_len",
        lookup=True,
        source="LMCache's coordinator (tier l1, not shared) or controller (LocalCPUBackend)",
        staleness="`lmcache.answers_ttl`",
    ),
    Feature(
        name="disk_hit_len",
        doc="Leading prompt tokens that the instance holds in its host memory or on its own disk.",
        unit="tokens",
        at_most="prompt_len",
        lookup=True,
        source="LMCache's coordinator (tiers that are not shared) or controller (LocalCPUBackend, LocalDiskBackend)",
        staleness="`lmcache.answers_ttl`",
    ),
    Feature(
        name="store_hit_len",
        doc="Leading prompt tokens in a store that every instance can fetch from; the same for all.",
        unit="tokens",
        at_most="prompt_len",
        lookup=True,
        source="LMCache's coordinator (tiers that are shared)",
        staleness="`lmcache.answers_ttl`",
    ),
    Feature(
        name="requests",
        doc="Requests running or waiting on the instance, counting each of n × prompts; more in its slow start.",
        unit="requests",
        unknown=Unknown.MEAN,
        load=True,
        source="vLLM /metrics at the last scrape, plus what was sent since, minus what ended since",
        staleness=_SCRAPED,
    ),
    Feature(
        name="running",
        doc="Requests the instance is running; without metrics, those the router sent there.",
        unit="requests",
        unknown=Unknown.MEAN,
        load=True,
        source="vllm:num_requests_running, corrected by the ledger",
        staleness=_SCRAPED,
    ),
    Feature(
        name="waiting",
        doc="Requests waiting in the instance's queue.",
        unit="requests",
        unknown=Unknown.MEAN,
        load=True,
        source="vllm:num_requests_waiting, at most `requests`",
        staleness=_SCRAPED,
    ),
    Feature(
        name="unprefilled",
        doc="Prompt tokens sent, first token not back, less the hits known when they were sent; more in a slow start.",
        unit="tokens",
        load=True,
        source="the router's ledger",
        staleness=_NOW,
    ),
    Feature(
        name="inflight_tokens",
        doc="Prompt tokens of the requests sent there that have not ended.",
        unit="tokens",
        load=True,
        source="the router's ledger",
        staleness=_NOW,
    ),
    Feature(
        name="kv_usage",
        doc="Share of the KV cache's blocks in use by running requests; reusable cached blocks count as free.",
        high=1.0,
        unknown=Unknown.MEAN,
        load=True,
        source="vllm:kv_cache_usage_perc (vllm:gpu_cache_usage_perc before 0.10), mean over the page's engines",
        staleness="every second; unknown after 30 s",
    ),
    Feature(
        name="healthy",
        doc="Whether the instance answers and is not ejected; false only for candidates taken in a panic.",
        kind=Kind.BOOL,
        default=False,
        source="probes of /health, refused connections, requests that failed",
        staleness="a refused connection: none; else two seconds (`health.fall` probes)",
    ),
    Feature(
        name="draining",
        doc="Whether an operator drains the instance, or its engine is ending; such instances are no candidates.",
        kind=Kind.BOOL,
        default=False,
        source="`smetric drain`; answers that say the engine is shutting down",
        staleness=_NOW,
    ),
    Feature(
        name="id",
        doc="The instance's id.",
        kind=Kind.STRING,
        default="",
        source="configuration, else host:port",
        staleness=_NOW,
    ),
    Feature(
        name="model",
        doc="The first, by name, of the models the instance serves; empty while unknown.",
        kind=Kind.STRING,
        default="",
        source="configuration, else GET /v1/models",
        staleness="30 s",
    ),
    Feature(
        name="role",
        doc="prefill, decode or both.",
        kind=Kind.STRING,
        default="both",
        source="configuration",
        staleness=_NOW,
    ),
    Feature(
        name="pool",
        doc="The instance's pool label.",
        kind=Kind.STRING,
        default="",
        source="configuration",
        staleness=_NOW,
    ),
    Feature(
        name="zone",
        doc="The instance's zone label.",
        kind=Kind.STRING,
        default="",
        source="configuration",
        staleness=_NOW,
    ),
)

_REQUEST = (
    RequestField(
        name="turn",
        doc="Assistant turns in the carried history; 0 for the first request of a session.",
        may_be_unknown=True,
    ),
    RequestField(
        name="prompt_len",
        doc="Tokens of the prompt (the sum over prompts), estimated from its rendered bytes until its ids are known.",
        unit="tokens",
        low=1.0,
        default=1.0,
    ),
    RequestField(
        name="est_hit",
        doc="Tokens of the carried history, floored to the block size: the hit to expect where the session was served.",
        unit="tokens",
        may_be_unknown=True,
    ),
    RequestField(
        name="priority",
        doc="Higher is more urgent: the negative of vLLM's body field or header.",
        low=-1e15,
    ),
    RequestField(name="model", doc="The model asked for, which may be an adapter.", kind=Kind.STRING, default=""),
    RequestField(
        name="tenant",
        doc="Who asks, from the header that `tenant_header` names; empty without one.",
        kind=Kind.STRING,
        default="",
    ),
    RequestField(name="session", doc="The session id of known agent headers.", kind=Kind.STRING, default=""),
    RequestField(name="id", doc="The request's id.", kind=Kind.STRING, default=""),
    RequestField(name="held", doc="How long `hold` rules have held it so far.", unit="seconds"),
)

VOCABULARY = Vocabulary(
    features={feature.name: feature for feature in _FEATURES},
    request={field.name: field for field in _REQUEST},
)
