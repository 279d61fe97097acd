"""One task answers the requests of a connection in their order, as long as there is a client and a server."""

from __future__ import annotations

import asyncio

import pytest

from smetric.http.connection import Turns
from smetric.http.headers import App, Receive, Scope, Send
from smetric.http.limits import Limits
from smetric.http.transaction import Transaction
from smetric.http.watchdog import Timer
from tests.fakes import PlainHandler, until


class Wire:
    """A connection that takes everything, and goes on with the next request as soon as one is answered."""

    is_full = is_ending = False

    def __init__(self, app: App) -> None:
        self.turns = Turns(PlainHandler(app), Timer(), asyncio.get_running_loop())
        self.waiting: list[Transaction] = []
        self.answers: list[str] = []

    def ask(self, path: str) -> Transaction:
        scope = {"http_version": "1.1", "method": "GET", "path": path, "headers": []}
        transaction = Transaction(self, scope, Limits(), True)
        transaction.end_body()
        return transaction

    def write(self, *pieces: bytes) -> None:
        return None

    async def drained(self) -> None:
        return None

    def taken(self) -> None:
        return None

    def answered(self, transaction: Transaction) -> None:
        self.answers.append(transaction.scope["path"])
        if self.waiting:
            self.turns.take(self.waiting.pop(0))

    def failed(self, transaction: Transaction) -> None:
        self.answers.append("failed")


async def well(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


async def test_requests_are_answered_by_one_task_that_ends_when_the_client_has_left() -> None:
    wire = Wire(well)
    wire.waiting = [wire.ask("/2"), wire.ask("/3")]
    wire.turns.take(wire.ask("/1"))
    task = wire.turns.task
    await until(lambda: len(wire.answers) == 3)
    wire.turns.take(wire.ask("/4"))
    await until(lambda: len(wire.answers) == 4)
    assert wire.answers == ["/1", "/2", "/3", "/4"]
    assert task is not None
    assert wire.turns.task is task
    wire.turns.end()
    await asyncio.wait_for(task, 5)


async def test_a_task_that_is_cancelled_behind_an_answer_leaves_the_next_request_to_another() -> None:
    async def lingering(scope: Scope, receive: Receive, send: Send) -> None:
        await well(scope, receive, send)
        if scope["path"] == "/1":
            await asyncio.Event().wait()

    wire = Wire(lingering)
    wire.waiting = [wire.ask("/2")]
    wire.turns.take(wire.ask("/1"))
    first = wire.turns.task
    assert first is not None
    await until(lambda: wire.answers == ["/1"])
    first.cancel()
    await until(lambda: wire.answers == ["/1", "/2"])
    with pytest.raises(asyncio.CancelledError):
        await first
    wire.turns.end()
    assert wire.turns.task is not None
    await asyncio.wait_for(wire.turns.task, 5)
