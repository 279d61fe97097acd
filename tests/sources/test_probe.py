"""Probes of instances that answer, refuse, hang and talk nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trustme
from structlog.testing import capture_logs

from smetric.fleet.health import Health, Tolerance
from smetric.fleet.instance import Instance, State
from smetric.http import addresses
from smetric.sources import vllm
from smetric.sources.vllm import Prober
from tests.fakes import FakeEngine, capture, hang, until
from tests.resolver import Resolver


def prober(instance: Instance, *, timeout_s: float = 1.0) -> Prober:
    health = Health([instance], Tolerance(fall=1, rise=1, slow_start_s=0))
    return Prober([instance], health, interval_s=0.01, timeout_s=timeout_s)


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[Instance]:
    """An instance that answers one connection with *pieces*, a moment between two, and keeps it open."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.01)
            await reader.read()
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield Instance("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await ended.wait()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    "raw",
    [
        capture("health")[1],
        b"HTTP/1.1 401 Unauthorized\r\n\r\n",
        b"HTTP/1.0 404 Not Found\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\n\r\n",
    ],
)
async def test_whoever_answers_below_500_is_well(raw: bytes) -> None:
    async with answering(raw) as instance:
        await prober(instance).probe(instance)
    assert instance.state is State.WELL


async def test_a_fault_of_ours_is_told_and_the_instance_is_probed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    await engine.start()
    instance = Instance("a", engine.url)
    health = Health([instance], Tolerance(fall=1, rise=1, slow_start_s=0))
    one = Prober([instance], health, interval_s=0.01)
    with monkeypatch.context() as broken, capture_logs() as logs:
        broken.setattr(health, "settle", lambda: 1 / 0)
        await one.start()
        await until(lambda: bool(logs))
    assert [(line["event"], line["instance"]) for line in logs] == [("smetric.probe.crashed", "a")]
    await engine.stop()
    await until(lambda: instance.state is State.REFUSING)
    await one.stop()


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 500 X\r\n\r\n",
        b"HTTP/1.1 2000 X\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"\x00\xff" * 8000,
        b"SSH-2.0-OpenSSH\r\n",
    ],
)
async def test_whoever_answers_an_error_or_nonsense_is_ill(raw: bytes) -> None:
    async with answering(raw) as instance:
        await prober(instance).probe(instance)
    assert instance.state is State.ILL


async def test_an_answer_may_come_in_pieces() -> None:
    async with answering(b"HTTP", b"/1.1 2", b"00 OK\r", b"\n\r\n") as instance:
        await prober(instance).probe(instance)
    assert instance.state is State.WELL


async def test_an_answer_that_ends_before_its_first_line_is_none() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        instance = Instance("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await prober(instance).probe(instance)
    assert instance.state is State.ILL


async def test_the_systems_authorities_are_read_once_for_all_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    authority, made = trustme.CA(), []

    def trusting() -> ssl.SSLContext:
        made.append(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        authority.configure_trust(made[-1])
        return made[-1]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await reader.read()
        writer.close()

    monkeypatch.setattr(ssl, "create_default_context", trusting)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        instance = Instance("a", f"https://localhost:{server.sockets[0].getsockname()[1]}")
        probing = prober(instance)
        for _ in range(3):
            await probing.probe(instance)
            assert instance.state is State.WELL
    assert len(made) == 1


async def test_whoever_takes_connections_but_never_answers_is_ill_at_the_time_out() -> None:
    async with answering(b"") as instance:
        await prober(instance, timeout_s=0.05).probe(instance)
    assert instance.state is State.ILL


async def test_a_probe_that_was_under_way_while_the_process_was_suspended_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "LATE_S", 0.05)
    async with answering(b"") as instance:
        asyncio.get_running_loop().call_later(0.01, time.sleep, 0.2)
        await prober(instance, timeout_s=0.05).probe(instance)
    assert instance.state is State.WELL


async def test_a_port_nobody_listens_on_refuses() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        instance = Instance("a", f"http://127.0.0.1:{taken.getsockname()[1]}")
        await prober(instance).probe(instance)
    assert instance.state is State.REFUSING


async def test_an_instance_is_well_where_one_of_its_addresses_answers_and_while_its_name_cannot_be_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "TTL_S", 0.0)
    resolver = Resolver("127.0.0.2", "127.0.0.1")  # nobody is at the first
    engine = FakeEngine()
    await engine.start()
    instance = Instance("a", engine.url.replace("127.0.0.1", "engine.test"))
    probing = Prober([instance], Health([instance], Tolerance(fall=1, slow_start_s=0)), resolve=resolver)
    await probing.probe(instance)
    resolver.found = ()
    await probing.probe(instance)
    assert engine.connections == 2
    assert instance.healthy
    await engine.stop()
    await probing.probe(instance)
    assert instance.state is State.REFUSING


async def test_probes_go_on_and_one_that_hangs_delays_no_other() -> None:
    engines = [FakeEngine(), FakeEngine()]
    engines[0].health = hang
    for engine in engines:
        await engine.start()
    instances = [Instance(f"e{i}", engine.url) for i, engine in enumerate(engines)]
    health = Health(instances, Tolerance(fall=1, rise=1, slow_start_s=0))
    probing = Prober(instances, health, interval_s=0.02, timeout_s=0.2)
    await probing.start()
    await until(lambda: engines[1].connections >= 10 and instances[0].state is State.ILL)
    assert engines[1].connections > 2 * engines[0].connections
    assert instances[1].state is State.WELL
    engines[0].recover()
    await until(lambda: instances[0].state is State.WELL)
    await probing.stop()
    for engine in engines:
        await engine.stop()
