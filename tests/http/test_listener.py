from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from smetric.errors import ConfigError
from smetric.http import listener
from smetric.http.connection import LAST_REQUEST_S
from smetric.http.headers import Receive, Scope, Send
from smetric.http.limits import HttpLimits
from smetric.http.listener import (
    RESERVED_FDS,
    PortListener,
    address_of,
    handed_over,
    listen,
    most_connections,
    notify,
    raise_fd_limit,
)
from tests.fakes import PlainHandler, RawClient, listening

pytestmark = pytest.mark.slow

PID = 4711
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Slow:
    """An app that answers with its head, and with the body once `go` is set; `cut` leaves the body out."""

    def __init__(self, *, cut: bool = False, body: bytes = b"ok") -> None:
        self.go = asyncio.Event()
        self.cut = cut
        self.body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    async with listening(PlainHandler(app, limits), drain_s=drain_s) as listener:
        yield listener.url, listener.stop


async def test_response_head_does_not_wait_for_its_body() -> None:
    app = Slow()
    async with serving(app) as (url, _), await RawClient.connect(url) as client:
        await client.send(GET)
        assert (await client.head()).status == 200
        app.go.set()
        assert await client.reader.readexactly(2) == b"ok"


async def test_response_head_without_its_body_is_sent_before_the_close() -> None:
    async with serving(Slow(cut=True)) as (url, _), await RawClient.connect(url) as client:
        await client.send(GET)
        response = await client.response("GET")
        assert (response.status, response.complete) == (200, False)


async def test_idle_connection_is_closed_after_its_timeout() -> None:
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
def test_request_that_has_arrived_at_its_timeout_is_answered(before: int) -> None:
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


async def test_request_under_way_outlives_the_idle_timeout() -> None:
    app = Slow()
    async with serving(app, limits=HttpLimits(idle_timeout_s=0.05)) as (url, _), await RawClient.connect(url) as client:
        await client.send(GET)
        asyncio.get_running_loop().call_later(0.3, app.go.set)
        assert (await client.response("GET")).body == b"ok"


async def test_drain_does_not_wait_for_idle_connections() -> None:
    app = Slow()
    app.go.set()
    async with serving(app) as (url, stop), await RawClient.connect(url) as fresh, await RawClient.connect(url) as used:
        await used.send(GET)
        assert (await used.response("GET")).body == b"ok"
        stop.set()
        assert await fresh.at_end()
        assert await used.at_end()


async def test_drain_takes_one_more_request_after_a_response_that_began_before_it() -> None:
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


async def test_drain_leaves_a_head_that_began_before_it_its_timeout() -> None:
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


async def test_drain_delivers_the_last_response_whole_despite_pipelined_requests() -> None:
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


async def test_drain_answers_connections_that_wait_to_be_accepted() -> None:
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


def test_listener_accepts_connections_in_batches() -> None:
    """On the loop that a router runs on, which accepts one connection in a round."""

    async def rounds() -> int:
        port = PortListener(PlainHandler(Slow()), 1000)
        with listen("127.0.0.1", 0) as sock, contextlib.ExitStack() as stack:
            await port.open(sock)
            for _ in range(200):
                stack.enter_context(socket.create_connection(sock.getsockname()))
            taken = 0
            while port.count()[0] < 200:
                await asyncio.sleep(0)
                taken += 1
            await port.close()
        return taken

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(rounds()) < 20


async def test_drain_that_cuts_connections_logs_no_traceback() -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["message"]))
    async with serving(Slow(), drain_s=0.1) as (url, stop), await RawClient.connect(url) as client:
        await client.send(GET)
        assert (await client.head()).status == 200
        stop.set()
        assert await client.at_end()
    assert reported == []


def test_listen_on_a_port_in_use_names_the_way_out() -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*choose another"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["router..example", "r" * 64 + ".example", "two words"])
def test_listen_on_an_invalid_host_names_the_way_out(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot listen on {host}:0: .*choose another address"):
        listen(host, 0)


def test_address_of_gives_a_url() -> None:
    with listen("127.0.0.1", 0) as sock:
        assert address_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_raise_fd_limit_raises_it_to_the_hard_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert most_connections() == (256 - RESERVED_FDS) // 2
        raise_fd_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert most_connections() > 96
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def environ(count: int | str = 1, names: str = "data", pid: int = PID) -> dict[str, str]:
    return {"LISTEN_PID": str(pid), "LISTEN_FDS": str(count), "LISTEN_FDNAMES": names}


def test_handed_over_ignores_sockets_of_another_process() -> None:
    assert handed_over({}, PID) == {}
    assert handed_over(environ(pid=1), PID) == {}


def test_handed_over_takes_a_single_socket_as_the_data_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as given:
        monkeypatch.setattr(listener, "FIRST_FD", os.dup(given.fileno()))
        with handed_over(environ(names="smetric.socket"), PID)["data"] as taken:
            assert taken.getsockname() == given.getsockname()
            assert not taken.getblocking()
            assert not taken.get_inheritable()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (environ(3), 'LISTEN_FDS: expected 1 or 2 sockets, for data and admin, got "3"'),
        (environ("many"), 'got "many"'),
        (environ(2, "data:data"), "LISTEN_FDNAMES: of two sockets, name one data and one admin"),
    ],
)
def test_handed_over_refuses_unknown_sockets(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        handed_over(given, PID)


def test_handed_over_refuses_all_but_listening_tcp_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "file").open("wb") as file:
        monkeypatch.setattr(listener, "FIRST_FD", os.dup(file.fileno()))
        with pytest.raises(ConfigError, match=r"descriptor \d+ \(data\) is no socket"):
            handed_over(environ(), PID)
    os.close(listener.FIRST_FD)
    with socket.socket() as mute:
        monkeypatch.setattr(listener, "FIRST_FD", os.dup(mute.fileno()))
        with pytest.raises(ConfigError, match="is not a TCP socket that listens"):
            handed_over(environ(), PID)


@pytest.mark.parametrize("is_abstract", [False, True])
def test_notify_sends_the_state(tmp_path: Path, is_abstract: bool) -> None:
    name = f"@smetric-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind("\0" + name[1:] if is_abstract else name)
        notify({"NOTIFY_SOCKET": name}, "READY=1")
        supervisor.settimeout(5)
        assert supervisor.recv(64) == b"READY=1"


def test_notify_survives_a_missing_supervisor(tmp_path: Path) -> None:
    notify({}, "READY=1")
    notify({"NOTIFY_SOCKET": str(tmp_path / "missing")}, "READY=1")
