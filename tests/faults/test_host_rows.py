"""Rows of A, B and D with `smetric.create_app` on uvicorn and Hypercorn."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import orjson
import pytest
import structlog
import uvicorn
from hypercorn.asyncio import serve
from hypercorn.config import Config

from smetric.app import Application
from smetric.config.settings import Forward, InstanceSettings, LimitSettings, ScrapeSettings, Settings
from smetric.http.headers import App
from smetric.http.listener import address_of, listen
from tests.fakes import DONE, Call, FakeEngine, RawClient, delta, fetch, hang, request, until
from tests.faults.harness import chat

if TYPE_CHECKING:
    from hypercorn.typing import ASGIFramework

MIB = 1024 * 1024
MANUAL = Path(__file__).parents[2] / "docs" / "guide" / "operations.md"


@dataclass
class Served:
    """A router on another server."""

    application: Application
    url: str
    engine: FakeEngine

    def is_idle(self) -> bool:
        """The ledger counts nothing."""
        return all(one.own == 0 for one in self.application.fleet.instances)


Host = Callable[[App], AbstractAsyncContextManager[str]]


@pytest.fixture(params=["uvicorn", "hypercorn"])
def host(request: pytest.FixtureRequest) -> Host:
    """A server that another project maintains: serves an app and gives its address."""
    return {"uvicorn": uvicorn_host, "hypercorn": hypercorn_host}[request.param]


@asynccontextmanager
async def hosted(
    host: Host, limits: LimitSettings | None = None, forward: Forward | None = None
) -> AsyncIterator[Served]:
    engine = FakeEngine()
    await engine.start()
    application = Application(
        Settings(
            instances=(InstanceSettings(url=engine.url),),
            policy="load_only",
            limits=limits or LimitSettings(),
            forward=forward or Forward(),
            scrape=ScrapeSettings(interval=0.2, timeout=1.0),
        ),
        {},
    )
    try:
        async with host(application.data_app()) as url:
            await until(lambda: application.is_ready and all(one.scrape for one in application.fleet.instances))
            yield Served(application, url, engine)
    finally:
        await engine.stop()


@asynccontextmanager
async def uvicorn_host(app: App) -> AsyncIterator[str]:
    sock = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        app, log_config=None, http="httptools", lifespan="on", server_header=False, date_header=False
    )
    server = uvicorn.Server(config)
    served = asyncio.create_task(server.serve([sock]))
    try:
        yield address_of(sock)
    finally:
        server.should_exit = True
        async with asyncio.timeout(10):
            await served


@asynccontextmanager
async def hypercorn_host(app: App) -> AsyncIterator[str]:
    sock = listen("127.0.0.1", 0)
    url, stop = address_of(sock), asyncio.Event()
    config = Config()
    config.bind = [f"fd://{sock.detach()}"]
    config.include_server_header = config.include_date_header = False
    config.graceful_timeout = 1.0
    config.errorlog = None
    served = asyncio.create_task(serve(cast("ASGIFramework", app), config, shutdown_trigger=stop.wait))
    try:
        yield url
    finally:
        stop.set()
        async with asyncio.timeout(10):
            await served


def manuals_router(settings: str) -> dict[str, Any]:
    """The module that the manual shows, where *settings* are in the working directory."""
    Path("smetric.yaml").write_text(settings)
    module: dict[str, Any] = {}
    exec(MANUAL.read_text().partition("# router.py")[2].partition("```")[0].partition("\n")[2], module)
    return module


async def test_router_of_the_manual_serves_on_another_server(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(lambda call: call.answer(200, b"{}", (b"date", b"today"), (b"server", b"engine")))
    await engine.start()
    monkeypatch.chdir(tmp_path)
    module = manuals_router(f"instances: [{engine.url}]\n")
    try:
        async with host(module["app"]) as url:
            answer = await fetch(url, "POST", "/v1/chat/completions", chat())
    finally:
        await engine.stop()
    assert answer.value("x-smetric-instance") == engine.url.removeprefix("http://")
    assert (answer.value("date"), answer.value("server")) == ("today", "engine")


async def test_a1_host_refuses_content_length_with_transfer_encoding(host: Host) -> None:
    async with hosted(host) as router, await RawClient.connect(router.url) as client:
        framing = b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + framing)
        assert (await client.response()).status == 400
        assert router.engine.calls == []


async def test_host_answers_though_the_access_line_cannot_be_written(host: Host) -> None:
    def render(_: object, __: str, event: MutableMapping[str, Any]) -> str:
        if event["event"] == "request":
            raise ValueError("I/O operation on closed file")
        return str(event)

    structlog.configure(processors=[render], logger_factory=structlog.PrintLoggerFactory(io.StringIO()))
    try:
        async with hosted(host) as router:
            for _ in range(2):
                assert (await fetch(router.url, "POST", "/v1/chat/completions", chat())).status == 200
                assert (await fetch(router.url, "GET", "/v1/models")).status == 200
            await until(router.is_idle)
            read = router.application.metrics.registry.get_sample_value
            assert read("smetric_listener_failures_total", {"listener": "AccessLog"}) == 4
    finally:
        structlog.reset_defaults()


@pytest.mark.parametrize("framing", [b"Content-Length: %d", b"Transfer-Encoding: chunked"], ids=["length", "chunked"])
async def test_a5_host_answers_413_above_the_body_limit(host: Host, framing: bytes) -> None:
    async with hosted(host, forward=Forward(max_body=MIB)) as router, await RawClient.connect(router.url) as client:
        size = MIB + 1
        line = framing % size if b"%d" in framing else framing
        body = b"x" * size if b"%d" in framing else b"%x\r\n%b\r\n" % (size, b"x" * size)
        await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n\r\n" + body)
        answer = await client.response()
        assert (answer.status, answer.complete) == (413, True)
        assert orjson.loads(answer.body)["error"]["type"] == "request_too_large"


async def test_a10_host_serves_no_spelling_of_an_admin_path(host: Host) -> None:
    async with hosted(host) as router:
        for path in ("/admin/policy", "//admin/policy", "/%61dmin/policy", "/v1/..%2fadmin/policy", "/metrics"):
            for target in (path, f"http://other{path}"):
                assert (await fetch(router.url, "GET", target)).status == 404


async def test_a8_host_refuses_websockets(host: Host) -> None:
    fields = [("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Version", "13")]
    fields.append(("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="))
    async with hosted(host) as router:
        answer = await fetch(router.url, "GET", "/v1/responses", headers=fields)
        assert (answer.status, answer.value("upgrade")) == (426, "HTTP/1.1")
        assert router.engine.calls == []


async def test_a11_host_answers_pipelined_requests_in_order(host: Host) -> None:
    async def echo(call: Call) -> None:
        await asyncio.sleep(0.05 if b"first" in call.body else 0)
        await call.answer(200, call.body, (b"content-type", b"application/json"))

    async with hosted(host) as router, await RawClient.connect(router.url) as client:
        router.engine.script = echo
        bodies = [chat(user=user) for user in ("first", "second", "third")]
        await client.send(b"".join(request("POST", "/v1/chat/completions", body) for body in bodies))
        assert [(await client.response()).body for _ in bodies] == bodies


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
@pytest.mark.parametrize("how", ["FIN", "RST"])
async def test_b2_host_aborts_prefill_after_a_disconnect(host: Host, how: str, stream: bool) -> None:
    async with hosted(host) as router:
        router.engine.script = hang
        for n in range(10):
            client = await RawClient.connect(router.url)
            await client.send(request("POST", "/v1/chat/completions", chat(stream=stream)))
            await until(lambda n=n: len(router.engine.calls) == n + 1)  # type: ignore[misc]
            client.reset() if how == "RST" else client.leave()
        await until(lambda: len(router.engine.aborted) == 10)
        await until(router.is_idle)


async def test_b4_host_answers_408_to_a_body_that_does_not_arrive(host: Host) -> None:
    async with hosted(host, LimitSettings(body_timeout=0.3)) as router, await RawClient.connect(router.url) as client:
        await client.send(request("POST", "/v1/chat/completions", chat())[:-10])
        assert (await client.response()).status == 408
        assert router.engine.calls == []


async def test_d4_host_ends_a_broken_stream_with_an_error_event(host: Host) -> None:
    async def break_off(call: Call) -> None:
        await call.stream(delta("a"), end=False)
        call.close()

    async with hosted(host) as router:
        router.engine.script = break_off
        answer = await fetch(router.url, "POST", "/v1/chat/completions", chat(stream=True))
        assert not answer.complete
        assert answer.body.startswith(delta("a") + b'data: {"error":')
        assert b"[DONE]" not in answer.body


async def test_host_passes_a_whole_stream_untouched(host: Host) -> None:
    async with hosted(host) as router:
        answer = await fetch(router.url, "POST", "/v1/chat/completions", chat(stream=True))
        assert (answer.status, answer.complete) == (200, True)
        assert answer.body == delta("o") + delta("k") + DONE


async def test_host_serves_a_client_that_leaves_behind_the_last_event(host: Host) -> None:
    async def without_end(call: Call) -> None:
        await call.stream(delta("a"), DONE, end=False)
        await hang(call)

    async with hosted(host) as router:
        router.engine.script = without_end
        async with await RawClient.connect(router.url) as client:
            await client.send(request("POST", "/v1/chat/completions", chat(stream=True)))
            await client.reader.readuntil(DONE)
        await until(router.is_idle)
        assert [record.status for record in router.application.telemetry.decisions.recent(1)] == [200]
