"""Construction of the sources that a configuration asks for. Modules of optional sources are imported on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from smetric.config import Settings
from smetric.config.values import networks, odd_address
from smetric.errors import ConfigError
from smetric.fleet.fleet import Fleet, Measure
from smetric.fleet.instance import Instance
from smetric.http.addresses import resolve_unless
from smetric.request.prompt import BLOCK_BYTES
from smetric.request.request import INITIAL
from smetric.sources.measured import Adapters, FetchRates, Prefills, PromptClasses, RequestRates
from smetric.sources.prefix_index.index import PrefixIndex, PrefixIndexes, PrefixPart
from smetric.sources.prefix_index.persistence import IndexFile
from smetric.sources.source import Background, Follower, Source, SourceCounts, TokenIds
from smetric.sources.tokens.request_tokens import token_source
from smetric.sources.vllm import Prober, Scraper

if TYPE_CHECKING:
    from smetric.sources.kv_events.source import KvEvents
    from smetric.sources.prefix_index.tokens import TokenPrefixIndex
    from smetric.sources.shared.peers import Peers

#: The index of text gets 1 / TEXT_SHARE of the prefix index's memory if there is an index of token ids as well.
TEXT_SHARE = 4


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of one router.

    Args:
        scraper: reads the instances' `/metrics`.
        ranked: all sources, best first.
        indexes: the prefix index; empty if it is off.
        prefills: how long instances prefill, as far as that is known.
        peers: the exchange of placements with other routers, if there are any.
        kv_events: the source of KV events, if it is enabled.
        background: everything that starts and stops with the application, in that order.
    """

    scraper: Scraper
    ranked: list[Source]
    indexes: PrefixIndexes
    prefills: Prefills
    peers: Peers | None
    kv_events: KvEvents | None
    background: list[Background]


def build_sources(
    settings: Settings,
    fleet: Fleet,
    counts: SourceCounts,
    token_ids: TokenIds,
    deadline: Callable[[int], float],
    on_restart: Callable[[Instance], None],
) -> Sources:
    """Build the sources: what engines report of their GPU, then our own record of it, then what LMCache holds.

    Args:
        settings: everything that can be set.
        fleet: the instances.
        counts: counts scrapes and look-ups.
        token_ids: gives the ids that some sources look prompts up by.
        deadline: seconds the router gives the look-ups of a prompt, from its tokens.
        on_restart: called with an instance whose process is a new one.

    Raises:
        ConfigError: an address cannot be used, or a package is missing.
    """
    prefills = Prefills()
    followers: list[Follower] = [
        prefills,
        FetchRates(prefills, configured=settings.prefill.fetch_rate),
        RequestRates(),
        PromptClasses(),
        Adapters(fleet.instances),
    ]
    kv_events = _kv_events(settings, fleet, token_ids)
    tokens, text = _prefix_index(settings, token_ids)
    ranked: list[Source | None] = [kv_events, tokens, text]
    if settings.lmcache.url:
        from smetric.sources.lmcache.source import lmcache_sources

        ranked += lmcache_sources(settings, token_ids, deadline, counts)
        ranked.append(None if text is None else PrefixPart(text))
    # Prompts without ids are only in the index of text, so `cached_tokens` is measured there.
    measures: list[Measure | None] = [text, *followers]
    for measure in measures:
        if measure is not None:
            fleet.measured_by(measure)

    resolve = resolve_unless(partial(odd_address, allowed=networks(settings.instance_networks)))
    prober = Prober(
        fleet.instances,
        fleet.health,
        interval_s=settings.health.interval,
        timeout_s=settings.health.timeout,
        resolve=resolve,
    )
    scraper = Scraper(
        fleet.instances,
        interval_s=settings.scrape.interval,
        timeout_s=settings.scrape.timeout,
        resolve=resolve,
        on_restart=on_restart,
        on_scrape=lambda instance, result, seconds: counts.scraped(instance.id, result, seconds),
        on_sleep=fleet.health.sleeps,
    )
    sources = [source for source in (*ranked, *followers) if source is not None]
    background: list[Background] = [prober, scraper, *sources]
    indexes = PrefixIndexes(index for index in (None if tokens is None else tokens.index, text) if index is not None)
    if indexes and settings.prefix_index.folder:
        folder = Path(settings.prefix_index.folder)
        background.append(IndexFile(indexes, folder, interval_s=settings.prefix_index.save_every))
    peers: Peers | None = None
    if indexes and settings.peers.urls:
        from smetric.sources.shared.peers import Peers

        urls, token = settings.peers.urls, settings.peers.token
        peers = Peers(indexes, fleet, urls, token=token, interval_s=settings.peers.interval)
        background.append(peers)
    return Sources(scraper, sources, indexes, prefills, peers, kv_events, background)


