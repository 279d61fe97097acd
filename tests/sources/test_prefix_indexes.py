"""The prefix indexes of a router as one: what is asked of all, and what is in an image of them."""

from __future__ import annotations

from smetric.fleet.instance import Instance
from smetric.request.prompt import BLOCK_BYTES, Prompt
from smetric.request.request import InferenceRequest
from smetric.sources.prefix_index.index import PrefixIndex, PrefixIndexes
from smetric.sources.prefix_index.persistence import encode_image

ASKED = InferenceRequest(prompt=Prompt([b"x" * 2 * BLOCK_BYTES], 4.0))


def both() -> tuple[PrefixIndex, PrefixIndex, PrefixIndexes]:
    """One of token ids, one of text, and the two as one."""
    tokens, text = PrefixIndex(2**20, block_tokens=16), PrefixIndex(2**19)
    return tokens, text, PrefixIndexes([tokens, text])


def engine() -> Instance:
    instance = Instance("a", "http://127.0.0.1:1")
    instance.started_at = 1000.0
    return instance


def test_each_is_found_by_the_tokens_of_its_blocks() -> None:
    tokens, text, indexes = both()
    assert (indexes.of(16), indexes.of(0), indexes.of(32)) == (tokens, text, None)
    assert [*indexes] == [tokens, text]
    assert indexes
    assert not PrefixIndexes()


def test_figures_and_changes_are_those_of_all() -> None:
    tokens, text, indexes = both()
    before = indexes.changes
    tokens.placed(engine(), [1, 2, 3])
    text.prefilled(ASKED, engine())
    figures = indexes.figures()
    assert (figures.blocks, figures.evictions) == (5, 0)
    assert figures.memory_bytes == tokens.table.memory_bytes + text.table.memory_bytes
    assert indexes.changes > before


async def test_what_is_in_an_image_is_restored_to_blocks_of_the_same_kind() -> None:
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


async def test_an_image_of_full_indexes_has_room_where_they_have() -> None:
    tokens, text, indexes = both()
    tokens.placed(engine(), range(1, 100_000))
    text.placed(engine(), range(1, 100_000))
    assert indexes.figures().evictions
    assert len(encode_image(await indexes.image())) <= indexes.image_bytes == 2**20 + 2**19


def test_what_never_arrived_is_unknown_to_all() -> None:
    tokens, text, indexes = both()
    instance = engine()
    instance.seen_empty = True
    assert tokens.misses_are_known(instance)
    assert text.misses_are_known(instance)
    indexes.missed([instance])
    assert not tokens.misses_are_known(instance)
    assert not text.misses_are_known(instance)
