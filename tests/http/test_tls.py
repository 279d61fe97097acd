"""A listener's certificate and its handshakes, tried by a client that takes the handshake step by step."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from structlog.testing import capture_logs

from smetric.errors import ConfigError
from smetric.http.headers import Receive, Scope, Send
from smetric.http.limits import HttpLimits
from smetric.http.listener import MAX_REFUSED
from smetric.http.tls import Tls
from tests.fakes import Listening, PlainHandler, RawClient, Response, listening, until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("cert", "key", "reason"),
    [
        ("nowhere", "key", "no such file or directory"),
        ("cert", "nowhere", "no such file or directory"),
        ("cert", "other", "key values mismatch"),
        ("key", "key", "no certificate or no key is there"),
        ("cert", "", "no certificate or no key is there"),
        ("cert", "locked", "the key is encrypted"),
        ("pipe", "key", "not a regular file"),
        ("cert", "pipe", "not a regular file"),
    ],
)
def test_tls_names_the_file_of_an_unusable_certificate(tmp_path: Path, cert: str, key: str, reason: str) -> None:
    made, other = trustme.CA().issue_cert("a"), trustme.CA().issue_cert("a")
    made.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    made.private_key_pem.write_to_path(tmp_path / "key")
    other.private_key_pem.write_to_path(tmp_path / "other")
    secret = load_pem_private_key(made.private_key_pem.bytes(), None)
    locked = secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (tmp_path / "locked").write_bytes(locked)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=rf"listen\.cert_file: cannot be used \({reason}\): .*/{cert}") as refused:
        Tls(str(tmp_path / cert), str(tmp_path / key) if key else "")
    assert "\n" not in str(refused.value)


def with_a_pipe(file: Path) -> None:
    """Put a pipe in the place of *file*."""
    file.unlink()
    os.mkfifo(file)


class Issued:
    """Certificates for localhost, each of an authority of its own, in the files of one listener."""

    def __init__(self, folder: Path) -> None:
        self.cert, self.key = folder / "cert.pem", folder / "key.pem"
        self.trusting = self.renew()

    def renew(self) -> ssl.SSLContext:
        """Write a new one; what a client needs that trusts it and no other."""
        authority, trusting = trustme.CA(), ssl.create_default_context()
        authority.configure_trust(trusting)
        made = authority.issue_cert("localhost")
        for file in (self.cert, self.key):
            file.unlink(missing_ok=True)
        made.cert_chain_pems[0].write_to_path(self.cert)
        made.private_key_pem.write_to_path(self.key)
        return trusting

    def tls(self) -> Tls:
        return Tls(str(self.cert), str(self.key))


def shake_hands(tls: Tls, trusting: ssl.SSLContext) -> None:
    """A whole handshake with *tls*, in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server, server_hostname="localhost")
    server = tls.context(lambda: True).wrap_bio(to_server, to_client, server_side=True)
    for one in (client, server, client, server):
        with suppress(ssl.SSLWantReadError):
            one.do_handshake()
    assert client.version() == server.version() == "TLSv1.3"
    assert server.selected_alpn_protocol() is None


def test_tls_uses_a_new_certificate_for_new_connections(tmp_path: Path) -> None:
    issued = Issued(tmp_path)
    tls = issued.tls()
    shake_hands(tls, issued.trusting)
    trusting = issued.renew()
    with capture_logs() as lines:
        tls.refresh()
        tls.refresh()
    assert lines == [{"event": "smetric.tls.reloaded", "log_level": "info", "cert_file": str(issued.cert)}]
    shake_hands(tls, trusting)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tls, issued.trusting)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda issued: issued.cert.write_text(issued.cert.read_text()[:100]), "no certificate or no key is there"),
        (lambda issued: issued.key.write_text(""), "no certificate or no key is there"),
        (lambda issued: issued.key.unlink(), "no such file or directory"),
        (lambda issued: with_a_pipe(issued.key), "not a regular file"),
        (lambda issued: trustme.CA().issue_cert("x").private_key_pem.write_to_path(issued.key), "key values mismatch"),
    ],
    ids=["half a certificate", "no key", "a missing file", "a pipe", "another's key"],
)
def test_tls_keeps_the_old_certificate_while_the_files_are_unusable(
    tmp_path: Path, harm: Callable[[Issued], object], reason: str
) -> None:
    issued = Issued(tmp_path)
    tls = issued.tls()
    harm(issued)
    with capture_logs() as lines:
        tls.refresh()
        tls.refresh()
    (line,) = lines
    assert (line["event"], line["log_level"]) == ("smetric.tls.kept", "error")
    assert line["error"].startswith(f"listen.cert_file: cannot be used ({reason}): ")
    shake_hands(tls, issued.trusting)
    trusting = issued.renew()
    with capture_logs() as lines:
        tls.refresh()
    assert [line["event"] for line in lines] == ["smetric.tls.reloaded"]
    shake_hands(tls, trusting)


