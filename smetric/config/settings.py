"""The table of all settings: name, kind, default and one sentence each; schema, manual and errors come from it.

How values are read from a file, the environment and flags is in `layers.py`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from smetric.config.address import BaseUrl, FolderRef, Network, NetworkRange, PolicyRef
from smetric.config.kind import Choice, Flag, Integer, ParamValue, Secret, Text, did_you_mean
from smetric.config.layers import Flagged, place_of, stack
from smetric.config.quantity import Duration, Size
from smetric.config.raw import Table
from smetric.config.section import ListOf, MapOf, Section, setting
from smetric.errors import ConfigError

_HOST = Text(r"[A-Za-z0-9.:_-]{1,253}", "a host name or an IP address")
_PORT = Integer(0, 65535)
_LABEL = Text(r"[A-Za-z0-9._:/\[\]-]{0,128}", "at most 128 of A-Z a-z 0-9 . _ : / [ ] -", empty=True)
_ID = Text(r"[A-Za-z0-9._:\[\]-]{1,128}", "1 to 128 of A-Z a-z 0-9 . _ : [ ] -")
_MODEL = Text(r"[\x21-\x7e]{1,256}", "a model name of 1 to 256 printable ASCII characters")
_LMCACHE_ID = Text(r"[\x21-\x7e]{1,256}", "an LMCache instance id of 1 to 256 printable ASCII characters")
_ENDPOINT = Text(
    r"tcp://\S{1,255}:(?:[0-9]{1,5}|[0-9]?\{port\})|ipc://\S{1,255}",
    "a ZeroMQ address such as tcp://{host}:5557",
    empty=True,
)
_TOPIC = Text(r"[\x21-\x7e]{0,256}", "at most 256 printable ASCII characters", empty=True)
_PRIVATE = ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where clients connect."""

    host: str = setting(_HOST, "Address that serves `/v1/…`, `/healthz` and `/readyz`; `0.0.0.0` for all.", "127.0.0.1")
    port: int = setting(_PORT, "Its port; 0 takes a free one.", 8080)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admin:
    """Where operators connect."""

    host: str = setting(_HOST, "Address that serves `/metrics`, health and `/admin/…`; keep it private.", "127.0.0.1")
    port: int = setting(_PORT, "Its port; 0 takes a free one.", 9464)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSettings:
    """One vLLM instance. A bare URL stands for an instance with that `url`."""

    url: str = setting(BaseUrl(), "Base URL of the instance, without a path.")
    id: str = setting(_ID, "Its name in headers, traces and metrics; host:port when not set.", "")
    models: tuple[str, ...] | None = setting(
        ListOf(_MODEL), "Model and adapter names it serves; asked of the instance when not set.", None
    )
    role: str = setting(Choice("both", "prefill", "decode"), "The stage it serves; policies read it.", "both")
    pool: str = setting(_LABEL, "A free label that policies may read.", "")
    zone: str = setting(_LABEL, "A free label that policies may read.", "")
    kv_events: str = setting(_ENDPOINT, "Its own address of KV events, instead of `kv_events.endpoint`.", "")
    kv_replay: str = setting(_ENDPOINT, "Its own replay address, instead of `kv_events.replay`.", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """Reading the instances' `/metrics`."""

    interval: float = setting(Duration("50ms", "1m"), "Time between two scrapes of one instance.", 1.0)
    timeout: float = setting(Duration("10ms", "1m"), "Longest wait for one page.", 2.0)
    unknown_after: float = setting(
        Duration("1s", "1h"), "Age from which a value, corrected by the router's own count till then, is unknown.", 30.0
    )


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
        FolderRef(empty=True),
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
        _ENDPOINT,
        "Where an instance publishes (its `endpoint` in `--kv-events-config`); `{host}` and `{port}` are those of its "
        "URL.",
        "tcp://{host}:5557",
    )
    replay: str = setting(
        _ENDPOINT, "Where it sends again what was missed (its `replay_endpoint`); empty for nowhere.", ""
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
        MapOf(_MODEL),
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
        MapOf(FolderRef()),
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

    deadline: float = setting(
        Duration("0s", "1h"), "Time that running requests get after SIGTERM before they are cut off.", 180.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client connection may ask for."""

    max_headers: int = setting(Integer(1, 1000), "Most header lines of a request.", 100)
    max_header_bytes: int = setting(Size("1KiB", "1MiB"), "Most bytes of a request's head.", 32 << 10)
    body_timeout: float = setting(Duration("100ms", "1h"), "Longest time a request body may take to arrive.", 60.0)
    send_timeout: float = setting(Duration("100ms", "1h"), "Longest wait for a client that does not read.", 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What stands in spans; where they go is set by the `OTEL_…` variables."""

    candidates: int = setting(Integer(0, 32), "Rows of the candidate table in a decision's span.", 8)
    ui_hints: bool = setting(Flag(), "Add the OpenInference attributes that tracing UIs show first.", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Log lines on standard error."""

    level: str = setting(Choice("debug", "info", "warning", "error"), "The least severe line that is written.", "info")
    format: str = setting(Choice("auto", "json", "console"), "auto is console on a terminal, else JSON.", "auto")


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
    models: Mapping[str, str] = setting(
        MapOf(_MODEL), "Model aliases: the name a client sends, and the name that is sent on.", {}
    )
    scrape: Scrape = setting(Section(Scrape), "Reading the instances' `/metrics`.", Scrape())
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
    limits: Limits = setting(Section(Limits), "What one client connection may ask for.", Limits())
    trace: Trace = setting(Section(Trace), "What stands in spans.", Trace())
    log: Log = setting(Section(Log), "Log lines on standard error.", Log())
    response_headers: bool = setting(Flag(), "Add the `x-smetric-…` headers to responses.", True)
    trusted_proxies: tuple[Network, ...] = setting(
        ListOf(NetworkRange()),
        "Peers whose `traceparent` is continued; from others a new trace is started and linked.",
        tuple(ipaddress.ip_network(text) for text in _PRIVATE),
    )
    trust_session_headers: bool = setting(
        Flag(), "Let `x-session-turn` and `x-session-id` override what the request's history says.", False
    )
    block_size: int = setting(
        Integer(1, 4096), "Tokens of a KV block; expected and looked-up hits are whole blocks.", 16
    )
    replicas: int = setting(
        Integer(1, 1024),
        "How many routers are in front of the same instances, this one among them; `smetric doctor` checks that they "
        "share what they know.",
        1,
    )

    @classmethod
    def load(cls, path: Path | None, env: Mapping[str, str], flags: Sequence[Flagged] = ()) -> Settings:
        """The settings of the file *path*, the `SMETRIC_…` variables of *env* and *flags*; the later win.

        Raises:
            ConfigError: anything in them cannot be used; one line that names the place.
        """
        return from_table(stack(path, env, flags, SETTINGS))


#: The root of the table.
SETTINGS: Section[Settings] = Section(Settings)


def from_table(table: Table) -> Settings:
    """The settings that *table* spells out, checked one by one and against each other."""
    settings = SETTINGS.parse(table, "")
    settings = replace(settings, instances=tuple(_named(instance) for instance in settings.instances))
    for path, problem in _contradictions(settings):
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        raise ConfigError(f"{place_of(table, path)}: {name}: {problem}")
    return settings


def schema() -> dict[str, Any]:
    """JSON Schema of a configuration file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "SMetric configuration",
        **SETTINGS.schema(),
    }


def _named(instance: InstanceSettings) -> InstanceSettings:
    if instance.id:
        return instance
    parts = urlsplit(instance.url)
    return replace(
        instance, id=parts.netloc if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"
    )


def _contradictions(settings: Settings) -> list[tuple[tuple[str | int, ...], str]]:
    """Settings that do not go together: the one to change, and why."""
    found: list[tuple[tuple[str | int, ...], str]] = []
    for field, values in (
        ("id", [instance.id for instance in settings.instances]),
        ("url", [instance.url for instance in settings.instances]),
    ):
        for i, value in enumerate(values):
            if value in values[:i]:
                found.append((("instances", i), f"{field} {value} stands twice; give each instance its own {field}"))
    ids = [instance.id for instance in settings.instances]
    found += [
        (("lmcache", "instances", id), f"no instance has this id{did_you_mean(id, ids)}")
        for id in settings.lmcache.instances
        if id not in ids
    ]
    if settings.peers.urls and not settings.prefix_index.enabled:
        found.append((("peers", "urls"), "set, but prefix_index.enabled is false: there is nothing to share; drop one"))
    listen, admin = settings.listen, settings.admin
    everywhere = {"0.0.0.0", "::"}
    if listen.port == admin.port != 0 and (listen.host == admin.host or everywhere & {listen.host, admin.host}):
        found.append((("admin", "port"), f"{admin.port} is listen.port too; use another port"))
    if settings.tokenizer.source == "local" and not settings.tokenizer.folders:
        found.append(
            (
                ("tokenizer", "folders"),
                'empty, but tokenizer.source is local; name each model\'s folder, or one for "*"',
            )
        )
    scrape, lookup = settings.scrape, settings.lookup
    for section, smaller, low, larger, high in (
        ("scrape", "interval", scrape.interval, "unknown_after", scrape.unknown_after),
        ("lookup", "deadline_base", lookup.deadline_base, "deadline_cap", lookup.deadline_cap),
    ):
        if low > high:
            found.append(
                ((section, larger), f"{high:g}s is less than {smaller}, {low:g}s; raise it or lower {smaller}")
            )
    return found
