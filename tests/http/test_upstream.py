from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric.fleet.instance import Instance
from smetric.http import addresses
from smetric.http.answer import HIGH_BYTES, AnswerBroken, InstanceUnreachable, UpstreamFailed, UpstreamResponse
from smetric.http.headers import Headers
from smetric.http.upstream import PROBE_AFTER_S, Ages, Upstream, request_head
from tests.fakes import Call, FakeEngine, Script, chunk, hang, head, until
from tests.resolver import Resolver

OK = (b"content-length", b"2")


class Client:
    """An upstream that sends to one engine."""

    def __init__(self, engine: FakeEngine, upstream: Upstream) -> None:
        self.engine = engine
        self.upstream = upstream
        self.resent = 0

    async def send(
        self, method: str = "POST", target: bytes = b"/v1/x", headers: Headers | None = None, body: bytes | None = b"{}"
    ) -> UpstreamResponse:
        async with asyncio.timeout(10):
            return await self.upstream.send(
                Instance("e", self.engine.url), method, target, headers or [], body, self._note_resend
            )

    def _note_resend(self) -> None:
        self.resent += 1

    async def ask(self, method: str = "POST", body: bytes | None = b"{}") -> tuple[int, bytes]:
        """Send and read all."""
        answer = await self.send(method, body=body)
        data = await rest(answer)
        answer.finish()
        return answer.status, data


async def rest(answer: UpstreamResponse) -> bytes:
    pieces = []
    async with asyncio.timeout(20):
        while piece := await answer.read():
            pieces.append(piece)
    return b"".join(pieces)


async def until_broken(answer: UpstreamResponse) -> bytes:
    """What comes before the answer breaks; it must."""
    pieces = []
    try:
        while piece := await answer.read():
            pieces.append(piece)
    except AnswerBroken:
        return b"".join(pieces)
    raise AssertionError("the answer ended well")


@asynccontextmanager
async def client_of(script: Script, ages: Ages | None = None) -> AsyncIterator[Client]:
    engine = FakeEngine(script)
    await engine.start()
    upstream = Upstream(ages=ages)
    try:
        yield Client(engine, upstream)
    finally:
        await upstream.close()
        await engine.stop()


