"""Prefix index against a naive model, and its bounds."""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import CacheConfig, Instance
from smetric.request.prompt import BLOCK_BYTES, Prompt
from smetric.request.request import InferenceRequest
from smetric.sources.prefix_index.index import (
    MAX_INSTANCES_WAITING,
    MAX_WAITING,
    PrefixIndex,
    PrefixIndexes,
    PrefixPart,
)
from smetric.sources.prefix_index.persistence import (
    IndexImage,
    InstanceImage,
    decode_image,
    encode_image,
)
from tests.clock import Clock
from tests.sources.prefix_index.lettered import ENTRY, TOKENS_PER_BLOCK, hits, instances, request


class Naive:
    """Remembers every prefix it was sent, for ever."""

    def __init__(self) -> None:
        self.prefixes: dict[str, set[str]] = {}

    def sent(self, id: str, blocks: str) -> None:
        self.prefixes.setdefault(id, set()).update(blocks[:i] for i in range(1, len(blocks) + 1))

    def hit(self, id: str, blocks: str) -> int:
        held = self.prefixes.get(id, set())
        return max((i for i in range(1, len(blocks) + 1) if blocks[:i] in held), default=0)


PROMPT = st.text("xyz", max_size=7)
STEP = st.one_of(
    st.tuples(st.just("sent"), st.integers(0, 3), PROMPT),
    st.tuples(st.just("asked"), st.integers(0, 3), PROMPT),
    st.tuples(st.just("forget"), st.integers(0, 3), st.just("")),
    st.tuples(st.just("restart"), st.integers(0, 3), st.just("")),
)
STEPS = st.lists(STEP, max_size=30)


@given(STEPS, st.integers(1, 12) | st.just(10_000))
def test_index_agrees_with_a_model_that_forgets_nothing_as_far_as_it_has_room(
    steps: list[tuple[str, int, str]], entries: int
) -> None:
    fleet, index, naive = instances(4), PrefixIndex(entries * ENTRY), Naive()
    for what, which, blocks in steps:
        match what:
            case "sent":
                index.prefilled(request(blocks), fleet[which])
                naive.sent(fleet[which].id, blocks)
                held = hits(index, request(blocks), fleet)[which]
                assert (held is not None and held >= min(len(blocks), entries)) or not blocks
            case "forget":
                index.forget(fleet[which])
                naive.prefixes.pop(fleet[which].id, None)
            case "restart":
                fleet[which].restarted()
                naive.prefixes.pop(fleet[which].id, None)
        for cell, one in zip(hits(index, request(blocks), fleet), fleet, strict=True):
            known = naive.hit(one.id, blocks)
            assert cell == known or (entries < 10_000 and (cell is None or 0 < cell < known))
        assert index.table.memory_bytes <= entries * ENTRY


@given(st.lists(PROMPT.filter(len), min_size=1, max_size=20), st.integers(1, 10))
def test_index_keeps_at_most_the_capacity_of_an_instance(prompts: list[str], capacity: int) -> None:
    (instance,) = fleet = instances(1)
    instance.cache.block_size, instance.cache.num_blocks = TOKENS_PER_BLOCK, capacity
    index = PrefixIndex()
    for blocks in prompts:
        index.prefilled(request(blocks), instance)
        assert index.table.blocks <= capacity
        assert hits(index, request(blocks), fleet) == [min(len(blocks), capacity)]


def test_lookup_returns_cells_in_the_order_of_instances() -> None:
    fleet, index = instances(3), PrefixIndex()
    index.prefilled(request("abcd"), fleet[2])
    index.prefilled(request("ab"), fleet[0])
    assert hits(index, request("abcz"), fleet) == [2, 0, 3]
    assert hits(index, request("abcz"), fleet[::-1]) == [3, 0, 2]
    assert hits(index, request("abcz"), fleet[:1]) == [2]


def test_lookup_shares_nothing_between_keys_and_incarnations() -> None:
    fleet, index = instances(1), PrefixIndex()
    index.prefilled(request("ab", key=b"m"), fleet[0])
    assert hits(index, request("ab", key=b"n"), fleet) == [0]
    fleet[0].restarted()
    assert hits(index, request("ab", key=b"m"), fleet) == [0]
    assert index.table.blocks == 0


