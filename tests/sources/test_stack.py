"""Which sources a configuration asks for, and in which order they are asked."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

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
from smetric.sources.build import Sources, build_sources, grains, require_token_ids
from smetric.telemetry.metrics import Metrics
from tests.sources.lettered import TOKENS_PER_BLOCK, instances, request
from tests.sources.lmcache_fakes import Ids

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
async def test_hit_lengths_are_asked_for_best_knowledge_first(settings: dict[str, Any], names: list[str]) -> None:
    assert [source.name for source in stack(**settings).ranked if "hit_len" in source.fills] == names


def test_the_two_kinds_of_blocks_share_the_memory_of_the_index() -> None:
    alone, (tokens, text) = stack().indexes, stack(tokenizer=TOKENS).indexes
    assert [index.table.max_bytes for index in alone] == [PLAIN.prefix_index.max_bytes]
    assert tokens.table.max_bytes + text.table.max_bytes == PLAIN.prefix_index.max_bytes
    assert (tokens.block_tokens, text.block_tokens) == (PLAIN.block_size, 0)


@pytest.mark.parametrize("settings", [{}, {"tokenizer": TOKENS}], ids=["text alone", "token ids as well"])
def test_what_an_instance_holds_is_measured_where_every_prompt_is_entered_also_one_without_ids(
    settings: dict[str, Any],
) -> None:
    fleet = Fleet(instances(2), VOCABULARY)
    for source in stack(fleet, **settings).ranked:
        source.prefilled(request("abc"), fleet["a"])
    measured = fleet.snapshot(Candidates(fleet.instances), frozenset({"cached_tokens"}))
    assert measured.columns["cached_tokens"] == [3 * TOKENS_PER_BLOCK, 0]


def test_each_source_that_counts_in_more_than_blocks_of_the_engine_has_a_grain() -> None:
    coarse = grains(replace(PLAIN, lmcache=LMCACHE, block_size=32))
    assert coarse == {
        "prefix_index:tokens": 32,
        "prefix_index": 256,
        "prefix_index:part": 256,
        "lmcache:host": LMCACHE.chunk_size,
        "lmcache:likely": LMCACHE.chunk_size,
    }


@pytest.mark.parametrize("wanting", [{"lmcache": LMCACHE}, {"kv_events": EVENTS}], ids=["lmcache", "kv_events"])
def test_what_needs_token_ids_is_refused_where_nothing_gives_any(wanting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.source to engine or local"):
        require_token_ids(replace(PLAIN, **wanting))
    require_token_ids(replace(PLAIN, tokenizer=TOKENS, **wanting))
