"""The lookup services as they may be met: well, down, hanging, slow, lying."""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from typing import Any

import pytest
from structlog.testing import capture_logs

from smetric import names
from smetric.http import addresses
from smetric.sources.lmcache import client
from smetric.sources.lmcache.client import (
    INLINE_TOKENS,
    MAX_ANSWER_BYTES,
    NOTHING,
    Controller,
    Coordinator,
    Holdings,
    Question,
    Service,
)
from tests.fakes import Call, chunk, hang, head, until
from tests.resolver import Resolver
from tests.sources import lmcache_captures
from tests.sources.lmcache_captures import exchange
from tests.sources.lmcache_fakes import JSON, answering, asking, request

#: Both A's and B's prefixes of 1,024 tokens.
BOTH = exchange("coordinator_20_lookup_both")[2]
HELD = Holdings(host={"mpA": 1024, "mpB": 512}, own={"mpA": 1024, "mpB": 512}, shared=1024)

#: How captures that are no answers count: 4xx blames the question, all else the service.
REFUSED = {400, 413, 422}


@pytest.mark.parametrize("name", lmcache_captures.names("c", "mpreal"))
async def test_every_capture_is_an_answer_or_unknown_and_refusals_do_not_suspend_the_service(name: str) -> None:
    _, status, body = exchange(name)
    kind: Service = Controller() if name.startswith("controller") else Coordinator(256, 1)
    async with asking(answering(status, body), service=kind, failures=1) as asked:
        holdings = await asked.lookup.of(request())
        assert len(asked.service.calls) == 1
        if status == 200:
            assert asked.results[0] in (names.LOOKUP_OK, names.LOOKUP_UNREADABLE)
        else:
            assert (asked.results, holdings) == ([names.LOOKUP_HTTP_ERROR], NOTHING)
            assert asked.suspended == ([] if status in REFUSED else [True])


async def test_a_well_service_is_asked_in_its_own_words_and_its_answer_read() -> None:
    async with asking(answering(200, BOTH)) as asked:
        assert await asked.lookup.of(request()) == HELD
        (call,) = asked.service.calls
        assert (call.method, call.target) == (b"POST", b"/directory/lookup")
        assert call.values(b"content-type") == [b"application/json"]
        assert asked.questions == [
            {"token_ids": list(range(1000, 2024)), "model_name": "m/test-model", "world_size": 1, "cache_salt": ""}
        ]


async def test_a_name_leads_where_it_did_while_it_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver("127.0.0.1")
    monkeypatch.setattr(addresses, "TTL_S", 0.0)
    monkeypatch.setattr(client, "resolve", resolver)

    async def once(call: Call) -> None:
        await call.answer(200, BOTH, JSON, (b"connection", b"close"))

    async with asking(once, host="lmcache.test") as asked:
        assert await asked.lookup.of(request()) == HELD
        resolver.found = ()
        asked.clock.now += 1.0
        assert await asked.lookup.of(request()) == HELD
        assert len(resolver.asked) == 2


async def test_a_service_that_is_down_is_left_alone_after_some_failures_and_tried_again_later() -> None:
    async with asking(answering(200, BOTH)) as asked:
        port = int(asked.service.url.rpartition(":")[2])
        await asked.service.stop()
        with capture_logs() as logs:
            for _ in range(5):
                assert await asked.lookup.of(request()) is NOTHING
            assert asked.results == [names.LOOKUP_CONNECT_ERROR] * 3 + [names.LOOKUP_SUSPENDED] * 2
            assert asked.suspended == [True]
            await asked.service.start(port)
            assert await asked.lookup.of(request()) is NOTHING
            asked.clock.now += 5.0
            assert await asked.lookup.of(request()) == HELD
            assert asked.suspended == [True, False]
        assert [(line["event"], line["log_level"]) for line in logs] == [
            ("smetric.lookup.suspended", "warning"),
            ("smetric.lookup.resumed", "info"),
        ]


async def test_a_service_that_hangs_ends_with_the_deadline_is_let_go_and_is_left_alone_in_the_end() -> None:
    async with asking(hang, deadline_s=0.2, clock=time.monotonic) as asked:
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await asked.lookup.of(request())
            assert time.monotonic() - started < 2.0
        assert asked.results == [names.LOOKUP_LATE] * 3
        assert asked.suspended == [True]
        assert await asked.lookup.of(request()) is NOTHING
        await until(lambda: len(asked.service.aborted) == 3)


