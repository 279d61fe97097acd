"""Flow control has no deadlock, in whatever order bytes arrive, are taken and are held back.

Both ends run over transports without sockets, which read only while they are not paused, as real ones do.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smetric.http.answer import HIGH_BYTES, READ_BYTES, WRITE_BYTES, AnswerBroken, UpstreamConnection, UpstreamResponse
from smetric.http.connection import HIGH_WATER, Connection
from smetric.http.headers import App, Receive, Scope, Send
from smetric.http.transaction import Timer
from tests.fakes import PlainHandler, chunk, head, request

#: Rounds of the loop without any progress after which nothing will come any more.
NEVER = 50
#: What a transport holds before it says that it is full.
FULL_BYTES = 64 * 1024
#: File descriptor of which the system reports nothing: a pipe into which nothing is written.
SILENT, _ = os.pipe()


class Pipe:
    """The transport of a connection whose other end is the test."""

    def __init__(self) -> None:
        self.is_reading = True
        #: Nothing more will come from this end.
        self.is_over = False
        self.sent = bytearray()
        self._held = 0
        self._protocol: Any = None

    def join(self, protocol: Connection | UpstreamConnection) -> None:
        self._protocol = protocol
        protocol.connection_made(cast(asyncio.Transport, self))

    def drain(self) -> None:
        """The other end takes what there is."""
        was_full, self._held = self._held > FULL_BYTES, 0
        if was_full:
            self._protocol.resume_writing()

    # As asyncio has it.

    def get_extra_info(self, name: str) -> Any:
        return self if name == "socket" else None

    def fileno(self) -> int:
        return SILENT

    def is_closing(self) -> bool:
        return self.is_over

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def get_write_buffer_size(self) -> int:
        return self._held

    def write(self, data: bytes) -> None:
        self.sent += data
        was_full, self._held = self._held > FULL_BYTES, self._held + len(data)
        if not was_full and self._held > FULL_BYTES:
            self._protocol.pause_writing()

    def writelines(self, pieces: list[bytes]) -> None:
        self.write(b"".join(pieces))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_over = True

    def abort(self) -> None:
        if not self.is_over:
            self.is_over = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    close = abort


def connection(app: App) -> Connection:
    return Connection(PlainHandler(app), lambda _: None, lambda _: None, Timer())


@dataclass(frozen=True)
class Asked:
    """One request, and what the app does with it."""

    body: int
    #: Whether it takes the body; at once, or after some rounds of the loop.
    takes: bool
    after: int
    pieces: int


ASKED = st.builds(
    Asked,
    body=st.sampled_from([0, 1, HIGH_WATER - 1, HIGH_WATER, HIGH_WATER + 1, 2 * HIGH_WATER + 7]),
    takes=st.booleans(),
    after=st.integers(0, 4),
    pieces=st.integers(1, 3),
)
#: How many bytes come at a time, and how many rounds of the loop pass behind them.
ARRIVALS = st.lists(st.tuples(st.sampled_from([9_000, 64_000, 256_000, 1_000_000]), st.integers(0, 2)), min_size=1)
#: At which of these rounds the other end takes what it was sent.
DRAINS = st.lists(st.booleans(), min_size=1, max_size=8).filter(any)


@settings(max_examples=60)
@given(st.lists(ASKED, min_size=1, max_size=12), ARRIVALS, DRAINS)
@example([Asked(HIGH_WATER + 1, False, 0, 1), Asked(0, True, 0, 1)], [(1_000_000, 0)], [True])
def test_connection_answers_every_request_or_closes(
    requests: list[Asked], arrivals: list[tuple[int, int]], drains: list[bool]
) -> None:
    async def run() -> None:
        todo = iter(requests)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            asked = next(todo)
            for _ in range(asked.after):
                await asyncio.sleep(0)
            while asked.takes and (await receive()).get("more_body"):
                pass
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for left in reversed(range(asked.pieces)):
                await send({"type": "http.response.body", "body": b"x" * FULL_BYTES, "more_body": left > 0})

        pipe = Pipe()
        client = connection(app)
        pipe.join(client)
        raw = b"".join(request("POST", "/", bytes(each.body)) for each in requests)
        await _feed(pipe, raw, arrivals, drains, client.data_received)
        answered = pipe.sent.count(b"HTTP/1.1 200")
        # An answer before the end of the body closes the connection: that end is not waited for.
        assert answered == len(requests) or (pipe.is_over and answered > 0)
        client.abort()
        if client.task is not None:
            await asyncio.wait((client.task,))

    asyncio.run(run())


@settings(max_examples=60)
@given(
    st.sampled_from([0, 1, WRITE_BYTES, WRITE_BYTES + 1, 3 * WRITE_BYTES + 7]),
    st.lists(st.sampled_from([1, HIGH_BYTES - 1, HIGH_BYTES, 3 * HIGH_BYTES]), max_size=6),
    st.sampled_from(["chunked", "by its end", "cut"]),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    ARRIVALS,
    DRAINS,
)
def test_upstream_response_ends_for_its_reader(
    body: int, pieces: list[int], ending: str, pauses: list[int], arrivals: list[tuple[int, int]], drains: list[bool]
) -> None:
    async def run() -> None:
        pipe = Pipe()
        just_read = memoryview(bytearray(READ_BYTES))
        wire = UpstreamConnection(asyncio.get_running_loop(), just_read, lambda _: None, lambda _: None, lambda _: None)
        pipe.join(wire)
        expected = b"".join(b"%c" % (65 + nth) * size for nth, size in enumerate(pieces))

        async def read() -> tuple[bytes, bool]:
            got = b""
            answer = await wire.ask(UpstreamResponse(wire, is_head=False), b"POST / HTTP/1.1\r\n\r\n", bytes(body))
            try:
                for rounds in cycle(pauses):
                    for _ in range(rounds):
                        await asyncio.sleep(0)
                    piece = await answer.read()
                    if not piece:
                        answer.finish()
                        return got, True
                    got += piece
            except AnswerBroken:
                answer.close()
            return got, False

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        framing = [] if ending == "by its end" else [(b"transfer-encoding", b"chunked")]
        raw = head(200, *framing)
        raw += b"".join(chunk(expected[i : i + 5000]) if framing else expected[i : i + 5000] for i in _steps(expected))
        raw += b"0\r\n\r\n" if ending == "chunked" else b""

        def arrive(data: bytes) -> None:
            just_read[: len(data)] = data
            wire.get_buffer(-1)
            wire.buffer_updated(len(data))

        await _feed(pipe, raw, [(min(size, READ_BYTES), rounds) for size, rounds in arrivals], drains, arrive)
        if not pipe.is_over:
            wire.eof_received()
            pipe.abort()
        async with asyncio.timeout(5):
            got, is_whole = await reader
        assert (got, is_whole) == (expected, ending != "cut")

    asyncio.run(run())


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "not read"])
async def test_connection_yields_between_pieces_that_are_mostly_framing(is_read: bool) -> None:
    """A transport reads as long as there is something, before anything else runs."""
    chunks = b"1\r\nx\r\n" * 40_000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while is_read and (await receive()).get("more_body"):
            pass
        await asyncio.Event().wait()

    pipe = Pipe()
    client = connection(app)
    pipe.join(client)
    client.data_received(request("POST", "/", headers=[("Transfer-Encoding", "chunked")]))
    for _ in range(5):
        await asyncio.sleep(0)
        assert pipe.is_reading
        client.data_received(chunks)
        assert not pipe.is_reading
    client.abort()
    assert client.task is not None
    client.task.cancel()
    await asyncio.wait((client.task,))


async def test_waiting_requests_hold_no_more_than_one_alone() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    pipe = Pipe()
    client = connection(app)
    pipe.join(client)
    rest = request("POST", "/") + request("POST", "/", bytes(100_000)) * 20
    held = 0
    while pipe.is_reading and rest:
        held += len(rest[:10_000])
        client.data_received(rest[:10_000])
        rest = rest[10_000:]
        await asyncio.sleep(0)
    assert HIGH_WATER < held < HIGH_WATER + 20_000
    client.abort()
    assert client.task is not None
    client.task.cancel()
    await asyncio.wait((client.task,))


@pytest.mark.parametrize("one", [request("GET", "/"), request("POST", "/", b"a")], ids=["GET", "POST"])
async def test_cost_of_a_request_does_not_grow_with_the_pipeline(one: bytes) -> None:
    """One piece may hold hundreds, and the loop does nothing else meanwhile."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    async def steps(number: int) -> int:
        """Calls that it takes to read so many."""
        client = connection(app)
        Pipe().join(client)
        seen: Counter[str] = Counter()
        sys.setprofile(lambda _frame, event, _: seen.update([event]))
        client.data_received(one * number)
        sys.setprofile(None)
        await asyncio.sleep(0)
        client.abort()
        assert client.task is not None
        client.task.cancel()
        await asyncio.wait((client.task,))
        return seen["call"] + seen["c_call"]

    assert await steps(400) < 4.5 * await steps(100)


def _steps(text: bytes) -> Iterator[int]:
    return iter(range(0, len(text), 5000))


async def _feed(pipe: Pipe, raw: bytes, arrivals: list[tuple[int, int]], drains: list[bool], arrive: Any) -> None:
    """Let *raw* come while it is read, and the other end take what it is sent, until nothing happens any more."""
    takes = cycle(drains)
    idle = 0
    for size, rounds in cycle(arrivals):
        before = (len(raw), len(pipe.sent))
        if raw and pipe.is_reading and not pipe.is_over:
            arrive(raw[:size])
            raw = raw[size:]
        for _ in range(rounds if raw and pipe.is_reading else 1):
            await asyncio.sleep(0)
            if next(takes):
                pipe.drain()
        idle = idle + 1 if before == (len(raw), len(pipe.sent)) else 0
        if idle > NEVER or (pipe.is_over and idle > 10):
            return
