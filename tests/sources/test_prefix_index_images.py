"""What a prefix index tells another one, and what that one makes of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smetric.request.prompt import BLOCK_BYTES
from smetric.sources.prefix_index.index import MAX_INSTANCES_WAITING, MAX_WAITING, PrefixIndex
from smetric.sources.prefix_index.persistence import (
    IndexImage,
    InstanceImage,
    decode_image,
    encode_image,
)
from tests.sources.lettered import ENTRY, TOKENS_PER_BLOCK, hits, instances, request

PROMPT = st.text("xyz", max_size=7)


def image_of(index: PrefixIndex) -> list[InstanceImage]:
    return decode_image(encode_image(IndexImage(0.0, BLOCK_BYTES, list(index.images())))).instances


@given(st.lists(st.tuples(st.integers(0, 3), PROMPT), max_size=20), st.lists(PROMPT, max_size=5))
def test_a_restored_index_answers_as_the_one_it_was_taken_from(sent: list[tuple[int, str]], asked: list[str]) -> None:
    index, fleet = PrefixIndex(), instances(4)
    for which, blocks in sent:
        index.prefilled(request(blocks), fleet[which])
    again = PrefixIndex()
    again.restore(image_of(index))
    for blocks in asked + [blocks for _, blocks in sent]:
        assert hits(again, request(blocks), fleet) == hits(index, request(blocks), fleet)
    assert again.table.blocks == index.table.blocks


def test_only_the_same_process_gets_its_blocks_back_and_not_before_it_has_said_which_it_is() -> None:
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


def test_what_is_restored_is_older_than_what_was_placed_since() -> None:
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


def test_what_is_restored_twice_counts_once_and_stays_within_the_bound() -> None:
    index, fleet = PrefixIndex(), instances(2)
    index.prefilled(request("abc"), fleet[0])
    index.prefilled(request("abd"), fleet[1])
    again = PrefixIndex(4 * ENTRY)
    again.restore(image_of(index))
    again.restore(image_of(index))
    assert hits(again, request("abc"), fleet)[0] is not None
    assert again.table.memory_bytes <= 4 * ENTRY


def test_images_of_instances_nobody_knows_do_not_pile_up() -> None:
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


async def test_what_nobody_has_asked_about_since_the_start_is_passed_on_to_the_next_process() -> None:
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


async def test_what_waits_for_instances_that_are_not_configured_any_more_is_dropped() -> None:
    index, fleet = PrefixIndex(), instances(2)
    for instance in fleet:
        index.prefilled(request("ab"), instance)
    again, (kept, _) = PrefixIndex(), instances(2, seen_empty=False)
    again.restore(image_of(index))
    kept.started_at = None
    await again.recall([kept])
    assert again.is_restoring
    assert [one.id for one in again.images()] == [kept.id]
