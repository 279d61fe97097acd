"""What a lookup service is asked for, and what of its answers is remembered."""

from __future__ import annotations

import asyncio
from array import array
from functools import partial
from typing import Any

import pytest

from smetric import names
from smetric.fleet.instance import Instance
from smetric.request.reader import Reading
from smetric.sources.lmcache import source
from smetric.sources.lmcache.client import MAX_TOKENS, NOTHING, Controller, Holdings
from tests.fakes import hang
from tests.sources import lmcache_fakes
from tests.sources.lmcache_captures import exchange
from tests.sources.lmcache_fakes import answering, asking, request

INSTANCE = Instance("mpA", "http://mpA")
#: Both A's and B's prefixes of 1,024 tokens.
BOTH = exchange("coordinator_20_lookup_both")[2]
HELD = Holdings(host={"mpA": 1024, "mpB": 512}, own={"mpA": 1024, "mpB": 512}, shared=1024)


async def test_what_came_of_a_look_up_serves_the_rest_of_the_decision_even_if_it_was_late() -> None:
    async with asking(hang, deadline_s=0.05) as asked:
        one = request()
        assert asked.lookup.recent(one) is None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asked.lookup.of(one)
        assert asked.lookup.recent(one) is NOTHING
        assert asked.lookup.recent(request()) is None
        asked.clock.now += 1.0
        assert asked.lookup.recent(one) is None


async def test_an_answer_is_used_again_for_the_same_leading_chunks_until_it_is_old_or_forgotten() -> None:
    async with asking(answering(200, BOTH)) as asked:
        assert await asked.lookup.of(request()) == HELD
        asked.ids.ids = [*range(1000, 2024), 7, 8, 9]  # the same chunks, another tail
        assert await asked.lookup.of(request()) == HELD
        assert asked.results == [names.LOOKUP_OK, names.LOOKUP_CACHED]
        asked.clock.now += 1.0
        await asked.lookup.of(request())
        asked.lookup.forget(INSTANCE)
        await asked.lookup.of(request())
        assert len(asked.service.calls) == 3
        asked.ids.ids = range(1001, 2025)
        await asked.lookup.of(request())
        await asked.lookup.of(request(model="m/other"))
        await asked.lookup.of(request(cache_salt="tenant1"))
        assert len(asked.service.calls) == 6


async def test_once_an_instance_has_computed_a_prompt_what_was_answered_before_is_asked_again() -> None:
    async with asking(answering(200, BOTH)) as asked:
        first, other = request(), request()
        await asked.lookup.of(first)
        first.token_ids = array("I", range(1000, 2024))
        asked.lookup.prefilled(first, INSTANCE)
        assert asked.lookup.recent(first) is None
        asked.ids.ids = [*range(1000, 2024), 7, 8, 9]  # a follow-up that adds less than a chunk
        await asked.lookup.of(other)
        assert asked.results == [names.LOOKUP_OK, names.LOOKUP_OK]
        other.token_ids = array("I", range(5000, 6024))  # of another prompt: what is known stays
        asked.lookup.prefilled(other, INSTANCE)
        await asked.lookup.of(request())
        assert asked.results[-1] == names.LOOKUP_CACHED


@pytest.mark.parametrize("ids", [range(255), (), [-1] * 256, [1 << 32] * 256, [1.5] * 256, ["1"] * 256, [None] * 256])
async def test_what_is_no_whole_chunk_of_token_ids_is_never_sent(ids: Any) -> None:
    async with asking(answering(200, BOTH), ids=ids) as asked:
        assert await asked.lookup.of(request()) is NOTHING
        assert asked.results == [names.LOOKUP_NOT_ASKED]
        assert asked.service.calls == []


async def test_a_prompt_without_token_ids_is_unknown() -> None:
    async with asking(answering(200, BOTH), ids=None) as asked:
        assert await asked.lookup.of(request()) is NOTHING
        assert asked.results == [names.LOOKUP_NO_TOKENS]


async def test_more_tokens_than_the_coordinator_takes_are_looked_up_as_far_as_it_takes_them() -> None:
    async with asking(answering(400, b"{}"), ids=array("I", [1]) * (MAX_TOKENS + 100_000)) as asked:
        await asked.lookup.of(request())
        assert len(asked.questions[0]["token_ids"]) == MAX_TOKENS // 256 * 256


async def test_salts_models_and_aliases_are_told_as_the_keys_have_them() -> None:
    models = {"m/test-model": "/models/seven"}
    request = partial(lmcache_fakes.request, reading=Reading(aliases={"gpt": "m/test-model"}))
    async with asking(answering(200, BOTH), models=models) as asked:
        await asked.lookup.of(request(model="gpt", cache_salt="tenant1"))
        (question,) = asked.questions
        assert (question["model_name"], question["cache_salt"]) == ("/models/seven", "tenant1")
        assert await asked.lookup.of(request(model="m/adapter")) is NOTHING
        await asked.lookup.of(request(model="gpt", cache_salt=None))
        assert [question["cache_salt"] for question in asked.questions] == ["tenant1", ""]
        assert await asked.lookup.of(request(model="gpt", cache_salt=7)) is NOTHING
        assert len(asked.service.calls) == 2


async def test_the_controller_is_not_asked_for_salted_prompts_which_it_cannot_tell_apart() -> None:
    body = exchange("controller_10_lookup_hit_one")[2]
    async with asking(answering(200, body), service=Controller()) as asked:
        assert await asked.lookup.of(request(cache_salt="tenant1")) is NOTHING
        assert asked.service.calls == []
        assert (await asked.lookup.of(request(cache_salt=""))).host == {"instA": 1024}


async def test_answers_that_name_a_crowd_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_LENGTHS", 5)
    async with asking(answering(200, BOTH)) as asked:  # five lengths each: two hosts, two of its own, and the answer
        first, second = request(model="a"), request(model="b")
        for one in (first, second, second, first):
            assert await asked.lookup.of(one) == HELD
        assert asked.results == [names.LOOKUP_OK, names.LOOKUP_OK, names.LOOKUP_CACHED, names.LOOKUP_OK]
    monkeypatch.setattr(source, "MAX_LENGTHS", 4)
    async with asking(answering(200, BOTH)) as asked:
        for _ in range(2):
            assert await asked.lookup.of(first) == HELD
        assert asked.results == [names.LOOKUP_OK, names.LOOKUP_OK]