def test_index_reports_blocks_evicted_for_memory_as_unknown() -> None:
    fleet, index = instances(2), PrefixIndex(2 * ENTRY)
    index.prefilled(request("ab"), fleet[0])
    index.prefilled(request("xy"), fleet[1])
    assert hits(index, request("ab"), fleet) == [None, 0]
    assert hits(index, request("xy"), fleet) == [None, 2]
    index.forget(fleet[0])
    assert hits(index, request("ab"), fleet) == [0, 0]


def test_instance_without_prefix_caching_holds_nothing() -> None:
    fleet, index = instances(1), PrefixIndex()
    fleet[0].cache.prefix_caching = False
    index.prefilled(request("ab"), fleet[0])
    assert hits(index, request("ab"), fleet) == [0]


def test_lookup_without_prompt_is_unknown() -> None:
    fleet, index = instances(2), PrefixIndex()
    index.prefilled(InferenceRequest(), fleet[0])
    assert index.lookup(InferenceRequest(), fleet) == {"hit_len": [None, None]}


def test_hit_counts_by_the_prompts_own_ratio() -> None:
    fleet, index = instances(1), PrefixIndex()
    text = [b"x" * 2 * BLOCK_BYTES]
    asked = InferenceRequest(prompt=Prompt(text, 3.0))
    index.prefilled(asked, fleet[0])
    assert index.lookup(asked, fleet) == {"hit_len": [int(2 * BLOCK_BYTES / 3)]}
    assert index.lookup(request("ab", tail=100), fleet) == {"hit_len": [0]}


@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("holders", [1, 6])
def test_table_memory_bound_counts_real_bytes(holders: int, size: int) -> None:
    fleet, index, rng = instances(8), PrefixIndex(2**40), random.Random(5)
    prompts = [array("Q", (rng.getrandbits(64) for _ in range(size))) for _ in range(120)]
    index.measure("cached_tokens", fleet)  # the cost of an instance itself is not the table's
    gc.collect()  # no lists and tuples are left over, which would be used for nothing
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number, blocks in enumerate(prompts):
            for holder in range(holders):
                index.placed(fleet[(number + holder) % 8], blocks)
            taken = tracemalloc.get_traced_memory()[0] - before
            assert number < 4 or taken <= index.table.memory_bytes  # Python creates some hundred bytes once
    finally:
        tracemalloc.stop()
    image = sum(len(one.packed) for one in index.images())
    assert taken + image > index.table.memory_bytes / 3


# ── Replies ──────────────────────────────────────────────────────────────────


def asked(prompt: bytes, reply: bytes = b"", then: bytes = b"") -> InferenceRequest:
    """A first request, or with a *reply* the one that follows it."""
    history = len(prompt) + len(reply) if reply else 0
    question = len(prompt) if reply else 0
    whole = Prompt([prompt, reply, then], 4.0, history_bytes=history, question_bytes=question)
    return InferenceRequest(prompt=whole)


