from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smetric.lab.store import TOKEN_BYTES, block_keys, root_key


@given(st.binary(max_size=400), st.binary(max_size=400), st.integers(1, 8))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(first: bytes, second: bytes, block_size: int) -> None:
    width = block_size * TOKEN_BYTES
    keys = block_keys(first + second, block_size)
    assert len(keys) == len(first + second) // width
    short = block_keys(first, block_size)
    assert keys[: len(short)] == short


def test_a_key_depends_on_everything_before_its_block() -> None:
    assert block_keys(b"aaaabbbb", 1)[1] != block_keys(b"xxxxbbbb", 1)[1]


def test_a_salt_changes_every_key() -> None:
    tokens = b"aaaabbbb"
    plain, salted = block_keys(tokens, 1, root_key()), block_keys(tokens, 1, root_key("tenant"))
    assert not set(plain) & set(salted)


def test_keys_are_the_same_in_every_process() -> None:
    assert block_keys(b"abcdefgh", 2) == [8017998777839871107]
