from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from smetric.fleet.instance import Instance
from smetric.http.answer import AnswerBroken, InstanceUnreachable, UpstreamFailed, UpstreamResponse
from smetric.http.upstream import Upstream
from tests.fakes import chunk, head, until

WHOLE = head(200, (b"content-length", b"2")) + b"ok"


@pytest.fixture
def authority(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> trustme.CA:
    """An authority that is trusted as an operator would have it trusted."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    return authority


@asynccontextmanager
async def serving(certificate: trustme.LeafCert, *pieces: bytes, cut: bool = False) -> AsyncIterator[Instance]:
    """An instance behind TLS that answers each request with *pieces*; with *cut* it then ends without a goodbye."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    served: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        served.add(task)
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                if cut:
                    await asyncio.sleep(0.05)
                    writer.transport.abort()
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is done
        finally:
            writer.close()
            served.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield Instance("e", f"https://localhost:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()
        await until(lambda: not served)


@asynccontextmanager
async def an_upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream(connect_timeout_s=2.0)
    try:
        yield upstream
    finally:
        await upstream.close()
        await asyncio.sleep(0.02)  # TLS transports take a few rounds of the loop to close


async def ask(upstream: Upstream, instance: Instance) -> UpstreamResponse:
    async with asyncio.timeout(10):
        return await upstream.send(instance, "GET", b"/", [], None)


async def read(answer: UpstreamResponse) -> bytes:
    data = b""
    while piece := await answer.read():
        data += piece
    answer.finish()
    return data


async def test_d12_connections_to_a_trusted_instance_are_kept(authority: trustme.CA) -> None:
    async with serving(authority.issue_cert("localhost"), WHOLE) as instance, an_upstream() as upstream:
        for _ in range(3):
            assert await read(await ask(upstream, instance)) == b"ok"


async def test_d12_a_certificate_of_an_unknown_authority_is_refused(authority: trustme.CA) -> None:
    async with serving(trustme.CA().issue_cert("localhost"), WHOLE) as instance, an_upstream() as upstream:
        await is_refused(upstream, instance)


async def test_d12_a_certificate_for_another_name_is_refused(authority: trustme.CA) -> None:
    async with serving(authority.issue_cert("example.org"), WHOLE) as instance, an_upstream() as upstream:
        await is_refused(upstream, instance)


async def test_d12_a_certificate_that_has_expired_is_refused(authority: trustme.CA) -> None:
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    certificate = authority.issue_cert("localhost", not_before=past, not_after=past + datetime.timedelta(days=1))
    async with serving(certificate, WHOLE) as instance, an_upstream() as upstream:
        await is_refused(upstream, instance)


async def is_refused(upstream: Upstream, instance: Instance) -> None:
    for _ in range(2):
        with pytest.raises(UpstreamFailed) as failed:
            await ask(upstream, instance)
        assert failed.value.reason == "connect_error"
        assert not isinstance(failed.value, InstanceUnreachable)


async def test_d12_plain_http_on_a_port_for_tls_fails_and_so_does_tls_on_a_plain_port(authority: trustme.CA) -> None:
    async with serving(authority.issue_cert("localhost"), WHOLE) as instance, an_upstream() as upstream:
        with pytest.raises(UpstreamFailed):
            await ask(upstream, Instance("e", instance.url.replace("https", "http")))

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(WHOLE)
        writer.close()

    server = await asyncio.start_server(plain, "127.0.0.1", 0)
    async with an_upstream() as upstream:
        await is_refused(upstream, Instance("e", f"https://localhost:{server.sockets[0].getsockname()[1]}"))
    server.close()


@pytest.mark.parametrize(
    "start",
    [
        head(200, (b"content-length", b"100")) + b"abc",
        head(200, (b"transfer-encoding", b"chunked")) + chunk(b"abc"),
        head(200) + b"abc",
    ],
    ids=["of a length", "chunked", "up to the end"],
)
async def test_body_over_tls_that_is_cut_off_is_broken(authority: trustme.CA, start: bytes) -> None:
    async with serving(authority.issue_cert("localhost"), start, cut=True) as instance, an_upstream() as upstream:
        answer = await ask(upstream, instance)
        assert await answer.read() == b"abc"
        with pytest.raises(AnswerBroken):
            await answer.read()
        answer.close()


async def test_large_response_over_tls_arrives_whole_at_a_slow_reader(authority: trustme.CA) -> None:
    body = bytes(range(256)) * 20_000
    start = head(200, (b"content-length", b"%d" % len(body)))
    async with serving(authority.issue_cert("localhost"), start, body) as instance, an_upstream() as upstream:
        answer = await ask(upstream, instance)
        await asyncio.sleep(0.1)
        assert await read(answer) == body
