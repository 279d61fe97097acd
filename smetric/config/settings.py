"""Settings: every section with the type, default and documentation of each setting.

The JSON Schema, the manual and the errors are made from these classes. `smetric.config.load` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, get_args

from msgspec import Meta

from smetric.config.values import (
    ApiKey,
    BaseUrl,
    Folder,
    HeaderName,
    Host,
    InstanceId,
    Label,
    LmcacheId,
    Model,
    NetworkText,
    OneOrMore,
    OptionalFile,
    OptionalFolder,
    OptionalPolicy,
    OptionalUrl,
    ParamValue,
    PolicyRef,
    Port,
    RouteName,
    Secret,
    Section,
    Tenant,
    Topic,
    TraceUrl,
    ZmqEndpoint,
    doc,
    duration,
    size,
)

_Path = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/chat/completions/batch",
    "/v1/systemone",
    "/generative_scoring",
    "/inference/v1/generate",
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
]
#: Paths whose requests a policy decides on.
PATHS: tuple[str, ...] = get_args(_Path)
#: Name of the route that `policy` stands for.
LAST_ROUTE = "default"
#: Most shadows of one policy, and most observed policies.
MOST_SHADOWS = 8
MOST_OBSERVED = 16

_Kept = Literal["held", "rejected", "no_candidate", "error", "migration"]
#: Outcomes that are traced whatever the sampler says: see `smetric.names.KEPT`.
TRACES_KEPT: tuple[_Kept, ...] = ("held", "rejected", "no_candidate", "error", "migration")
_PRIVATE_NETWORKS = ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")


class Listen(Section, frozen=True, kw_only=True):
    """Where clients connect."""

    host: Annotated[Host, doc("Address that serves `/v1/…`, `/healthz` and `/readyz`; `0.0.0.0` for all.")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, doc("Its port; 0 takes a free one.")] = 8080
    cert_file: Annotated[
        OptionalFile,
        doc(
            "Certificate chain (PEM), read again when the file changes. If set, clients connect by TLS only; "
            "otherwise by plain HTTP."
        ),
    ] = ""
    key_file: Annotated[OptionalFile, doc("Key of that certificate (PEM). If not set, it is in `cert_file`.")] = ""


class Admin(Section, frozen=True, kw_only=True):
    """Where operators connect."""

    host: Annotated[Host, doc("Address that serves `/metrics`, health and `/admin/…`; keep it private.")] = "127.0.0.1"
    port: Annotated[Port, doc("Its port; 0 takes a free one.")] = 9464
    token: Annotated[
        Secret,
        doc("Bearer token of `/admin/…`, sent as `Authorization: Bearer …`. Required if `host` is not loopback."),
    ] = ""
    token_file: Annotated[OptionalFile, doc("File with that token; read again when it changes.")] = ""


class InstanceSettings(Section, frozen=True, kw_only=True):
    """One vLLM instance. A bare URL stands for an instance with that `url`."""

    shorthand: ClassVar[str] = "url"

    url: Annotated[BaseUrl, doc("Base URL of the instance, without a path.")]
    id: Annotated[InstanceId, doc("Name in headers, traces and metrics. Default: host:port.")] = ""
    models: Annotated[
        tuple[Model, ...] | None,
        doc("Model and adapter names it serves. If not set, the instance is asked."),
    ] = None
    role: Annotated[
        Literal["both", "prefill", "decode"],
        doc("Stage it serves; policies read it. `prefill` takes no ordinary requests."),
    ] = "both"
    pool: Annotated[Label, doc("Free label that policies may read.")] = ""
    zone: Annotated[Label, doc("Free label that policies may read.")] = ""
    api_key: Annotated[
        ApiKey, doc("Key sent to it as `Authorization: Bearer …`. If not set, the client's own is passed on.")
    ] = ""
    api_key_file: Annotated[OptionalFile, doc("File with that key; read again when it changes.")] = ""
    kv_events: Annotated[ZmqEndpoint, doc("Address of its KV events; overrides `kv_events.endpoint`.")] = ""
    kv_replay: Annotated[ZmqEndpoint, doc("Its replay address; overrides `kv_events.replay`.")] = ""


class ShadowSettings(Section, frozen=True, kw_only=True):
    """A policy in shadow or observed. A bare name stands for one with that `policy`."""

    shorthand: ClassVar[str] = "policy"

    policy: Annotated[PolicyRef, doc("Shipped policy by name, or path of a `.policy` file.")]
    params: Annotated[Mapping[str, ParamValue], doc("Values for its parameters.")] = {}


class CanarySettings(Section, frozen=True, kw_only=True):
    """A policy that decides for a share of the conversations."""

    policy: Annotated[
        OptionalPolicy, doc("Shipped policy by name, or path of a `.policy` file. No canary if not set.")
    ] = ""
    params: Annotated[Mapping[str, ParamValue], doc("Values for its parameters.")] = {}
    share: Annotated[
        float,
        Meta(ge=0.0, le=1.0),
        doc("Share of the conversations it decides for. A conversation keeps its policy from its first turn on."),
    ] = 0.05


class MatchSettings(Section, frozen=True, kw_only=True):
    """Conditions on a request. All that are set must hold; one item of a list is enough. Nothing set matches all."""

    model: Annotated[
        OneOrMore[Model], doc("Models, as clients name them. An alias also matches by the model it stands for.")
    ] = ()
    tenant: Annotated[OneOrMore[Tenant], doc("Tenants, as `tenant_header` names them.")] = ()
    path: Annotated[OneOrMore[_Path], doc("Paths of the data port, such as `/v1/chat/completions`.")] = ()


class RouteSettings(Section, frozen=True, kw_only=True):
    """The policy for some of the requests."""

    name: Annotated[
        RouteName,
        doc("Name in metrics, traces and `/admin/policies`. Default: `route-1`, `route-2`, … by position."),
    ] = ""
    match: MatchSettings = MatchSettings()
    policy: Annotated[PolicyRef, doc("Shipped policy by name, or path of a `.policy` file.")]
    params: Annotated[Mapping[str, ParamValue], doc("Values for the policy's parameters.")] = {}
    shadow: Annotated[
        tuple[ShadowSettings, ...], Meta(max_length=MOST_SHADOWS), doc("Policies evaluated beside it.")
    ] = ()
    canary: CanarySettings = CanarySettings()


class GuardrailSettings(Section, frozen=True, kw_only=True):
    """Restoring the previous policy when load or errors leave their band after a policy file has changed."""

    enabled: Annotated[bool, doc("Whether the guardrail acts.")] = True
    imbalance_percent: Annotated[
        int,
        Meta(ge=110, le=100_000),
        doc(
            "Out of band: the changed policy's requests on the busiest instance, as a percentage of their mean over "
            "the instances of the same models. The limit is a quarter above the value before the change, if that is "
            "more."
        ),
    ] = 300
    errors_percent: Annotated[
        int,
        Meta(ge=1, le=100),
        doc("Out of band: percentage points of requests answered 429 or 5xx above the value before the change."),
    ] = 20
    window: Annotated[float, duration("100ms", "10m"), doc("Time over which both are measured.")] = 10.0
    watch: Annotated[float, duration("1s", "24h"), doc("Time after a change during which it is watched.")] = 600.0


class ScrapeSettings(Section, frozen=True, kw_only=True):
    """Reading the instances' `/metrics`."""

    interval: Annotated[float, duration("50ms", "1m"), doc("Time between two scrapes of one instance.")] = 1.0
    timeout: Annotated[float, duration("10ms", "1m"), doc("Timeout of one scrape.")] = 2.0
    unknown_after: Annotated[
        float,
        duration("1s", "1h"),
        doc("Age at which a value becomes unknown. Until then the router's own ledger corrects it."),
    ] = 30.0


