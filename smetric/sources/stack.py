"""Sources that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from smetric.sources.kv_events.publisher import publishers
from smetric.sources.lmcache.source import lmcache_sources
from smetric.sources.measured import Adapters, FetchRates, PrefillRates, PrefillTimes, PromptClasses, RequestRates
from smetric.sources.prefix_index.cut import Cutting, TokenCutting
from smetric.sources.prefix_index.file import IndexFile
from smetric.sources.prefix_index.index import PrefixIndex, PrefixIndexes, PrefixPart, PrefixTokens
from smetric.sources.shared.peers import Peers
from smetric.sources.source import Background, Follower, Source, SourceCounts, TokenIds
from smetric.sources.vllm import Prober, VllmSource

if TYPE_CHECKING:
    from smetric.sources.kv_events.source import KvEvents

#: Of the memory of the prefix index, the part that blocks of text have where there are blocks of token ids as well.
TEXT_SHARE = 4


@dataclass(frozen=True, slots=True)
class SourceStack:
    """What knows something about instances.

    Args:
        scraper: reads the instances' `/metrics`.
        sources: all sources, best first.
        indexes: the prefix index; none where it is off.
        prefill_times: how long instances prefill, as far as that is known.
        peers: the exchange of placements with other routers, where there are any.
        kv_events: the source of KV events, where it is enabled.
        background: everything that starts and stops with the application, in that order.
    """

    scraper: VllmSource
    sources: list[Source]
    indexes: PrefixIndexes
    prefill_times: PrefillTimes
    peers: Peers | None
    kv_events: KvEvents | None
    background: list[Background]


def source_stack(
    settings: Settings,
    fleet: Fleet,
    counts: SourceCounts,
    token_ids: TokenIds,
    deadline: Callable[[int], float],
    on_restart: Callable[[Instance], None],
) -> SourceStack:
    """Build the stack: what is in the GPU by the engines' word, then by our own record, then what LMCache holds.

    Args:
        settings: everything that can be set.
        fleet: the instances.
        counts: counts scrapes and look-ups.
        token_ids: gives the ids that some sources look prompts up by.
        deadline: seconds the router gives the look-ups of a prompt, from its tokens.
        on_restart: told of an instance whose process is a new one.

    Raises:
        ConfigError: an address cannot be used, or a package is missing.
    """
    resolve = resolve_unless(partial(odd_address, allowed=networks(settings.instance_networks)))
    scraper = VllmSource(
        fleet.instances,
        interval_s=settings.scrape.interval,
        timeout_s=settings.scrape.timeout,
        resolve=resolve,
        on_restart=on_restart,
        on_scrape=lambda instance, result, seconds: counts.scraped(instance.id, result, seconds),
    )
    sources: list[Source] = []
    kv_events = _kv_events(settings, fleet.instances, token_ids) if settings.kv_events.enabled else None
    if kv_events is not None:
        sources.append(kv_events)
    prefixes = _prefix_sources(settings, token_ids) if settings.prefix_index.enabled else []
    by_text = [one for one in prefixes if isinstance(one, PrefixIndex)]
    sources += prefixes
    indexes = PrefixIndexes(one if isinstance(one, PrefixIndex) else one.index for one in prefixes)
    if settings.lmcache.url:
        sources += lmcache_sources(settings, token_ids, deadline, counts)
        sources += map(PrefixPart, by_text)
    prefill_times = PrefillTimes()
    followers = _followers(settings, fleet, prefill_times)
    sources += followers
    # Prompts without ids are in the index of text alone.
    measures: list[Measure] = [*by_text, *followers]
    for measure in measures:
        fleet.measured_by(measure)
    prober = Prober(
        fleet.instances,
        fleet.health,
        interval_s=settings.health.interval,
        timeout_s=settings.health.timeout,
        resolve=resolve,
    )
    background: list[Background] = [prober, scraper, *sources]
    peers: Peers | None = None
    if indexes and settings.prefix_index.folder:
        folder = Path(settings.prefix_index.folder)
        background.append(IndexFile(indexes, folder, interval_s=settings.prefix_index.save_every))
    if indexes and settings.peers.urls:
        urls, token = settings.peers.urls, settings.peers.token
        peers = Peers(indexes, fleet, urls, token=token, interval_s=settings.peers.interval)
        background.append(peers)
    return SourceStack(scraper, sources, indexes, prefill_times, peers, kv_events, background)


def _followers(settings: Settings, fleet: Fleet, prefill_times: PrefillTimes) -> list[Follower]:
    """What learns from where requests go and when they are answered, *prefill_times* among them."""
    return [
        PrefillRates(),
        prefill_times,
        FetchRates(prefill_times, configured=settings.prefill.fetch_rate),
        RequestRates(),
        PromptClasses(),
        Adapters(fleet.instances),
    ]


def _prefix_sources(settings: Settings, token_ids: TokenIds) -> list[PrefixTokens | PrefixIndex]:
    """The prefix index: by token ids where a tokenizer gives them, and by text."""
    yields = bool(settings.lmcache.url)

    def index(max_bytes: int, cutting: Cutting | None = None) -> PrefixIndex:
        return PrefixIndex(
            max_bytes,
            warm_up_s=settings.prefix_index.warm_up,
            sees_all=settings.replicas == 1 or bool(settings.peers.urls),
            yields=yields,
            cutting=cutting,
        )

    most = settings.prefix_index.max_bytes
    if settings.tokenizer.source == "estimated":
        return [index(most)]
    text, cutting = index(most // TEXT_SHARE), TokenCutting(settings.block_size)
    return [PrefixTokens(index(most - text.table.max_bytes, cutting), cutting, text, token_ids, yields=yields), text]


def grains(settings: Settings) -> dict[str, int]:
    """Tokens in which a source of `hit_len` counts, by its name, where that is more than a block of the engine."""
    block_of_text, chunk = int(BLOCK_BYTES / INITIAL), settings.lmcache.chunk_size
    return {
        PrefixTokens.name: settings.block_size,
        PrefixIndex.name: block_of_text,
        PrefixPart.name: block_of_text,
        "lmcache:host": chunk,
        "lmcache:likely": chunk,
    }


def require_token_ids(settings: Settings) -> None:
    """Refuse a source that looks prompts up by token ids where nothing gives any.

    Raises:
        ConfigError: which one, and what to set.
    """
    for wanted, name in ((settings.lmcache.url, "lmcache.url"), (settings.kv_events.enabled, "kv_events.enabled")):
        if wanted and settings.tokenizer.source == "estimated":
            raise ConfigError(
                f"{name} is set, but tokenizer.source is estimated, and its look-ups need token ids; set "
                "tokenizer.source to engine or local"
            )


def _kv_events(settings: Settings, instances: Iterable[Instance], token_ids: TokenIds) -> KvEvents:
    """The source that listens to what engines publish; ZeroMQ is imported only here."""
    at = publishers(settings, instances)
    try:
        from smetric.sources.kv_events.source import KvEvents
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"kv_events.enabled needs a package that is not installed ({error.name}): "
            "pip install 'smetric-router[kv-events]'"
        ) from error
    return KvEvents(at, token_ids, max_bytes=settings.kv_events.max_bytes)
