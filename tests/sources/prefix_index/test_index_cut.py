"""Prompts cut into blocks: what hits, and what stands for a reply."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.request.prompt import BLOCK_BYTES, Prompt
from smetric.request.request import InferenceRequest, Usage
from smetric.sources.prefix_index.index import Cut, cut_ids, cut_of

BLOCK = 16


def leading(held: set[int]) -> Callable[[Sequence[int]], int]:
    """How many leading ones of some hashes are among *held*."""
    return lambda blocks: next((at for at, block in enumerate(blocks) if block not in held), len(blocks))


def prompt(text: str = "question", *, key: bytes = b"m\0", question: int = 0, history: int = 0) -> Prompt:
    return Prompt([text.encode()], 4.0, key=key, question_bytes=question, history_bytes=history)


def cut(ids: list[int], of: Prompt | None = None) -> Cut:
    return cut_ids(of or prompt(), array("I", ids), BLOCK)


@given(st.lists(st.integers(0, 9), max_size=100), st.lists(st.integers(0, 9), max_size=100))
def test_token_blocks_are_equal_exactly_where_ids_are(one: list[int], other: list[int]) -> None:
    blocks = zip(cut(one).blocks, cut(other).blocks, strict=False)
    for number, (mine, theirs) in enumerate(blocks, 1):
        assert (mine == theirs) == (one[: number * BLOCK] == other[: number * BLOCK])


@pytest.mark.parametrize("key", [b'm\0"salt"', b"adapter\0", b"\0"])
def test_token_blocks_differ_by_model_adapter_and_salt(key: bytes) -> None:
    ids = list(range(64))
    assert not set(cut(ids).blocks) & set(cut(ids, prompt(key=key)).blocks)


@pytest.mark.parametrize(("length", "most"), [(1, 0), (16, 0), (17, 16), (64, 48), (65, 64), (79, 64)])
def test_token_hit_is_whole_blocks_and_less_than_the_prompt(length: int, most: int) -> None:
    one = cut(list(range(length)))
    assert one.tokens(one.reach(len(one.blocks), lambda _: False)) == most


@given(question=st.integers(1, 100), reply=st.integers(1, 100), follow=st.integers(1, 50))
def test_token_reply_is_held_except_its_last_token(question: int, reply: int, follow: int) -> None:
    first = cut(list(range(question)), prompt("question"))
    held = set(first.reply(Usage(question, reply, 0)))
    second = cut(list(range(question + reply + follow)), prompt("question and more", question=8, history=12))
    reach = second.reach(question // BLOCK, leading(held))
    assert reach == (question + reply - 1) // BLOCK * BLOCK


def test_token_reply_is_found_only_behind_its_question() -> None:
    held = set(cut(list(range(40)), prompt("question")).reply(Usage(40, 100, 0)))
    ids = list(range(200))
    assert cut(ids, prompt("Question and more", question=8)).reach(2, leading(held)) == 32
    assert cut(ids, prompt("question and more", question=8)).reach(1, leading(held)) == 16
    assert cut(ids, prompt("question and more", question=8)).reach(2, leading(held)) == 128


@pytest.mark.parametrize("usage", [None, Usage(40, None, 0), Usage(40, 0, 0), Usage(41, 50, 0), Usage(40, 1, 0)])
def test_token_reply_without_exact_usage_has_no_blocks(usage: Usage | None) -> None:
    assert list(cut(list(range(40))).reply(usage)) == []


def test_text_hit_includes_the_history_once_the_question_was_answered() -> None:
    question = "q" * 3 * BLOCK_BYTES
    (answered,) = cut_of(InferenceRequest(prompt=prompt(question)), 0).reply(None)  # type: ignore[union-attr]
    history = len(question) + 1000
    follow = prompt(question + "a" * 5000, question=len(question), history=history)
    one = cut_of(InferenceRequest(prompt=follow), 0)
    assert one is not None
    assert one.tokens(one.reach(3, leading({answered}))) == history // 4
    assert one.tokens(one.reach(3, set[int]().__contains__)) == 768
    assert one.tokens(one.reach(2, leading({answered}))) == 512


def test_token_blocks_are_kept_without_the_ids() -> None:
    request = InferenceRequest(prompt=prompt())
    assert cut_of(request, BLOCK) is None
    request.token_ids = array("I", range(40))
    first = cut_of(request, BLOCK)
    request.token_ids = None
    again = cut_of(request, BLOCK)
    assert first is not None
    assert again is not None
    assert (again.blocks, again.size) == (first.blocks, 40)
    assert cut_of(InferenceRequest(), BLOCK) is None


@given(question=st.integers(1, 40), reply=st.integers(17, 60))
def test_token_cut_names_the_first_hash_of_the_reply_it_follows(question: int, reply: int) -> None:
    answered = list(cut(list(range(question)), prompt("question")).reply(Usage(question, reply, 0)))
    second = cut(list(range(question + reply)), prompt("question and more", question=8, history=12))
    assert second.answered(question // BLOCK) == answered[0]
    assert cut(list(range(question + reply))).answered(question // BLOCK) == 0
    assert cut([1], prompt("question and more", question=8)).answered(0) == 0


def test_text_cut_names_its_question_if_that_is_held_to_its_last_full_block() -> None:
    question = "q" * (BLOCK_BYTES + 1)
    one = cut_of(InferenceRequest(prompt=prompt(question + "more", question=len(question))), 0)
    asked = cut_of(InferenceRequest(prompt=prompt(question)), 0)
    assert one is not None
    assert asked is not None
    assert [one.answered(1)] == list(asked.reply(None))
    assert one.answered(0) == 0
