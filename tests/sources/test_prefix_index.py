"""The prefix index against a naive model, and its bounds."""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.request.prompt import BLOCK_BYTES, Prompt
from smetric.request.request import InferenceRequest
from smetric.sources.prefix_index.index import PrefixIndex
from tests.clock import Clock
from tests.sources.lettered import ENTRY, TOKENS_PER_BLOCK, hits, instances, request


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


@given(STEPS)
def test_with_room_enough_it_answers_as_one_that_forgets_nothing(steps: list[tuple[str, int, str]]) -> None:
    fleet, index, naive = instances(4), PrefixIndex(), Naive()
    for what, which, blocks in steps:
        if what == "sent":
            index.prefilled(request(blocks), fleet[which])
            naive.sent(fleet[which].id, blocks)
        elif what == "forget":
            index.forget(fleet[which])
            naive.prefixes.pop(fleet[which].id, None)
        elif what == "restart":
            fleet[which].restarted()
            naive.prefixes.pop(fleet[which].id, None)
        else:
            assert hits(index, request(blocks), fleet) == [naive.hit(one.id, blocks) for one in fleet]


@given(STEPS, st.integers(1, 12))
def test_with_too_little_room_it_claims_no_hit_that_is_not_there_and_stays_in_its_bound(
    steps: list[tuple[str, int, str]], entries: int
) -> None:
    fleet, index, naive = instances(4), PrefixIndex(entries * ENTRY), Naive()
    for what, which, blocks in steps:
        if what == "sent":
            index.prefilled(request(blocks), fleet[which])
            naive.sent(fleet[which].id, blocks)
            held = hits(index, request(blocks), fleet)[which]
            assert (held is not None and held >= min(len(blocks), entries)) or not blocks
        elif what == "forget":
            index.forget(fleet[which])
            naive.prefixes.pop(fleet[which].id, None)
        for cell, one in zip(hits(index, request(blocks), fleet), fleet, strict=True):
            assert cell is None or cell <= naive.hit(one.id, blocks)
            assert cell != 0 or naive.hit(one.id, blocks) == 0 or what == "restart"
        assert index.table.memory_bytes <= entries * ENTRY


@given(st.lists(PROMPT.filter(len), min_size=1, max_size=20), st.integers(1, 10))
def test_an_instance_holds_at_most_its_capacity_and_the_latest_prompt_first(prompts: list[str], capacity: int) -> None:
    (instance,) = fleet = instances(1)
    instance.cache.block_size, instance.cache.num_blocks = TOKENS_PER_BLOCK, capacity
    index = PrefixIndex()
    for blocks in prompts:
        index.prefilled(request(blocks), instance)
        assert index.table.blocks <= capacity
        assert hits(index, request(blocks), fleet) == [min(len(blocks), capacity)]


def test_of_a_prompt_the_end_is_forgotten_before_the_beginning_and_the_oldest_prompt_first() -> None:
    (instance,) = fleet = instances(1)
    instance.cache.block_size, instance.cache.num_blocks = TOKENS_PER_BLOCK, 6
    index = PrefixIndex()
    index.prefilled(request("abcd"), instance)
    index.prefilled(request("xy"), instance)
    index.prefilled(request("z"), instance)
    assert hits(index, request("abcd"), fleet) == [3]
    assert hits(index, request("xy"), fleet) == [2]
    assert (index.table.blocks, index.table.evictions) == (6, 1)


def test_one_walk_answers_for_all_instances_in_the_order_asked() -> None:
    fleet, index = instances(3), PrefixIndex()
    index.prefilled(request("abcd"), fleet[2])
    index.prefilled(request("ab"), fleet[0])
    assert hits(index, request("abcz"), fleet) == [2, 0, 3]
    assert hits(index, request("abcz"), fleet[::-1]) == [3, 0, 2]
    assert hits(index, request("abcz"), fleet[:1]) == [2]


def test_another_model_adapter_or_salt_shares_nothing() -> None:
    fleet, index = instances(1), PrefixIndex()
    index.prefilled(request("ab", key=b"m"), fleet[0])
    assert hits(index, request("ab", key=b"n"), fleet) == [0]


def test_an_incarnation_inherits_nothing_even_before_anybody_says_it_restarted() -> None:
    fleet, index = instances(1), PrefixIndex()
    index.prefilled(request("ab"), fleet[0])
    fleet[0].restarted()
    assert hits(index, request("ab"), fleet) == [0]
    assert index.table.blocks == 0


def test_what_was_lost_for_want_of_room_is_unknown_and_not_zero() -> None:
    fleet, index = instances(2), PrefixIndex(2 * ENTRY)
    index.prefilled(request("ab"), fleet[0])
    index.prefilled(request("xy"), fleet[1])
    assert hits(index, request("ab"), fleet) == [None, 0]
    assert hits(index, request("xy"), fleet) == [None, 2]
    index.forget(fleet[0])
    assert hits(index, request("ab"), fleet) == [0, 0]


def test_an_instance_without_prefix_caching_holds_nothing() -> None:
    fleet, index = instances(1), PrefixIndex()
    fleet[0].cache.prefix_caching = False
    index.prefilled(request("ab"), fleet[0])
    assert hits(index, request("ab"), fleet) == [0]


