"""Real gateways in front of routers, with the manual's configurations.

    pytest -m e2e tests/e2e/test_gateways.py

Puts the gateways where they can be had first; those that cannot are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
import pytest_asyncio

from tests.e2e.gateways import KINDS, gateway, program, set_up
from tests.fakes import DONE, Call, FakeEngine, RawClient, Response, chunk, delta, hang, healthy, request, until
from tests.faults.process import Process, process
from tests.ports import free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

CHAT = "/v1/chat/completions"
#: LiteLLM reads requests and answers and writes its own.
PROXIES = [name for name in KINDS if name != "litellm"]
#: httpd reads no answer while it sends a body; it and LiteLLM do not see a client leave before the answer begins.
HEARING = [name for name in PROXIES if name != "httpd"]
TRACE = "0af7651916cd43dd8448eb211c80319c"
SESSION = "4b6ad1b0-3f4f-4a58-9e8e-6a3c4f0d2a11"
MIB = 1 << 20
#: Longest mean time of an event through a gateway, seconds.
EVENT_S = 0.05
#: Of the routers.
ENVIRON = {
    "SMETRIC_LIMITS__BODY_TIMEOUT": "2s",
    "SMETRIC_FORWARD__MAX_BODY": "24MiB",
    "SMETRIC_OVERLOAD__BODIES": "24MiB",
}
#: Of the one whose port closes: health checks of the manual's take two seconds.
ANNOUNCE = {"SMETRIC_DRAIN__ANNOUNCE": "4s"}


def chat(*, stream: bool = False, size: int = 0) -> bytes:
    text = "word " * (size // 5) + "hello"
    return orjson.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": stream})


@dataclass
class Site:
    """Two routers with one engine, and a gateway in front of them."""

    kind: str
    url: str
    engine: FakeEngine
    #: Where the first router is.
    port: int
    #: Of the second one, which is handed from process to process.
    handed: socket.socket
    work: Path
    routers: list[Process]
    stack: AsyncExitStack

    async def start(self, number: int) -> Process:
        """A process that is router *number*; of the second there may be several."""
        log = self.work / f"router-{number}-{random.getrandbits(32)}.log"
        if number == 0:
            started = process(log, "--instance", self.engine.url, "--port", str(self.port), environ=ENVIRON | ANNOUNCE)
        else:
            started = process(log, "--instance", self.engine.url, sockets=[("data", self.handed)], environ=ENVIRON)
        return await self.stack.enter_async_context(started)

    async def ask(self, body: bytes, *headers: tuple[str, str]) -> Response:
        """An answer may come before the body was taken, and ends the sending then."""
        async with await RawClient.connect(self.url) as client:
            sending = asyncio.create_task(client.send(request("POST", CHAT, body, headers)))
            try:
                return await client.response()
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    set_up()
    kind: str = request.param
    if program(KINDS[kind].program) is None:
        pytest.skip(f"{KINDS[kind].program} is not installed, and tests/e2e/setup_gateways.sh could not get it")
    work = tmp_path_factory.mktemp(kind)
    async with AsyncExitStack() as stack:
        engine = FakeEngine()
        await engine.start()
        stack.push_async_callback(engine.stop)
        handed = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=512))
        (port,) = free_ports(1)
        made = Site(kind, "", engine, port, handed, work, [], stack)
        made.routers = [await made.start(number) for number in range(2)]
        addresses = [f"127.0.0.1:{one}" for one in (port, handed.getsockname()[1])]
        serving = gateway(KINDS[kind], addresses, work)
        made.url = await asyncio.to_thread(serving.__enter__)
        try:
            yield made
        finally:
            await asyncio.to_thread(serving.__exit__, None, None, None)


@pytest.fixture(autouse=True)
def _well(site: Site) -> None:
    site.engine.recover()
    site.engine.calls.clear()


def of(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("site", kinds, indirect=True, scope="module")


async def test_a_request_and_its_answer_pass_with_session_and_trace(site: Site) -> None:
    answer = await site.ask(
        chat(), ("traceparent", f"00-{TRACE}-b7ad6b7169203331-01"), ("x-claude-code-session-id", SESSION)
    )
    assert answer.status == 200, answer.body
    assert orjson.loads(answer.body)["choices"][0]["message"]["content"] == "ok"
    (call,) = site.engine.calls
    assert call.values(b"traceparent")[0].split(b"-")[1] == TRACE.encode()
    assert call.values(b"x-claude-code-session-id") == [SESSION.encode()]
    if site.kind != "litellm":
        assert call.body == chat()
        assert answer.value("x-smetric-instance")


async def test_every_event_passes_when_it_comes(site: Site) -> None:
    """The engine sends an event when the client has the one before; the bound is the mean, as machines are busy."""
    seen = asyncio.Event()
    words = [f"word-{number:02}" for number in range(20)]

    async def one_by_one(call: Call) -> None:
        await call.stream(end=False)
        for word in words:
            seen.clear()
            await call.send(chunk(delta(word)))
            await seen.wait()
        await call.send(chunk(DONE) + b"0\r\n\r\n")

    site.engine.script = one_by_one
    async with await RawClient.connect(site.url) as client:
        await client.send(request("POST", CHAT, chat(stream=True)))
        async with asyncio.timeout(30):
            head = await client.head()
            assert head.status == 200
            await client.reader.readuntil(words[0].encode())
            started = time.monotonic()
            for word in words[1:]:
                seen.set()
                await client.reader.readuntil(word.encode())
            took_s = time.monotonic() - started
            seen.set()
            await client.reader.readuntil(b"[DONE]")
    assert took_s / len(words[1:]) < EVENT_S


@of(*HEARING)
async def test_a_client_that_leaves_before_the_first_event_takes_its_request_in_the_engine_with_it(site: Site) -> None:
    site.engine.script = hang
    async with await RawClient.connect(site.url) as client:
        await client.send(request("POST", CHAT, chat(stream=True)))
        await until(lambda: bool(site.engine.calls))
    await until(lambda: bool(site.engine.aborted))


async def test_a_client_that_leaves_in_mid_stream_takes_its_request_in_the_engine_with_it(site: Site) -> None:
    async def endless(call: Call) -> None:
        await call.stream(end=False)
        while True:
            await call.send(chunk(delta("more")))
            await asyncio.sleep(0.1)

    site.engine.script = endless
    async with await RawClient.connect(site.url) as client:
        await client.send(request("POST", CHAT, chat(stream=True)))
        async with asyncio.timeout(10):
            await client.reader.readuntil(b"more")
    await until(lambda: bool(site.engine.aborted))


async def test_ten_megabytes_pass(site: Site) -> None:
    body = chat(size=10 * MIB)
    answer = await site.ask(body)
    assert answer.status == 200, answer.body
    (call,) = site.engine.calls
    assert len(call.body) >= len(body) - 100


@pytest.mark.parametrize("status", [400, 429])
async def test_what_the_engine_refuses_is_told_as_it_said_it(site: Site, status: int) -> None:
    async def refuse(call: Call) -> None:
        said = b'{"error":{"message":"no, because","type":"x","code":%d}}' % status
        await call.answer(status, said, (b"content-type", b"application/json"), (b"retry-after", b"7"))

    site.engine.script = refuse
    answer = await site.ask(chat())
    assert answer.status == status
    assert b"no, because" in answer.body
    assert len(site.engine.calls) == 1
    if status == 429:
        assert answer.value("llm_provider-retry-after" if site.kind == "litellm" else "retry-after") == "7"
    site.engine.script = healthy
    assert (await site.ask(chat())).status == 200


@of(*HEARING)
@pytest.mark.parametrize("size", [25 * MIB, 40 * MIB])
async def test_a_body_that_is_too_large_is_refused(site: Site, size: int) -> None:
    answer = await site.ask(chat(size=size))
    assert (answer.status, b"error" in answer.body) == (413, True), answer.body


@of(*HEARING)
async def test_what_the_router_refuses_before_it_has_read_it_is_told_as_it_said_it(site: Site) -> None:
    async def held() -> None:
        async with await RawClient.connect(site.url) as client:
            await client.send(request("POST", CHAT, chat(size=20 * MIB)))
            await client.head()

    site.engine.script = hang
    holders = [asyncio.create_task(held()) for _ in range(8)]
    try:
        await until(lambda: len(site.engine.calls) == 2, within_s=20)
        answer = await site.ask(chat(size=20 * MIB))
        assert (answer.status, b"overload.bodies" in answer.body) == (503, True), answer.body
        assert int(answer.value("retry-after")) > 0
    finally:
        for one in holders:
            one.cancel()
        await asyncio.gather(*holders, return_exceptions=True)


@of(*HEARING)
async def test_a_body_that_comes_too_slowly_is_answered_408(site: Site) -> None:
    whole = request("POST", CHAT, chat(size=MIB))
    async with await RawClient.connect(site.url) as client:
        await client.send(whole[: MIB // 2])
        await asyncio.sleep(3)  # the router waits for two
        with contextlib.suppress(ConnectionError):
            await client.send(whole[MIB // 2 :])
        answer = await client.response()
    assert answer.status == 408, answer.body


@of(*PROXIES)
async def test_kept_connections_are_used_again_without_a_race(site: Site) -> None:
    """Pauses about as long as the router's `limits.idle_timeout`."""

    async def twice(pause_s: float) -> list[int]:
        async with await RawClient.connect(site.url) as client:
            said = []
            for wait_s in (0.0, 0.5, pause_s):
                await asyncio.sleep(wait_s)
                await client.send(request("POST", CHAT, chat()))
                said.append((await client.response()).status)
            return said

    pauses = [9.98 + 0.0005 * number for number in range(60)]
    assert await asyncio.gather(*map(twice, pauses)) == [[200] * 3] * len(pauses)


