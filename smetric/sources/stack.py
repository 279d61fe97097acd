"""The sources that a configuration asks for, in the order in which look-ups fall from one to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from smetric.config import Settings
from smetric.errors import ConfigError
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.sources.index_file import IndexFile
from smetric.sources.kv_publisher import kv_events_source
from smetric.sources.lmcache import lmcache_tiers
from smetric.sources.peers import Peers
from smetric.sources.prefix_index import PrefixIndex
from smetric.sources.prefix_part import PrefixPart
from smetric.sources.probe import Prober
from smetric.sources.source import Background, Source
from smetric.sources.vllm import VllmSource
from smetric.telemetry.metrics import Metrics
from smetric.token_ids import TokenIds


@dataclass(frozen=True, slots=True)
class SourceStack:
    """What knows something about instances.

    Args:
        scraper: reads the instances' `/metrics`.
        sources: all sources, best first.
        index: the prefix index, where it is on.
        peers: the exchange of placements with other routers, where there are any.
        background: everything that starts and stops with the application, in that order.
    """

    scraper: VllmSource
    sources: list[Source]
    index: PrefixIndex | None
    peers: Peers | None
    background: list[Background]


def source_stack(
    settings: Settings,
    fleet: Fleet,
    metrics: Metrics,
    token_ids: TokenIds,
    deadline: Callable[[int], float],
    on_restart: Callable[[Instance], None],
) -> SourceStack:
    """Build the stack: what is in the GPU by the engines' word, then by our own record, then what LMCache holds.

    Args:
        settings: everything that can be set.
        fleet: the instances.
        metrics: told of scrapes, look-ups and events.
        token_ids: gives the ids that some sources look prompts up by.
        deadline: seconds the router gives the look-ups of a prompt, from its tokens.
        on_restart: told of an instance whose process is a new one.

    Raises:
        ConfigError: an address cannot be used, or a package is missing.
    """
    scraper = VllmSource(
        fleet.instances,
        interval_s=settings.scrape.interval,
        timeout_s=settings.scrape.timeout,
        on_restart=on_restart,
        on_scrape=lambda instance, result, seconds: metrics.scraped(instance.id, result, seconds),
    )
    sources: list[Source] = [scraper]
    if settings.kv_events.enabled:
        sources.append(kv_events_source(settings, fleet.instances, token_ids, metrics))
    index: PrefixIndex | None = None
    if settings.prefix_index.enabled:
        index = PrefixIndex(
            settings.prefix_index.max_bytes,
            warm_up_s=settings.prefix_index.warm_up,
            sees_all=settings.replicas == 1 or bool(settings.peers.urls),
            yields=bool(settings.lmcache.url),
        )
        sources.append(index)
    if settings.lmcache.url:
        sources += lmcache_tiers(settings, token_ids, deadline, metrics)
        if index is not None:
            sources.append(PrefixPart(index))
    prober = Prober(
        fleet.instances, fleet.health, interval_s=settings.health.interval, timeout_s=settings.health.timeout
    )
    background: list[Background] = [prober, *sources]
    peers: Peers | None = None
    if index is not None and settings.prefix_index.folder:
        folder = Path(settings.prefix_index.folder)
        background.append(IndexFile(index, folder, interval_s=settings.prefix_index.save_every))
    if index is not None and settings.peers.urls:
        peers = Peers(index, fleet, settings.peers.urls, token=settings.peers.token, interval_s=settings.peers.interval)
        background.append(peers)
    return SourceStack(scraper, sources, index, peers, background)


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