@asynccontextmanager
async def client_before(serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[Client]:
    """A client of an engine on raw streams."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    engine = FakeEngine()
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    upstream = Upstream()
    try:
        yield Client(engine, upstream)
    finally:
        await upstream.close()
        server.close()


def saying(raw: bytes, *more: bytes) -> Script:
    """Answer with raw bytes, piece by piece, and leave the connection open."""

    async def script(call: Call) -> None:
        await call.send(raw)
        for piece in more:
            await asyncio.sleep(0.01)
            await call.send(piece)

    return script


def ending(raw: bytes) -> Script:
    """Answer with raw bytes and close."""

    async def script(call: Call) -> None:
        await call.send(raw)
        call.close()

    return script


WHOLE = head(200, OK) + b"ok"


async def test_upstream_sends_a_request_as_given() -> None:
    async with client_of(saying(WHOLE)) as client:
        answer = await client.send("POST", b"/v1/%2F%zz?a=%20", [(b"accept-encoding", b"br"), (b"x-a", b"1")], b"body")
        assert await rest(answer) == b"ok"
        (call,) = client.engine.calls
        host = client.engine.url.removeprefix("http://").encode()
        assert (call.method, call.target, call.body) == (b"POST", b"/v1/%2F%zz?a=%20", b"body")
        assert call.headers == [(b"Host", host), (b"accept-encoding", b"br"), (b"x-a", b"1"), (b"Content-Length", b"4")]


async def test_upstream_response_head_is_as_received() -> None:
    fields = [(b"Set-Cookie", b"a=1"), (b"SET-cookie", b"b=2"), (b"X-Mixed", b"V"), (b"Content-Encoding", b"gzip")]
    async with client_of(saying(head(200, *fields, OK) + b"\x1f\x8b")) as client:
        answer = await client.send()
        assert list(answer.headers) == [*fields, OK]
        assert await rest(answer) == b"\x1f\x8b"


@pytest.mark.parametrize("status", [204, 304])
async def test_upstream_response_without_body_by_its_status_ends_with_its_head(status: int) -> None:
    async with client_of(saying(head(status, (b"etag", b'"x"')))) as client:
        assert [await client.ask() for _ in range(3)] == [(status, b"")] * 3
        assert client.engine.connections == 1


@pytest.mark.parametrize("framing", [(b"content-length", b"5000"), (b"transfer-encoding", b"chunked")])
async def test_upstream_response_to_head_keeps_the_connection(framing: tuple[bytes, bytes]) -> None:
    async def script(call: Call) -> None:
        await call.send(head(200, framing) if call.method == b"HEAD" else WHOLE)

    async with client_of(script) as client:
        assert await client.ask("HEAD", None) == (200, b"")
        assert await client.ask() == (200, b"ok")
        assert await client.ask("HEAD", None) == (200, b"")
        assert client.engine.connections == 1


async def test_interim_responses_are_dropped() -> None:
    early = head(100) + head(103, (b"link", b"</x>"))
    async with client_of(saying(early, head(102), WHOLE)) as client:
        answer = await client.send()
        assert (answer.status, await rest(answer), list(answer.headers)) == (200, b"ok", [OK])
        answer.finish()
        assert (await client.ask(), client.engine.connections) == ((200, b"ok"), 1)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01 garbage\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"HTTP/2.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 099 X\r\ncontent-length: 2\r\n\r\nok",
        head(200, OK, (b"transfer-encoding", b"chunked")) + chunk(b"ok"),
        head(200, (b"transfer-encoding", b"chunked"), OK) + chunk(b"ok"),
        head(200, OK, (b"content-length", b"3")) + b"ok",
        head(200, (b"content-length", b"+2")) + b"ok",
        head(200, (b"content-length", b"-2")) + b"ok",
        head(200, (b"content-length", b"2, 2")) + b"ok",
        head(200, (b"content-length", b"9" * 25)) + b"ok",
        head(200, (b"content-length", b"0" * 5000 + b"2")) + b"ok",
        head(200, (b"transfer-encoding", b"gzip")) + b"ok",
        head(200, (b"transfer-encoding", b"gzip, chunked")) + chunk(b"ok"),
        head(200, (b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")) + chunk(b"ok"),
        b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"ok"),
        b"HTTP/1.1 200 OK\ncontent-length: 2\n\nok",
        b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\ncontent-length: 2\r\n\r\nok",
        head(200, (b"x", b"a\x00b"), OK) + b"ok",
        head(101, (b"upgrade", b"x"), (b"connection", b"upgrade")) + b"bytes",
        head(101),
        head(200, (b"x-big", b"a" * 70_000), OK) + b"ok",
        head(200, *[(b"x-%d" % n, b"v") for n in range(300)], OK) + b"ok",
        head(103, (b"link", b"x" * 1000)) * 100 + WHOLE,
        head(200, (b"transfer-encoding", b"chunked")) + b"zz-no-size\r\n",
    ],
    ids=lambda raw: repr(raw[:60]),
)
async def test_upstream_refuses_what_is_not_http_and_closes(raw: bytes) -> None:
    async with client_of(saying(raw)) as client:
        with pytest.raises(UpstreamFailed) as failed:
            await client.send()
        assert failed.value.reason == "protocol"
        client.engine.script = saying(WHOLE)
        assert await client.ask() == (200, b"ok")
        assert (client.engine.connections, client.resent) == (2, 0)


@pytest.mark.parametrize(
    "extra",
    [WHOLE, b"junk", head(100), b"x" * 100_000],
    ids=["a second answer", "junk", "an interim answer", "much"],
)
@pytest.mark.parametrize("together", [True, False])
async def test_bytes_after_a_response_close_the_connection(extra: bytes, together: bool) -> None:
    async with client_of(saying(WHOLE + extra) if together else saying(WHOLE, extra)) as client:
        for number in range(1, 6):
            assert await client.ask() == (200, b"ok")
            if not together:
                await until(lambda n=number: len(client.engine.calls) == n)  # type: ignore[misc]
                await asyncio.sleep(0.03)
            assert client.engine.connections == number


async def test_unasked_bytes_are_seen_before_the_next_request() -> None:
    """The extra answer is in the socket's buffer, unread, when the next request looks for a connection."""

    async def script(call: Call) -> None:
        await call.send(WHOLE)
        if call.body == b"first":
            await call.send(head(200, (b"content-length", b"6")) + b"MARKER")

    async with client_of(script) as client:
        answer = await client.send(body=b"first")
        assert await rest(answer) == b"ok"
        answer.finish()
        assert await client.ask() == (200, b"ok")


CHUNKED = head(200, (b"transfer-encoding", b"chunked")) + chunk(b"abc")


@pytest.mark.parametrize(
    ("raw", "is_reset"),
    [
        (head(200, (b"content-length", b"100")) + b"abc", False),
        (CHUNKED, False),
        (CHUNKED + b"5\r\nde", False),
        (CHUNKED + b"0\r\n", False),
        (head(200) + b"abc", True),
    ],
)
async def test_body_that_ends_too_early_is_broken_after_what_arrived(raw: bytes, is_reset: bool) -> None:
    async def script(call: Call) -> None:
        await call.send(raw)
        await asyncio.sleep(0.02)  # a reset drops what has not been read
        call.reset() if is_reset else call.close()

    async with client_of(script) as client:
        answer = await client.send()
        assert (await until_broken(answer)).startswith(b"abc")
        assert not answer.is_whole
        answer.close()


@pytest.mark.parametrize(
    "nonsense",
    [b"zz\r\n", b"-1\r\n", b"3\r\nabcX\r\n", b"\n\n", b"f" * 20 + b"\r\n", b"1;" + b"e" * 70_000],
    ids=lambda raw: repr(raw[:20]),
)
async def test_bad_chunk_breaks_the_response_after_what_arrived(nonsense: bytes) -> None:
    async with client_of(saying(CHUNKED, nonsense)) as client:
        answer = await client.send()
        assert (await until_broken(answer)).startswith(b"abc")
        answer.finish()
        client.engine.script = saying(WHOLE)
        assert await client.ask() == (200, b"ok")
        assert client.engine.connections == 2


async def test_trailers_are_dropped_and_limited() -> None:
    start = head(200, (b"transfer-encoding", b"chunked")) + chunk(b"ok")
    async with client_of(saying(start + b"0\r\nx-trailer: 1\r\nx-more: 2\r\n\r\n")) as client:
        answer = await client.send()
        assert (await rest(answer), list(answer.headers)) == (b"ok", [(b"transfer-encoding", b"chunked")])
        answer.finish()
        assert (await client.ask(), client.engine.connections) == ((200, b"ok"), 1)
        client.engine.script = saying(start + b"0\r\nx-trailer: ", *[b"x" * 10_000] * 8)
        answer = await client.send()
        assert await until_broken(answer) == b"ok"
        answer.close()


@pytest.mark.parametrize(
    ("script", "ages"),
    [
        (ending(b"HTTP/1.1 200 OK\r\n\r\nok"), Ages()),
        (ending(b"HTTP/1.0 200 OK\r\n\r\nok"), Ages()),
        (saying(head(200, OK, (b"connection", b"close")) + b"ok"), Ages()),
        (saying(WHOLE), Ages(life_s=0.0)),
    ],
    ids=["1.1 without length", "1.0 without length", "connection: close", "its age"],
)
async def test_upstream_connection_that_may_not_be_kept_serves_one_request(script: Script, ages: Ages) -> None:
    async with client_of(script, ages) as client:
        assert [await client.ask() for _ in range(3)] == [(200, b"ok")] * 3
        assert client.engine.connections == 3


@settings(max_examples=40)
@given(
    st.lists(st.binary(min_size=1, max_size=300), max_size=20),
    st.lists(st.integers(1, 200), max_size=30),
    st.booleans(),
)
def test_response_is_the_same_however_it_is_cut_into_segments(
    events: list[bytes], cuts: list[int], is_chunked: bool
) -> None:
    body = b"".join(events)
    if is_chunked:
        framed = b"".join(map(chunk, events)) + b"0\r\n\r\n"
        raw = head(200, (b"transfer-encoding", b"chunked")) + framed
    else:
        raw = head(200, (b"content-length", b"%d" % len(body))) + body

    async def script(call: Call) -> None:
        left = raw
        for piece in segments(left, cuts):
            await call.send(piece)
            await asyncio.sleep(0)

    async def run() -> None:
        async with client_of(script) as client:
            assert await client.ask() == (200, body)
            assert await client.ask() == (200, body)
            assert client.engine.connections == 1

    asyncio.run(run())


def segments(raw: bytes, cuts: list[int]) -> Iterator[bytes]:
    for cut in cuts:
        if raw[:cut]:
            yield raw[:cut]
        raw = raw[cut:]
    if raw:
        yield raw


async def test_upstream_connection_pauses_reading_without_a_reader() -> None:
    sent = 0

    async def script(call: Call) -> None:
        nonlocal sent
        await call.send(head(200, (b"transfer-encoding", b"chunked")))
        for _ in range(400):
            await call.send(chunk(b"x" * 65536))
            sent += 65536
        await call.send(b"0\r\n\r\n")

    async with client_of(script) as client:
        answer = await client.send()
        before = -1
        while before != sent:  # until the socket's buffers are full as well
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 400 * 65536
        largest = got = 0
        while piece := await answer.read():
            largest, got = max(largest, len(piece)), got + len(piece)
        assert got == 400 * 65536
        assert largest < 3 * HIGH_BYTES
        answer.finish()


async def test_large_body_arrives_whole_at_a_slow_engine() -> None:
    body = bytes(range(256)) * 40_000
    async with client_of(saying(WHOLE)) as client:
        assert await client.ask(body=body) == (200, b"ok")
        assert await client.ask(body=body) == (200, b"ok")
        assert [hashlib.sha256(call.body).digest() for call in client.engine.calls] == [
            hashlib.sha256(body).digest()
        ] * 2
        assert client.engine.connections == 1


REFUSAL = head(413, (b"content-length", b"9")) + b"too large"


@pytest.mark.parametrize("how", ["keeps the connection", "closes"])
async def test_refusal_during_the_upload_is_delivered(how: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(REFUSAL)
        await writer.drain()
        if how == "closes":
            await reader.read(4_000_000)
        while how == "keeps the connection" and await reader.read(1 << 16):
            pass
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        ended.append(how)

    ended: list[str] = []
    async with client_before(serve) as client:
        for _ in range(20):
            assert await client.ask(body=b"x" * 20_000_000) == (413, b"too large")
    await until(lambda: len(ended) == 20)


#: Server of twenty connections in a process of its own, which answers while the router is still writing.
REFUSE = """
import socket, sys
listening = socket.socket(fileno=int(sys.argv[1]))
for _ in range(20):
    client, _ = listening.accept()
    client.recv(1000)
    client.sendall(sys.argv[2].encode())
    client.close()
"""


@pytest.mark.parametrize("size", [20_000, 300_000, 20_000_000])
async def test_refusal_before_a_reset_is_delivered(size: int) -> None:
    """A server that closes with a part of the body unread resets the connection, and the next write fails by it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        file = listening.fileno()
        command = (sys.executable, "-c", REFUSE, str(file), REFUSAL.decode())
        process = await asyncio.create_subprocess_exec(*command, pass_fds=[file])
        engine = FakeEngine()
        engine.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        upstream = Upstream()
        client = Client(engine, upstream)
        answers = Counter([await client.ask(body=b"x" * size) for _ in range(20)])
        await process.wait()
        await upstream.close()
    assert answers == {(413, b"too large"): 20}


@pytest.mark.parametrize("status", [200, 413, 503])
async def test_response_ends_with_its_side_of_the_connection_during_the_upload(status: int) -> None:
    """The engine waits for the rest of the body to come, or for the connection to end, before it closes its own."""
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head(status, (b"connection", b"close")) + b"early")
        writer.write_eof()
        await asyncio.wait_for(left.wait(), 10)
        writer.close()

    async with client_before(serve) as client:
        try:
            async with asyncio.timeout(5):
                assert await client.ask(body=b"x" * 20_000_000) == (status, b"early")
        finally:
            left.set()


async def test_cancelled_request_closes_its_connection() -> None:
    async def script(call: Call) -> None:
        await asyncio.Event().wait()

    async with client_of(script) as client:
        waiting = asyncio.create_task(client.send())
        await until(lambda: len(client.engine.calls) == 1)
        waiting.cancel()
        await until(lambda: len(client.engine.aborted) == 1)
        assert waiting.cancelled()


async def test_closed_response_closes_its_connection_and_no_other() -> None:
    async def script(call: Call) -> None:
        if call.body == b"endless":
            await call.stream(b"data: 1\n\n", end=False)
            await asyncio.Event().wait()
        await call.send(WHOLE)

    async with client_of(script) as client:
        answer = await client.send(body=b"endless")
        await answer.read()
        answer.close()
        await until(lambda: len(client.engine.aborted) == 1)
        done = await client.send()
        await rest(done)
        done.finish()
        other = await client.send()  # on the connection that served `done`
        done.close()
        assert await rest(other) == b"ok"
        other.finish()
        assert client.engine.connections == 2


async def test_response_finished_before_its_end_closes_the_connection() -> None:
    async with client_of(saying(head(200, (b"content-length", b"4")) + b"ok")) as client:
        answer = await client.send()
        assert await answer.read() == b"ok"
        answer.finish()
        client.engine.script = saying(WHOLE)
        assert await client.ask() == (200, b"ok")
        assert client.engine.connections == 2


async def test_idle_upstream_connection_is_closed_before_engines_close_theirs() -> None:
    async with client_of(saying(WHOLE), Ages(idle_s=0.1)) as client:
        await client.ask()
        await client.ask()
        assert client.engine.connections == 1
        await until(lambda: not client.engine._open)
        await client.ask()
        assert client.engine.connections == 2


def asked_in(port: int) -> float | None:
    """Seconds until the system asks whether the other end of a connection to *port* is there; None for never."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state, _, timer, *_ = line.split()
        kind, ticks = timer.split(":")
        if (int(remote.partition(":")[2], 16), state, kind) == (port, "01", "02"):
            return int(ticks, 16) / os.sysconf("SC_CLK_TCK")
    return None


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="needs Linux")
async def test_upstream_connection_has_tcp_keep_alive() -> None:
    async with client_of(hang) as client:
        asking = asyncio.create_task(client.ask())
        port = urlsplit(client.engine.url).port or 0
        await until(lambda: asked_in(port) is not None)
        assert (asked_in(port) or 0.0) <= PROBE_AFTER_S
        asking.cancel()


async def test_request_is_resent_after_a_408_on_a_reused_connection_only() -> None:
    """It was for the idle connection, and crossed with the request."""
    late = head(408, (b"content-length", b"4"), (b"connection", b"close")) + b"late"

    async def script(call: Call) -> None:
        await call.send(WHOLE if call.nth == 1 else late)
        if call.nth == 2:
            client.engine.script = saying(WHOLE)

    async with client_of(script) as client:
        assert [await client.ask() for _ in range(2)] == [(200, b"ok")] * 2
        assert (client.engine.connections, client.resent) == (2, 1)
        client.engine.script = saying(late)
        client.engine.drop_idle()
        await until(lambda: not client.engine._open)
        assert await client.ask() == (408, b"late")
        assert (client.engine.connections, client.resent) == (3, 1)


async def test_request_is_not_resent_after_a_byte_of_the_response() -> None:
    async def script(call: Call) -> None:
        if call.nth == 1:
            await call.send(WHOLE)
        else:
            await call.send(b"HTT")
            call.close()

    async with client_of(script) as client:
        await client.ask()
        with pytest.raises(UpstreamFailed) as failed:
            await client.send()
        assert (failed.value.reason, client.resent) == ("closed", 0)


@pytest.mark.parametrize(
    ("headers", "target"),
    [
        ([(b"x", b"a\r\nx-smetric-instance: b")], b"/"),
        ([(b"x", b"a\nb")], b"/"),
        ([(b"x", b"a\rb")], b"/"),
        ([(b"x\r\ny", b"a")], b"/"),
        ([(b"x", b"a\0b")], b"/"),
        ([], b"/ HTTP/1.1\r\nx: y"),
        ([], b"/ b"),
    ],
)
def test_request_head_refuses_line_breaks(headers: Headers, target: bytes) -> None:
    with pytest.raises(UpstreamFailed, match="protocol"):
        request_head(b"engine", "POST", target, headers, b"")


def test_request_head_announces_the_lack_of_a_body() -> None:
    assert request_head(b"engine:1", "GET", b"/x?y", [], None) == b"GET /x?y HTTP/1.1\r\nHost: engine:1\r\n\r\n"
    assert b"\r\nContent-Length: 0\r\n" in request_head(b"engine:1", "POST", b"/", [], None)


async def test_upstream_close_closes_all_connections() -> None:
    async def script(call: Call) -> None:
        if call.body == b"wait":
            await asyncio.Event().wait()
        await call.send(WHOLE)

    async with client_of(script) as client:
        await client.ask()
        waiting = asyncio.create_task(client.send(body=b"wait"))
        await until(lambda: len(client.engine.calls) == 2)
        await client.upstream.close()
        with pytest.raises(UpstreamFailed):
            await waiting
        await until(lambda: not client.engine._open)


async def test_d13_upstream_follows_the_name_and_stays_while_the_resolver_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "TTL_S", 0.0)
    seen: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        seen.append(writer.get_extra_info("sockname")[0])
        writer.write(WHOLE)
        await reader.read()
        writer.close()

    resolver = Resolver("127.0.0.1")
    first = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = first.sockets[0].getsockname()[1]
    second = await asyncio.start_server(serve, "127.0.0.2", port)
    engine = FakeEngine()
    engine.url = f"http://engine.test:{port}"
    upstream = Upstream(ages=Ages(life_s=0.0), resolve=resolver)
    client = Client(engine, upstream)
    await client.ask()
    resolver.found = ("127.0.0.3", "127.0.0.2")  # the first does not listen
    await client.ask()
    resolver.found = ()
    await client.ask()
    assert {host for host, _ in resolver.asked} == {"engine.test"}
    assert seen == ["127.0.0.1", "127.0.0.2", "127.0.0.2"]
    await upstream.close()
    await asyncio.sleep(0.02)
    first.close()
    second.close()