@asynccontextmanager
async def traffic(site: Site) -> AsyncIterator[list[Response]]:
    """Eight clients that ask again and again, each on one connection as far as it is kept."""
    said: list[Response] = []
    stop = asyncio.Event()

    async def one(number: int) -> None:
        while not stop.is_set():
            async with await RawClient.connect(site.url) as client:
                while not stop.is_set():
                    await client.send(request("POST", CHAT, chat(stream=number % 2 == 0)))
                    answer = await client.response()
                    said.append(answer)
                    await asyncio.sleep(random.uniform(0, 0.1))
                    if answer.values("connection") == ["close"]:
                        break

    clients = [asyncio.create_task(one(number)) for number in range(8)]
    try:
        yield said
    finally:
        stop.set()
        await asyncio.gather(*clients)


def lost(said: list[Response]) -> list[tuple[int, bool, bytes]]:
    return [(one.status, one.complete, one.body) for one in said if one.status != 200 or not one.complete]


@of(*PROXIES)
async def test_nothing_is_lost_while_a_router_drains_and_comes_back(site: Site) -> None:
    async with traffic(site) as said:
        await asyncio.sleep(1)
        site.routers[0].terminate()
        assert await site.routers[0].ended() == 0
        await asyncio.sleep(1)
        site.routers[0] = await site.start(0)
        await until(lambda: bool(site.routers[0].lines("request")), within_s=20)
    assert len(said) > 50
    assert lost(said) == []


@of(*PROXIES)
async def test_nothing_is_lost_while_a_router_is_upgraded(site: Site) -> None:
    async with traffic(site) as said:
        await asyncio.sleep(1)
        for _ in range(3):
            before, site.routers[1] = site.routers[1], await site.start(1)
            before.terminate()
            assert await before.ended() == 0
    assert len(said) > 50
    assert lost(said) == []


@of(*PROXIES)
async def test_a_router_that_is_killed_is_passed_by(site: Site) -> None:
    # The upgrade before may have answered a health check with 503: wait until the gateway uses the second router.
    other = site.routers[1]
    seen = len(other.lines("request"))
    async with asyncio.timeout(20):
        while len(other.lines("request")) == seen:
            await site.ask(chat())
            await asyncio.sleep(0.1)
    site.routers[0].process.kill()
    await site.routers[0].ended()
    said = [await site.ask(chat()) for _ in range(8)]
    assert lost(said) == []
