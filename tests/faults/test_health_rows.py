"""Rows D: restarting, flapping, slow and failing instances."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from msgspec.structs import replace

from smetric.config.settings import HealthSettings
from smetric.fleet.instance import State
from tests.fakes import DONE, Call, FakeEngine, Response, Script, capture, chunk, delta, fetch, hang, healthy, until
from tests.faults.harness import Running, Tell, chat, running

#: Judges fast, so that rows are short.
EAGER = HealthSettings(interval=0.05, timeout=0.5, fall=2, rise=1, ejection=0.3, longest_ejection=3.0, slow_start=0.5)


ABORTED = orjson.dumps({"id": "c", "choices": [{"index": 0, "message": {}, "finish_reason": "abort"}]})


class Crowd:
    """Clients that ask again as soon as they are answered."""

    def __init__(self, router: Running, count: int, **fields: Any) -> None:
        self.answers: list[Response] = []
        self._router = router
        self._fields = fields
        self._ended = False
        self._clients = [asyncio.create_task(self._ask()) for _ in range(count)]

    async def _ask(self) -> None:
        while not self._ended:
            self.answers.append(await self._router.chat(**self._fields))

    async def leave(self) -> None:
        self._ended = True
        await asyncio.gather(*self._clients)

    def has_answers(self, count: int) -> bool:
        return len(self.answers) >= count

    def statuses(self) -> Counter[int]:
        return Counter(answer.status for answer in self.answers)

    def share(self, since: int) -> float:
        """The share of e0 in the answers from number *since* on."""
        served = [answer.value("x-smetric-instance") for answer in self.answers[since:]]
        return served.count("e0") / len(served)


def slow(seconds: float) -> Script:
    """Answers well, but late."""

    async def script(call: Call) -> None:
        await asyncio.sleep(seconds)
        await healthy(call)

    return script


async def restart(router: Running, engine: FakeEngine) -> None:
    """Stop *engine*, and start it on the same port once the router has noticed."""
    instance, port = router.instance_of(engine), urlsplit(engine.url).port
    await engine.stop()
    await until(lambda: not instance.healthy)
    await engine.start(port or 0)
    await until(lambda: instance.healthy)


def turns(folder: Path) -> str:
    """Return the path of a policy that takes the instances in turn."""
    path = folder / "turns.policy"
    path.write_text("policy turns\n\nroute rr_argmin(0)\n")
    return str(path)


async def test_d14_rolling_restart_loses_no_request() -> None:
    async with running(*(FakeEngine(slow(0.02)) for _ in range(4)), health=EAGER) as router:
        crowd = Crowd(router, 6)
        for engine in router.engines:
            await restart(router, engine)
            await until(partial(crowd.has_answers, len(crowd.answers) + 30))
        await crowd.leave()
        assert crowd.statuses().keys() == {200}
        assert await router.figure("smetric_instance_ejections_total{") == 4


async def test_d14_streams_broken_by_a_restart_are_never_complete() -> None:
    async def talking(call: Call) -> None:
        await call.stream(delta("a"), end=False)
        for event in (delta("b"), DONE):
            await asyncio.sleep(0.1)
            await call.send(chunk(event))
        await call.send(b"0\r\n\r\n")

    whole = delta("a") + delta("b") + DONE
    async with running(*(FakeEngine(talking) for _ in range(3)), health=EAGER) as router:
        crowd = Crowd(router, 12, stream=True)
        for engine in router.engines:
            await until(lambda engine=engine: router.instance_of(engine).own > 1)  # type: ignore[misc]
            await restart(router, engine)
        await crowd.leave()
        assert crowd.statuses().keys() == {200}
        broken = [answer for answer in crowd.answers if not answer.complete]
        assert broken
        assert all(answer.body == whole for answer in crowd.answers if answer.complete)
        for answer in broken:
            told, _, error = answer.body.partition(b'data: {"error":')
            assert whole.startswith(told)
            assert (told.count(DONE), error.count(b"data:"), b"upstream_error" in error) == (0, 0, True)


async def test_d15_tenfold_slower_instance_loses_and_regains_its_share() -> None:
    async with running(*(FakeEngine(slow(0.05)) for _ in range(4)), health=EAGER) as router:
        router.engines[0].script = slow(1.2)
        crowd = Crowd(router, 16)
        await until(partial(crowd.has_answers, 60))
        since = len(crowd.answers)
        await until(partial(crowd.has_answers, since + 200))
        assert crowd.share(since) < 0.05
        assert router.instance_of(router.engines[0]).healthy
        router.engines[0].script = slow(0.05)
        await asyncio.sleep(1.3)  # the slow ones must end
        since = len(crowd.answers)
        await until(partial(crowd.has_answers, since + 150))
        assert crowd.share(since) == pytest.approx(0.25, abs=0.1)
        await crowd.leave()
        assert crowd.statuses().keys() == {200}


async def test_d15_slow_instance_is_ejected_under_any_policy(tmp_path: Path, record_property: Tell) -> None:
    """Probes pass and the policy spreads evenly: latency alone cuts the share."""
    health = replace(EAGER, ejection=2.0)
    async with running(*(FakeEngine(slow(0.03)) for _ in range(4)), health=health, policy=turns(tmp_path)) as router:
        grey = router.engines[0]
        instance = router.instance_of(grey)
        crowd = Crowd(router, 8, stream=True)
        await until(partial(crowd.has_answers, 40))
        grey.script = slow(0.4)
        began = asyncio.get_running_loop().time()
        await until(lambda: instance.state is State.EJECTED, within_s=15.0)
        record_property("F12", f"slow: {asyncio.get_running_loop().time() - began:.1f} s")
        assert await router.figure('smetric_instance_ejections_total{instance="e0",reason="slow"}') == 1
        await asyncio.sleep(0.5)  # its running requests must end
        since = len(crowd.answers)
        await until(partial(crowd.has_answers, since + 150))
        assert crowd.share(since) < 0.05
        grey.script = slow(0.03)
        await until(lambda: instance.healthy)
        await until(lambda: instance.state is State.WELL)
        since = len(crowd.answers)
        await until(partial(crowd.has_answers, since + 100))
        assert crowd.share(since) == pytest.approx(0.25, abs=0.1)
        await crowd.leave()
        assert crowd.statuses().keys() == {200}
        assert all(answer.complete for answer in crowd.answers)


async def test_d17_failing_probes_alone_are_a_counted_panic() -> None:
    async with running(FakeEngine(), FakeEngine(), FakeEngine(), health=EAGER) as router:
        for engine in router.engines:
            engine.health = lambda call: call.answer(503, b"")
        await until(lambda: not any(router.instance_of(engine).healthy for engine in router.engines))
        assert [(await router.chat()).status for _ in range(9)] == [200] * 9
        assert all(engine.calls for engine in router.engines)
        assert await router.figure("smetric_panics_total ") >= 9
        assert await router.figure('smetric_instance_state{instance="e1",state="ill"}') == 1
        for engine in router.engines:
            engine.recover()
        await until(lambda: all(router.instance_of(engine).healthy for engine in router.engines))


async def test_d17_panic_leaves_out_instances_that_refuse_connections() -> None:
    async with running(FakeEngine(), FakeEngine(), FakeEngine(), health=EAGER, check_after=False) as router:
        for engine in router.engines[1:]:
            await engine.stop()
        await until(lambda: [i.state for i in router.application.fleet.instances[1:]] == [State.REFUSING] * 2)
        answers = [await router.chat() for _ in range(6)]
        assert {(answer.status, answer.value("x-smetric-instance")) for answer in answers} == {(200, "e0")}
        for engine in router.engines[1:]:
            await engine.start(urlsplit(engine.url).port or 0)


async def test_d18_flapping_instance_stays_out_and_costs_no_request() -> None:
    async with running(FakeEngine(slow(0.02)), FakeEngine(slow(0.02)), health=EAGER) as router:
        flapping = router.engines[0]
        instance, port = router.instance_of(flapping), urlsplit(flapping.url).port or 0
        crowd = Crowd(router, 4)
        out = []
        for _ in range(3):
            await flapping.stop()
            await until(lambda: not instance.healthy)
            await flapping.start(port)
            started = asyncio.get_running_loop().time()
            await until(lambda: instance.healthy)
            out.append(asyncio.get_running_loop().time() - started)
        await crowd.leave()
        assert crowd.statuses().keys() == {200}
        assert out[0] < 0.25 < out[1] < 0.55 < out[2]


async def test_instance_with_failing_requests_is_ejected_and_returns() -> None:
    async with running(FakeEngine(), FakeEngine(), health=EAGER) as router:
        bad = router.engines[0]
        bad.script = lambda call: call.answer(500, b'{"error":{}}')
        for _ in range(12):
            assert (await router.chat()).status == 200
        assert router.instance_of(bad).state is State.EJECTED
        assert await router.figure('smetric_instance_ejections_total{instance="e0",reason="5xx"}') == 1
        assert router.lines("smetric.instance.changed")[-1]["state"] == "ejected"
        bad.recover()
        await until(lambda: router.instance_of(bad).healthy)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "one piece"])
async def test_instance_that_never_answers_is_ejected_as_its_clients_leave(stream: bool) -> None:
    async with running(*(FakeEngine() for _ in range(4)), policy="round_robin", health=EAGER) as router:
        hung = router.engines[0]
        hung.script = lambda call: call.answer(400, b"{}") if b"wrong" in call.body else hang(call)
        began = asyncio.get_running_loop().time()

        async def leaving() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0), await router.client(chat(stream=stream)) as client:
                    assert (await client.head()).status == 200

        while router.instance_of(hung).state is State.WELL:
            await asyncio.gather(*(leaving() for _ in range(8)))
            for _ in router.engines:  # what the hung one refuses is no output
                await router.chat(stream=stream, user="wrong")
            assert asyncio.get_running_loop().time() - began < 10.0
        assert router.instance_of(hung).state is State.EJECTED
        line = router.lines("smetric.instance.changed")[-1]
        assert (line["instance"], line["reason"]) == ("e0", "timeout")
        assert all(router.instance_of(engine).state is State.WELL for engine in router.engines[1:])


def answers(status: int) -> Script:
    """Answers at once that it cannot."""
    return lambda call: call.answer(status, b'{"error":{}}')


async def closes(call: Call) -> None:
    """Closes without an answer."""
    call.reset()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "one piece"])
@pytest.mark.parametrize("script", [answers(500), answers(503), answers(429), closes], ids=["500", "503", "429", "end"])
async def test_instance_failing_at_once_costs_no_request(script: Script, stream: bool) -> None:
    """It looks idle, so that each decision is for it; were it judged when others end, most clients would see it."""
    go_on = asyncio.Event()

    async def long(call: Call) -> None:
        if stream:
            await call.stream(delta("a"), end=False)
        await go_on.wait()
        await (call.send(chunk(DONE) + b"0\r\n\r\n") if stream else healthy(call))

    async with running(*(FakeEngine() for _ in range(3)), health=EAGER) as router, AsyncExitStack() as stack:
        bad, *others = router.engines
        for engine in others:
            engine.script = long
        bad.script = script

        def taken(number: int) -> bool:
            return sum(len(engine.calls) for engine in others) == number

        clients = []
        for number in range(1, 31):
            clients.append(await stack.enter_async_context(await router.client(chat(stream=stream))))
            await until(partial(taken, number))
        go_on.set()
        assert [(await client.head()).status for client in clients] == [200] * 30
        assert bad.calls
        bad.recover()
        await until(lambda: router.instance_of(bad).healthy and not router.instance_of(bad).deprioritized)


async def test_poisonous_request_ejects_no_instance() -> None:
    async def poisoned(call: Call) -> None:
        await (call.answer(500, b'{"error":{}}') if b'"poison"' in call.body else healthy(call))

    async with running(*(FakeEngine(poisoned) for _ in range(4)), health=EAGER) as router:
        for _ in range(30):
            assert (await router.chat(user="poison")).status == 500
        assert {router.instance_of(engine).state for engine in router.engines} == {State.WELL}


@pytest.mark.parametrize("count", [1, 4])
async def test_poisonous_request_with_aborted_answers_ejects_no_instance(count: int) -> None:
    quoted = orjson.dumps({"error": {"message": 'no model "cannot schedule new futures after shutdown"'}})

    async def poisoned(call: Call) -> None:
        if b'"aborts"' in call.body:
            await call.answer(200, ABORTED, (b"content-type", b"application/json"))
        else:
            await (call.answer(500, quoted) if b'"quotes"' in call.body else healthy(call))

    async with running(*(FakeEngine(poisoned) for _ in range(count)), health=EAGER, check_after=False) as router:
        for poison in ("aborts", "quotes"):
            for _ in range(12):
                await router.chat(user=poison)
            states = [router.instance_of(engine).state for engine in router.engines]
            assert states.count(State.STOPPING) <= count // 4
            assert (await router.chat()).status == 200
            assert (await fetch(router.url, "GET", "/readyz")).status == 200


async def test_engine_shutting_down_gets_no_request_and_drains() -> None:
    _, answer = capture("draining_500")
    async with running(FakeEngine(), FakeEngine(), health=EAGER) as router:
        ending = router.engines[0]
        ending.script = lambda call: call.send(answer)
        for _ in range(6):
            assert (await router.chat()).status == 200
        assert len(ending.calls) == 1
        instance = router.instance_of(ending)
        assert (instance.draining, instance.state) == (True, State.STOPPING)
        port = urlsplit(ending.url).port or 0
        await ending.stop()
        await until(lambda: instance.state is State.REFUSING)
        await ending.start(port)
        ending.recover()
        await until(lambda: instance.healthy and not instance.draining)


async def test_aborted_answers_mark_their_engine_as_stopping() -> None:
    async with running(FakeEngine(), FakeEngine(), health=EAGER, check_after=False) as router:
        router.engines[0].script = lambda call: call.answer(200, ABORTED, (b"content-type", b"application/json"))
        for _ in range(8):
            assert (await router.chat()).status == 200
        assert router.instance_of(router.engines[0]).state is State.STOPPING
        assert len(router.engines[0].calls) == 2
