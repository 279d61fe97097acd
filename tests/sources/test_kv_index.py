import tracemalloc

import xxhash

from smetric.request.prompt import ROOT, BlockKeys
from smetric.sources.kv_events.contents import BYTES_PER_BLOCK, BYTES_PER_HOLDING, KvIndex
from tests.sources.kv_engine import BLOCK, stored
from tests.sources.test_kv_contents import PROMPT, ROOM, apply, fresh, hits


def test_equal_prefixes_are_one_whatever_engines_call_them() -> None:
    index = KvIndex(ROOM)
    one, other, none = fresh(index), fresh(index), fresh(index)
    apply(one, stored(PROMPT, seed="one"))
    apply(other, stored(PROMPT[: 2 * BLOCK], seed="other"), stored([1, *PROMPT], seed="other"))
    assert hits(index, PROMPT, one, other, none) == [5, 2, 0]
    assert hits(index, PROMPT[: 3 * BLOCK] + [9] * BLOCK, one, other, none) == [3, 2, 0]
    assert index.blocks == 10


def test_the_walk_costs_what_the_longest_hit_costs() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    apply(contents, stored(PROMPT))
    prompt = BlockKeys(PROMPT + [9] * 1000 * BLOCK, BLOCK)
    assert index.depths(prompt, 1005, [contents.bit]) == [5]
    assert len(prompt.keys) <= 16


def key_of(number: int) -> int:
    return xxhash.xxh3_64_intdigest(str(number).encode())


def test_the_costs_the_bound_counts_with_are_not_below_the_real_ones() -> None:
    index = KvIndex(ROOM)
    contents = fresh(index)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for i in range(30_000):
            index.hold(key_of(i), ROOT, contents.bit)
            contents._keys[key_of(-i)] = key_of(i)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (taken - before) / 30_000 <= BYTES_PER_BLOCK + BYTES_PER_HOLDING
