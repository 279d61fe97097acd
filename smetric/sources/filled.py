"""Which look-ups and measured features a configuration fills, without building its sources."""

from __future__ import annotations

from smetric.config import Settings


def filled_by(settings: Settings) -> frozenset[str]:
    """The look-ups and measured features that some source of *settings* may know."""
    filled = {"prefill_rate", "qps"}
    if settings.prefix_index.enabled:
        filled.add("cached_tokens")
    if settings.lmcache.url or settings.prefill.fetch_rate:
        filled.add("fetch_rate")
    if settings.kv_events.enabled or settings.prefix_index.enabled:
        filled.add("hit_len")
    if settings.lmcache.url:
        filled |= {"hit_len", "host_hit_len", "disk_hit_len"}
        if settings.lmcache.mode != "controller":  # it knows of no store, so that tier is always unknown
            filled.add("store_hit_len")
    return frozenset(filled)
