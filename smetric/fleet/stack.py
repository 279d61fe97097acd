"""The fleet that a configuration asks for: its instances, with their keys, and what judges them."""

from __future__ import annotations

from smetric.config import Settings
from smetric.config.credential import credential
from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.fleet.health import Health
from smetric.fleet.instance import Instance
from smetric.fleet.tolerance import tolerance_of
from smetric.telemetry.metrics import Metrics


def fleet_of(settings: Settings, metrics: Metrics) -> Fleet:
    """What the settings say; *metrics* are told of ejections.

    Raises:
        ConfigError: an instance's key cannot be read.
    """
    instances = [
        Instance(
            one.id,
            one.url,
            models=one.models,
            role=one.role,
            pool=one.pool,
            zone=one.zone,
            key=credential(f"instances: {one.id}: api_key_file", one.api_key, one.api_key_file),
            attention_tokens=settings.prefill.attention_tokens,
        )
        for one in settings.instances
    ]
    return Fleet(
        instances,
        VOCABULARY,
        unknown_after_s=settings.scrape.unknown_after,
        health=Health(instances, tolerance_of(settings), on_ejected=metrics.ejected),
    )
