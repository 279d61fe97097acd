"""Prefix index of token ids that are known in time, late, or not at all."""

from __future__ import annotations

import asyncio
import inspect
from array import array
from collections.abc import Awaitable, Sequence

import pytest

from smetric.fleet.instance import Instance
from smetric.request.prompt import Prompt
from smetric.request.request import InferenceRequest, Usage
from smetric.sources.prefix_index.index import PrefixIndex
from smetric.sources.prefix_index.tokens import ASKED_S, TokenPrefixIndex
from tests.clock import Clock
from tests.fakes import until
from tests.sources.prefix_index.lettered import instances

BLOCK = 16


class Ids:
    """Token ids: one for each four bytes of text, known when `ready` is set."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.ready.set()
        self.begun = 0
        self.are_known = True

    async def of(self, request: InferenceRequest) -> Sequence[int] | None:
        await self.ready.wait()
        if self.are_known:
            request.count_by(ids_of(request), BLOCK)
        return request.token_ids

    def begin(self, request: InferenceRequest) -> Awaitable[Sequence[int] | None] | None:
        self.begun += 1
        return asyncio.ensure_future(self._later(ids_of(request))) if self.are_known else None

    async def _later(self, ids: array[int]) -> array[int]:
        await self.ready.wait()
        return ids


class Pair:
    """Both indexes, and the fleet they know."""

    def __init__(self, count: int = 2, *, seen_empty: bool = True, yields: bool = False) -> None:
        self.fleet = instances(count, seen_empty=seen_empty)
        self.ids, self.clock = Ids(), Clock()
        self.text = PrefixIndex(yields=yields, clock=self.clock)
        index = PrefixIndex(block_tokens=BLOCK, yields=yields, clock=self.clock)
        self.tokens = TokenPrefixIndex(index, self.text, self.ids, yields=yields, clock=self.clock)

    async def look_up(self, request: InferenceRequest) -> list[float | None]:
        answer = self.tokens.lookup(request, self.fleet)
        return list((await answer if inspect.isawaitable(answer) else answer)["hit_len"])

    def by_text(self, request: InferenceRequest) -> list[float | None]:
        return list(self.text.lookup(request, self.fleet)["hit_len"])

    def serve(self, request: InferenceRequest, instance: Instance, usage: Usage | None = None) -> None:
        """Prefill and answer the request, without waiting for late ids."""
        for source in (self.tokens, self.text):
            source.prefilled(request, instance)
        request.answering()
        for source in (self.tokens, self.text):
            source.settled(request, instance, usage)


def asked(text: str, *, question: str = "", est_hit: int = 0, key: bytes = b"m\0") -> InferenceRequest:
    prompt = Prompt([text.encode()], 4.0, key=key, question_bytes=len(question), history_bytes=len(question))
    request = InferenceRequest(prompt=prompt, prompt_len=prompt.length, turn=int(bool(est_hit)), est_hit=est_hit)
    request.body = text.encode()
    return request


def ids_of(request: InferenceRequest) -> array[int]:
    assert request.body is not None
    return array("I", request.body + b"." * (-len(request.body) % 4))


def spelt(tokens: int, letter: str = "a") -> str:
    """Text of so many tokens."""
    return "".join(f"{letter}{number:03}" for number in range(tokens))


async def test_token_hit_is_exact_to_a_block_of_the_engine() -> None:
    pair = Pair()
    await pair.ids.of(first := asked(spelt(500)))
    pair.serve(first, pair.fleet[0])
    assert await pair.look_up(asked(spelt(500) + "and more of it")) == [496, None]
    assert await pair.look_up(asked(spelt(300))) == [288, None]
    assert await pair.look_up(asked(spelt(500, "b"))) == [None, None]
    pair.fleet[0].cache.block_size = 32
    assert await pair.look_up(asked(spelt(500) + "and more of it")) == [480, None]


async def test_prompt_without_ids_is_entered_when_they_are_known() -> None:
    pair = Pair()
    pair.ids.ready.clear()
    pair.serve(asked(spelt(500)), pair.fleet[0], Usage(500, 40, 0))
    assert pair.tokens.index.table.blocks == 0
    pair.ids.ready.set()
    await until(lambda: pair.tokens.index.table.blocks > 0)
    follow_up = asked(spelt(600), question=spelt(500))
    assert await pair.look_up(follow_up) == [(500 + 40 - 1) // BLOCK * BLOCK, None]


async def test_prompt_is_entered_if_ids_come_before_the_response_ends() -> None:
    pair = Pair()
    request = asked(spelt(500))
    pair.tokens.prefilled(request, pair.fleet[0])
    await until(lambda: pair.tokens.index.table.blocks > 0)
    request.answering()
    pair.tokens.settled(request, pair.fleet[0], Usage(500, 40, 0))
    assert pair.tokens.index.least(asked(spelt(1)), pair.fleet) == [0, 0]
    assert await pair.look_up(asked(spelt(600), question=spelt(500))) == [528, None]


async def test_index_of_text_answers_without_ids() -> None:
    pair = Pair()
    pair.serve(asked(spelt(1000)), pair.fleet[0])
    await until(lambda: pair.tokens.index.table.blocks > 0)
    pair.ids.are_known = False
    again = asked(spelt(1000))
    assert await pair.look_up(again) == [None, None]
    assert pair.by_text(again) == [768, 0]


async def test_token_index_does_not_hide_a_longer_hit_by_text() -> None:
    pair = Pair()
    pair.serve(asked(spelt(256)), pair.fleet[0])
    await until(lambda: pair.tokens.index.table.blocks > 0)
    pair.ids.are_known = False
    pair.serve(asked(spelt(2000)), pair.fleet[0])
    pair.ids.are_known = True
    assert await pair.look_up(asked(spelt(2000))) == [None, None]
    assert pair.by_text(asked(spelt(2000))) == [2048, 0]


async def test_token_index_does_not_hide_text_placements_of_other_routers() -> None:
    pair = Pair()
    for instance in pair.fleet:
        await pair.ids.of(shared := asked(spelt(256)))
        pair.serve(shared, instance)
    elsewhere = asked(spelt(2000)).prompt
    assert elsewhere is not None
    pair.text.placed(pair.fleet[0], elsewhere.hashes.blocks)
    follow_up = asked(spelt(2100), question=spelt(2000))
    assert await pair.look_up(follow_up) == [None, 256]
    assert pair.by_text(follow_up) == [2048, 256]


async def test_token_index_yields_partial_hits() -> None:
    for yields, cells in ((False, [256, None]), (True, [None, None])):
        pair = Pair(yields=yields)
        pair.serve(asked(spelt(257)), pair.fleet[0])
        await until(lambda pair=pair: pair.tokens.index.table.blocks > 0)  # type: ignore[misc]
        assert await pair.look_up(asked(spelt(1000), est_hit=900)) == cells


async def test_late_ids_are_not_entered_for_another_process() -> None:
    pair = Pair()
    pair.ids.ready.clear()
    pair.serve(asked(spelt(500)), pair.fleet[0])
    pair.fleet[0].restarted(2000.0)
    pair.tokens.forget(pair.fleet[0])
    pair.ids.ready.set()
    await until(lambda: not pair.tokens._tasks)
    assert pair.tokens.index.table.blocks == 0


async def test_token_ids_are_not_requested_without_lookups() -> None:
    pair = Pair()
    pair.clock.now += ASKED_S
    pair.serve(asked(spelt(500)), pair.fleet[0])
    assert pair.ids.begun == 0
    await pair.look_up(asked(spelt(500)))
    pair.serve(asked(spelt(500)), pair.fleet[0])
    assert pair.ids.begun == 1
    await pair.tokens.stop()
    assert pair.tokens.index.table.blocks == 0


async def test_lookup_requests_no_ids_while_nothing_is_held() -> None:
    pair = Pair()
    pair.ids.ready.clear()
    assert await asyncio.wait_for(pair.look_up(asked(spelt(500))), 1) == [None, None]


async def test_replies_are_believed_only_while_they_are_found_again() -> None:
    pair = Pair(1)
    (instance,) = pair.fleet

    async def believed_of(letter: str, cached: int) -> float | None:
        """Serve a follow-up to a reply of 200 tokens that reports *cached* tokens; return its predicted hit."""
        question = spelt(500, letter)
        await pair.ids.of(first := asked(question))
        pair.serve(first, instance, Usage(500, 200, 0))
        await pair.ids.of(second := asked(question + spelt(400, "!"), question=question))
        (cell,) = await pair.look_up(second)
        pair.serve(second, instance, Usage(900, 1, cached))
        return cell

    assert [await believed_of(letter, 496) for letter in "abcdefgh"] == [688] * 6 + [496] * 2
    assert [await believed_of(letter, 688) for letter in "ijkl"] == [496] * 3 + [688]


async def test_images_of_both_kinds_are_restored_by_their_own_kind() -> None:
    pair, other = Pair(), Pair(seen_empty=False)
    pair.serve(asked(spelt(1000)), pair.fleet[0])
    await until(lambda: pair.tokens.index.table.blocks > 0)
    images = [*pair.tokens.index.images(), *pair.text.images()]
    assert [one.tokens for one in images] == [BLOCK, 0]
    for index in (other.tokens.index, other.text):
        index.restore(images)
    assert await other.look_up(asked(spelt(1000))) == [992, None]
    assert other.by_text(asked(spelt(1000))) == [768, None]


@pytest.mark.parametrize("prompts", [1, 3])
async def test_usage_of_several_prompts_teaches_nothing(prompts: int) -> None:
    pair = Pair(1)
    (instance,) = pair.fleet
    await pair.ids.of(first := asked(spelt(500)))
    first.prompts = prompts
    pair.serve(first, instance, Usage(500, 100, 0))
    follow_up = asked(spelt(700), question=spelt(500))
    assert await pair.look_up(follow_up) == [592 if prompts == 1 else 496]