class HealthSettings(Section, frozen=True, kw_only=True):
    """Health of instances: probes of `/health`, and how requests sent to them end."""

    interval: Annotated[float, duration("50ms", "1m"), doc("Time between two probes of one instance.")] = 1.0
    timeout: Annotated[float, duration("10ms", "1m"), doc("Timeout of one probe.")] = 1.0
    fall: Annotated[int, Meta(ge=1, le=100), doc("Failed probes in a row that make an instance unhealthy.")] = 2
    rise: Annotated[int, Meta(ge=1, le=100), doc("Successful probes in a row that make an instance healthy again.")] = 2
    failures: Annotated[
        int,
        Meta(ge=1, le=1000),
        doc(
            "Failed requests in a row that eject an instance (5xx except 501 and 503, no output in time, a "
            "broken answer), or that clients gave up while it gave no output at all."
        ),
    ] = 5
    slow_factor: Annotated[
        int,
        Meta(ge=0, le=1000),
        doc(
            "Ejects an instance whose time to first token, also per prompt token, is more than so many times that of "
            "its peers. 0: never."
        ),
    ] = 4
    ejection: Annotated[
        float, duration("100ms", "1h"), doc("Time of an ejection; multiplied by the recent ejections in a row.")
    ] = 30.0
    longest_ejection: Annotated[float, duration("100ms", "24h"), doc("Longest time of one ejection.")] = 300.0
    max_ejected_percent: Annotated[
        int,
        Meta(ge=0, le=100),
        doc("Largest share of the instances that may be ejected for failed requests; one always may."),
    ] = 30
    panic_below_percent: Annotated[
        int,
        Meta(ge=0, le=100),
        doc("Share of healthy instances below which every instance that accepts connections is a candidate (panic)."),
    ] = 50
    slow_start: Annotated[
        float,
        duration("0s", "1h"),
        doc("Time over which an instance that has come back regains its full share of requests."),
    ] = 30.0


