from __future__ import annotations

import asyncio
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import pytest

from smetric.errors import RequestError
from smetric.http import transaction as module
from smetric.http.limits import HttpLimits
from smetric.http.transaction import COPIED_BYTES, Timer, Transaction, Watchdog


class Connection:
    """The connection of a transaction, and its transport; remembers each write."""

    def __init__(self, limits: HttpLimits | None = None) -> None:
        self.limits = limits or HttpLimits()
        self.transport: Any = self
        self.is_full = self.is_paused = self.is_ending = self.is_closing = False
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.writes.append(b"".join(pieces))

    async def drained(self) -> None:
        raise AssertionError("it is never full")

    def body_taken(self) -> None: ...

    def answered(self, transaction: Transaction) -> None: ...


class NoBounds:
    """Room for any body."""

    def grow(self, received: int) -> None: ...

    def settle(self, size: int) -> None: ...


def asked(connection: Connection, method: str = "POST") -> Transaction:
    """A request that has arrived but for its body, and is served in the test's own task."""
    scope = {"type": "http", "method": method, "http_version": "1.1", "headers": []}
    transaction = Transaction(connection, scope, is_last=False)
    task = asyncio.current_task()
    assert task is not None
    transaction.task, transaction.watchdog = task, Watchdog(task)
    return transaction


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("size", [0, 1, COPIED_BYTES, COPIED_BYTES + 1])
async def test_whole_response_is_one_write(size: int) -> None:
    body = bytes(size)
    for headers, expected in (
        ([(b"content-length", b"%d" % size)], HEAD % size + body),
        ([], CHUNKED + (b"%x\r\n%b\r\n" % (size, body) if size else b"") + b"0\r\n\r\n"),
    ):
        connection = Connection()
        transaction = asked(connection)
        transaction.end_body()
        transaction.begin(200, headers, body, is_last=True)
        assert connection.writes == [expected]


async def test_begin_without_a_piece_sends_the_head() -> None:
    connection = Connection()
    transaction = asked(connection)
    transaction.end_body()
    transaction.begin(200, [])
    assert connection.writes == [CHUNKED]
    transaction.pass_on(b"a")
    transaction.pass_on(b"", is_last=True)
    assert connection.writes[1:] == [b"1\r\na\r\n", b"0\r\n\r\n"]


async def test_response_to_head_has_no_body_and_no_framing_of_its_own() -> None:
    for fields, expected in (([(b"content-length", b"3")], HEAD % 3), ([], b"HTTP/1.1 200 OK\r\n\r\n")):
        connection = Connection()
        transaction = asked(connection, "HEAD")
        transaction.end_body()
        transaction.begin(200, fields, b"abc", is_last=True)
        assert connection.writes == [expected]


async def test_transaction_writes_nothing_after_a_disconnect() -> None:
    connection = Connection()
    transaction = asked(connection)
    transaction.end_body()
    transaction.leave()
    transaction.begin(200, [], b"a")
    transaction.pass_on(b"b", is_last=True)
    assert connection.writes == []


async def test_transaction_refuses_pieces_before_the_head_and_after_the_end() -> None:
    transaction = asked(Connection())
    transaction.end_body()
    with pytest.raises(RuntimeError, match="waiting"):
        transaction.pass_on(b"a")
    transaction.begin(200, [], is_last=True)
    with pytest.raises(RuntimeError, match="ended"):
        transaction.pass_on(b"a")


@pytest.mark.parametrize("is_complete", [True, False])
async def test_body_above_the_limit_is_refused(is_complete: bool) -> None:
    transaction = asked(Connection(HttpLimits(body_bytes=11)))
    for _ in range(3):
        transaction.feed(bytes(4))
    if is_complete:
        transaction.end_body()
    with pytest.raises(RequestError, match="larger than 11 bytes") as refused:
        await transaction.body(NoBounds())
    assert refused.value.status == 413


async def test_body_at_the_limit_is_taken() -> None:
    transaction = asked(Connection(HttpLimits(body_bytes=11)))
    transaction.feed(b"hello")
    transaction.feed(b" world")
    transaction.end_body()
    assert await transaction.body(NoBounds()) == b"hello world"


@pytest.mark.parametrize("is_taken", [True, False], ids=["taken at once", "waiting"])
async def test_body_in_tiny_pieces_takes_little_more_than_its_bytes(is_taken: bool) -> None:
    """As chunks of two bytes bring it: what objects take is no part of the bytes that bodies may take in all."""
    transaction = asked(Connection())
    pieces = [b"%02d" % (n % 100) for n in range(1000)]
    tracemalloc.start()
    try:
        taking = asyncio.create_task(transaction.body(NoBounds()))
        for _ in range(100):
            for piece in pieces:
                transaction.feed(piece[:1] + piece[1:])  # an object of its own
            if is_taken:
                await asyncio.sleep(0)
        transaction.end_body()
        body = await taking
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert body == b"".join(pieces) * 100
    assert peak < 5 * len(body)


