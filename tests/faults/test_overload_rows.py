"""Rows I and B: overload of instances and of the router."""

from __future__ import annotations

import asyncio
import os
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median, quantiles

import orjson
import pytest

from smetric.config.settings import LimitSettings, OverloadSettings
from smetric.fleet.instance import State
from smetric.proxy.overload import Level
from tests.fakes import CHAT_ANSWER, Call, FakeEngine, RawClient, Response, delta, fetch, request, until
from tests.faults.gated import JSON, asked, busy, figures, occupied
from tests.faults.harness import Running, Tell, chat, running

#: Requests the engine of row I2 serves at a time, and the seconds each of them takes.
CAPACITY, SERVICE_S = 4, 0.1
PATH = "/v1/chat/completions"


# I2: overload of the instances


class Shop:
    """Engine of bounded concurrency; more at once would be the router's fault."""

    def __init__(self) -> None:
        self.inside = self.most_inside = 0
        #: From when to when each was served, seconds of the loop.
        self.services: list[tuple[float, float]] = []

    async def script(self, call: Call) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            await asyncio.sleep(SERVICE_S)
            await call.answer(200, CHAT_ANSWER, JSON)
            self.services.append((began, clock()))
        finally:
            self.inside -= 1

    def in_use(self, since: float, until: float) -> float:
        """Return the share of slots in use between the two times."""
        served = sum(max(0.0, min(ended, until) - max(began, since)) for began, ended in self.services)
        return served / (CAPACITY * (until - since))


async def timed(router: Running) -> tuple[Response, float]:
    """An answer, and the seconds that it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    return await router.chat(), loop.time() - began


async def offered(router: Running, per_second: float, seconds: float) -> list[tuple[Response, float]]:
    """Return the answers to requests sent at a fixed rate (open loop)."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    tasks: list[asyncio.Task[tuple[Response, float]]] = []
    while (now := loop.time() - began) < seconds:
        while len(tasks) < now * per_second:
            tasks.append(asyncio.create_task(timed(router)))
        await asyncio.sleep(0.005)
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize("times", [2, 5])
async def test_i2_overload_keeps_throughput_and_refuses_the_rest(times: int, record_property: Tell) -> None:
    shop = Shop()
    settings = OverloadSettings(in_flight=CAPACITY, wait=0.5, queue=2 * CAPACITY)
    async with running(FakeEngine(), overload=settings) as router:
        router.engines[0].script = shop.script
        loop = asyncio.get_running_loop()
        seconds = 1.5
        began = loop.time()
        told = await offered(router, times * CAPACITY / SERVICE_S, seconds)
        # The first requests need time to arrive.
        in_use = shop.in_use(began + SERVICE_S, began + seconds)
        statuses = Counter(answer.status for answer, _ in told)
        assert statuses.keys() == {200, 429}
        assert statuses[200] == len(shop.services)
        assert shop.most_inside == CAPACITY, "never more at once, and never fewer while somebody waits"
        assert in_use >= 0.9  # the clients take time here too
        refusals = [(answer, seconds) for answer, seconds in told if answer.status == 429]
        for answer, _ in refusals:
            assert 1 <= int(answer.value("retry-after")) <= 6
            assert orjson.loads(answer.body)["error"]["type"] == "rate_limit_exceeded"
        assert len({answer.value("retry-after-ms") for answer, _ in refusals}) > 1, "not in one wave"
        waits = [seconds for _, seconds in refusals]
        assert median(waits) < 0.05
        refused = figures(router, "smetric_requests_refused_total")
        assert refused == {'smetric_requests_refused_total{reason="in_flight"}': len(refusals)}
        assert busy(router) == 0
        answer, took = await timed(router)
        assert answer.status == 200
        assert took < 5 * SERVICE_S, "it is as before at once"
        record_property(
            "F13",
            f"{times}×: {100 * in_use:.0f} % of what can be served, {len(refusals)} of {len(told)} refused with "
            f"Retry-After in {1000 * quantiles(waits, n=100)[98]:.0f} ms (p99), as before at once",
        )


