"""Feature table: every value that a policy may read, with unit, range, source, staleness and rule for unknown.

The checker, the manual, the trace and the snapshot read this table. `smetric.fleet.fleet` reads the values.
"""

from __future__ import annotations

from smetric.policy.vocabulary import Feature, Kind, RequestField, Unknown, Vocabulary

_SCRAPED = "every second; the last value corrected by the ledger up to 30 s, then unknown"
_METRICS = "every second; unknown after 30 s"
_RATE = "the samples of ten minutes; unknown before there are 8"


def _hits(name: str, doc: str, source: str, staleness: str = "`lmcache.answers_ttl`") -> Feature:
    """A number of prompt tokens that a cache holds, looked up."""
    return Feature(
        name=name, doc=doc, unit="tokens", at_most="prompt_len", lookup=True, source=source, staleness=staleness
    )


def _label(name: str, doc: str, source: str = "configuration", default: str = "") -> Feature:
    """A string of the instance."""
    return Feature(name=name, doc=doc, kind=Kind.STRING, default=default, source=source)


def _text(name: str, doc: str) -> RequestField:
    """A string of the request."""
    return RequestField(name=name, doc=doc, kind=Kind.STRING, default="")


_FEATURES = (
    _hits(
        "hit_len",
        "Leading prompt tokens that the instance holds in its own KV cache.",
        "the engines' KV events, else the prefix index: what the router sent there, else LMCache",
        "none: looked up with the decision",
    ),
    _hits(
        "host_hit_len",
        "Leading prompt tokens that the instance holds in its host memory, whether or not its KV cache has them too.",
        "LMCache's coordinator (tier l1, not shared) or controller (LocalCPUBackend); KV events of medium CPU",
    ),
    _hits(
        "disk_hit_len",
        "Leading prompt tokens that the instance holds in its host memory or on its own disk.",
        "LMCache's coordinator (tiers that are not shared) or controller (LocalCPUBackend, LocalDiskBackend); KV "
        "events of media CPU and STORAGE",
    ),
    _hits(
        "store_hit_len",
        "Leading prompt tokens in a store that every instance can fetch from; the same for all.",
        "LMCache's coordinator (tiers that are shared)",
    ),
    Feature(
        name="requests",
        doc="Requests running or waiting on the instance, counting each of n × prompts; more in its slow start.",
        unit="requests",
        unknown=Unknown.MEAN,
        load=True,
        counted=True,
        source="vLLM /metrics at the last scrape, plus what was sent since, minus what ended since",
        staleness=_SCRAPED,
    ),
    Feature(
        name="running",
        doc="Requests the instance is running; without metrics, those the router sent there.",
        unit="requests",
        unknown=Unknown.MEAN,
        load=True,
        counted=True,
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
        doc="Prompt tokens of requests that wait for their first token, less their known hits; more in its slow start.",
        unit="tokens",
        load=True,
        source="the router's ledger",
    ),
    Feature(
        name="unprefilled_cost",
        doc="Cost of the prefills in `unprefilled`, with attention: n + n (L - n / 2) / L_eq for n of L tokens.",
        unit="tokens",
        load=True,
        source="the router's ledger, less what any tier was known to hold; L_eq is `prefill.attention_tokens`",
    ),
    Feature(
        name="inflight_tokens",
        doc="Tokens of the requests that have not ended there: their prompts, and one token per streamed event.",
        unit="tokens",
        load=True,
        source="the router's ledger",
    ),
    Feature(
        name="decode_blocks",
        doc="KV blocks of the requests that have not ended there and of this one: shared prompt blocks count once.",
        unit="blocks",
        load=True,
        source="the router's ledger; the engine's block size, 16 tokens until it says",
    ),
    Feature(
        name="qps",
        doc="Requests per second that this router sent there, over the last minute.",
        unit="requests per second",
        load=True,
        measured=True,
        source="the router's own count",
    ),
    Feature(
        name="prefill_rate",
        doc="Prefill cost that it computes per second: 90th percentile of cost / time to first token over 64 streams.",
        unit="tokens per second",
        low=1.0,
        unknown=Unknown.MEAN,
        default=1.0,
        measured=True,
        source="measured by the router on answers that stream; cost as of `unprefilled_cost`",
        staleness=_RATE,
    ),
    Feature(
        name="fetch_rate",
        doc="Tokens per second fetched from host memory, disk or store, queueing included; the same for all.",
        unit="tokens per second",
        low=1.0,
        default=1.0,
        instead="prefill_rate",
        measured=True,
        source="measured by the router on the last 100 fetches that look-ups reported, or `prefill.fetch_rate`",
        staleness=_RATE,
    ),
    Feature(
        name="cached_tokens",
        doc="Tokens that the prefix index believes it to hold.",
        unit="tokens",
        measured=True,
        source="the prefix index",
    ),
    Feature(
        name="kv_usage",
        doc="Share of the KV cache's blocks in use by running requests; reusable cached blocks count as free.",
        high=1.0,
        unknown=Unknown.MEAN,
        load=True,
        source="vllm:kv_cache_usage_perc (vllm:gpu_cache_usage_perc before 0.10), mean over the page's engines",
        staleness=_METRICS,
    ),
    Feature(
        name="loras",
        doc="The adapters that its requests, running or waiting, use now.",
        kind=Kind.SET,
        default=frozenset(),
        source="vllm:lora_requests_info",
        staleness=_METRICS,
    ),
    Feature(
        name="lora_room",
        doc="Whether it has a slot for one more adapter.",
        kind=Kind.BOOL,
        default=False,
        source="vllm:lora_requests_info: its `max_lora`, and the adapters in use",
        staleness=_METRICS,
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
        doc="Whether an operator drains the instance, or its engine ends or sleeps; such instances are no candidates.",
        kind=Kind.BOOL,
        default=False,
        source="`smetric drain`; answers that say the engine is shutting down; `vllm:engine_sleep_state`",
    ),
    _label("id", "The instance's id.", "configuration, else host:port"),
    Feature(
        name="model",
        doc="The first, by name, of the models the instance serves; empty while unknown.",
        kind=Kind.STRING,
        default="",
        source="configuration, else GET /v1/models",
        staleness="30 s",
    ),
    _label("role", "decode or both; instances for prefill alone take no ordinary requests.", default="both"),
    _label("pool", "The instance's pool label."),
    _label("zone", "The instance's zone label."),
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
        at_most="prompt_len",
        may_be_unknown=True,
    ),
    RequestField(name="priority", doc="Higher is more urgent: the negative of vLLM's body field or header.", low=-1e15),
    _text("model", "The model asked for, which may be an adapter."),
    _text("lora", "The model asked for, where instances say that it is an adapter; else empty."),
    _text("tenant", "Who asks, from the header that `tenant_header` names; empty without one."),
    _text("session", "The session id of known agent headers."),
    _text("id", "The request's id."),
    _text("prefix", "Key of the prompt's first 256 tokens (1 KiB of its text), or of all of a shorter one."),
    RequestField(
        name="class_share",
        doc="Share of the last 1,000 requests, of ten minutes at most, whose prompts begin alike (`req.prefix`).",
        high=1.0,
        on_demand=True,
    ),
    RequestField(
        name="class_streak",
        doc="How many of the last requests with this prefix went, in a row, to an instance that held a part of them.",
        unit="requests",
        on_demand=True,
    ),
    _text("prefill", "In a decode decision, the id of the instance that prefilled it; else empty."),
    _text("prefill_zone", "In a decode decision, the zone of that instance; else empty."),
    RequestField(name="held", doc="How long `hold` rules have held it so far.", unit="seconds"),
)

VOCABULARY = Vocabulary(
    features={feature.name: feature for feature in _FEATURES}, request={field.name: field for field in _REQUEST}
)
#: Request fields that are filled only for a policy that reads them.
ON_DEMAND = frozenset(field.name for field in _REQUEST if field.on_demand)