class PrefillSettings(Section, frozen=True, kw_only=True):
    """Cost of prefill; policies read it as `unprefilled_cost`, `prefill_rate` and `fetch_rate`."""

    attention_tokens: Annotated[
        int,
        Meta(ge=1, le=1_000_000_000),
        doc(
            "Context length at which attention costs as much as the weights: about active parameters / (2 × layers × "
            "query heads × head size). 6,923 for a 30B model."
        ),
    ] = 6923
    fetch_rate: Annotated[
        int,
        Meta(ge=0, le=1_000_000_000),
        doc("Tokens per second fetched from host memory, disk or a store. 0: measured."),
    ] = 0


class PrefixIndexSettings(Section, frozen=True, kw_only=True):
    """The embedded index of which instance holds which prefix."""

    enabled: Annotated[
        bool, doc("Whether the index runs. Without it and without another source, every hit length is unknown.")
    ] = True
    max_bytes: Annotated[int, size("1MiB", "16GiB"), doc("Memory limit of the index.")] = 64 << 20
    warm_up: Annotated[
        float,
        duration("0s", "24h"),
        doc(
            "Time after which an instance that was not observed from its start is assumed to hold only what the index "
            "knows."
        ),
    ] = 600.0
    folder: Annotated[
        OptionalFolder,
        doc("Folder that keeps the index over a restart (hashes only), one per router. Not kept if not set."),
    ] = ""
    save_every: Annotated[float, duration("100ms", "1h"), doc("Time between two writes to that folder.")] = 10.0


class PeersSettings(Section, frozen=True, kw_only=True):
    """Other routers in front of the same instances, which share placements."""

    urls: Annotated[
        tuple[BaseUrl, ...],
        Meta(max_length=64),
        doc("Their admin ports. This router's own may be listed too, so that all routers can share one list."),
    ] = ()
    token: Annotated[
        Secret,
        doc("Secret shared by all of them. Without it, any client of the admin port may send placements."),
    ] = ""
    interval: Annotated[
        float, duration("10ms", "10s"), doc("Time for which placements are gathered before they are sent.")
    ] = 0.2


