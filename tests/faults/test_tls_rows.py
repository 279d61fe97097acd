"""Row B7: TLS on a plain port, no TLS on a TLS port, and broken TLS connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import trustme

from tests.fakes import DONE, FakeEngine, RawClient, Response, hang, request, until
from tests.faults.harness import chat, running
from tests.faults.process import Process, process
from tests.faults.shapes import events_of, streaming

#: Seconds a client has for its handshake here, and for a request's head.
PATIENCE_S = 0.5
CLIENT_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(501)


def ssl_hello() -> bytes:
    """Return the ClientHello of a current TLS client."""
    said, heard = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(heard, said, server_hostname="router").do_handshake()
    return said.read()


async def test_b7_tls_client_on_a_plain_port_is_refused_at_once() -> None:
    async with running(FakeEngine()) as router:
        for url in (router.url, router.admin_url):
            for hello in (CLIENT_HELLO, CLIENT_HELLO[:5], ssl_hello()):
                async with await RawClient.connect(url) as client:
                    await client.send(hello)
                    assert (await client.response()).status in (400, 405)
                    assert await client.at_end()
            async with await RawClient.connect(url) as half:
                await half.send(CLIENT_HELLO[:1])
                half.reset()
        assert not any('"level":"error"' in line or "Traceback" in line for line in router.logged().splitlines())


@dataclass
class Secure:
    """A router that speaks TLS to clients."""

    router: Process
    engine: FakeEngine
    trusting: ssl.SSLContext

    @property
    def port(self) -> int:
        return urlsplit(self.router.data).port or 0

    async def client(self) -> RawClient:
        """A client that has shaken hands."""
        return RawClient(*await asyncio.open_connection("localhost", self.port, ssl=self.trusting, limit=1 << 22))

    async def ask(self, *, stream: bool) -> Response:
        async with await self.client() as client:
            await client.send(request("POST", "/v1/chat/completions", chat(stream=stream)))
            return await client.response()


@asynccontextmanager
async def secure(folder: Path) -> AsyncIterator[Secure]:
    """Run a router with a certificate for localhost; it must serve afterwards and raise nothing."""
    authority = trustme.CA()
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    certificate = authority.issue_cert("localhost")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    environ = {
        "SMETRIC_LISTEN__CERT_FILE": str(folder / "cert.pem"),
        "SMETRIC_LISTEN__KEY_FILE": str(folder / "key.pem"),
        "SMETRIC_LIMITS__HEAD_TIMEOUT": f"{PATIENCE_S}s",
    }
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        engine = FakeEngine()
        await engine.start()
        stack.push_async_callback(engine.stop)
        started = process(folder / "log", "--instance", engine.url, environ=environ)
        router = await stack.enter_async_context(started)
        assert router.data.startswith("https://")
        made = Secure(router, engine, trusting)
        yield made
        engine.recover()
        answer = await made.ask(stream=True)
        assert (answer.status, answer.complete, answer.body[-len(DONE) :]) == (200, True, DONE)
        router.terminate()
        assert await router.ended() == 0
        log = await asyncio.to_thread(router.log.read_text)
        assert "Traceback" not in log
        assert '"level":"error"' not in log
        assert all(line.startswith("{") for line in log.splitlines())


async def seconds_until_closed(sock: socket.socket) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(10):
            while await loop.sock_recv(sock, 4096):
                pass
    return loop.time() - began


async def test_b7_connections_without_a_handshake_are_closed(tmp_path: Path) -> None:
    waiting = {"silence": b"", "half a record": CLIENT_HELLO[:5], "half a handshake": ssl_hello()[:100]}
    hopeless = {"plain HTTP": b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", "nonsense": b"\x00" * 1000}
    async with secure(tmp_path) as router:
        with ExitStack() as stack:
            clients = {}
            for what, said in {**waiting, **hopeless}.items():
                clients[what] = client = stack.enter_context(socket.create_connection(("127.0.0.1", router.port)))
                client.setblocking(False)
                client.send(said)
            took = dict(zip(clients, await asyncio.gather(*map(seconds_until_closed, clients.values())), strict=True))
        assert max(took[what] for what in hopeless) < PATIENCE_S
        assert all(PATIENCE_S - 0.1 <= took[what] < PATIENCE_S + 1.0 for what in waiting)


async def test_b7_dropped_tls_connection_aborts_in_the_engine(tmp_path: Path) -> None:
    async with secure(tmp_path) as router:
        router.engine.script = hang
        for how in ("without close_notify", "RST"):
            before = len(router.engine.aborted)
            client = await router.client()
            await client.send(request("POST", "/v1/chat/completions", chat(stream=True)))
            await until(lambda before=before: len(router.engine.calls) > before)  # type: ignore[misc]
            under = client.writer.get_extra_info("socket")
            if how == "RST":
                under.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.writer.transport.abort()
            await until(lambda before=before: len(router.engine.aborted) > before)  # type: ignore[misc]


async def test_b7_tls_serves_like_plain_http(tmp_path: Path) -> None:
    async with secure(tmp_path) as router:
        for stream in (True, False):
            answers = await asyncio.gather(*(router.ask(stream=stream) for _ in range(20)))
            assert {(answer.status, answer.complete) for answer in answers} == {(200, True)}
        body = chat(padding="x" * 3_000_000)
        async with await router.client() as client:
            for _ in range(2):
                await client.send(request("POST", "/v1/chat/completions", body))
                assert (await client.response()).status == 200
            assert router.engine.calls[-1].body == body
            router.engine.script = streaming(events_of("one event of 5 MB"))
            await client.send(request("POST", "/v1/chat/completions", chat(stream=True)))
            assert (await client.response()).body == b"".join(events_of("one event of 5 MB"))
