from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop

from smetric.http.connection import LAST_REQUEST_S
from smetric.http.headers import Receive, Scope, Send
from smetric.http.limits import HttpLimits
from smetric.http.listener import address_of, listen, serve_port
from tests.fakes import PlainHandler, RawClient, live

pytestmark = pytest.mark.slow

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Slow:
    """An app that answers with its head, and with the body once `go` is set; `cut` leaves the body out."""

    def __init__(self, *, cut: bool = False, body: bytes = b"ok") -> None:
        self.go = asyncio.Event()
        self.cut = cut
        self.body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(receive, send)
            return
        length = b"%d" % len(self.body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        if self.cut:
            return
        await self.go.wait()
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


@asynccontextmanager
async def serving(
    app: Slow, *, drain_s: float = 30.0, limits: HttpLimits | None = None
) -> AsyncIterator[tuple[str, asyncio.Event]]:
    stop = asyncio.Event()
    with listen("127.0.0.1", 0) as sock:
        task = asyncio.create_task(serve_port(PlainHandler(app, limits), sock, stop=stop.wait, drain_s=drain_s))
        try:
            yield address_of(sock), stop
        finally:
            stop.set()
            async with asyncio.timeout(5):
                await task


async def test_a_head_does_not_wait_for_its_body() -> None:
    app = Slow()
    async with serving(app) as (url, _), await RawClient.connect(url) as client:
        await client.send(GET)
        assert (await client.head()).status == 200
        app.go.set()
        assert await client.reader.readexactly(2) == b"ok"


async def test_a_head_whose_body_never_comes_is_sent_before_the_connection_ends() -> None:
    async with serving(Slow(cut=True)) as (url, _), await RawClient.connect(url) as client:
        await client.send(GET)
        response = await client.response("GET")
        assert (response.status, response.complete) == (200, False)


async def test_an_idle_connection_is_closed_when_its_time_is_over() -> None:
    app = Slow()
    app.go.set()
    limits = HttpLimits(idle_timeout_s=0.2)
    async with (
        serving(app, limits=limits) as (url, _),
        await RawClient.connect(url) as fresh,
        await RawClient.connect(url) as used,
    ):
        await used.send(GET)
        assert (await used.response("GET")).body == b"ok"
        assert await fresh.at_end()
        assert await used.at_end()


@pytest.mark.parametrize("before", [0, 10], ids=["all of it", "the rest of its head"])
def test_a_request_that_has_come_when_the_time_for_it_is_over_is_answered(before: int) -> None:
    """On the loop that a router runs on, which comes to its timers before it reads."""

    async def late() -> tuple[int, bytes]:
        app = Slow()
        app.go.set()
        ours, (wake, waker) = socket.socket(), socket.socketpair()

        def busy() -> None:
            """While this is read the deadline passes, and then the request comes."""
            asyncio.get_running_loop().remove_reader(wake)
            time.sleep(0.3)
            ours.sendall(GET[before:])

        with ours, wake, waker:
            async with serving(app, limits=HttpLimits(idle_timeout_s=0.2, head_timeout_s=0.2)) as (url, _):
                host, _, port = url.removeprefix("http://").partition(":")
                ours.connect((host, int(port)))
                async with RawClient(*await asyncio.open_connection(sock=ours.dup())) as client:
                    await client.send(GET)
                    await client.response("GET")
                    await client.send(GET[:before])
                    await asyncio.sleep(0.05)
                    asyncio.get_running_loop().add_reader(wake, busy)
                    waker.send(b".")
                    answer = await client.response("GET")
                    return answer.status, answer.body

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(late()) == (200, b"ok")


async def test_a_request_under_way_outlives_the_idle_time() -> None:
    app = Slow()
    async with serving(app, limits=HttpLimits(idle_timeout_s=0.05)) as (url, _), await RawClient.connect(url) as client:
        await client.send(GET)
        asyncio.get_running_loop().call_later(0.3, app.go.set)
        assert (await client.response("GET")).body == b"ok"


async def test_idle_connections_do_not_hold_up_the_end() -> None:
    app = Slow()
    app.go.set()
    async with serving(app) as (url, stop), await RawClient.connect(url) as fresh, await RawClient.connect(url) as used:
        await used.send(GET)
        assert (await used.response("GET")).body == b"ok"
        stop.set()
        assert await fresh.at_end()
        assert await used.at_end()


async def test_a_connection_whose_answer_began_before_the_end_may_bring_one_more_request() -> None:
    app = Slow()
    async with serving(app) as (url, stop), await RawClient.connect(url) as client:
        await client.send(GET)
        begun = await client.head()
        stop.set()
        await asyncio.sleep(0.1)
        app.go.set()
        assert await client.reader.readexactly(2) == b"ok"
        await client.send(GET)
        last = await client.response("GET")
        assert (begun.values("connection"), last.values("connection"), last.body) == ([], ["close"], b"ok")
        assert await client.at_end()


async def test_a_head_that_began_before_the_end_has_its_time() -> None:
    app = Slow()
    async with serving(app) as (url, stop), await RawClient.connect(url) as client:
        await client.send(GET + GET[:10])
        await client.head()
        stop.set()
        app.go.set()
        assert await client.reader.readexactly(2) == b"ok"
        await asyncio.sleep(LAST_REQUEST_S + 0.1)
        await client.send(GET[10:])
        assert (await client.response("GET")).body == b"ok"


async def test_a_last_answer_arrives_whole_though_more_requests_have_come_behind_it() -> None:
    """A connection that is closed with something unread is reset, and what was still to be sent is lost."""
    app = Slow(body=b"x" * 300_000)
    post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n" + b"a" * 200_000
    async with serving(app) as (url, stop), await RawClient.connect(url) as client:
        client.writer.write(GET + post * 15)
        assert (await client.head()).status == 200
        stop.set()
        app.go.set()
        assert await client.reader.readexactly(300_000) == app.body
        assert (await client.head()).values("connection") == ["close"]
        await asyncio.sleep(0.1)  # its buffer is full
        assert await client.reader.readexactly(300_000) == app.body


async def test_whoever_the_system_let_in_before_the_port_closed_is_answered() -> None:
    app = Slow()
    app.go.set()
    asked: list[socket.socket] = []
    async with serving(app) as (url, stop):
        host, _, port = url.removeprefix("http://").partition(":")
        with contextlib.suppress(ConnectionRefusedError):
            while len(asked) < 1000:  # one more in each round of the loop
                client = socket.create_connection((host, int(port)))
                client.sendall(GET)
                asked.append(client)
                if len(asked) == 10:
                    stop.set()
                await asyncio.sleep(0)
        assert 10 <= len(asked) < 1000
        for one in asked:
            async with RawClient(*await asyncio.open_connection(sock=one)) as answered:
                answer = await answered.response("GET")
                assert (answer.status, answer.body) == (200, b"ok")


async def test_connections_that_are_cut_short_by_the_end_leave_no_traceback() -> None:
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
    async with serving(Slow(), drain_s=0.1) as (url, stop), await RawClient.connect(url) as client:
        await client.send(GET)
        assert (await client.head()).status == 200
        stop.set()
        assert await client.at_end()
    assert told == []