class KvEventsSettings(Section, frozen=True, kw_only=True):
    """KV cache events of the engines. Needs the extra `kv-events`, and token ids."""

    enabled: Annotated[bool, doc("Whether the router subscribes to them.")] = False
    endpoint: Annotated[
        ZmqEndpoint,
        doc(
            "Address at which an instance publishes (`endpoint` in its `--kv-events-config`). `{host}` and `{port}` "
            "are those of its URL."
        ),
    ] = "tcp://{host}:5557"
    replay: Annotated[ZmqEndpoint, doc("Address that sends missed events again (`replay_endpoint`). Empty: none.")] = ""
    bind: Annotated[bool, doc("Bind the endpoint here; the instances connect to it. Each instance needs its own.")] = (
        False
    )
    ranks: Annotated[int, Meta(ge=1, le=64), doc("Data-parallel ranks of an instance; each has the next port.")] = 1
    topic: Annotated[Topic, doc("Prefix of its topics; `{host}` and `{port}` as above.")] = ""
    max_bytes: Annotated[int, size("1MiB", "64GiB"), doc("Memory limit of the block index.")] = 1 << 30
    ready_within: Annotated[
        float,
        duration("0ms", "5m"),
        doc("With `replay`: longest time for which the router is not ready at start while caches are still `behind`."),
    ] = 10.0


class LmcacheSettings(Section, frozen=True, kw_only=True):
    """LMCache's lookup service. Needs token ids."""

    url: Annotated[OptionalUrl, doc("Base URL of the lookup service. Not used if not set.")] = ""
    mode: Annotated[
        Literal["coordinator", "controller"],
        doc("The service: coordinator (LMCache in its own process) or controller (within the engines)."),
    ] = "coordinator"
    instances: Annotated[
        Mapping[str, LmcacheId],
        doc("LMCache instance of each instance, by the instance's id. Default: the same id."),
    ] = {}
    models: Annotated[
        Mapping[str, Model],
        doc(
            "Models to look up, and their names in LMCache's keys. Empty: all, under their own names. With the "
            "controller, leave out adapters: it takes them for their base model."
        ),
    ] = {}
    chunk_size: Annotated[int, Meta(ge=1, le=65536), doc("Tokens of a chunk, as configured in LMCache.")] = 256
    world_size: Annotated[int, Meta(ge=1, le=1024), doc("Tensor-parallel ranks of each engine.")] = 1
    answers_ttl: Annotated[
        float, duration("10ms", "1m"), doc("Time for which an answer is reused for the same prompt.")
    ] = 1.0
    breaker_failures: Annotated[
        int, Meta(ge=1, le=1000), doc("Failed or late look-ups in a row that open the circuit breaker.")
    ] = 5
    breaker_open: Annotated[
        float, duration("100ms", "10m"), doc("Time the circuit breaker stays open before one look-up tries again.")
    ] = 5.0


class TokenizerSettings(Section, frozen=True, kw_only=True):
    """Token ids of prompts, for the sources that look prompts up by them."""

    source: Annotated[
        Literal["auto", "estimated", "engine", "local"],
        doc(
            "auto: estimated, unless KV events or LMCache need ids; then local for models in `folders` or in the local "
            "cache of Hugging Face's hub, and engine for others. estimated: no ids; lengths are bytes divided by a "
            "ratio learned per model. engine: from the instances' `/tokenize`. local: from the models' own files; "
            "needs the extra `tokenizers`."
        ),
    ] = "auto"
    timeout: Annotated[
        float,
        duration("10ms", "1m"),
        doc("auto, engine: timeout of one instance. A decision waits no longer than `lookup` allows."),
    ] = 2.0
    folders: Annotated[
        Mapping[str, Folder],
        doc(
            "auto, local: folder of each model with its `tokenizer.json`, `tokenizer_config.json` and chat template. "
            '`"*"` stands for every other model.'
        ),
    ] = {}
    max_bytes: Annotated[
        int,
        size("1MiB", "16GiB"),
        doc("auto, local: memory limit of the cache of encoded text; a turn encodes only what is new."),
    ] = 64 << 20


