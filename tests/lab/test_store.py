"""Prefix cache of one engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.lab.store import TOKEN_BYTES, PrefixCache, block_keys, root_key


@given(st.binary(max_size=400), st.binary(max_size=400), st.integers(1, 8))
def test_block_keys_of_prefix_are_prefix_of_keys(first: bytes, second: bytes, block_size: int) -> None:
    width = block_size * TOKEN_BYTES
    keys = block_keys(first + second, block_size)
    assert len(keys) == len(first + second) // width
    short = block_keys(first, block_size)
    assert keys[: len(short)] == short


def test_block_keys_depend_on_everything_before_their_block() -> None:
    assert block_keys(b"aaaabbbb", 1)[1] != block_keys(b"xxxxbbbb", 1)[1]


def test_block_keys_change_with_salt() -> None:
    tokens = b"aaaabbbb"
    plain, salted = block_keys(tokens, 1, root_key()), block_keys(tokens, 1, root_key("tenant"))
    assert not set(plain) & set(salted)


def test_block_keys_are_equal_in_every_process() -> None:
    assert block_keys(b"abcdefgh", 2) == [8017998777839871107]


def filled(cache: PrefixCache, keys: list[int]) -> None:
    """Compute *keys* for one sequence and release them."""
    assert cache.reserve(len(keys))
    for key in keys:
        cache.commit(key)
    cache.release(keys, 0)


def test_cache_counts_leading_blocks_as_hits() -> None:
    cache = PrefixCache(8)
    filled(cache, [1, 2, 3])
    assert cache.match([1, 2, 3, 4]) == 3
    assert cache.match([2, 3]) == 2
    assert cache.match([9, 1, 2]) == 0


def test_cache_evicts_end_of_prefix_before_its_beginning() -> None:
    cache = PrefixCache(4)
    filled(cache, [1, 2, 3])
    assert cache.reserve(2)
    assert cache.match([1, 2, 3]) == 2


def test_cache_evicts_least_recently_used_prefix_first() -> None:
    cache = PrefixCache(4)
    filled(cache, [1, 2])
    filled(cache, [5, 6])
    cache.pin([1, 2])
    cache.release([1, 2], 0)
    assert cache.reserve(2)
    assert (cache.match([1, 2]), cache.match([5, 6])) == (2, 0)


def test_cache_keeps_pinned_blocks_and_reserves_all_or_nothing() -> None:
    cache = PrefixCache(3)
    filled(cache, [1, 2])
    cache.pin([1, 2])
    assert not cache.reserve(2)
    assert (cache.used, cache.available, cache.match([1, 2])) == (2, 1, 2)


def test_cache_holds_shared_block_until_its_last_release() -> None:
    cache = PrefixCache(2)
    assert cache.reserve(1)
    cache.commit(7)
    cache.pin([7])
    cache.release([7], 0)
    assert not cache.reserve(2)
    cache.release([7], 0)
    assert cache.reserve(2)


def test_cache_shares_block_computed_twice() -> None:
    cache = PrefixCache(4)
    assert cache.reserve(2)
    cache.commit(7)
    cache.commit(7)
    assert (cache.used, cache.available) == (1, 3)
    cache.release([7], 0)
    assert cache.used == 1


def test_cache_pin_of_missing_block_raises() -> None:
    with pytest.raises(KeyError):
        PrefixCache(4).pin([1])


def test_cache_without_blocks_is_rejected() -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        PrefixCache(0)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5), st.booleans()), max_size=40))
def test_cache_blocks_always_add_up(steps: list[tuple[int, int, bool]]) -> None:
    """Held, idle and free blocks add up after every step of sequences over six prefixes."""
    cache = PrefixCache(12)
    held: list[tuple[list[int], int]] = []
    for prefix, length, lets_go in steps:
        keys = [prefix * 100 + index for index in range(length)]
        hits = cache.match(keys)
        if length - hits + 1 <= cache.available - cache.idle_among(keys[:hits]):
            cache.pin(keys[:hits])
            assert cache.reserve(length - hits + 1)
            for key in keys[hits:]:
                cache.commit(key)
            held.append((keys, 1))
            assert cache.match(keys) == length
        if lets_go and held:
            cache.release(*held.pop(0))
        pinned = {key for keys, _ in held for key in keys}
        assert cache.used == len(pinned) + len(held)
        assert cache.used <= cache.capacity
        assert cache.cached <= cache.capacity - len(held)
    for keys, private in held:
        cache.release(keys, private)
    assert (cache.used, cache.available) == (0, 12)