async def test_i2_refusal_reads_no_body_and_closes_the_connection() -> None:
    async with occupied(overload=OverloadSettings(in_flight=1, queue=0)) as (router, gated, tasks):
        async with await RawClient.connect(router.url) as client:
            await client.send(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" % PATH.encode())
            refused = await client.response()
            assert (refused.status, refused.value("connection")) == (429, "close")
            assert await client.at_end()
        refused = await router.ask("POST", "/v1/messages", chat())
        assert orjson.loads(refused.body)["error"]["type"] == "rate_limit_error"
        assert (await router.ask("GET", "/v1/models")).status == 200, "requests without inference take no slot"
        saturation = figures(router, "smetric_saturation_ratio")
        assert saturation['smetric_saturation_ratio{of="instances"}'] >= 1.0
        await gated.serve(1)
        assert (await tasks[0]).status == 200


async def test_i2_waiting_requests_get_slots_by_priority_then_arrival() -> None:
    async with occupied(overload=OverloadSettings(in_flight=1, wait=30.0)) as (router, gated, tasks):
        for user, priority in (("second", 0), ("third", 0), ("urgent", -5)):
            tasks.append(asked(router, user, priority=priority))
            await until(lambda: 1 + busy(router) == len(tasks))
        await gated.serve(4)
        assert [answer.status for answer in await asyncio.gather(*tasks)] == [200] * 4
        assert gated.users == ["first", "urgent", "second", "third"]


async def test_i2_disconnect_frees_a_place_in_the_queue() -> None:
    async with occupied(overload=OverloadSettings(in_flight=1, queue=1, wait=30.0)) as (router, gated, tasks):
        leaver = await router.client(chat(user="leaver"))
        await until(lambda: busy(router) == 1)
        assert (await router.chat()).status == 429
        leaver.leave()
        await until(lambda: busy(router) == 0)
        tasks.append(asked(router, "second"))
        await until(lambda: busy(router) == 1)
        await gated.serve(2)
        assert [(await task).status for task in tasks] == [200, 200]
        assert gated.users == ["first", "second"]


# I3: overload of the router


async def test_i3_memory_limit_refuses_new_work_and_ends_streams() -> None:
    gate = asyncio.Event()

    async def streaming(call: Call) -> None:
        await call.stream(delta("a"), end=False)
        await gate.wait()
        tail = delta("b") + b"data: [DONE]\n\n"
        await call.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(tail), tail))

    async with running(FakeEngine()) as router:
        overload = router.application.admission.overload
        router.engines[0].script = streaming
        streams = [await router.client(chat(stream=True)) for _ in range(3)]
        heads = [await client.head() for client in streams]
        assert [head.status for head in heads] == [200] * 3
        overload.memory_bytes = 1
        await until(lambda: overload.level is Level.HARD)
        refused = await router.chat()
        assert (refused.status, orjson.loads(refused.body)["error"]["type"]) == (503, "overloaded")
        assert int(refused.value("retry-after")) >= 1
        assert (await router.ask("GET", "/healthz")).status == 200
        levels = figures(router, "smetric_overload_level")
        assert levels['smetric_overload_level{resource="memory"}'] == 2
        assert (figures(router, "smetric_saturation"))['smetric_saturation_ratio{of="router"}'] > 1
        gate.set()
        for client in streams:
            assert b"[DONE]" in await client.reader.readuntil(b"0\r\n\r\n")
            client.leave()
        overload.memory_bytes = 1 << 50
        await until(lambda: overload.level is Level.CALM)
        assert (await router.chat()).status == 200
        told = [line["state"] for line in router.lines("smetric.overload.changed")]
        assert told == ["hard", "calm"]


async def test_i3_retries_of_clients_are_refused_first_and_counted_apart() -> None:
    again = (("x-stainless-retry-count", "2"),)
    async with occupied() as (router, gated, tasks):
        overload = router.application.admission.overload
        tasks.append(asked(router, "second"))
        await until(lambda: len(gated.users) == 2)
        overload.load.bound()
        overload.level, overload.resources = Level.SOFT, ["memory"]
        assert (await router.chat()).status == 503, "no more than are under way"
        gated.let_through()
        await until(lambda: sum(task.done() for task in tasks) == 1)
        assert (await fetch(router.url, "POST", PATH, chat(), again)).status == 503, "and no retry of a client"
        tasks.append(asked(router, "third"))
        await until(lambda: len(gated.users) == 3)
        overload.level = Level.CALM
        tasks.append(asyncio.create_task(fetch(router.url, "POST", PATH, chat(user="again"), again)))
        await until(lambda: len(gated.users) == 4)
        for _ in range(3):
            gated.let_through()
        assert [answer.status for answer in await asyncio.gather(*tasks)] == [200] * 4
        assert figures(router, "smetric_client_retries_total") == {
            'smetric_client_retries_total{result="refused"}': 1,
            'smetric_client_retries_total{result="admitted"}': 1,
        }


