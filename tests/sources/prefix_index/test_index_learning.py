"""Prefix index: what it learns from cached tokens that responses report."""

from __future__ import annotations

import random

import pytest

from smetric.fleet.instance import Instance
from smetric.lab.store import PrefixCache
from smetric.request.prompt import BLOCK_BYTES, Prompt
from smetric.request.request import InferenceRequest, Usage
from smetric.sources.prefix_index.index import ZEROS, PrefixIndex
from tests.sources.prefix_index.lettered import TOKENS_PER_BLOCK, hits, instances, request


def served(index: PrefixIndex, instance: Instance, blocks: str, cached_blocks: float) -> None:
    """Serve a prompt of which the instance reports to have held *cached_blocks*."""
    sent = request(blocks)
    index.prefilled(sent, instance)
    total = len(blocks) * TOKENS_PER_BLOCK
    index.settled(sent, instance, Usage(total, 10, int(cached_blocks * TOKENS_PER_BLOCK)))


def warm(capacity: int | None) -> tuple[PrefixIndex, Instance]:
    """An instance that was sent `old`, `abcdefgh`, and then 40 short prompts: 80 blocks and ends of prompts."""
    (instance,) = instances(1)
    index = PrefixIndex()
    served(index, instance, "old", 0)
    served(index, instance, "abcdefgh", 0)
    for i in range(40):
        served(index, instance, chr(ord("!") + i), 0)
    instance.cache.block_size, instance.cache.num_blocks = TOKENS_PER_BLOCK, capacity
    return index, instance


def test_reported_eviction_drops_everything_older() -> None:
    index, instance = warm(120)
    assert hits(index, request("old"), [instance]) == [3]
    served(index, instance, "abcdefgh", 2)
    assert hits(index, request("old"), [instance]) == [0]
    assert hits(index, request("abcdefgh"), [instance]) == [8]
    assert hits(index, request("0"), [instance]) == [1]


@pytest.mark.parametrize(("capacity", "cached"), [(400, 2), (120, 7), (None, 2)])
def test_reported_miss_that_eviction_cannot_explain_drops_nothing(capacity: int | None, cached: int) -> None:
    index, instance = warm(capacity)
    served(index, instance, "abcdefgh", cached)
    assert hits(index, request("old"), [instance]) == [3]


def test_cleared_cache_is_noticed_after_three_responses_without_hit() -> None:
    index, instance = warm(None)
    served(index, instance, "abcdefgh", 8)
    for number in range(ZEROS):
        assert hits(index, request("old"), [instance]) == [3], number
        served(index, instance, "abcdefgh", 0)
    assert hits(index, request("old"), [instance]) == [0]
    assert hits(index, request("abcdefgh"), [instance]) == [8]


def test_instance_that_never_reports_hits_does_not_count_as_cleared() -> None:
    index, instance = warm(None)
    for _ in range(2 * ZEROS):
        served(index, instance, "abcdefgh", 0)
    assert hits(index, request("old"), [instance]) == [3]


def beliefs(
    *, says: float, reports: bool = True, sessions: int = 8, holds: int = 400, turns: int = 400
) -> tuple[float, float]:
    """Return what was believed too much and too little, as shares of the blocks held by an engine that evicts as vLLM.

    Args:
        says: the capacity it tells, as a multiple of what it has.
        reports: whether its answers say how much was cached.
        sessions: they take turns at random, and grow.
        holds: blocks it has.
        turns: of all sessions together; the first quarter does not count.
    """
    rng, engine, index = random.Random(5), PrefixCache(holds), PrefixIndex()
    (instance,) = fleet = instances(1)
    instance.cache.block_size, instance.cache.num_blocks = TOKENS_PER_BLOCK, int(says * holds)
    texts = [rng.randbytes(rng.randint(30, 80) * BLOCK_BYTES) for _ in range(sessions)]
    too_much = too_little = held = 0.0
    for turn in range(turns):
        who = rng.randrange(sessions)
        sent = InferenceRequest(prompt=Prompt([texts[who]], 4.0))
        assert sent.prompt is not None
        (believed,) = hits(index, sent, fleet)
        blocks = sent.prompt.hashes.blocks
        actual = engine.match(blocks)
        engine.pin(blocks[:actual])
        assert engine.reserve(len(blocks) - actual)
        for block in blocks[actual:]:
            engine.commit(block)
        engine.release(blocks, 0)
        index.prefilled(sent, instance)
        cached = actual * TOKENS_PER_BLOCK if reports else None
        index.settled(sent, instance, Usage(len(blocks) * TOKENS_PER_BLOCK, 1, cached))
        if turn >= turns / 4:
            held += actual
            too_much += max(0.0, (believed or 0) - actual)
            too_little += max(0.0, actual - (believed or 0))
        grown = texts[who] + rng.randbytes(rng.randint(1, 3) * BLOCK_BYTES)
        texts[who] = grown if len(grown) < 120 * BLOCK_BYTES else rng.randbytes(40 * BLOCK_BYTES)
    return too_much / held, too_little / held


def test_model_learns_the_capacity_of_an_engine_that_has_half_of_it() -> None:
    too_much, too_little = beliefs(says=2.0)
    assert too_much < 0.1
    assert too_little < 0.05
    assert beliefs(says=2.0, reports=False)[0] > 0.3


@pytest.mark.parametrize(("cached", "least", "most"), [(0, 60, 90), (4, 150, 200)])
def test_model_regains_room_if_more_is_held_than_believed(cached: int, least: int, most: int) -> None:
    index, instance = warm(200)
    served(index, instance, "abcdefgh", 2)
    for i in range(40):
        served(index, instance, chr(ord("!") + i) + "new", cached)
    assert least < index.table.blocks <= most
