"""Which look-up features a configuration fills, without building its sources."""

from __future__ import annotations

from smetric.config import Settings


def filled_by(settings: Settings) -> frozenset[str]:
    """The look-up features that some source of *settings* may know."""
    filled: set[str] = set()
    if settings.kv_events.enabled or settings.prefix_index.enabled:
        filled.add("hit_len")
    if settings.lmcache.url:
        filled |= {"hit_len", "host_hit_len", "disk_hit_len"}
        if settings.lmcache.mode != "controller":  # it knows of no store, so that tier is always unknown
            filled.add("store_hit_len")
    return frozenset(filled)
