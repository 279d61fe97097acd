"""Settings: every section with doc, default and range."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from smetric.config.values import (
    LABELS,
    BaseUrl,
    Choice,
    Duration,
    Flag,
    Integer,
    ListOf,
    MapOf,
    Network,
    NetworkRange,
    Number,
    OneOrMore,
    ParamValue,
    PathRef,
    PolicyRef,
    Secret,
    Section,
    Size,
    Text,
    setting,
)

# The kinds of text that settings of several sections have.

MODEL = Text(r"[\x21-\x7e]{1,256}", "a model name of 1 to 256 printable ASCII characters")
ENDPOINT = Text(
    r"tcp://\S{1,255}:(?:[0-9]{1,5}|[0-9]?\{port\})|ipc://\S{1,255}",
    "a ZeroMQ address such as tcp://{host}:5557",
    empty=True,
)
SECRET_FILE = PathRef(empty=True, what="a file")


# The section of the configuration that says what counts as answered in time.


@dataclass(frozen=True, slots=True, kw_only=True)
class SloSettings:
    """When a stream counts as answered in time, in `smetric_slo_tokens_total`; no decision rests on it."""

    ttft_base: float = setting(Duration("0ms", "1h"), "Time to the first token, for a prompt without tokens.", 1.0)
    ttft_per_1k_tokens: float = setting(Duration("0ms", "1h"), "Added for every 1,000 prompt tokens.", 0.1)
    tpot: float = setting(Duration("0ms", "1m"), "Time between two tokens, on average over an answer.", 0.03)


# The section of the configuration that says how much is taken at once, and what becomes of the rest.


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadSettings:
    """How much is taken at once; what is above is refused at once, or waits in the queue."""

    in_flight: int = setting(
        Integer(0, 1_000_000),
        "Most inference requests under way at the instances; those above wait in the queue. 0: as many as come.",
        0,
    )
    wait: float = setting(
        Duration("0s", "10m"),
        "Longest wait for one of these places; a request that would wait longer is answered 429 at once.",
        2.0,
    )
    queue: int = setting(
        Integer(0, 65536), "Most requests in the queue: held by a policy's `hold`, or for want of a place.", 1024
    )
    queue_bytes: int = setting(Size("1KiB", "64GiB"), "Most bytes of their bodies.", 64 << 20)
    bodies: int = setting(
        Size("1KiB", "1024GiB"),
        "Most bytes of request bodies kept until their answers begin; what does not fit is answered 503.",
        256 << 20,
    )
    memory: int = setting(
        Size("0B", "1024GiB"), "Memory the router may take; 0B for what its container allows, if that is limited.", 0
    )
    soft_percent: int = setting(
        Integer(1, 100),
        "Share of that memory, or of the open files allowed, from which no more are taken than are under way.",
        85,
    )
    hard_percent: int = setting(Integer(1, 100), "Share from which no new ones are taken.", 95)
    soft_lag: float = setting(
        Duration("1ms", "1m"), "Lateness of the event loop from which no more are taken than are under way.", 0.5
    )
    hard_lag: float = setting(Duration("1ms", "1m"), "Lateness from which no new ones are taken.", 2.0)


# Settings of the instances: which there are, how they are watched, and what prefill costs them.

_LABEL = Text(r"[A-Za-z0-9._:/\[\]-]{0,128}", "at most 128 of A-Z a-z 0-9 . _ : / [ ] -", empty=True)
_ID = Text(r"[A-Za-z0-9._:\[\]-]{1,128}", "1 to 128 of A-Z a-z 0-9 . _ : [ ] -")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSettings:
    """One vLLM instance. A bare URL stands for an instance with that `url`."""

    url: str = setting(BaseUrl(), "Base URL of the instance, without a path.")
    id: str = setting(_ID, "Its name in headers, traces and metrics; host:port when not set.", "")
    models: tuple[str, ...] | None = setting(
        ListOf(MODEL), "Model and adapter names it serves; asked of the instance when not set.", None
    )
    role: str = setting(Choice("both", "prefill", "decode"), "The stage it serves; policies read it.", "both")
    pool: str = setting(_LABEL, "A free label that policies may read.", "")
    zone: str = setting(_LABEL, "A free label that policies may read.", "")
    api_key: str = setting(
        Secret(least=1), "What it wants as `Authorization: Bearer …`; the client's own is passed on when not set.", ""
    )
    api_key_file: str = setting(SECRET_FILE, "A file that holds that key; read again when it changes.", "")
    kv_events: str = setting(ENDPOINT, "Its own address of KV events, instead of `kv_events.endpoint`.", "")
    kv_replay: str = setting(ENDPOINT, "Its own replay address, instead of `kv_events.replay`.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """Reading the instances' `/metrics`."""

    interval: float = setting(Duration("50ms", "1m"), "Time between two scrapes of one instance.", 1.0)
    timeout: float = setting(Duration("10ms", "1m"), "Longest wait for one page.", 2.0)
    unknown_after: float = setting(
        Duration("1s", "1h"), "Age from which a value, corrected by the router's own count till then, is unknown.", 30.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """Who is a candidate: probes of the instances' `/health`, and how requests sent to them end."""

    interval: float = setting(Duration("50ms", "1m"), "Time between two probes of one instance.", 1.0)
    timeout: float = setting(Duration("10ms", "1m"), "Longest wait for the answer to a probe.", 1.0)
    fall: int = setting(Integer(1, 100), "Probes in a row that fail and make an instance ill.", 2)
    rise: int = setting(Integer(1, 100), "Probes in a row that succeed and make it well again.", 2)
    failures: int = setting(
        Integer(1, 1000),
        "Requests in a row that fail (5xx but 501 and 503, no first byte in time, a broken answer) and eject it.",
        5,
    )
    slow_factor: int = setting(
        Integer(0, 1000),
        "Times its peers' wait for a stream's first token, per prompt token, from which it is ejected; 0 for never.",
        5,
    )
    ejection: float = setting(
        Duration("100ms", "1h"), "Time it is ejected for, times the falls it has not been forgiven.", 30.0
    )
    longest_ejection: float = setting(Duration("100ms", "24h"), "Longest time it is ejected for in one go.", 300.0)
    max_ejected_percent: int = setting(
        Integer(0, 100), "Most of all instances that may be ejected for failed requests; one always may.", 30
    )
    panic_below_percent: int = setting(
        Integer(0, 100),
        "Share of healthy instances below which all that take connections are candidates, whatever their health.",
        50,
    )
    slow_start: float = setting(
        Duration("0s", "1h"), "Time over which an instance that has come back gets its share again.", 30.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings:
    """What prefill costs; policies read it as `unprefilled_cost`, `prefill_rate` and `fetch_rate`."""

    attention_tokens: int = setting(
        Integer(1, 1_000_000_000),
        "Tokens of context at which attention costs as much as the weights: about active parameters / (2 × layers × "
        "query heads × head size); 6,923 for a 30B model.",
        6923,
    )
    fetch_rate: int = setting(
        Integer(0, 1_000_000_000),
        "Tokens in a second that come from host memory, disk or a store; measured when 0.",
        0,
    )


# Settings of the sources that know what caches hold, of the token ids they ask by, and of how long they may take.

_LMCACHE_ID = Text(r"[\x21-\x7e]{1,256}", "an LMCache instance id of 1 to 256 printable ASCII characters")
_TOPIC = Text(r"[\x21-\x7e]{0,256}", "at most 256 printable ASCII characters", empty=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixIndexSettings:
    """The embedded index of which instance holds which prefix."""

    enabled: bool = setting(Flag(), "Whether it runs; without it and another source every hit length is unknown.", True)
    max_bytes: int = setting(Size("1MiB", "16GiB"), "Memory it may take.", 64 << 20)
    warm_up: float = setting(
        Duration("0s", "24h"),
        "Time after which an instance that was not watched from its start is taken to hold nothing but what is known.",
        600.0,
    )
    folder: str = setting(
        PathRef(empty=True),
        "Where it is kept over a restart, hashes only; one router, one folder. Not kept when not set.",
        "",
    )
    save_every: float = setting(Duration("100ms", "1h"), "Time between two times of writing it there.", 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersSettings:
    """Other routers in front of the same instances, with which placements are shared."""

    urls: tuple[str, ...] = setting(
        ListOf(BaseUrl(), most=64),
        "Their admin ports; this router's own may be among them, so that all can have the same list.",
        (),
    )
    token: str = setting(
        Secret(),
        "A secret that all of them know; without one, whoever reaches the admin port may send placements.",
        "",
    )
    interval: float = setting(Duration("10ms", "10s"), "Time for which placements are gathered before they go.", 0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsSettings:
    """Listening to what the engines publish of their KV caches; it needs the extra `kv-events`, and token ids."""

    enabled: bool = setting(Flag(), "Whether it is listened to.", False)
    endpoint: str = setting(
        ENDPOINT,
        "Where an instance publishes (its `endpoint` in `--kv-events-config`); `{host}` and `{port}` are those of its "
        "URL.",
        "tcp://{host}:5557",
    )
    replay: str = setting(
        ENDPOINT, "Where it sends again what was missed (its `replay_endpoint`); empty for nowhere.", ""
    )
    bind: bool = setting(Flag(), "The instances connect, so the endpoint is bound here; each needs its own.", False)
    ranks: int = setting(Integer(1, 64), "Data-parallel ranks of an instance; each has the next port.", 1)
    topic: str = setting(_TOPIC, "What its topics begin with; `{host}` and `{port}` as above.", "")
    max_bytes: int = setting(Size("1MiB", "64GiB"), "Memory the index of blocks may take.", 1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class LmcacheSettings:
    """Asking LMCache's lookup service; it needs token ids."""

    url: str = setting(BaseUrl(empty=True), "Base URL of LMCache's lookup service; not asked when not set.", "")
    mode: str = setting(
        Choice("coordinator", "controller"),
        "What answers there: the coordinator (LMCache in a process of its own) or the controller (within the engines).",
        "coordinator",
    )
    instances: Mapping[str, str] = setting(
        MapOf(_LMCACHE_ID),
        "Which LMCache instance belongs to an instance, by the instance's id; the one of the same id where not set.",
        {},
    )
    models: Mapping[str, str] = setting(
        MapOf(MODEL),
        "The models looked up, and their names in LMCache's keys; all, under their own names, when empty. With the "
        "controller, adapters must be left out: it takes them for their base model.",
        {},
    )
    chunk_size: int = setting(Integer(1, 65536), "Tokens of a chunk, as LMCache is configured.", 256)
    world_size: int = setting(Integer(1, 1024), "Tensor-parallel ranks of each engine.", 1)
    answers_ttl: float = setting(Duration("10ms", "1m"), "Time an answer is used again for the same prompt.", 1.0)
    breaker_failures: int = setting(
        Integer(1, 1000), "Failed or late look-ups in a row after which the service is left alone.", 5
    )
    breaker_open: float = setting(Duration("100ms", "10m"), "Time it is left alone, before one look-up tries it.", 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """Where the token ids of prompts come from, for the sources that look prompts up by them."""

    source: str = setting(
        Choice("estimated", "engine", "local"),
        "estimated: no ids, lengths are bytes by a ratio learned per model. engine: asked of the instances' "
        "`/tokenize`. local: by the models' own files, needs the extra `tokenizers`.",
        "estimated",
    )
    timeout: float = setting(
        Duration("10ms", "1m"),
        "engine: longest wait for one instance; a decision waits no longer than `lookup` says.",
        2.0,
    )
    folders: Mapping[str, str] = setting(
        MapOf(PathRef()),
        "local: models, and the folder with each one's `tokenizer.json`, `tokenizer_config.json` and chat template; "
        '`"*"` stands for every other model.',
        {},
    )
    max_bytes: int = setting(
        Size("1MiB", "16GiB"),
        "local: memory of what was encoded before, so that a turn encodes only what is new.",
        64 << 20,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """How long a decision may wait for looked-up features; what is late is unknown."""

    deadline_base: float = setting(Duration("1ms", "10s"), "Time for any look-up.", 0.020)
    deadline_per_1k_tokens: float = setting(Duration("0ms", "1s"), "Added for every 1,000 prompt tokens.", 0.002)
    deadline_cap: float = setting(Duration("1ms", "10s"), "Longest time in all.", 0.300)


# Settings of what is left behind: spans, records and log lines.

#: Outcomes out of the ordinary, and later turns that went elsewhere: `smetric.telemetry.names.KEPT`.
TRACES_KEPT = ("held", "rejected", "no_candidate", "error", "migration")

_TRACE_URL = Text(
    r"https?://[\x21-\x7e]{0,1000}\{trace_id\}[\x21-\x7e]{0,1000}",
    "an http or https URL with {trace_id} in it, such as http://localhost:6006/redirects/traces/{trace_id}",
    empty=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What stands in spans, and which are kept; where they go is set by the `OTEL_…` variables."""

    keep: tuple[str, ...] = setting(
        ListOf(Choice(*TRACES_KEPT), most=len(TRACES_KEPT)),
        "What is traced whatever `OTEL_TRACES_SAMPLER` says. A policy that moves most turns makes that most requests: "
        "leave `migration` out then.",
        TRACES_KEPT,
    )
    keep_over_parent: bool = setting(
        Flag(),
        "Trace what `keep` names also where the caller whose trace is continued does not record it: that trace begins "
        "here. `false` leaves it to the caller.",
        True,
    )
    candidates: int = setting(Integer(0, 32), "Rows of the candidate table in a decision's span.", 8)
    ui_hints: bool = setting(Flag(), "Add the OpenInference attributes that tracing UIs show first.", True)
    ui_url: str = setting(
        _TRACE_URL,
        "Where a tracing UI shows one trace, with `{trace_id}` in it; linked by the live page. No links when not set.",
        "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """Writing decisions, and the traffic itself, to files. A bare path stands for a record with that `path`."""

    path: str = setting(
        PathRef(empty=True, what="a file"),
        "File that gets a line for each decision; `.gz` or `.zst` (before Python 3.14: extra `zstd`) at its end packs "
        "it. Not written when not set.",
        "",
    )
    trace: str = setting(
        PathRef(empty=True, what="a file"),
        "File that gets a line for each request, as hashes: a trace for studies and simulators. Not written when not "
        "set.",
        "",
    )
    max_file: int = setting(Size("64KiB", "64GiB"), "Size from which on a file is put aside.", 256 << 20)
    keep: int = setting(Integer(0, 10_000), "Files put aside that are kept of each, the newest.", 8)
    queue: int = setting(
        Size("64KiB", "1GiB"), "Lines that may wait for the disk; what does not fit is dropped and counted.", 8 << 20
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Log lines on standard error."""

    level: str = setting(Choice("debug", "info", "warning", "error"), "The least severe line that is written.", "info")
    format: str = setting(
        Choice("auto", "json", "console"),
        "auto is console on a terminal, else JSON; `NO_COLOR` keeps colours out.",
        "auto",
    )


# Settings of the ports: who may come, with how much, for how long, and how serving ends.

_HOST = Text(LABELS + r"[A-Za-z0-9.:_-]{1,253}", "a host name or an IP address")
_PORT = Integer(0, 65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where clients connect."""

    host: str = setting(_HOST, "Address that serves `/v1/…`, `/healthz` and `/readyz`; `0.0.0.0` for all.", "127.0.0.1")
    port: int = setting(_PORT, "Its port; 0 takes a free one.", 8080)
    cert_file: str = setting(
        PathRef(empty=True, what="a file"),
        "A file with its certificate and those that vouch for it (PEM), read again when it changes: clients then come "
        "by TLS alone. Plain HTTP when not set.",
        "",
    )
    key_file: str = setting(
        PathRef(empty=True, what="a file"), "A file with that certificate's key (PEM); not set: it is in the other.", ""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Admin:
    """Where operators connect."""

    host: str = setting(_HOST, "Address that serves `/metrics`, health and `/admin/…`; keep it private.", "127.0.0.1")
    port: int = setting(_PORT, "Its port; 0 takes a free one.", 9464)
    token: str = setting(
        Secret(),
        "What `/admin/…` is opened with, as `Authorization: Bearer …`; needed where `host` is not loopback.",
        "",
    )
    token_file: str = setting(SECRET_FILE, "A file that holds it; read again when it changes.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Sending a request to the chosen instance."""

    connect_timeout: float = setting(Duration("10ms", "1m"), "Longest wait for a connection.", 2.0)
    first_byte_timeout: float = setting(
        Duration("100ms", "1h"),
        "Longest wait for the first byte of the response, queueing and prefill included.",
        300.0,
    )
    idle_timeout: float = setting(Duration("100ms", "1h"), "Longest silence within a response.", 60.0)
    max_body: int = setting(Size("1KiB", "1GiB"), "Largest request body; a larger one is answered 413.", 32 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Ending."""

    announce: float = setting(
        Duration("0s", "10m"),
        "Time after SIGTERM in which `/readyz` says 503 but clients are still served, so that a load balancer notices.",
        0.0,
    )
    deadline: float = setting(
        Duration("0s", "1h"), "Time that running requests get after that before they are cut off.", 180.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What clients may ask for, and how many of them there may be."""

    max_headers: int = setting(Integer(1, 1000), "Most header lines of a request.", 100)
    max_header_bytes: int = setting(Size("1KiB", "1MiB"), "Most bytes of a request's head.", 32 << 10)
    body_timeout: float = setting(Duration("100ms", "1h"), "Longest time a request body may take to arrive.", 60.0)
    send_timeout: float = setting(Duration("100ms", "1h"), "Longest wait for a client that does not read.", 60.0)
    head_timeout: float = setting(Duration("100ms", "1h"), "Longest time a request's head may take to arrive.", 10.0)
    idle_timeout: float = setting(Duration("100ms", "1h"), "Time a connection without a request is kept.", 10.0)
    max_connections: int = setting(
        Integer(0, 1_000_000),
        "Most connections of clients; 0, and at most: half as many as open files, less a few.",
        0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """Keeping apart, in the engines, the tenants that `tenant_header` names."""

    cache_salt: str = setting(
        Choice("client", "tenant"),
        "client: it passes as the client sends it. tenant: it is set from the tenant's name and the secret, so that "
        "tenants share no prefix cache and cannot guess each other's prompts by its timing; requests of no tenant are "
        "refused.",
        "client",
    )
    secret: str = setting(Secret(), "What those salts are made with; the same in all routers.", "")
    secret_file: str = setting(SECRET_FILE, "A file that holds it; read again when it changes.", "")


# The sections that say which policy serves which request, and what watches over a change of one.

_NAME = Text(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", "at most 64 of A-Z a-z 0-9 _ . -", empty=True)
_TENANT = Text(r"[\x20-\x7e]{1,256}", "the name of a tenant, 1 to 256 printable ASCII characters")
#: Paths whose requests a policy decides on.
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/classify",
    "/v1/embeddings",
    "/v1/moderations",
    "/v1/pooling",
    "/v1/rerank",
    "/v1/score",
)

#: The name of the route that `policy` stands for.
LAST_ROUTE = "default"
#: How many policies may be in shadow of one, and how many observed.
MOST_SHADOWS = 8
MOST_OBSERVED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowSettings:
    """A policy beside the acting ones, in shadow or observed. A bare name stands for one with that `policy`."""

    policy: str = setting(PolicyRef(), "A shipped policy by name, or the path of a `.policy` file.")
    params: Mapping[str, float | str | bool] = setting(MapOf(ParamValue()), "Values for its parameters.", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySettings:
    """A policy that decides for a share of the conversations."""

    policy: str = setting(
        PolicyRef(empty=True), "A shipped policy by name, or the path of a `.policy` file; none when not set.", ""
    )
    params: Mapping[str, float | str | bool] = setting(MapOf(ParamValue()), "Values for its parameters.", {})
    share: float = setting(
        Number(0.0, 1.0),
        "Share of the conversations it decides for; each stays where it is from its first turn on.",
        0.05,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchSettings:
    """Which requests: all that is set must fit, and of a list one; nothing set fits all."""

    model: tuple[str, ...] = setting(
        OneOrMore(MODEL), "Models, as clients name them; an alias fits by what it stands for, too.", ()
    )
    tenant: tuple[str, ...] = setting(OneOrMore(_TENANT), "Tenants, as `tenant_header` names them.", ())
    path: tuple[str, ...] = setting(
        OneOrMore(Choice(*PATHS)), "Paths of the data port, such as `/v1/chat/completions`.", ()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """The policy for some of the requests."""

    name: str = setting(
        _NAME, "Its name in metrics, traces and `/admin/policies`; `route-1` and so on by place when not set.", ""
    )
    match: MatchSettings = setting(Section(MatchSettings), "Which requests.", MatchSettings())
    policy: str = setting(PolicyRef(), "A shipped policy by name, or the path of a `.policy` file.")
    params: Mapping[str, float | str | bool] = setting(MapOf(ParamValue()), "Values for the policy's parameters.", {})
    shadow: tuple[ShadowSettings, ...] = setting(
        ListOf(Section(ShadowSettings, shorthand="policy"), most=MOST_SHADOWS), "Policies evaluated beside it.", ()
    )
    canary: CanarySettings = setting(
        Section(CanarySettings), "A policy for a share of its conversations.", CanarySettings()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardrailSettings:
    """Restoring the policy that was there before, when load or errors leave their band after a policy file changed."""

    enabled: bool = setting(Flag(), "Whether it is done.", True)
    imbalance_percent: int = setting(
        Integer(110, 100_000),
        "Requests of the changed policy on the busiest instance, of the mean of those for the same models, from which "
        "load is out of band; a quarter more than before the change if that is more.",
        300,
    )
    errors_percent: int = setting(
        Integer(1, 100), "Share of requests answered 429 or 5xx, more than before the change, that is out of band.", 20
    )
    window: float = setting(Duration("100ms", "10m"), "Time over which both are taken.", 10.0)
    watch: float = setting(Duration("1s", "24h"), "Time after a change in which it is watched.", 600.0)


# The root of all settings; schema, manual and errors come from this table.
#
# Its sections are in files of their own; how all of it is read and checked as a whole is in `whole.py`.

__all__ = [
    "Admin",
    "CanarySettings",
    "Drain",
    "Forward",
    "GuardrailSettings",
    "HealthSettings",
    "InstanceSettings",
    "KvEventsSettings",
    "Limits",
    "Listen",
    "LmcacheSettings",
    "Log",
    "Lookup",
    "OverloadSettings",
    "PeersSettings",
    "PrefillSettings",
    "PrefixIndexSettings",
    "RecordSettings",
    "RouteSettings",
    "Scrape",
    "Settings",
    "ShadowSettings",
    "SloSettings",
    "Tenants",
    "TokenizerSettings",
    "Trace",
]

_PRIVATE = ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")

_HEADER = Text(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{0,64}", "the name of a header, of at most 64 characters", empty=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set."""

    listen: Listen = setting(Section(Listen), "Where clients connect.", Listen())
    admin: Admin = setting(Section(Admin), "Where operators connect.", Admin())
    instances: tuple[InstanceSettings, ...] = setting(
        ListOf(Section(InstanceSettings, shorthand="url")), "The vLLM instances to route to.", ()
    )
    policy: str = setting(PolicyRef(), "A shipped policy by name, or the path of a `.policy` file.", "smetric")
    params: Mapping[str, float | str | bool] = setting(
        MapOf(ParamValue()), "Values for the policy's parameters, checked against their declared ranges.", {}
    )
    shadow: tuple[ShadowSettings, ...] = setting(
        ListOf(Section(ShadowSettings, shorthand="policy"), most=MOST_SHADOWS),
        "Policies evaluated beside the acting one, on what it saw, and never acted on.",
        (),
    )
    canary: CanarySettings = setting(
        Section(CanarySettings), "A policy that decides for a share of the conversations.", CanarySettings()
    )
    routes: tuple[RouteSettings, ...] = setting(
        ListOf(Section(RouteSettings), most=64),
        "Policies by model, tenant or path: the first that matches decides, and `policy` where none does.",
        (),
    )
    guardrail: GuardrailSettings = setting(
        Section(GuardrailSettings),
        "Undoing a change of a policy file after which load or errors leave their band.",
        GuardrailSettings(),
    )
    models: Mapping[str, str] = setting(
        MapOf(MODEL), "Model aliases: the name a client sends, and the name that is sent on.", {}
    )
    scrape: Scrape = setting(Section(Scrape), "Reading the instances' `/metrics`.", Scrape())
    health: HealthSettings = setting(
        Section(HealthSettings), "Probes of the instances, and who is a candidate.", HealthSettings()
    )
    prefill: PrefillSettings = setting(Section(PrefillSettings), "What prefill costs.", PrefillSettings())
    prefix_index: PrefixIndexSettings = setting(
        Section(PrefixIndexSettings), "The embedded index of which instance holds which prefix.", PrefixIndexSettings()
    )
    kv_events: KvEventsSettings = setting(
        Section(KvEventsSettings), "Listening to what the engines publish of their KV caches.", KvEventsSettings()
    )
    peers: PeersSettings = setting(
        Section(PeersSettings), "Other routers in front of the same instances.", PeersSettings()
    )
    lmcache: LmcacheSettings = setting(Section(LmcacheSettings), "Asking LMCache's lookup service.", LmcacheSettings())
    tokenizer: TokenizerSettings = setting(
        Section(TokenizerSettings), "Where the token ids of prompts come from.", TokenizerSettings()
    )
    lookup: Lookup = setting(Section(Lookup), "How long a decision may wait for looked-up features.", Lookup())
    forward: Forward = setting(Section(Forward), "Sending a request to the chosen instance.", Forward())
    drain: Drain = setting(Section(Drain), "Ending.", Drain())
    limits: Limits = setting(Section(Limits), "What clients may ask for.", Limits())
    overload: OverloadSettings = setting(
        Section(OverloadSettings), "How much is taken at once, and what becomes of the rest.", OverloadSettings()
    )
    trace: Trace = setting(Section(Trace), "What stands in spans.", Trace())
    slo: SloSettings = setting(Section(SloSettings), "What counts as answered in time, in metrics.", SloSettings())
    record: RecordSettings = setting(
        Section(RecordSettings, shorthand="path"), "Writing decisions and traffic to files.", RecordSettings()
    )
    observe: tuple[ShadowSettings, ...] = setting(
        ListOf(Section(ShadowSettings, shorthand="policy"), most=MOST_OBSERVED),
        "Policies that a record is to be replayed with, by name or with `params`: what they read is recorded too, "
        "looked up once the request has been sent.",
        (),
    )
    log: Log = setting(Section(Log), "Log lines on standard error.", Log())
    state_dir: str = setting(
        PathRef(empty=True),
        "Where it is kept over a restart which instances are drained; who takes over from a router shares its folder. "
        "Not kept when not set.",
        "",
    )
    response_headers: bool = setting(Flag(), "Add the `x-smetric-…` headers to responses.", True)
    trusted_proxies: tuple[Network, ...] = setting(
        ListOf(NetworkRange()),
        "Peers whose `traceparent` is continued; from others a new trace is started and linked.",
        tuple(ipaddress.ip_network(text) for text in _PRIVATE),
    )
    tenants: Tenants = setting(Section(Tenants), "Keeping tenants apart in the engines.", Tenants())
    instance_networks: tuple[Network, ...] = setting(
        ListOf(NetworkRange()),
        "Networks of instances that are refused otherwise: link-local, multicast, metadata services of clouds.",
        (),
    )
    trust_session_headers: bool = setting(
        Flag(), "Let the header `x-session-turn` override the turn that the request's history says.", False
    )
    tenant_header: str = setting(
        _HEADER,
        "Header that names who asks, `req.tenant` in policies; have the gateway set it, for clients may send anything. "
        "Not read when not set.",
        "",
    )
    block_size: int = setting(
        Integer(1, 4096), "Tokens of a KV block; expected and looked-up hits are whole blocks.", 16
    )
    replicas: int = setting(
        Integer(1, 1024),
        "How many routers are in front of the same instances, this one among them. With several and no `peers` the "
        "prefix index never takes what it does not know for absent; `smetric doctor` checks that they share what they "
        "know.",
        1,
    )