class LookupSettings(Section, frozen=True, kw_only=True):
    """Deadline of the look-ups of one decision; a late value is unknown."""

    deadline_base: Annotated[float, duration("1ms", "10s"), doc("Deadline of any look-up.")] = 0.020
    deadline_per_1k_tokens: Annotated[float, duration("0ms", "1s"), doc("Added for every 1,000 prompt tokens.")] = 0.002
    deadline_cap: Annotated[float, duration("1ms", "10s"), doc("Upper bound of the deadline.")] = 0.300


class Forward(Section, frozen=True, kw_only=True):
    """Sending a request to the chosen instance."""

    connect_timeout: Annotated[float, duration("10ms", "1m"), doc("Timeout of a connection.")] = 2.0
    first_byte_timeout: Annotated[
        float,
        duration("100ms", "1h"),
        doc(
            "Timeout of the first output of a stream, queueing and prefill included. Events without output, such as "
            "`response.created` or a chunk with nothing but the role, do not count."
        ),
    ] = 300.0
    answer_timeout: Annotated[
        float,
        duration("100ms", "24h"),
        doc("Timeout of a response that is not streamed: it comes in one piece, once all of it is generated."),
    ] = 1800.0
    idle_timeout: Annotated[
        float, duration("100ms", "1h"), doc("Longest pause within a response, from its first output on.")
    ] = 60.0
    max_body: Annotated[int, size("1KiB", "1GiB"), doc("Largest request body; a larger one is answered 413.")] = (
        32 << 20
    )


class Drain(Section, frozen=True, kw_only=True):
    """Graceful shutdown."""

    announce: Annotated[
        float,
        duration("0s", "10m"),
        doc(
            "Time after SIGTERM in which `/readyz` answers 503 while clients are still served, so that a load "
            "balancer notices."
        ),
    ] = 0.0
    deadline: Annotated[
        float, duration("0s", "1h"), doc("Time that running requests then have before they are cut off.")
    ] = 180.0


class LimitSettings(Section, frozen=True, kw_only=True):
    """Limits on clients."""

    max_headers: Annotated[int, Meta(ge=1, le=1000), doc("Most header fields of a request.")] = 100
    max_header_bytes: Annotated[int, size("1KiB", "1MiB"), doc("Most bytes of a request's head.")] = 32 << 10
    body_timeout: Annotated[float, duration("100ms", "1h"), doc("Longest time a request body may take to arrive.")] = (
        60.0
    )
    send_timeout: Annotated[float, duration("100ms", "1h"), doc("Longest wait for a client that does not read.")] = 60.0
    head_timeout: Annotated[
        float, duration("100ms", "1h"), doc("Longest time a request's head may take to arrive.")
    ] = 10.0
    idle_timeout: Annotated[float, duration("100ms", "1h"), doc("Time an idle connection is kept open.")] = 10.0
    max_connections: Annotated[
        int,
        Meta(ge=0, le=1_000_000),
        doc("Most client connections. 0, and at most: a little less than half of the open files allowed."),
    ] = 0


class OverloadSettings(Section, frozen=True, kw_only=True):
    """Load limits of the router; requests above them wait in the queue or are refused."""

    in_flight: Annotated[
        int,
        Meta(ge=0, le=1_000_000),
        doc("Most inference requests running on the instances; further ones wait in the queue. 0: no limit."),
    ] = 0
    wait: Annotated[
        float,
        duration("0s", "10m"),
        doc("Longest wait for a place among them; a request that would wait longer is answered 429 at once."),
    ] = 2.0
    queue: Annotated[
        int, Meta(ge=0, le=65536), doc("Most requests in the queue: held by a policy's `hold`, or waiting for a place.")
    ] = 1024
    queue_bytes: Annotated[int, size("1KiB", "64GiB"), doc("Most bytes of their bodies.")] = 64 << 20
    bodies: Annotated[
        int,
        size("1KiB", "1024GiB"),
        doc("Most bytes of request bodies kept until their answers begin; a body that does not fit is answered 503."),
    ] = 256 << 20
    memory: Annotated[
        int, size("0B", "1024GiB"), doc("Memory limit of the router. 0B: the limit of its container, if it has one.")
    ] = 0
    soft_percent: Annotated[
        int,
        Meta(ge=1, le=100),
        doc("Share of that memory, or of the open files allowed, above which the number of requests may not grow."),
    ] = 85
    hard_percent: Annotated[int, Meta(ge=1, le=100), doc("Share above which new requests are refused.")] = 95
    soft_lag: Annotated[
        float,
        duration("1ms", "1m"),
        doc("Lag of the event loop, kept for a second, above which fewer new requests are taken."),
    ] = 0.5
    hard_lag: Annotated[float, duration("1ms", "1m"), doc("Lag above which new requests are refused.")] = 2.0


