"""Settings of the instances: which there are, how they are watched, and what prefill costs them."""

from __future__ import annotations

from dataclasses import dataclass

from smetric.config.address import BaseUrl
from smetric.config.kind import Choice, Integer, Secret, Text
from smetric.config.quantity import Duration
from smetric.config.section import ListOf, setting
from smetric.config.text import ENDPOINT, MODEL, SECRET_FILE

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
