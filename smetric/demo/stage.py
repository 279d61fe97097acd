"""What the demo runs on: four small emulated engines, LMCache's lookup over them, and a router's settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from smetric.config.settings import (
    Admin,
    InstanceSettings,
    Listen,
    LmcacheSettings,
    Lookup,
    PrefixIndexSettings,
    Settings,
    TokenizerSettings,
)
from smetric.demo.dialect import MODEL
from smetric.emulator.fleet import EmulatedFleet
from smetric.emulator.instance import InstanceSettings as EngineSettings
from smetric.sim.engine import EngineConfig

INSTANCES = 4
#: KV blocks of one engine. All sessions end with some 120,000 tokens together: there is room for its share and some
#: more, far from room for all, so that it matters where a session's next request goes.
BLOCKS = 2560
BLOCK_SIZE = 16


def engines(speed: float = 1.0) -> EmulatedFleet:
    """The engines, *speed* times as fast as an H20; they listen while entered."""
    config = EngineConfig(block_size=BLOCK_SIZE, blocks=BLOCKS, max_model_len=BLOCKS * BLOCK_SIZE)
    return EmulatedFleet(INSTANCES, EngineSettings(model=MODEL, engine=config, time_scale=speed), lmcache=True)


def settings(
    urls: Sequence[str], policy: str, *, lmcache_url: str = "", port: int = 0, admin_port: int = 0
) -> Settings:
    """A router over the engines at *urls*, everything else as it comes.

    With *lmcache_url* the lookup service there tells what instances hold, instead of the prefix index.
    """
    instances = {f"vllm-{n}": url for n, url in enumerate(urls, 1)}
    told = Settings(
        listen=Listen(port=port),
        admin=Admin(port=admin_port),
        instances=tuple(InstanceSettings(id=id, url=url) for id, url in instances.items()),
        policy=policy,
    )
    if not lmcache_url:
        return told
    ids = {id: url.removeprefix("http://") for id, url in instances.items()}
    return replace(
        told,
        prefix_index=PrefixIndexSettings(enabled=False),
        lmcache=LmcacheSettings(url=lmcache_url, instances=ids),
        tokenizer=TokenizerSettings(source="engine"),
        # Engines, tokens and look-ups share this machine: where it is busy, they take longer than they ever would.
        lookup=Lookup(deadline_base=1.0, deadline_cap=2.0),
    )
