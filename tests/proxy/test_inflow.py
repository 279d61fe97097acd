"""What a client sends is left with the system for a while, and its departure is heard of all the same."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator
from typing import cast

import pytest

from smetric.http.connection import EVERY_S, Inflow, polled
from tests.fakes import until


class Line(asyncio.Protocol):
    """A client's connection, seen from both sides."""

    def __init__(self) -> None:
        self.client, self.own = socket.socketpair()
        self.received = b""
        self.departures = 0
        self.inflow: Inflow

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self.inflow = Inflow(self.transport, self.left)

    def data_received(self, data: bytes) -> None:
        self.received += data

    def left(self) -> None:
        self.departures += 1


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    line = Line()
    await asyncio.get_running_loop().create_connection(lambda: line, sock=line.own)
    yield line
    line.transport.abort()
    line.client.close()


async def test_nothing_is_read_while_it_is_paused_and_all_of_it_afterwards(line: Line) -> None:
    line.client.send(b"one")
    await until(lambda: line.received == b"one")
    for _ in range(2):
        line.inflow.pause(True)
    line.client.send(b"two")
    await asyncio.sleep(2 * EVERY_S)
    assert (line.received, line.departures) == (b"one", 0)
    for _ in range(2):
        line.inflow.pause(False)
    await until(lambda: line.received == b"onetwo")


async def test_who_leaves_while_nothing_is_read_is_heard_of_once_even_behind_what_it_sent(line: Line) -> None:
    line.inflow.pause(True)
    line.client.send(b"more")
    line.client.close()
    await until(lambda: line.departures == 1)
    await asyncio.sleep(2 * EVERY_S)
    assert (line.received, line.departures) == (b"", 1)


async def test_a_departure_is_looked_for_only_while_nothing_is_read(line: Line) -> None:
    line.inflow.pause(True)
    line.inflow.pause(False)
    line.client.send(b"bye")
    line.client.close()
    await until(lambda: line.received == b"bye")
    await asyncio.sleep(2 * EVERY_S)
    assert line.departures == 0


async def test_a_connection_that_closes_stays_as_it_is(line: Line) -> None:
    line.transport.close()
    line.inflow.pause(True)
    assert not line.inflow.is_paused


async def test_what_is_not_read_yet_has_come_and_so_has_the_end(line: Line) -> None:
    assert not polled(line.transport, select.POLLIN)
    line.client.send(b"x")
    assert polled(line.transport, select.POLLIN)
    await until(lambda: line.received == b"x")
    assert not polled(line.transport, select.POLLIN)
    line.client.shutdown(socket.SHUT_WR)
    assert polled(line.transport, select.POLLIN)