def filled_by(settings: Settings) -> frozenset[str]:
    """Return the look-ups and measured features that some source of *settings* may know."""
    filled = {"prefill_rate", "qps"}
    if settings.prefix_index.enabled:
        filled.add("cached_tokens")
    has_tiers = settings.lmcache.url or settings.kv_events.enabled
    if has_tiers or settings.prefill.fetch_rate:
        filled.add("fetch_rate")
    if has_tiers or settings.prefix_index.enabled:
        filled.add("hit_len")
    if has_tiers:
        filled |= {"host_hit_len", "disk_hit_len"}
    if settings.lmcache.url and settings.lmcache.mode != "controller":  # a controller does not report the shared store
        filled.add("store_hit_len")
    return frozenset(filled)


def grains(settings: Settings) -> dict[str, int]:
    """Return the tokens in which a source of `hit_len` counts, by its name, if that is more than an engine's block."""
    block_of_text, chunk = int(BLOCK_BYTES / INITIAL), settings.lmcache.chunk_size
    return {
        "prefix_index:tokens": settings.block_size,
        PrefixIndex.name: block_of_text,
        PrefixPart.name: block_of_text,
        "lmcache:host": chunk,
        "lmcache:likely": chunk,
    }


def require_token_ids(settings: Settings) -> None:
    """Refuse a source that looks prompts up by token ids if nothing gives any.

    Raises:
        ConfigError: names the source and what to set.
    """
    for wanted, name in ((settings.lmcache.url, "lmcache.url"), (settings.kv_events.enabled, "kv_events.enabled")):
        if wanted and token_source(settings) == "estimated":
            raise ConfigError(
                f"{name} is set, but tokenizer.source is estimated, and its look-ups need token ids; set "
                "tokenizer.source to auto, engine or local"
            )


def _prefix_index(settings: Settings, token_ids: TokenIds) -> tuple[TokenPrefixIndex | None, PrefixIndex | None]:
    """Build the prefix index: by token ids if there is a tokenizer, and by text; (None, None) if it is off."""
    if not settings.prefix_index.enabled:
        return None, None
    yields, most = bool(settings.lmcache.url), settings.prefix_index.max_bytes

    def index(max_bytes: int, block_tokens: int = 0) -> PrefixIndex:
        return PrefixIndex(
            max_bytes,
            warm_up_s=settings.prefix_index.warm_up,
            sees_all=settings.replicas == 1 or bool(settings.peers.urls),
            yields=yields,
            block_tokens=block_tokens,
        )

    if token_source(settings) == "estimated":
        return None, index(most)
    from smetric.sources.prefix_index.tokens import TokenPrefixIndex

    text = index(most // TEXT_SHARE)
    tokens = index(most - text.table.max_bytes, settings.block_size)
    return TokenPrefixIndex(tokens, text, token_ids, yields=yields), text


def _kv_events(settings: Settings, fleet: Fleet, token_ids: TokenIds) -> KvEvents | None:
    """Build the source that listens to what engines publish, if it is enabled. Only this imports ZeroMQ."""
    if not settings.kv_events.enabled:
        return None
    from smetric.sources.kv_events.publisher import publishers

    at = publishers(settings, fleet.instances)
    try:
        from smetric.sources.kv_events.source import KvEvents
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"kv_events.enabled needs a package that is not installed ({error.name}): "
            "pip install 'smetric-router[kv-events]'"
        ) from error
    return KvEvents(at, token_ids, max_bytes=settings.kv_events.max_bytes)
