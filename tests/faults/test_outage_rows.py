"""Rows D: unreachable, silent and dying instances."""

from __future__ import annotations

import asyncio
import socket
from statistics import median
from urllib.parse import urlsplit

import orjson
import pytest

from smetric.config.settings import Forward, HealthSettings, ScrapeSettings
from tests.fakes import Call, FakeEngine, Script, hang, healthy, until
from tests.faults.harness import CANARY, Tell, running

#: So seldom that what a row does to an engine is met by requests first.
SELDOM = ScrapeSettings(interval=60.0, timeout=1.0)


async def test_d1_refused_connection_costs_no_request() -> None:
    async with running(FakeEngine(), FakeEngine(), scrape=SELDOM) as router:
        await router.engines[0].stop()
        answers = [await router.chat() for _ in range(6)]
        assert [answer.status for answer in answers] == [200] * 6
        assert {answer.value("x-smetric-instance") for answer in answers} == {"e1"}
        assert not router.instance_of(router.engines[0]).healthy
        assert await router.attempts("connect_error") == 1


async def test_d1_unaccepted_connection_costs_no_request() -> None:
    async with running(FakeEngine(), FakeEngine(), scrape=SELDOM, forward=Forward(connect_timeout=0.3)) as router:
        await router.engines[0].stop()
        address = ("127.0.0.1", urlsplit(router.engines[0].url).port)
        with socket.socket() as full:
            full.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            full.bind(address)
            full.listen(0)
            waiting = [socket.socket() for _ in range(4)]
            for each in waiting:
                each.setblocking(False)
                each.connect_ex(address)
            loop = asyncio.get_running_loop()
            began = loop.time()
            answers = await asyncio.gather(*(router.chat() for _ in range(6)))
            assert loop.time() - began < 0.3 + 1.0, "the deadline once, and what a busy machine adds"
            for each in waiting:
                each.close()
        assert [answer.status for answer in answers] == [200] * 6
        assert await router.attempts("connect_timeout") >= 1


async def close_after_answer(call: Call) -> None:
    await healthy(call)
    call.close()


async def close_on_reuse(call: Call) -> None:
    if call.nth == 1:
        await healthy(call)
    call.close() if call.nth > 1 else None


async def reset_on_reuse(call: Call) -> None:
    if call.nth == 1:
        await healthy(call)
    else:
        call.reset()


@pytest.mark.parametrize("script", [close_after_answer, close_on_reuse, reset_on_reuse])
async def test_d2_dead_reused_connection_costs_no_request(script: Script) -> None:
    async with running(FakeEngine(), script=script) as router:
        engine = router.engines[0]
        statuses = [(await router.chat()).status for _ in range(200)]
        assert statuses == [200] * 200
        resent = await router.attempts("resent")
        assert resent <= 200
        assert resent or script is close_after_answer  # there the end is mostly seen before the next request
        assert len(engine.calls) <= 200 + resent
        assert await router.attempts("closed") == 0


async def close_at_once(call: Call) -> None:
    call.close()


async def reset_at_once(call: Call) -> None:
    call.reset()


@pytest.mark.parametrize("script", [close_at_once, reset_at_once])
async def test_d3_dead_fresh_connection_fails_over_once(script: Script) -> None:
    async with running(FakeEngine(), FakeEngine()) as router:
        bad, good = router.engines
        bad.script = script
        for _ in range(4):
            assert (await router.chat()).status == 200
        good.script = script
        bad.calls.clear()
        good.calls.clear()
        answer = await router.chat()
        assert answer.status == 502
        # A pooled connection may be reused first, and is worth one resend.
        assert len({call.body for call in bad.calls + good.calls}) == 1
        assert len(bad.calls) <= 2
        assert len(good.calls) <= 2
        assert CANARY.encode() not in answer.body


@pytest.mark.parametrize("is_reused", [False, True], ids=["new connections", "kept ones"])
async def test_d3_requests_of_a_dead_engine_are_answered_by_the_other(is_reused: bool) -> None:
    gate = asyncio.Event()

    async def waiting(call: Call) -> None:
        await gate.wait()
        await healthy(call)

    async with running(FakeEngine(), FakeEngine(), check_after=False, script=waiting) as router:
        if is_reused:
            first = [asyncio.create_task(router.chat()) for _ in range(60)]
            await until(lambda: sum(len(engine.calls) for engine in router.engines) == 60)
            gate.set()
            assert [answer.status for answer in await asyncio.gather(*first)] == [200] * 60
            gate.clear()
            for engine in router.engines:
                engine.calls.clear()
        asked = [asyncio.create_task(router.chat()) for _ in range(60)]
        await until(lambda: [len(engine.calls) for engine in router.engines] == [30, 30])
        await router.engines[0].stop()
        await until(lambda: len(router.engines[1].calls) == 60)
        gate.set()
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 60