def test_a_request_without_a_prompt_is_unknown() -> None:
    fleet, index = instances(2), PrefixIndex()
    index.prefilled(InferenceRequest(), fleet[0])
    assert index.lookup(InferenceRequest(), fleet) == {"hit_len": [None, None]}


def test_a_hit_is_in_tokens_of_the_prompts_own_ratio_and_never_above_its_length() -> None:
    fleet, index = instances(1), PrefixIndex()
    text = [b"x" * 2 * BLOCK_BYTES]
    asked = InferenceRequest(prompt=Prompt(text, 3.0))
    index.prefilled(asked, fleet[0])
    assert index.lookup(asked, fleet) == {"hit_len": [int(2 * BLOCK_BYTES / 3)]}
    assert index.lookup(request("ab", tail=100), fleet) == {"hit_len": [0]}


@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("holders", [1, 6])
def test_the_bound_counts_real_bytes(holders: int, size: int) -> None:
    fleet, index, rng = instances(8), PrefixIndex(2**40), random.Random(5)
    prompts = [array("Q", (rng.getrandbits(64) for _ in range(size))) for _ in range(120)]
    index.measure("cached_tokens", fleet)  # what each instance takes, however little it holds, is not the table's
    gc.collect()  # no lists and tuples are left over, which would be used for nothing
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number, blocks in enumerate(prompts):
            for holder in range(holders):
                index.placed(fleet[(number + holder) % 8], blocks)
            taken = tracemalloc.get_traced_memory()[0] - before
            assert number < 4 or taken <= index.table.memory_bytes  # what is made once is some hundred bytes, by Python
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
def test_who_answered_the_question_before_holds_the_reply_as_well(size: int) -> None:
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


def test_what_an_instance_answered_before_it_restarted_is_not_held_by_its_new_process() -> None:
    (instance,) = fleet = instances(1)
    index = PrefixIndex()
    first = asked(b"q" * 40)
    index.prefilled(first, instance)
    instance.restarted(2000.0, seen_empty=True)
    index.settled(first, instance, None)
    assert index.lookup(asked(b"q" * 40, b"r" * 5000), fleet) == {"hit_len": [0]}


def test_a_reply_is_forgotten_with_the_prompt_before_it() -> None:
    (instance,) = fleet = instances(1)
    instance.cache.block_size, instance.cache.num_blocks = TOKENS_PER_BLOCK, 3
    index = PrefixIndex()
    first = asked(b"q" * 2 * BLOCK_BYTES)
    index.prefilled(first, instance)
    index.settled(first, instance, None)
    index.prefilled(request("ab"), instance)
    assert index.lookup(asked(b"q" * 2 * BLOCK_BYTES, b"r" * 5000), fleet) == {"hit_len": [0]}


# ── Loss is not eviction ─────────────────────────────────────────────────────


def test_of_an_engine_that_was_warm_before_a_miss_is_unknown_until_the_warm_up_is_over() -> None:
    clock, (instance,) = Clock(0.0), instances(1, seen_empty=False)
    index = PrefixIndex(warm_up_s=600, clock=clock)
    assert hits(index, request("ab"), [instance]) == [None]
    index.prefilled(request("ab"), instance)
    assert hits(index, request("abc"), [instance]) == [2]
    assert hits(index, request("x"), [instance]) == [None]
    clock.now = 600.0
    assert hits(index, request("x"), [instance]) == [0]


def test_once_it_was_sent_its_capacity_all_it_held_before_is_gone() -> None:
    (instance,) = instances(1, seen_empty=False)
    instance.cache.block_size, instance.cache.num_blocks = TOKENS_PER_BLOCK, 4
    index = PrefixIndex(clock=Clock(0.0))
    index.prefilled(request("abc"), instance)
    index.prefilled(request("abc"), instance)
    assert hits(index, request("x"), [instance]) == [None]
    index.prefilled(request("d"), instance)
    assert hits(index, request("x"), [instance]) == [0]


def test_a_restart_that_was_seen_leaves_nothing_unknown() -> None:
    (instance,) = instances(1, seen_empty=False)
    index = PrefixIndex()
    index.prefilled(request("ab"), instance)
    instance.restarted(2000.0)
    assert hits(index, request("ab"), [instance]) == [0]


def test_placements_that_never_arrived_make_misses_unknown_and_hits_stay() -> None:
    clock, fleet = Clock(0.0), instances(2)
    index = PrefixIndex(clock=clock)
    index.prefilled(request("ab"), fleet[0])
    assert hits(index, request("ab"), fleet) == [2, 0]
    index.missed(fleet)
    assert hits(index, request("ab"), fleet) == [2, None]
    clock.now += 600
    assert hits(index, request("ab"), fleet) == [2, 0]


def test_a_loss_before_an_instance_was_ever_looked_at_counts() -> None:
    fleet, index = instances(1), PrefixIndex()
    index.missed(fleet)
    assert hits(index, request("ab"), fleet) == [None]
    fleet[0].restarted(2000.0)
    index.forget(fleet[0])
    assert hits(index, request("ab"), fleet) == [0]