class Trace(Section, frozen=True, kw_only=True):
    """Content of spans, and which traces are kept. The `OTEL_…` variables say where they go."""

    keep: Annotated[
        tuple[_Kept, ...],
        Meta(max_length=len(TRACES_KEPT)),
        doc(
            "Outcomes traced whatever `OTEL_TRACES_SAMPLER` says. If a policy moves most turns, leave out "
            "`migration`, or most requests are traced."
        ),
    ] = TRACES_KEPT
    keep_over_parent: Annotated[
        bool,
        doc(
            "Trace the outcomes in `keep` even if the caller's trace is not recorded; the trace then begins here. "
            "`false` leaves it to the caller."
        ),
    ] = True
    candidates: Annotated[int, Meta(ge=0, le=32), doc("Rows of the candidate table in the span of a decision.")] = 8
    ui_hints: Annotated[bool, doc("Add the OpenInference attributes that tracing UIs show first.")] = True
    ui_url: Annotated[
        TraceUrl,
        doc("URL of one trace in a tracing UI, with `{trace_id}` in it. The live page links to it if set."),
    ] = ""


class SloSettings(Section, frozen=True, kw_only=True):
    """Service level of a stream, for `smetric_slo_tokens_total`; no decision depends on it."""

    ttft_base: Annotated[float, duration("0ms", "1h"), doc("Time to first token of a prompt without tokens.")] = 1.0
    ttft_per_1k_tokens: Annotated[float, duration("0ms", "1h"), doc("Added for every 1,000 prompt tokens.")] = 0.1
    tpot: Annotated[float, duration("0ms", "1m"), doc("Mean time between two tokens of an answer.")] = 0.03


class RecordSettings(Section, frozen=True, kw_only=True):
    """Records of decisions and of the traffic. A bare path stands for a record with that `path`."""

    shorthand: ClassVar[str] = "path"

    path: Annotated[
        OptionalFile,
        doc(
            "File that gets a line for each decision, compressed if it ends in `.gz` or `.zst` (before Python 3.14: "
            "extra `zstd`). Not written if not set."
        ),
    ] = ""
    trace: Annotated[
        OptionalFile,
        doc(
            "File that gets a line for each request, as hashes: a trace for studies and simulators. Not written if "
            "not set."
        ),
    ] = ""
    max_file: Annotated[int, size("64KiB", "64GiB"), doc("Size at which a file is rotated.")] = 256 << 20
    keep: Annotated[int, Meta(ge=0, le=10_000), doc("Rotated files kept of each, the newest.")] = 8
    queue: Annotated[
        int,
        size("64KiB", "1GiB"),
        doc("Most bytes of lines that wait for the disk; further lines are dropped and counted."),
    ] = 8 << 20


