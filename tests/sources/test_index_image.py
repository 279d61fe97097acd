"""An index as bytes: what comes back is what was written, or an error that says why not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.request.prompt import BLOCK_BYTES
from smetric.sources.prefix_index.persistence import (
    MAGIC,
    IndexImage,
    InstanceImage,
    UnreadableImage,
    decode_image,
    encode_image,
    pack,
    unpack,
)

HASH = st.integers(0, 2**64 - 1)


def image(blocks: list[int], runs: list[tuple[int, int]]) -> IndexImage:
    return IndexImage(5.0, BLOCK_BYTES, [InstanceImage("a", 1000.5, pack(blocks), runs)])


@given(st.lists(HASH, max_size=40))
def test_what_was_written_comes_back(blocks: list[int]) -> None:
    runs = [(place, 1) for place in range(len(blocks))]
    (one,) = decode_image(encode_image(image(blocks, runs))).instances
    assert list(one.blocks) == blocks
    assert (one.id, one.started_at, one.runs) == ("a", 1000.5, runs)


def test_hashes_are_packed_in_little_endian() -> None:
    assert pack([1, 2**63]) == bytes([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 128])
    assert list(unpack(pack([7, 8]))) == [7, 8]


@given(st.data())
def test_one_changed_bit_or_a_missing_end_is_noticed(data: st.DataObject) -> None:
    whole = bytearray(encode_image(image([1, 2, 3], [(1, 3)])))
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    else:
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(UnreadableImage):
        decode_image(bytes(whole))


def test_another_version_is_named() -> None:
    other = bytearray(encode_image(image([], [])))
    other[len(MAGIC) - 1] += 1
    with pytest.raises(UnreadableImage, match="another version"):
        decode_image(bytes(other))


@pytest.mark.parametrize(
    "wrong",
    [
        image([1, 2], [(1, 3)]),
        image([1, 2], [(1, 2), (2, 0)]),
        image([1, 2], [(1, 3), (2, -1)]),
        image([1, 2], [(2, 1), (1, 1)]),
        IndexImage(0.0, BLOCK_BYTES, [InstanceImage("a", None, b"1234567", [(1, 1)])]),
        IndexImage(0.0, 512, []),
    ],
)
def test_what_cannot_be_is_refused_even_with_a_checksum_that_fits(wrong: IndexImage) -> None:
    with pytest.raises(UnreadableImage):
        decode_image(encode_image(wrong))