@pytest.mark.parametrize("size", [40, BLOCK_BYTES, 3 * BLOCK_BYTES + 500])
def test_hit_includes_the_reply_of_the_instance_that_gave_it(size: int) -> None:
    fleet, index = instances(2), PrefixIndex()
    prompt, reply = b"q" * size, b"r" * 5000
    first, follow_up = asked(prompt), asked(prompt, reply, b"next")
    index.prefilled(first, fleet[1])
    held = size // BLOCK_BYTES * BLOCK_BYTES
    assert index.lookup(follow_up, fleet) == {"hit_len": [0, held // 4]}
    index.settled(first, fleet[1], None)
    assert index.lookup(follow_up, fleet) == {"hit_len": [0, (size + 5000) // 4]}
    assert index.lookup(asked(b"p" + prompt[1:], reply, b"next"), fleet) == {"hit_len": [0, 0]}
    assert index.lookup(asked(prompt + b".", reply, b"next"), fleet) == {"hit_len": [0, held // 4]}


def test_reply_is_not_held_by_a_new_process() -> None:
    (instance,) = fleet = instances(1)
    index = PrefixIndex()
    first = asked(b"q" * 40)
    index.prefilled(first, instance)
    instance.restarted(2000.0, seen_empty=True)
    index.settled(first, instance, None)
    assert index.lookup(asked(b"q" * 40, b"r" * 5000), fleet) == {"hit_len": [0]}


def test_reply_is_evicted_with_the_prompt_before_it() -> None:
    (instance,) = fleet = instances(1)
    instance.cache.block_size, instance.cache.num_blocks = TOKENS_PER_BLOCK, 3
    index = PrefixIndex()
    first = asked(b"q" * 2 * BLOCK_BYTES)
    index.prefilled(first, instance)
    index.settled(first, instance, None)
    index.prefilled(request("ab"), instance)
    assert index.lookup(asked(b"q" * 2 * BLOCK_BYTES, b"r" * 5000), fleet) == {"hit_len": [0]}


# ── Loss is not eviction ─────────────────────────────────────────────────────


def test_miss_is_unknown_until_the_warm_up_is_over() -> None:
    clock, (instance,) = Clock(0.0), instances(1, seen_empty=False)
    index = PrefixIndex(warm_up_s=600, clock=clock)
    assert hits(index, request("ab"), [instance]) == [None]
    index.prefilled(request("ab"), instance)
    assert hits(index, request("abc"), [instance]) == [2]
    assert hits(index, request("x"), [instance]) == [None]
    clock.now = 600.0
    assert hits(index, request("x"), [instance]) == [0]


def test_miss_is_known_after_an_instance_was_sent_its_capacity() -> None:
    (instance,) = instances(1, seen_empty=False)
    instance.cache.block_size, instance.cache.num_blocks = TOKENS_PER_BLOCK, 4
    index = PrefixIndex(clock=Clock(0.0))
    index.prefilled(request("abc"), instance)
    index.prefilled(request("abc"), instance)
    assert hits(index, request("x"), [instance]) == [None]
    index.prefilled(request("d"), instance)
    assert hits(index, request("x"), [instance]) == [0]


def test_miss_is_known_after_a_restart() -> None:
    (instance,) = instances(1, seen_empty=False)
    index = PrefixIndex()
    index.prefilled(request("ab"), instance)
    instance.restarted(2000.0)
    assert hits(index, request("ab"), [instance]) == [0]


def test_missed_placements_make_misses_unknown_and_keep_hits() -> None:
    clock, fleet = Clock(0.0), instances(2)
    index = PrefixIndex(clock=clock)
    index.prefilled(request("ab"), fleet[0])
    assert hits(index, request("ab"), fleet) == [2, 0]
    index.missed(fleet)
    assert hits(index, request("ab"), fleet) == [2, None]
    clock.now += 600
    assert hits(index, request("ab"), fleet) == [2, 0]


def test_missed_placements_count_before_the_first_lookup() -> None:
    fleet, index = instances(1), PrefixIndex()
    index.missed(fleet)
    assert hits(index, request("ab"), fleet) == [None]
    fleet[0].restarted(2000.0)
    index.forget(fleet[0])
    assert hits(index, request("ab"), fleet) == [0]


def expecting(blocks: str, expected: float) -> InferenceRequest:
    return replace(request(blocks), turn=1, est_hit=int(expected * TOKENS_PER_BLOCK))


def parts(index: PrefixIndex, asked: InferenceRequest, fleet: Sequence[Instance]) -> list[float | None]:
    cells = PrefixPart(index).lookup(asked, fleet)["hit_len"]
    return [cell if cell is None else cell / TOKENS_PER_BLOCK for cell in cells]


def test_partial_hit_is_left_to_prefix_part() -> None:
    index, fleet = PrefixIndex(yields=True), instances(1, seen_empty=False)
    index.prefilled(request("ab"), fleet[0])
    for asked in (expecting("abcd", 4), expecting("abcd", 3), request("abcd")):
        assert hits(index, asked, fleet) == [None]
        assert parts(index, asked, fleet) == [2]


@pytest.mark.parametrize(
    ("yields", "seen_empty", "expected"),
    [(True, False, 2), (True, False, 2.9), (True, True, 4), (False, False, 4)],
    ids=["as expected", "within a block", "watched from its start", "no other source"],
)
def test_hit_is_reported_at_once_if_it_is_whole(yields: bool, seen_empty: bool, expected: float) -> None:
    index, fleet = PrefixIndex(yields=yields), instances(1, seen_empty=seen_empty)
    index.prefilled(request("ab"), fleet[0])
    assert hits(index, expecting("abcd", expected), fleet) == [2]


def test_prefix_part_reports_no_hit_as_unknown() -> None:
    index, fleet = PrefixIndex(yields=True), instances(1, seen_empty=False)
    assert parts(index, expecting("abcd", 4), fleet) == [None]
    assert parts(index, InferenceRequest(id="r", api=request("a").api, model="m", prompt=None), fleet) == [None]


def test_miss_is_unknown_if_other_routers_place_unseen() -> None:
    index, fleet = PrefixIndex(sees_all=False, warm_up_s=0.0), instances(2)
    index.prefilled(request("ab"), fleet[0])
    assert hits(index, request("abcd"), fleet) == [2, None]
    fleet[1].restarted(2000.0)
    assert hits(index, request("abcd"), fleet) == [2, None]


WARM_UP_S = 10.0
KEPT_STEP = st.tuples(
    st.sampled_from(["sent", "sent", "sent", "placed", "forget", "restart", "missed", "pass", "empty", "restore"]),
    st.integers(0, 2),
    PROMPT,
)


@settings(max_examples=200)
@given(st.lists(KEPT_STEP, max_size=25), st.integers(1, 4), st.none() | st.integers(1, 6))
def test_lookup_of_kept_candidates_equals_a_new_lookup(
    steps: list[tuple[str, int, str]], entries: int, capacity: int | None
) -> None:
    clock = Clock()
    fleet = Fleet(instances(3), VOCABULARY, clock=clock)
    index = PrefixIndex(entries * ENTRY, warm_up_s=WARM_UP_S, clock=clock)
    for one in fleet.instances:
        one.seen_empty = False
        one.cache = CacheConfig(TOKENS_PER_BLOCK, capacity)
    for what, which, blocks in steps:
        instance = fleet.instances[which]
        match what:
            case "sent":
                index.prefilled(request(blocks), instance)
            case "placed":
                index.placed(instance, list(request(blocks).prompt.hashes.blocks))  # type: ignore[union-attr]
            case "forget":
                index.forget(instance)
            case "restart":
                instance.restarted()
            case "missed":
                index.missed([instance])
            case "pass":
                clock.now += WARM_UP_S / 3
            case "empty":
                instance.seen_empty = True
            case "restore":
                index.restore(list(index.images()))
        for asked in (request(blocks), request("xy")):
            kept = index.lookup(asked, fleet.candidates(""))
            assert kept == index.lookup(asked, list(fleet.instances))
            assert kept == index.lookup(asked, fleet.candidates(""))


def image_of(index: PrefixIndex) -> list[InstanceImage]:
    return decode_image(encode_image(IndexImage(0.0, BLOCK_BYTES, list(index.images())))).instances


@given(st.lists(st.tuples(st.integers(0, 3), PROMPT), max_size=20), st.lists(PROMPT, max_size=5))
def test_restored_index_answers_as_its_original(sent: list[tuple[int, str]], asked: list[str]) -> None:
    index, fleet = PrefixIndex(), instances(4)
    for which, blocks in sent:
        index.prefilled(request(blocks), fleet[which])
    again = PrefixIndex()
    again.restore(image_of(index))
    for blocks in asked + [blocks for _, blocks in sent]:
        assert hits(again, request(blocks), fleet) == hits(index, request(blocks), fleet)
    assert again.table.blocks == index.table.blocks


def test_restore_waits_for_the_start_time_and_needs_the_same_process() -> None:
    index, (a, b, c) = PrefixIndex(), instances(3)
    for one in (a, b, c):
        index.prefilled(request("xy"), one)
    b.restarted(2000.0)
    again, fleet = PrefixIndex(), instances(3, seen_empty=False)
    image = image_of(index)
    fleet[1].started_at, fleet[2].started_at = 2000.0, None
    again.restore(image)
    assert hits(again, request("xy"), fleet) == [2, None, None]
    fleet[2].started_at = 1000.4
    assert hits(again, request("xy"), fleet) == [2, None, 2]


def test_restored_blocks_are_older_than_placed_ones() -> None:
    index, (instance,) = PrefixIndex(), instances(1)
    index.prefilled(request("abc"), instance)
    index.prefilled(request("xyz"), instance)
    again = PrefixIndex()
    (late,) = fleet = instances(1)
    late.cache.block_size, late.cache.num_blocks = TOKENS_PER_BLOCK, 5
    again.prefilled(request("mn"), late)
    again.restore(image_of(index))
    assert hits(again, request("xyz"), fleet) == [3]
    assert hits(again, request("abc"), fleet) == [0]
    assert hits(again, request("mn"), fleet) == [2]


def test_waiting_images_are_bounded() -> None:
    index, (instance,) = PrefixIndex(), instances(1)
    index.prefilled(request("ab"), instance)
    (known,) = index.images()
    again = PrefixIndex()
    for number in range(50):
        strangers = [InstanceImage(f"{number}-{i}", 1000.0, known.packed, known.runs) for i in range(100)]
        again.restore(strangers)
    assert len(again._waiting) <= MAX_INSTANCES_WAITING
    again.restore([known] * 50)
    assert sum(map(len, again._waiting.values())) <= MAX_WAITING * MAX_INSTANCES_WAITING


async def test_waiting_images_are_part_of_the_next_image() -> None:
    index, fleet = PrefixIndex(), instances(3)
    for instance in fleet:
        index.prefilled(request("ab"), instance)
    for is_recalled in (False, True):
        again = PrefixIndex()
        again.restore(image_of(index))
        if is_recalled:
            await again.recall(fleet)
            assert not again.is_restoring
        again.prefilled(request("xy"), fleet[0])
        last = PrefixIndex()
        last.restore(image_of(again))
        assert hits(last, request("ab"), fleet) == [2, 2, 2]
        assert hits(last, request("xy"), fleet) == [2, 0, 0]


async def test_waiting_images_of_removed_instances_are_dropped() -> None:
    index, fleet = PrefixIndex(), instances(2)
    for instance in fleet:
        index.prefilled(request("ab"), instance)
    again, (kept, _) = PrefixIndex(), instances(2, seen_empty=False)
    again.restore(image_of(index))
    kept.started_at = None
    await again.recall([kept])
    assert again.is_restoring
    assert [one.id for one in again.images()] == [kept.id]


ASKED = InferenceRequest(prompt=Prompt([b"x" * 2 * BLOCK_BYTES], 4.0))


def both() -> tuple[PrefixIndex, PrefixIndex, PrefixIndexes]:
    """One of token ids, one of text, and the two as one."""
    tokens, text = PrefixIndex(2**20, block_tokens=16), PrefixIndex(2**19)
    return tokens, text, PrefixIndexes([tokens, text])


def engine() -> Instance:
    instance = Instance("a", "http://127.0.0.1:1")
    instance.started_at = 1000.0
    return instance


def test_indexes_are_found_by_their_block_size() -> None:
    tokens, text, indexes = both()
    assert (indexes.of(16), indexes.of(0), indexes.of(32)) == (tokens, text, None)
    assert [*indexes] == [tokens, text]
    assert indexes
    assert not PrefixIndexes()


def test_indexes_sum_figures_and_changes() -> None:
    tokens, text, indexes = both()
    before = indexes.changes
    tokens.placed(engine(), [1, 2, 3])
    text.prefilled(ASKED, engine())
    figures = indexes.figures()
    assert (figures.blocks, figures.evictions) == (5, 0)
    assert figures.memory_bytes == tokens.table.memory_bytes + text.table.memory_bytes
    assert indexes.changes > before


async def test_indexes_restore_an_image_by_kind_of_blocks() -> None:
    tokens, text, indexes = both()
    tokens.placed(engine(), [1, 2, 3])
    text.prefilled(ASKED, engine())
    image = await indexes.image()
    assert [(one.id, one.tokens, len(one.blocks)) for one in image.instances] == [("a", 16, 3), ("a", 0, 2)]
    tokens, text, again = both()
    waits = [again.is_restoring]
    again.restore(image.instances)
    waits.append(again.is_restoring)
    await again.recall([engine()])
    waits.append(again.is_restoring)
    assert waits == [False, True, False]
    assert (tokens.table.blocks, text.table.blocks) == (3, 2)


async def test_indexes_bound_the_size_of_their_image() -> None:
    tokens, text, indexes = both()
    tokens.placed(engine(), range(1, 100_000))
    text.placed(engine(), range(1, 100_000))
    assert indexes.figures().evictions
    assert len(encode_image(await indexes.image())) <= indexes.image_bytes == 2**20 + 2**19


def test_indexes_all_note_missed_placements() -> None:
    tokens, text, indexes = both()
    instance = engine()
    instance.seen_empty = True
    assert tokens.misses_are_known(instance)
    assert text.misses_are_known(instance)
    indexes.missed([instance])
    assert not tokens.misses_are_known(instance)
    assert not text.misses_are_known(instance)
