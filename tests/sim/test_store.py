from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.lab.store import PrefixCache


def filled(cache: PrefixCache, keys: list[int]) -> None:
    """One sequence computes *keys*, then ends."""
    assert cache.reserve(len(keys))
    for key in keys:
        cache.commit(key)
    cache.release(keys, 0)


def test_only_leading_blocks_count_as_hits() -> None:
    cache = PrefixCache(8)
    filled(cache, [1, 2, 3])
    assert cache.match([1, 2, 3, 4]) == 3
    assert cache.match([2, 3]) == 2
    assert cache.match([9, 1, 2]) == 0


def test_the_end_of_a_prefix_is_forgotten_before_its_beginning() -> None:
    cache = PrefixCache(4)
    filled(cache, [1, 2, 3])
    assert cache.reserve(2)
    assert cache.match([1, 2, 3]) == 2


def test_the_prefix_that_was_used_longest_ago_is_forgotten_first() -> None:
    cache = PrefixCache(4)
    filled(cache, [1, 2])
    filled(cache, [5, 6])
    cache.pin([1, 2])
    cache.release([1, 2], 0)
    assert cache.reserve(2)
    assert (cache.match([1, 2]), cache.match([5, 6])) == (2, 0)


def test_pinned_blocks_are_never_evicted_and_room_is_all_or_nothing() -> None:
    cache = PrefixCache(3)
    filled(cache, [1, 2])
    cache.pin([1, 2])
    assert not cache.reserve(2)
    assert (cache.used, cache.available, cache.match([1, 2])) == (2, 1, 2)


def test_a_shared_block_is_held_until_the_last_sequence_lets_it_go() -> None:
    cache = PrefixCache(2)
    assert cache.reserve(1)
    cache.commit(7)
    cache.pin([7])
    cache.release([7], 0)
    assert not cache.reserve(2)
    cache.release([7], 0)
    assert cache.reserve(2)


def test_two_sequences_that_compute_the_same_block_share_it() -> None:
    cache = PrefixCache(4)
    assert cache.reserve(2)
    cache.commit(7)
    cache.commit(7)
    assert (cache.used, cache.available) == (1, 3)
    cache.release([7], 0)
    assert cache.used == 1


def test_pinning_what_is_not_cached_is_an_error() -> None:
    with pytest.raises(KeyError):
        PrefixCache(4).pin([1])


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        PrefixCache(0)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5), st.booleans()), max_size=40))
def test_blocks_are_neither_lost_nor_made(steps: list[tuple[int, int, bool]]) -> None:
    """Sequences over six prefixes come and go; what they hold, what is idle and what is free add up at any time."""
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
