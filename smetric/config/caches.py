"""Settings of the sources that know what caches hold, of the token ids they ask by, and of how long they may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smetric.config.address import BaseUrl, PathRef
from smetric.config.kind import Choice, Flag, Integer, Secret, Text
from smetric.config.quantity import Duration, Size
from smetric.config.section import ListOf, MapOf, setting
from smetric.config.text import ENDPOINT, MODEL

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
