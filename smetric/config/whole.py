"""All settings as a whole: read from a file, the environment and flags, checked, and against each other.

What one setting may be is said where it stands (`settings.py`), what must hold between them in `contradictions.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smetric.config.address import host_and_port
from smetric.config.contradictions import contradictions
from smetric.config.instances import InstanceSettings
from smetric.config.layers import Flagged, place_of, stack
from smetric.config.raw import Table
from smetric.config.section import Section
from smetric.config.settings import Settings
from smetric.errors import ConfigError

#: The root of the table.
SETTINGS: Section[Settings] = Section(Settings)


def load_settings(path: Path | None, env: Mapping[str, str], flags: Sequence[Flagged] = ()) -> Settings:
    """The settings of the file *path*, the `SMETRIC_…` variables of *env* and *flags*; the later win.

    Raises:
        ConfigError: anything in them cannot be used; one line that names the place.
    """
    return from_table(stack(path, env, flags, SETTINGS))


def from_table(table: Table) -> Settings:
    """The settings that *table* spells out, checked one by one and against each other."""
    settings = SETTINGS.parse(table, "")
    settings = replace(
        settings,
        instances=tuple(_named(instance) for instance in settings.instances),
        routes=tuple(
            replace(route, name=route.name or f"route-{i}") for i, route in enumerate(settings.routes, start=1)
        ),
    )
    for path, problem in contradictions(settings):
        name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        raise ConfigError(f"{place_of(table, path)}: {name}: {problem}")
    return settings


def schema() -> dict[str, Any]:
    """JSON Schema of a configuration file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "SMetric configuration",
        **SETTINGS.schema(),
    }


def _named(instance: InstanceSettings) -> InstanceSettings:
    return instance if instance.id else replace(instance, id=host_and_port(instance.url))