async def test_i3_bodies_beyond_the_budget_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smetric.proxy.admission.SEARCH_EVERY_S", 0.0)
    settings = OverloadSettings(bodies=33 << 20)
    monkeypatch.setattr("smetric.proxy.admission.SEARCH_EVERY_S", 0.0)
    async with running(FakeEngine(), overload=settings) as router:
        admission = router.application.admission
        big = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (PATH.encode(), 30 << 20)
        async with await RawClient.connect(router.url) as slow, await RawClient.connect(router.url) as other:
            await slow.send(big + bytes(8 << 20))
            await until(lambda: admission.bytes >= 8 << 20)
            await other.send(big)
            refused = await other.response()
            assert (refused.status, refused.value("connection")) == (503, "close")
            assert (await router.chat()).status == 200, "small ones fit"
            monkeypatch.setattr("smetric.proxy.admission.SLOW_STEP_S", 0.0)
            assert (await router.chat(user="x" * (26 << 20))).status == 200, "one that does not arrive makes room"
            assert (await slow.response()).status == 408
        await until(lambda: (admission.bytes, admission.under_way) == (0, 0))
        chunked = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % PATH.encode()
        admission.most_bytes = 1 << 20
        async with await RawClient.connect(router.url) as client:
            await client.send(chunked)
            for _ in range(16):
                await client.send(b"%x\r\n%b\r\n" % (100_000, bytes(100_000)))
            refused = await client.response()
            assert (refused.status, refused.value("connection")) == (503, "close")
        await until(lambda: admission.bytes == 0)


async def test_i3_body_is_freed_when_its_answer_begins() -> None:
    gate = asyncio.Event()

    async def streaming(call: Call) -> None:
        await call.stream(delta("a"), end=False)
        await gate.wait()
        await call.send(b"%x\r\n%b\r\n0\r\n\r\n" % (14, b"data: [DONE]\n\n"))

    async with running(FakeEngine()) as router:
        admission = router.application.admission
        router.engines[0].script = streaming
        async with await router.client(chat(stream=True, user="x" * 50_000)) as client:
            await client.head()
            assert (admission.bytes, admission.under_way) == (0, 1)
            gate.set()
            assert (await client.reader.readuntil(b"0\r\n\r\n"))[-7:] == b"\r\n0\r\n\r\n"
        await until(lambda: admission.under_way == 0)


# B6: connections and files


async def test_b6_connections_are_bounded_by_a_setting_and_counted() -> None:
    async with running(FakeEngine(), limits=LimitSettings(max_connections=10)) as router:
        clients = [await RawClient.connect(router.url) for _ in range(10)]
        await until(lambda: len(clients) == 10)
        assert figures(router, "smetric_connections") == {"smetric_connections": 10}
        async with await RawClient.connect(router.url) as eleventh:
            assert (await eleventh.response()).status == 503
        for client in clients:
            client.leave()
        await until(lambda: router.application.admission.under_way == 0)
        await asyncio.sleep(0.05)
        assert (await router.chat()).status == 200


@contextmanager
def no_file_left() -> Iterator[None]:
    """No file can be opened in this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, before[1]))
        while True:
            try:
                taken.append(os.dup(0))
            except OSError:
                break
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_b6_local_connect_error_does_not_eject_the_instance() -> None:
    async with running(FakeEngine(), FakeEngine()) as router, await RawClient.connect(router.url) as client:
        for engine in router.engines:
            engine.drop_idle()
        await asyncio.sleep(0.05)
        with no_file_left():
            for _ in range(8):
                await client.send(request("POST", PATH, chat()))
                refused = await client.response()
                assert (refused.status, int(refused.value("retry-after")) >= 1) == (503, True)
            assert [one.state for one in router.application.fleet.instances] == [State.WELL] * 2
            assert all(one.healthy for one in router.application.fleet.instances)
        attempts = figures(router, "smetric_upstream_attempts_total")
        assert sum(count for name, count in attempts.items() if 'result="exhausted"' in name) == 8
        assert not any('result="connect_error"' in name for name in attempts)
        assert figures(router, "smetric_instance_ejections_total{") == {}
