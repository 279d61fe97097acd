"""The root of all settings; schema, manual and errors come from this table.

Its sections are in files of their own; how all of it is read and checked as a whole is in `whole.py`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from smetric.config.address import Network, NetworkRange, PathRef, PolicyRef
from smetric.config.caches import (
    KvEventsSettings,
    LmcacheSettings,
    Lookup,
    PeersSettings,
    PrefixIndexSettings,
    TokenizerSettings,
)
from smetric.config.evidence import Log, RecordSettings, Trace
from smetric.config.instances import HealthSettings, InstanceSettings, PrefillSettings, Scrape
from smetric.config.kind import Flag, Integer, ParamValue, Text
from smetric.config.overload import OverloadSettings
from smetric.config.ports import Admin, Drain, Forward, Limits, Listen, Tenants
from smetric.config.routing import (
    MOST_OBSERVED,
    MOST_SHADOWS,
    CanarySettings,
    GuardrailSettings,
    RouteSettings,
    ShadowSettings,
)
from smetric.config.section import ListOf, MapOf, Section, setting
from smetric.config.service_level import SloSettings
from smetric.config.text import MODEL

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