async def test_a_client_that_leaves_says_nothing_of_the_service() -> None:
    async with asking(hang, failures=1, deadline_s=30.0, clock=time.monotonic) as asked:
        asking_it = asyncio.create_task(asked.lookup.of(request()))
        await until(lambda: len(asked.service.calls) == 1)
        asking_it.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking_it
        assert (asked.results, asked.suspended) == ([], [])
        await until(lambda: len(asked.service.aborted) == 1)


async def test_tokens_that_take_all_the_time_are_not_held_against_the_service() -> None:
    async with asking(answering(200, BOTH), failures=1, deadline_s=0.05, clock=time.monotonic) as asked:
        asked.ids.delay_s = 5.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asked.lookup.of(request())
        assert (asked.service.calls, asked.suspended) == ([], [])


async def endless(call: Call) -> None:
    await call.send(head(200, JSON, (b"transfer-encoding", b"chunked")))
    while True:
        await call.send(chunk(b" " * 65536))


async def nonsense(call: Call) -> None:
    await call.send(b"SMTP ready\r\n\r\n")
    call.close()


async def cut_short(call: Call) -> None:
    await call.send(head(200, JSON, (b"content-length", b"%d" % len(BOTH))) + BOTH[:-1])
    call.close()


async def encoded(call: Call) -> None:
    await call.answer(200, BOTH, JSON, (b"content-encoding", b"gzip"))


async def elsewhere(call: Call) -> None:
    await call.answer(307, b"", (b"location", b"http://127.0.0.1:1/directory/lookup"))


@pytest.mark.parametrize("script", [endless, nonsense, cut_short, encoded, elsewhere, answering(200, b"{}")])
async def test_a_service_that_lies_or_speaks_something_else_is_unknown_and_left_alone(script: Any) -> None:
    async with asking(script, failures=2) as asked:
        for _ in range(3):
            assert await asked.lookup.of(request()) is NOTHING
        assert asked.suspended == [True]
        assert len(asked.service.calls) == 2
        assert names.LOOKUP_OK not in asked.results
        assert set(asked.results) <= set(names.LOOKUP_RESULTS)


@pytest.mark.parametrize(("chunks", "holders"), [(4, 1000), (512, 100), (3906, 30)])
def test_real_answers_fit_the_bound(chunks: int, holders: int) -> None:
    tokens, placement = 256 * len("123456,"), len('{"instance_id":"gpu-12","incarnation":1795986298,"tier":"l1",')
    placement += len('"backend":"dram","size_bytes":1048576,"shared":false},')
    question = Question(array("I", bytes(4 * 256 * chunks)), "m", "")
    bound = min(Coordinator(256, 1).largest(question), MAX_ANSWER_BYTES)
    assert chunks * (250 + tokens + holders * placement) < bound


class Threads(Coordinator):
    """Notes which threads it works in."""

    def __init__(self) -> None:
        super().__init__(256, 1)
        self.seen: list[bool] = []

    def body(self, question: Question) -> bytes:
        self.seen.append(threading.current_thread() is threading.main_thread())
        return super().body(question)

    def read(self, body: bytes, question: Question) -> Holdings:
        self.seen.append(threading.current_thread() is threading.main_thread())
        return NOTHING


@pytest.mark.parametrize("tokens", [INLINE_TOKENS, INLINE_TOKENS + 256])
async def test_long_prompts_are_written_and_read_off_the_loop(tokens: int) -> None:
    kind = Threads()
    async with asking(answering(200, b"{}"), service=kind, ids=range(tokens)) as asked:
        await asked.lookup.of(request())
        assert kind.seen == [tokens <= INLINE_TOKENS] * 2


class Broken(Coordinator):
    """Has a bug."""

    def read(self, body: bytes, question: Question) -> Holdings:
        raise ZeroDivisionError


async def test_a_bug_while_the_service_is_tried_again_does_not_shut_it_out_for_ever() -> None:
    kind = Broken(256, 1)
    async with asking(answering(500, b""), service=kind, failures=1) as asked:
        await asked.lookup.of(request())
        asked.service.script = answering(200, BOTH)
        asked.clock.now += 5.0
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await asked.lookup.of(request())
        assert len(asked.service.calls) == 3


async def test_once_stopped_nothing_is_asked() -> None:
    async with asking(answering(200, BOTH)) as asked:
        await asked.lookup.stop()
        await asked.lookup.stop()
        assert await asked.lookup.of(request()) is NOTHING
        assert asked.service.calls == []
