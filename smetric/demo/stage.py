"""What the demo runs on: four small emulated engines, and the settings of a router in front of them."""

from __future__ import annotations

from collections.abc import Sequence

from smetric.config.settings import Admin, InstanceSettings, Listen, Settings
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
    return EmulatedFleet(INSTANCES, EngineSettings(model=MODEL, engine=config, time_scale=speed))


def settings(urls: Sequence[str], policy: str, *, port: int = 0, admin_port: int = 0) -> Settings:
    """A router over the engines at *urls*, everything else as it comes."""
    return Settings(
        listen=Listen(port=port),
        admin=Admin(port=admin_port),
        instances=tuple(InstanceSettings(id=f"vllm-{n}", url=url) for n, url in enumerate(urls, 1)),
        policy=policy,
    )