async def test_d5_silent_engine_is_given_up_at_the_deadline() -> None:
    async def script(call: Call) -> None:
        await (hang(call) if b'"slow"' in call.body else healthy(call))

    async with running(FakeEngine(), FakeEngine(), forward=Forward(first_byte_timeout=2.0), script=script) as router:
        slow = [asyncio.create_task(router.chat(user="slow", stream=True)) for _ in range(150)]
        await until(lambda: router.counted()[0] == 150)
        assert [(await router.chat()).status for _ in range(20)] == [200] * 20
        assert not any(task.done() for task in slow), "nobody waited for those that wait"
        answers = await asyncio.gather(*slow)
        assert {answer.status for answer in answers} == {504}
        assert orjson.loads(answers[0].body)["error"]["message"] == "no answer within 2 s"
        await until(lambda: sum(len(engine.aborted) for engine in router.engines) == 150)
        assert await router.attempts("timeout") == 150


async def test_d5_answer_in_one_piece_has_a_deadline_of_its_own() -> None:
    """It is generated whole before its first byte, so that its time says nothing of the engine's health."""

    async def script(call: Call) -> None:
        await (hang(call) if b'"never"' in call.body else asyncio.sleep(0.3))
        await healthy(call)

    forward, health = Forward(first_byte_timeout=0.1, answer_timeout=1.0), HealthSettings(failures=1)
    async with running(FakeEngine(), forward=forward, health=health, script=script) as router:
        assert (await router.chat()).status == 200
        answer = await router.chat(user="never")
        assert answer.status == 504
        assert orjson.loads(answer.body)["error"]["message"] == "no answer within 1 s"
        assert await router.attempts("timeout") == 1
        assert router.instance_of(router.engines[0]).healthy


@pytest.mark.slow
async def test_d5_hanging_engine_is_left_out_within_seconds(record_property: Tell) -> None:
    """With the probes' own defaults: neither `/health` nor anything else is answered, connections are taken."""
    async with running(FakeEngine(), FakeEngine(), FakeEngine(), check_after=False) as router:
        ill = router.engines[0]
        ill.script = ill.health = ill.metrics = hang
        began = asyncio.get_running_loop().time()
        await until(lambda: not router.instance_of(ill).healthy, within_s=10.0)
        seconds = asyncio.get_running_loop().time() - began
        ill.calls.clear()
        assert [(await router.chat()).status for _ in range(30)] == [200] * 30
        assert ill.calls == []
        record_property("F12", f"hangs: {seconds:.1f} s")


async def test_d16_full_outage_is_not_multiplied_by_retries(record_property: Tell) -> None:
    async def overloaded(call: Call) -> None:
        await call.answer(503, b'{"error":{"message":"busy"}}', (b"retry-after", b"3"))

    async with running(FakeEngine(), FakeEngine(), FakeEngine(), script=overloaded) as router:
        answers = [answer for _ in range(40) for answer in await asyncio.gather(*(router.chat() for _ in range(15)))]
        assert {(answer.status, answer.value("retry-after")) for answer in answers} == {(503, "3")}
        asked = sum(len(engine.calls) for engine in router.engines)
        assert asked <= 1.2 * (len(answers) + len(router.engines)), "the budget counts the warm-up's too"
        record_property("F11", f"{asked / len(answers):.3f} in {len(answers)} requests")
        assert await router.figure("smetric_retries_refused_total ") > 0
        for engine in router.engines:
            engine.recover()
        assert [(await router.chat()).status for _ in range(6)] == [200] * 6


async def test_d16_full_outage_is_a_fast_503_until_instances_return() -> None:
    async with running(FakeEngine(), FakeEngine()) as router:
        ports = [urlsplit(engine.url).port or 0 for engine in router.engines]
        for engine in router.engines:
            await engine.stop()
        loop = asyncio.get_running_loop()
        answers, seconds = [], []
        for _ in range(60):
            began = loop.time()
            answers.append(await router.chat())
            seconds.append(loop.time() - began)
        assert {(answer.status, answer.value("retry-after")) for answer in answers} == {(503, "1")}
        assert orjson.loads(answers[0].body)["error"]["type"] == "upstream_error"
        assert median(seconds) < 0.05
        assert await router.attempts("connect_error") <= 1.2 * len(answers) + 1
        for engine, port in zip(router.engines, ports, strict=True):
            await engine.start(port)
        await until(lambda: all(router.instance_of(engine).healthy for engine in router.engines))
        assert [(await router.chat()).status for _ in range(6)] == [200] * 6