class Log(Section, frozen=True, kw_only=True):
    """Log lines on standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], doc("Least severe level that is written.")] = "info"
    format: Annotated[
        Literal["auto", "json", "console"],
        doc("auto: console on a terminal, otherwise JSON. `NO_COLOR` turns colours off."),
    ] = "auto"


class Tenants(Section, frozen=True, kw_only=True):
    """Isolation, in the engines, of the tenants that `tenant_header` names."""

    cache_salt: Annotated[
        Literal["client", "tenant"],
        doc(
            "client: passed on as the client sends it. tenant: derived from the tenant's name and the secret, so that "
            "tenants share no prefix cache and cannot guess each other's prompts from its timing; requests without a "
            "tenant are refused."
        ),
    ] = "client"
    secret: Annotated[Secret, doc("Secret from which the salts are derived; the same in all routers.")] = ""
    secret_file: Annotated[OptionalFile, doc("File with that secret; read again when it changes.")] = ""


class Settings(Section, frozen=True, kw_only=True):
    """All settings."""

    listen: Listen = Listen()
    admin: Admin = Admin()
    instances: Annotated[tuple[InstanceSettings, ...], doc("The vLLM instances to route to.")] = ()
    policy: Annotated[PolicyRef, doc("Shipped policy by name, or path of a `.policy` file.")] = "smetric"
    params: Annotated[
        Mapping[str, ParamValue], doc("Values for the policy's parameters, checked against their declared ranges.")
    ] = {}
    shadow: Annotated[
        tuple[ShadowSettings, ...],
        Meta(max_length=MOST_SHADOWS),
        doc("Policies evaluated beside the acting one, on the same snapshot, and never acted on."),
    ] = ()
    canary: CanarySettings = CanarySettings()
    routes: Annotated[
        tuple[RouteSettings, ...],
        Meta(max_length=64),
        doc("Policies by model, tenant or path. The first match decides; without a match, `policy` does."),
    ] = ()
    guardrail: GuardrailSettings = GuardrailSettings()
    models: Annotated[
        Mapping[str, Model], doc("Model aliases: the name a client sends, and the name that is sent on.")
    ] = {}
    scrape: ScrapeSettings = ScrapeSettings()
    health: HealthSettings = HealthSettings()
    prefill: PrefillSettings = PrefillSettings()
    prefix_index: PrefixIndexSettings = PrefixIndexSettings()
    kv_events: KvEventsSettings = KvEventsSettings()
    peers: PeersSettings = PeersSettings()
    lmcache: LmcacheSettings = LmcacheSettings()
    tokenizer: TokenizerSettings = TokenizerSettings()
    lookup: LookupSettings = LookupSettings()
    forward: Forward = Forward()
    drain: Drain = Drain()
    limits: LimitSettings = LimitSettings()
    overload: OverloadSettings = OverloadSettings()
    trace: Trace = Trace()
    slo: SloSettings = SloSettings()
    record: RecordSettings = RecordSettings()
    observe: Annotated[
        tuple[ShadowSettings, ...],
        Meta(max_length=MOST_OBSERVED),
        doc(
            "Policies that a record will be replayed with, by name or with `params`: the features they read are "
            "recorded too, looked up after the request has been sent."
        ),
    ] = ()
    log: Log = Log()
    state_dir: Annotated[
        OptionalFolder,
        doc(
            "Folder that keeps which instances are drained over a restart. A router that takes over from another "
            "shares its folder. Not kept if not set."
        ),
    ] = ""
    response_headers: Annotated[bool, doc("Add the `x-smetric-…` headers to responses.")] = True
    trusted_proxies: Annotated[
        tuple[NetworkText, ...],
        doc("Networks of callers whose `traceparent` is continued; for others a new trace is started and linked."),
    ] = _PRIVATE_NETWORKS
    tenants: Tenants = Tenants()
    instance_networks: Annotated[
        tuple[NetworkText, ...],
        doc("Networks allowed for instances although refused by default: link-local, multicast, metadata services."),
    ] = ()
    trust_session_headers: Annotated[
        bool, doc("Let the header `x-session-turn` override the turn derived from the request's history.")
    ] = False
    tenant_header: Annotated[
        HeaderName,
        doc(
            "Header that names the tenant, `req.tenant` in policies. Let the gateway set it: clients may send "
            "anything. Not read if not set."
        ),
    ] = ""
    block_size: Annotated[
        int,
        Meta(ge=1, le=4096),
        doc("Tokens of a KV block; expected and looked-up hits are whole blocks."),
    ] = 16
    replicas: Annotated[
        int,
        Meta(ge=1, le=1024),
        doc(
            "Number of routers in front of the same instances, this one included. With several routers and no "
            "`peers`, the prefix index never takes what it does not know for absent. `smetric doctor` checks that "
            "they share what they know."
        ),
    ] = 1
