from array import array

from hypothesis import given
from hypothesis import strategies as st

from smetric.request.prompt import BlockKeys

TOKENS = st.lists(st.integers(0, 3), max_size=24)


def keys_of(tokens: list[int], size: int, adapter: str = "", salt: str = "") -> list[int]:
    return BlockKeys(tokens, size, adapter, salt).upto(100)


@given(TOKENS, TOKENS, st.sampled_from([1, 2, 5]))
def test_two_prompts_share_the_keys_of_their_common_blocks_and_no_more(a: list[int], b: list[int], size: int) -> None:
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    shared = [one == other for one, other in zip(keys_of(a, size), keys_of(b, size), strict=False)]
    assert shared == [True] * (common // size) + [False] * (len(shared) - common // size)
    assert len(keys_of(a, size)) == len(a) // size


def test_keys_are_computed_as_far_as_somebody_asks() -> None:
    prompt = BlockKeys(range(1000), 10)
    assert len(prompt.upto(3)) == 3
    assert len(prompt.upto(1)) == 3
    assert prompt.upto(1000) == BlockKeys(array("I", range(1000)), 10).upto(100)


def test_adapter_and_salt_keep_prompts_apart() -> None:
    tokens = list(range(12))
    kinds = [keys_of(tokens, 4, adapter, salt) for adapter in ("", "a", "b") for salt in ("", "s", "t")]
    assert len({keys[0] for keys in kinds}) == len(kinds)
    assert len({keys[-1] for keys in kinds}) == len(kinds)


def test_blocks_of_another_size_have_other_keys() -> None:
    assert not set(keys_of(list(range(12)), 4)) & set(keys_of(list(range(12)), 3))