async def test_unknown_name_is_unreachable() -> None:
    with pytest.raises(InstanceUnreachable, match="connect_error"):
        await Upstream(resolve=Resolver()).send(Instance("e", "http://engine.test:1"), "GET", b"/", [], None)


async def test_hanging_resolver_ends_at_the_connect_timeout() -> None:
    resolver = Resolver()
    resolver.gate.clear()
    upstream = Upstream(connect_timeout_s=0.1, resolve=resolver)
    with pytest.raises(InstanceUnreachable, match="connect_timeout"):
        await upstream.send(Instance("e", "http://engine.test:1"), "GET", b"/", [], None)
    await upstream.close()


async def test_connection_of_a_refused_upload_is_not_used_again() -> None:
    """The engine would take another request for the rest of the body."""
    received: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head(413, OK) + b"no")
        size = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                size += len(data)
        received.append(size)
        writer.close()

    async with client_before(serve) as client:
        for number in range(1, 4):
            assert await client.ask(body=b"x" * 20_000_000) == (413, b"no")
            await until(lambda n=number: len(received) == n)  # type: ignore[misc]
    assert max(received) < 20_000_000


async def test_address_that_drops_packets_delays_the_first_request_only() -> None:
    """As the IPv6 address of a name does where IPv6 leads nowhere."""

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]

    engine = FakeEngine(lambda call: call.answer(200, b"ok", (b"connection", b"close")))
    await engine.start()
    port = int(engine.url.rpartition(":")[2])
    with socket.create_server(("127.0.0.2", port), backlog=0) as swallowing, ExitStack() as stack:
        for _ in range(4):  # until it takes no more
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(swallowing.getsockname())
        engine.url = f"http://engine.test:{port}"
        upstream = Upstream(connect_timeout_s=1.0, resolve=resolve)
        client = Client(engine, upstream)
        loop = asyncio.get_running_loop()
        assert (await client.ask())[0] == 200
        began = loop.time()
        for _ in range(5):
            assert (await client.ask())[0] == 200
        assert loop.time() - began < 0.5
        await upstream.close()
    await engine.stop()


