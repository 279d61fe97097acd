from __future__ import annotations

import asyncio
import resource
from importlib import metadata

import hypercorn.asyncio.run
import pytest
from hypercorn.asyncio.tcp_server import TCPServer

from smetric.errors import ConfigError
from smetric.http.listener import RESERVED_FDS, Shutdown, address_of, listen, most_connections, raise_fd_limit
from tests.fakes import FakeEngine, RawClient, hang, until
from tests.faults.harness import chat, running

pytestmark = pytest.mark.slow


def test_a_port_in_use_is_told_with_the_way_out() -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*choose another"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["router..example", "r" * 64 + ".example", "two words"])
def test_an_address_that_is_none_is_told_with_the_way_out(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot listen on {host}:0: .*choose another address"):
        listen(host, 0)


def test_an_address_is_told_as_a_url() -> None:
    with listen("127.0.0.1", 0) as sock:
        assert address_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_a_second_signal_forces_the_end() -> None:
    shutdown = Shutdown()
    shutdown.signalled()
    assert shutdown.draining.is_set()
    assert not shutdown.forced.is_set()
    shutdown.signalled()
    assert shutdown.forced.is_set()


async def test_a_hypercorn_that_is_not_known_serves_as_it_is_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.19.2")
    monkeypatch.setattr(hypercorn.asyncio.run, "TCPServer", TCPServer)
    async with running(FakeEngine(), check_after=False) as router:  # what it leaves behind is why it is not ours
        assert vars(hypercorn.asyncio.run)["TCPServer"] is TCPServer
        (line, _) = router.lines("smetric.hypercorn.unknown")  # one for each port
        assert (line["level"], line["version"], line["known"]) == ("warning", "0.19.2", "0.18.x")
        assert (await router.chat(stream=True)).complete
        engine = router.engines[0]
        engine.script = hang
        client = await router.client(chat())
        await until(lambda: len(engine.calls) == 2)
        client.leave()
        await until(lambda: len(engine.aborted) == 1)


def test_a_limit_of_open_files_is_raised_as_far_as_it_goes() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert most_connections() == (256 - RESERVED_FDS) // 2
        raise_fd_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert most_connections() > 96
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_client_that_has_left_is_forgotten_at_once() -> None:
    async with running(FakeEngine()) as router:
        before = len(asyncio.all_tasks())
        clients = [await RawClient.connect(router.url) for _ in range(20)]
        await until(lambda: len(asyncio.all_tasks()) >= before + 20)
        for client in clients:
            client.leave()
        await until(lambda: len(asyncio.all_tasks()) <= before)