async def no_content(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 204 to everything; the scheme is a header field."""
    fields = [(b"x-scheme", scope["scheme"].encode())]
    await send({"type": "http.response.start", "status": 204, "headers": fields})
    await send({"type": "http.response.body"})


def serving(
    tls: Tls | None, limits: HttpLimits | None = None, drain_s: float = 1.0
) -> AbstractAsyncContextManager[Listening]:
    """A listener that speaks *tls* and answers 204 to everything."""
    return listening(PlainHandler(no_content, limits), drain_s=drain_s, tls=tls)


async def answer_of(port: int, trusting: ssl.SSLContext | None) -> Response:
    """What one client is answered."""
    async with RawClient(*await asyncio.open_connection("localhost", port, ssl=trusting)) as client:
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return await client.response("GET")


async def status_of(port: int, trusting: ssl.SSLContext) -> int:
    """The status that one client is answered."""
    return (await answer_of(port, trusting)).status


async def test_scope_over_tls_has_scheme_https(tmp_path: Path) -> None:
    issued = Issued(tmp_path)
    for tls, trusting, scheme in ((None, None, "http"), (issued.tls(), issued.trusting, "https")):
        async with serving(tls) as listener:
            assert (await answer_of(listener.port, trusting)).value("x-scheme") == scheme


@contextmanager
def no_collector() -> Iterator[None]:
    """What is freed meanwhile is freed at once."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def test_handshake_counts_until_it_ends(tmp_path: Path) -> None:
    issued = Issued(tmp_path)
    tls = issued.tls()
    with no_collector():
        async with serving(tls, HttpLimits(head_timeout_s=0.3)) as listener:
            for end in ("FIN", "RST", "nonsense", "the deadline"):
                client = await RawClient.connect(listener.url)
                await client.send(b"\x16\x03\x01")
                await until(lambda: tls.handshakes() == 1)
                if end == "FIN":
                    client.leave()
                elif end == "RST":
                    client.reset()
                elif end == "nonsense":
                    await client.send(b"GET / HTTP/1.1\r\n\r\n")
                await until(lambda: tls.handshakes() == 0, within_s=2.0)
                client.leave()
            assert await status_of(listener.port, issued.trusting) == 204
            assert tls.handshakes() == 0


async def test_b7_handshakes_count_as_connections_and_are_limited(tmp_path: Path) -> None:
    issued = Issued(tmp_path)
    tls = issued.tls()
    most = 4
    with capture_logs() as lines:
        async with serving(tls, HttpLimits(head_timeout_s=1.0, connections=most)) as listener:
            url, port = listener.url, listener.port
            silent = [await RawClient.connect(url) for _ in range(most)]
            await until(lambda: tls.handshakes() == most)
            assert await status_of(port, issued.trusting) == 503, "after its handshake"
            silent += [await RawClient.connect(url) for _ in range(MAX_REFUSED)]
            await until(lambda: tls.handshakes() == most + MAX_REFUSED)
            async with await RawClient.connect(url) as dropped:
                assert await dropped.at_end(), "without a handshake"
            assert tls.handshakes() == most + MAX_REFUSED
            began = asyncio.get_running_loop().time()
            await until(lambda: tls.handshakes() == 0)
            assert asyncio.get_running_loop().time() - began < 3.0
            assert await status_of(port, issued.trusting) == 204
            for client in silent:
                client.leave()
    (line,) = [line for line in lines if line["event"] == "smetric.connections.full"]
    assert (line["most"], line["turned_away"]) == (most, 1)


async def test_listener_watches_the_files_of_its_certificate(tmp_path: Path) -> None:
    issued = Issued(tmp_path)
    async with serving(issued.tls()) as listener:
        assert await status_of(listener.port, issued.trusting) == 204
        await asyncio.sleep(0.1)  # the watch is set up in a thread that reports nothing when it is ready
        with capture_logs() as lines:
            trusting = issued.renew()
            await until(lambda: any(line["event"] == "smetric.tls.reloaded" for line in lines), within_s=10.0)
        assert await status_of(listener.port, trusting) == 204
        with pytest.raises(ssl.SSLCertVerificationError):
            await status_of(listener.port, issued.trusting)


async def test_drain_answers_a_client_in_its_handshake(tmp_path: Path) -> None:
    issued = Issued(tmp_path)
    heard, said = ssl.MemoryBIO(), ssl.MemoryBIO()
    secured = issued.trusting.wrap_bio(heard, said, server_hostname="localhost")
    async with (
        serving(issued.tls()) as listener,
        await RawClient.connect(listener.url) as client,
        asyncio.timeout(5),
    ):
        with pytest.raises(ssl.SSLWantReadError):
            secured.do_handshake()
        await client.send(said.read())
        heard.write(await client.reader.read(65536))
        secured.do_handshake()
        listener.stop.set()
        await asyncio.sleep(0.1)
        secured.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await client.send(said.read())  # the end of its handshake, too
        answer = b""
        while not answer:
            heard.write(await client.reader.read(65536))
            with suppress(ssl.SSLWantReadError):
                answer = secured.read(65536)
        assert answer.startswith(b"HTTP/1.1 204 ")


async def test_drain_answers_tls_connections_that_wait_to_be_accepted(tmp_path: Path) -> None:
    issued = Issued(tmp_path)
    let_in: list[socket.socket] = []
    async with serving(issued.tls()) as listener:
        listener.stop.set()
        with suppress(ConnectionRefusedError):
            while len(let_in) < 20:  # one more in each round of the loop
                let_in.append(socket.create_connection(("127.0.0.1", listener.port)))
                await asyncio.sleep(0)
        assert 0 < len(let_in) < 20

        async def status(let_in: socket.socket) -> int:
            streams = await asyncio.open_connection(sock=let_in, ssl=issued.trusting, server_hostname="localhost")
            async with RawClient(*streams) as client:
                await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                return (await client.response("GET")).status

        assert await asyncio.gather(*map(status, let_in)) == [204] * len(let_in)


async def test_drain_does_not_wait_for_a_handshake_that_never_ends(tmp_path: Path) -> None:
    tls = Issued(tmp_path).tls()
    async with serving(tls) as listener, await RawClient.connect(listener.url):
        await until(lambda: tls.handshakes() == 1)
        listener.stop.set()
        await until(listener.task.done, within_s=1.5)


@pytest.mark.parametrize("field", [b"", b"Connection: close\r\n"], ids=["kept", "closed"])
async def test_drain_does_not_wait_for_a_tls_client_that_never_reads(tmp_path: Path, field: bytes) -> None:
    issued = Issued(tmp_path)

    def used_and_kept(port: int) -> ssl.SSLSocket:
        client = issued.trusting.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="localhost")
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n%b\r\n" % field)
        assert client.recv(1000).startswith(b"HTTP/1.1 204 ")
        return client

    async with serving(issued.tls(), drain_s=30.0) as listener:
        with await asyncio.to_thread(used_and_kept, listener.port):
            listener.stop.set()
            await until(listener.task.done, within_s=4.0)


async def test_broken_response_over_tls_ends_without_goodbye_if_its_close_delimits_it(tmp_path: Path) -> None:
    issued = Issued(tmp_path)

    async def breaking_off(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"some", "more_body": True})

    async with listening(PlainHandler(breaking_off), tls=issued.tls()) as listener:
        reader, writer = await asyncio.open_connection("localhost", listener.port, ssl=issued.trusting)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        await reader.readuntil(b"some")
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
