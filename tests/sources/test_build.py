"""Construction of sources: which ones, in which order, and what they fill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from smetric.app import Application
from smetric.config import load_settings
from smetric.config.settings import (
    InstanceSettings,
    KvEventsSettings,
    LmcacheSettings,
    PrefixIndexSettings,
    Settings,
    TokenizerSettings,
)
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.fleet.fleet import Candidates, Fleet
from smetric.fleet.instance import Instance
from smetric.policy import load
from smetric.sources.build import Sources, build_sources, filled_by, grains, require_token_ids
from smetric.telemetry.metrics import Metrics
from tests.sources.lmcache.fakes import Ids
from tests.sources.prefix_index.lettered import TOKENS_PER_BLOCK, instances, request

PLAIN = Settings(instances=(InstanceSettings(url="http://127.0.0.1:1", id="a"),))
TOKENS = TokenizerSettings(source="engine")
LMCACHE = LmcacheSettings(url="http://127.0.0.1:2")
EVENTS = KvEventsSettings(enabled=True)


def stack(fleet: Fleet | None = None, **settings: object) -> Sources:
    chosen = replace(PLAIN, **settings)
    fleet = fleet or Fleet([Instance("a", "http://127.0.0.1:1")], VOCABULARY)
    metrics = Metrics(per_instance=True)
    return build_sources(chosen, fleet, metrics, Ids(()), lambda _: 0.1, lambda _: None)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, ["prefix_index"]),
        ({"tokenizer": TOKENS}, ["prefix_index:tokens", "prefix_index"]),
        ({"prefix_index": PrefixIndexSettings(enabled=False), "tokenizer": TOKENS}, []),
        (
            {"tokenizer": TOKENS, "kv_events": EVENTS, "lmcache": LMCACHE},
            ["kv_events", "prefix_index:tokens", "prefix_index", "lmcache:host", "lmcache:likely", "prefix_index:part"],
        ),
    ],
    ids=["nothing set", "token ids", "no index", "everything"],
)
async def test_sources_of_hit_len_are_ranked_best_first(settings: dict[str, Any], names: list[str]) -> None:
    assert [source.name for source in stack(**settings).ranked if "hit_len" in source.fills] == names


def test_prefix_indexes_share_the_configured_memory() -> None:
    alone, (tokens, text) = stack().indexes, stack(tokenizer=TOKENS).indexes
    assert [index.table.max_bytes for index in alone] == [PLAIN.prefix_index.max_bytes]
    assert tokens.table.max_bytes + text.table.max_bytes == PLAIN.prefix_index.max_bytes
    assert (tokens.block_tokens, text.block_tokens) == (PLAIN.block_size, 0)


@pytest.mark.parametrize("settings", [{}, {"tokenizer": TOKENS}], ids=["text alone", "token ids as well"])
def test_cached_tokens_are_measured_by_the_index_of_text(
    settings: dict[str, Any],
) -> None:
    fleet = Fleet(instances(2), VOCABULARY)
    for source in stack(fleet, **settings).ranked:
        source.prefilled(request("abc"), fleet["a"])
    measured = fleet.snapshot(Candidates(fleet.instances), frozenset({"cached_tokens"}))
    assert measured.columns["cached_tokens"] == [3 * TOKENS_PER_BLOCK, 0]


def test_grains_name_each_source_that_counts_in_larger_units() -> None:
    coarse = grains(replace(PLAIN, lmcache=LMCACHE, block_size=32))
    assert coarse == {
        "prefix_index:tokens": 32,
        "prefix_index": 256,
        "prefix_index:part": 256,
        "lmcache:host": LMCACHE.chunk_size,
        "lmcache:likely": LMCACHE.chunk_size,
    }


@pytest.mark.parametrize("wanting", [{"lmcache": LMCACHE}, {"kv_events": EVENTS}], ids=["lmcache", "kv_events"])
def test_sources_that_need_token_ids_are_refused_without_a_tokenizer(wanting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.source to auto, engine or local"):
        require_token_ids(replace(PLAIN, tokenizer=TokenizerSettings(source="estimated"), **wanting))
    require_token_ids(replace(PLAIN, **wanting))


_LMCACHE = "lmcache:\n  url: http://127.0.0.1:9\n"
_TOKENIZER = "tokenizer:\n  source: engine\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "prefix_index:\n  enabled: false\n",
        "prefix_index:\n  enabled: false\nprefill:\n  fetch_rate: 40000\n",
        f"prefix_index:\n  enabled: false\n{_LMCACHE}  mode: coordinator\n{_TOKENIZER}",
        f"{_LMCACHE}  mode: coordinator\n{_TOKENIZER}",
        f"{_LMCACHE}  mode: controller\n{_TOKENIZER}",
        "prefix_index:\n  enabled: false\nkv_events:\n  enabled: true\n",
    ],
)
def test_filled_by_names_the_features_of_the_built_sources(text: str, tmp_path: Path) -> None:
    path = tmp_path / "smetric.yaml"
    path.write_text(f"instances: [http://127.0.0.1:9]\n{text}")
    settings = load_settings(path, {})
    sources = Application(settings, environ={}).sources.ranked
    filled = {name for source in sources for name in (*source.fills, *getattr(source, "measures", ()))}
    if not settings.lmcache.url and not settings.kv_events.enabled and not settings.prefill.fetch_rate:
        filled -= {"fetch_rate"}  # it is measured where a look-up tells of other tiers
    if settings.lmcache.mode == "controller":
        filled -= {"store_hit_len"}  # its source is there, and never knows
    assert filled_by(settings) == filled


def test_unfilled_feature_warning_names_its_substitute(tmp_path: Path) -> None:
    path = tmp_path / "smetric.yaml"
    path.write_text("instances: [http://127.0.0.1:9]\nprefix_index:\n  enabled: false\n")
    text = (
        "policy p\nlet s = unprefilled / fetch_rate + unprefilled / prefill_rate\n"
        "route argmin(s) when req.turn == 0\nroute argmax(cached_tokens)\n"
    )
    found = load(text, VOCABULARY).unfilled(filled_by(load_settings(path, {})))
    assert [(each.message, each.help) for each in found] == [
        (
            "no configured source fills `fetch_rate`",
            "it is unknown everywhere; arithmetic sees `prefill_rate` in its place",
        ),
        ("no configured source fills `cached_tokens`", "it is unknown everywhere; arithmetic sees 0 in its place"),
    ]
