"""The fleet that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from smetric.config.settings import InstanceSettings, PrefillSettings, Scrape, Settings
from smetric.errors import ConfigError
from smetric.fleet.fleet import fleet_of

ONE = InstanceSettings(url="http://127.0.0.1:1", id="b", models=("m",), role="decode", pool="p", zone="z")
OTHER = InstanceSettings(url="http://127.0.0.1:2", id="a")


def test_instances_are_what_the_settings_say_of_them(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-of-a\n")
    settings = Settings(
        instances=(ONE, replace(OTHER, api_key_file=str(key))),
        prefill=PrefillSettings(attention_tokens=1234),
        scrape=Scrape(unknown_after=7.0),
    )
    fleet = fleet_of(settings, lambda *_: None)
    assert [each.id for each in fleet.instances] == ["a", "b"]
    other, one = fleet.instances
    assert (one.url, one.models, one.role, one.pool, one.zone) == (ONE.url, frozenset({"m"}), "decode", "p", "z")
    assert one.key is None
    assert other.key is not None
    assert other.key.text == "sk-of-a"
    assert one.attention_tokens == other.attention_tokens == 1234
    assert fleet.unknown_after_s == 7.0


def test_an_ejection_is_reported_with_its_reason() -> None:
    ejected: list[tuple[str, str]] = []
    fleet = fleet_of(Settings(instances=(ONE, OTHER)), lambda instance, reason: ejected.append((instance.id, reason)))
    for _ in range(5):
        fleet.health.probed(fleet["a"], ok=False)
    assert ejected == [("a", "probe")]


def test_a_key_that_cannot_be_read_names_its_instance(tmp_path: Path) -> None:
    settings = Settings(instances=(replace(OTHER, api_key_file=str(tmp_path / "none")),))
    with pytest.raises(ConfigError, match="instances: a: api_key_file"):
        fleet_of(settings, lambda *_: None)