@pytest.mark.parametrize("taken_at_once", [1, 2, 100], ids=["each piece", "some pieces", "all pieces"])
async def test_relay_gives_each_piece_to_its_sink_until_that_takes_no_more(taken_at_once: int) -> None:
    pieces = [b"%d" % number for number in range(6)]
    async with client_of(saying(head(200, (b"content-length", b"6")), *pieces)) as client:
        answer = await client.send()
        got: list[bytes] = []

        def sink(piece: bytes) -> bool:
            got.append(piece)
            return len(got) % taken_at_once != 0

        stops = 0
        async with asyncio.timeout(10):
            while not await answer.relay(sink):
                stops += 1
        assert b"".join(got) == b"012345"
        assert stops == len(got) // taken_at_once
        assert answer.is_whole
        answer.finish()


async def test_relay_gives_what_has_arrived_before_an_answer_breaks() -> None:
    async def script(call: Call) -> None:
        await call.send(head(200, (b"content-length", b"9")) + b"abc")
        await asyncio.sleep(0.01)
        await call.send(b"def")
        call.close()

    async with client_of(script) as client:
        answer = await client.send()
        got: list[bytes] = []

        def sink(piece: bytes) -> bool:
            got.append(piece)
            return True

        with pytest.raises(AnswerBroken):
            async with asyncio.timeout(10):
                await answer.relay(sink)
        assert b"".join(got) == b"abcdef"
        answer.close()


async def test_relay_raises_an_error_of_its_sink() -> None:
    async with client_of(saying(head(200, (b"content-length", b"9")), b"abc", b"def", b"ghi")) as client:
        answer = await client.send()

        def sink(_: bytes) -> bool:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            async with asyncio.timeout(10):
                await answer.relay(sink)
        answer.close()


async def test_relay_that_is_cancelled_gives_its_sink_nothing_more() -> None:
    async with client_of(saying(head(200, (b"content-length", b"6")), *[b"x"] * 6)) as client:
        answer = await client.send()
        got: list[bytes] = []

        def sink(piece: bytes) -> bool:
            got.append(piece)
            return True

        relaying = asyncio.create_task(answer.relay(sink))
        await until(lambda: len(got) == 2)
        relaying.cancel()
        await asyncio.gather(relaying, return_exceptions=True)
        assert await rest(answer) == b"xxxx"
        assert len(got) == 2
        answer.finish()
