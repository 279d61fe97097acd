from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.sources.tokens import request_tokens
from smetric.sources.tokens.chat import Refused
from smetric.sources.tokens.request_tokens import PIECE_BYTES, body_of_ids

ID = st.integers(0, 2**32 - 1)


@given(st.lists(ID), st.booleans(), st.sampled_from([None, 1]), st.integers(1, 8))
def test_ids_are_those_of_the_first_list_wherever_it_is_cut(
    ids: list[int], is_nested: bool, indent: int | None, piece: int
) -> None:
    prompt = [ids, [7]] if is_nested and ids else ids
    body = msgspec.json.format(msgspec.json.encode({"prompt": prompt, "echo": True}), indent=indent or -1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(request_tokens, "PIECE_BYTES", piece)
        found = asyncio.run(body_of_ids(body))
    assert (found["prompt"].tolist(), found["echo"]) == (ids, True)


@pytest.mark.parametrize("wrong", ["-1", str(1 << 32), '"x"', "1.5", "[]", "null"])
async def test_one_that_is_none_makes_all_of_them_unknown(wrong: str) -> None:
    with pytest.raises(Refused):
        await body_of_ids(b'{"prompt": [%b%b]}' % (b"5, " * PIECE_BYTES, wrong.encode()))


async def test_a_long_list_leaves_the_loop_to_others() -> None:
    reading = asyncio.create_task(body_of_ids(b'{"prompt": [%b5]}' % (b"5, " * PIECE_BYTES)))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert len((await reading)["prompt"]) == PIECE_BYTES + 1
    assert turns >= 3