@pytest.mark.parametrize("pair", [tuple, list])
async def test_start_takes_any_pairs_as_fields_and_drops_those_of_the_framing(
    pair: Callable[[tuple[bytes, bytes]], Any],
) -> None:
    fields = [(b"x-a", b"1"), (b"transfer-encoding", b"gzip"), (b"connection", b"Keep-Alive, Close"), (b"x-a", b"2")]
    connection = Connection()
    transaction = asked(connection)
    transaction.end_body()
    await transaction.send({"type": "http.response.start", "status": 200, "headers": map(pair, fields)})
    head = b"HTTP/1.1 200 OK\r\nx-a: 1\r\nx-a: 2\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    assert connection.writes == [head]


async def test_transaction_has_a_deadline_only_while_it_waits_for_the_client() -> None:
    """An app may take as long as it likes with a body that has come, and between two pieces of its answer."""
    deadlines: list[float] = []

    class Slow(Connection):
        async def drained(self) -> None:
            deadlines.append(transaction.watchdog.at)

    connection = Slow()
    transaction = asked(connection)
    transaction.watchdog.arm(60.0, "body")
    transaction.feed(b"{")
    assert (await transaction())["more_body"]
    assert transaction.watchdog.at < inf
    transaction.feed(b"}")
    transaction.end_body()
    assert not (await transaction())["more_body"]
    assert transaction.watchdog.at == inf
    connection.is_full = True
    await transaction.send({"type": "http.response.start", "status": 200})
    await transaction.drained()
    assert max(deadlines) < inf
    assert (len(deadlines), transaction.watchdog.at) == (2, inf)


async def sleeping(watchdog_of: list[Watchdog], *deadlines: tuple[float, str]) -> None:
    task = asyncio.current_task()
    assert task is not None
    watchdog = Watchdog(task)
    watchdog_of.append(watchdog)
    try:
        for seconds, what in deadlines:
            watchdog.arm(seconds, what) if what else watchdog.extend(seconds)
        await asyncio.Event().wait()
    finally:
        watchdog.close()


@pytest.mark.parametrize(
    "deadlines",
    [
        [(0.01, "idle")],
        [(60.0, "send"), (0.01, "idle")],
        [(0.01, "send"), (0.02, "idle")],
        [(0.01, "idle"), (0.02, "")],  # extended
    ],
)
async def test_watchdog_cancels_at_the_last_deadline_armed(deadlines: list[tuple[float, str]]) -> None:
    made: list[Watchdog] = []
    task = asyncio.create_task(sleeping(made, *deadlines))
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert made[0].expired == "idle"


async def test_watchdog_that_is_disarmed_or_closed_cancels_nothing() -> None:
    task = asyncio.current_task()
    assert task is not None
    for end in (Watchdog.disarm, Watchdog.close):
        watchdog = Watchdog(task)
        watchdog.arm(0.01, "idle")
        end(watchdog)
        await asyncio.sleep(0.03)
        assert watchdog.expired is None


async def test_watchdogs_of_one_timer_keep_their_own_deadlines() -> None:
    timer = Timer()
    passed: list[str] = []

    async def wait(seconds: float, what: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        watchdog = Watchdog(task, timer)
        watchdog.arm(seconds, what)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert watchdog.expired is not None
            passed.append(watchdog.expired)
            watchdog.resume()
        finally:
            watchdog.close()

    async with asyncio.timeout(5):
        await asyncio.gather(*(wait(seconds, what) for seconds, what in ((0.06, "c"), (0.03, "b"), (0.01, "a"))))
    assert passed == ["a", "b", "c"]
    assert not timer.watchdogs


def test_timer_serves_one_event_loop_after_another() -> None:
    timer = Timer()

    async def overdue(seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        watchdog = Watchdog(task, timer)
        watchdog.arm(seconds, "body")
        try:
            await asyncio.sleep(0.05)
        finally:
            watchdog.close()

    asyncio.run(overdue(0.06))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(overdue(0.02))


async def read(sock: socket.socket) -> bytes:
    """What comes within 20 ms; nothing if none does."""
    task = asyncio.current_task()
    assert task is not None
    reader, writer = await asyncio.open_connection(sock=sock)
    watchdog = Watchdog(task)
    watchdog.arm(0.02, "idle")
    try:
        return await reader.read(1)
    except asyncio.CancelledError:
        watchdog.resume()
        return b""
    finally:
        watchdog.close()
        writer.close()


@pytest.mark.parametrize("comes", [b"x", b""])
async def test_watchdog_extends_a_deadline_that_passed_while_the_process_was_suspended(
    comes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LATE_S", 0.05)
    monkeypatch.setattr(module, "RESUMED_S", 0.05)
    ours, theirs = socket.socketpair()
    with theirs:
        reading = asyncio.create_task(read(ours))
        await asyncio.sleep(0.005)
        theirs.send(comes)
        asyncio.get_running_loop().call_soon(time.sleep, 0.1)
        async with asyncio.timeout(5):
            assert await reading == comes
