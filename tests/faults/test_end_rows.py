"""Rows G: drain, upgrade and restart."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson
import pytest

from smetric.http.listener import address_of, listen
from tests.fakes import DONE, Call, FakeEngine, RawClient, Script, chunk, delta, fetch, healthy, request, until
from tests.faults.harness import Tell, chat, running
from tests.faults.process import Process, process
from tests.telemetry.otlp_receiver import receiving

STREAMS = 200
#: Seconds in which a router must serve again: two on an idle machine, more beside other tests.
STARTED_S = 10.0
PATH = "/v1/chat/completions"


@asynccontextmanager
async def engine_of(script: Script) -> AsyncIterator[FakeEngine]:
    """Run an engine and stop it at the end."""
    engine = FakeEngine(script)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@asynccontextmanager
async def serving(
    folder: Path, script: Script = healthy, environ: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[Process, FakeEngine]]:
    """Run a router process before an engine that follows *script*."""
    async with (
        engine_of(script) as engine,
        process(folder / "log", "--instance", engine.url, environ=environ) as router,
    ):
        yield router, engine


async def begin_stream(client: RawClient) -> None:
    """Send a request and read the head of its stream."""
    await client.send(request("POST", PATH, chat(stream=True)))
    assert (await client.head()).status == 200


async def test_g1_sigterm_ends_200_streams_and_refuses_connections(tmp_path: Path, record_property: Tell) -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await call.stream(delta("a"), end=False)
        await go_on.wait()
        for event in (delta("b"), DONE):
            await call.send(chunk(event))
        await call.send(b"0\r\n\r\n")

    with receiving() as collector:
        environ = {"SMETRIC_DRAIN__DEADLINE": "30s", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        async with serving(tmp_path, script, environ) as (router, engine):
            clients = await asyncio.gather(*(RawClient.connect(router.data) for _ in range(STREAMS)))
            idle = await RawClient.connect(router.data)
            for client in clients:
                await client.send(request("POST", PATH, chat(stream=True)))
            await until(lambda: len(engine.calls) == STREAMS, within_s=20)

            router.terminate()
            await until(lambda: bool(router.lines("smetric.draining")))
            assert (await fetch(router.admin, "GET", "/readyz")).status == 503
            assert (await fetch(router.admin, "GET", "/healthz")).status == 200
            assert await idle.at_end()
            with pytest.raises(ConnectionRefusedError):
                await RawClient.connect(router.data)

            go_on.set()
            answers = await asyncio.gather(*(client.response() for client in clients))
            assert all(answer.complete for answer in answers)
            assert {answer.body for answer in answers} == {delta("a") + delta("b") + DONE}
            record_property("F2", f"0 of {len(answers)} streams")
            assert await router.ended() == 0
            assert router.lines("smetric.stopped")
            assert len(collector.named("POST ")) == STREAMS, "traces are sent before it ends"
            for client in [*clients, idle]:
                client.leave()


async def test_g2_stream_beyond_the_drain_deadline_is_cut_off_and_aborted() -> None:
    async def endless(call: Call) -> None:
        await call.stream(delta("a"), end=False)
        await asyncio.Event().wait()

    engine = FakeEngine()
    async with running(engine, drain_s=0.3, check_after=False) as router:
        engine.script = endless
        client = await router.client(chat(stream=True))
        assert (await client.head()).status == 200
        await client.reader.readuntil(b"\n\n")
    # the router has ended although the stream had not
    assert len(engine.aborted) == 1
    assert router.counted() == (0, 0, 0)
    assert b"[DONE]" not in await client.reader.read()
    client.leave()


def endless(seen: list[Call]) -> Script:
    """An engine that begins a stream and never ends it."""

    async def script(call: Call) -> None:
        seen.append(call)
        if b'"stream":true' in call.body:
            await call.stream(delta("a"), end=False)
        await asyncio.Event().wait()

    return script


async def test_g2_deadline_sends_api_errors_and_sets_the_exit_code(tmp_path: Path) -> None:
    calls: list[Call] = []
    message = {"role": "user", "content": "x"}
    asked: dict[str, dict[str, object]] = {
        "/v1/chat/completions": {"stream": True, "messages": [message]},
        "/v1/messages": {"stream": True, "messages": [message], "max_tokens": 1},
        "/v1/audio/transcriptions": {"stream": True},
        "/v1/completions": {"prompt": "x"},
    }
    async with serving(tmp_path, endless(calls), {"SMETRIC_DRAIN__DEADLINE": "500ms"}) as (router, engine):
        clients = {path: await RawClient.connect(router.data) for path in asked}
        for path, fields in asked.items():
            await clients[path].send(request("POST", path, orjson.dumps({"model": "tiny", **fields})))
        await until(lambda: len(calls) == len(asked))
        router.terminate()
        answers = {path: await client.response() for path, client in clients.items()}
        assert await router.ended() == 4
        assert [line["requests"] for line in router.lines("smetric.cut_off")] == [len(asked)]
        for path in ("/v1/chat/completions", "/v1/audio/transcriptions"):
            stream = answers[path]
            assert not stream.complete
            event = stream.body.removeprefix(delta("a"))
            assert orjson.loads(event.removeprefix(b"data: "))["error"]["type"] == "shutting_down"
            assert b"[DONE]" not in stream.body
        assert answers["/v1/messages"].body.startswith(delta("a") + b"event: error\ndata: ")
        unanswered = answers["/v1/completions"]
        assert (unanswered.status, unanswered.complete) == (503, True)
        assert unanswered.value("retry-after") == "1"
        lines = {line["path"]: (line["status"], line["bytes"], line["error_type"]) for line in router.lines("request")}
        streamed = (200, len(delta("a")), "shutdown")  # as their clients saw it
        unsent = (503, 0, "shutdown")
        assert lines == {**dict.fromkeys(asked, streamed), "/v1/completions": unsent}
        assert len(engine.aborted) == len(asked)
        for client in clients.values():
            client.leave()


async def test_second_signal_ends_at_once_with_its_exit_code(tmp_path: Path) -> None:
    async with serving(tmp_path, endless([])) as (router, _), await RawClient.connect(router.data) as client:
        await begin_stream(client)
        await client.reader.readuntil(b"\n\n")
        router.terminate()
        await until(lambda: bool(router.lines("smetric.draining")))
        router.terminate()
        rest = await client.reader.read()
        assert b"shutting_down" in rest
        assert not rest.endswith(b"0\r\n\r\n")
        assert await router.ended() == 1
        (line,) = router.lines("request")
        assert (line["status"], line["bytes"], line["error_type"]) == (200, len(delta("a")), "shutdown")


async def test_readiness_fails_before_the_port_closes_and_a_late_signal_changes_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, environ={"SMETRIC_DRAIN__ANNOUNCE": "1s"}) as (router, _):
        router.terminate()
        await until(lambda: bool(router.lines("smetric.draining")))
        assert (await fetch(router.data, "GET", "/readyz")).status == 503
        assert (await fetch(router.data, "POST", PATH, chat())).status == 200
        await until(lambda: bool(router.lines("smetric.stopped")))
        while router.process.returncode is None:
            router.terminate()
            await asyncio.sleep(0.002)
        assert await router.ended() == 0


@pytest.mark.slow
async def test_upgrade_over_an_inherited_socket_loses_no_request(tmp_path: Path) -> None:
    stop = asyncio.Event()
    statuses: list[tuple[int, bool]] = []

    async def keep_asking(url: str) -> None:
        while not stop.is_set():
            answer = await fetch(url, "POST", PATH, chat(stream=True))
            statuses.append((answer.status, answer.complete))

    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(engine_of(healthy))
        data, admin = stack.enter_context(listen("127.0.0.1", 0)), stack.enter_context(listen("127.0.0.1", 0))

        async def begin(number: int) -> Process:
            sockets = [("data", data), ("admin", admin)]
            router = process(tmp_path / str(number), "--instance", engine.url, sockets=sockets)
            return await stack.enter_async_context(router)

        acting = await begin(0)
        async with asyncio.TaskGroup() as asking:
            for _ in range(4):
                asking.create_task(keep_asking(address_of(data)))
            for number in (1, 2):
                successor = await begin(number)
                acting.terminate()
                assert await acting.ended() == 0
                assert (await fetch(address_of(admin), "GET", "/readyz")).status == 200
                acting = successor
            enough = len(statuses) + 20
            await until(lambda: len(statuses) > enough)
            stop.set()
        assert set(statuses) == {(200, True)}
        assert len(statuses) > 100


async def test_drained_instances_stay_drained_after_an_upgrade(tmp_path: Path) -> None:
    environ = {"SMETRIC_STATE_DIR": str(tmp_path / "state")}
    async with engine_of(healthy) as engine:
        with listen("127.0.0.1", 0) as data:
            arguments = ("--instance", engine.url)
            one = process(tmp_path / "one", *arguments, sockets=[("data", data)], environ=environ)
            async with one as acting:
                id = engine.url.removeprefix("http://")
                another = process(tmp_path / "another", *arguments, sockets=[("data", data)], environ=environ)
                async with another as successor:
                    assert (await fetch(acting.admin, "POST", f"/admin/instances/{id}/drain")).status == 200
                    await until(lambda: bool(successor.lines("smetric.drains.drained")), within_s=10)
                    acting.terminate()
                    assert await acting.ended() == 0
                    refused = await fetch(address_of(data), "POST", PATH, chat())
                    assert (refused.status, engine.calls) == (503, [])
                    assert (await fetch(successor.admin, "POST", f"/admin/instances/{id}/undrain")).status == 200
                    assert (await fetch(address_of(data), "POST", PATH, chat())).status == 200


@pytest.mark.slow
async def test_g3_killed_router_serves_at_once_after_a_restart(tmp_path: Path) -> None:
    calls: list[Call] = []
    folder = tmp_path / "index"
    folder.mkdir()
    environ = {"SMETRIC_PREFIX_INDEX__FOLDER": str(folder), "SMETRIC_PREFIX_INDEX__SAVE_EVERY": "100ms"}
    async with engine_of(endless(calls)) as engine:
        async with (
            process(tmp_path / "first", "--instance", engine.url, environ=environ) as router,
            await RawClient.connect(router.data) as client,
        ):
            await begin_stream(client)
            router.process.kill()
            await router.ended()
            await until(lambda: len(engine.aborted) == 1)
            assert not (await client.reader.read()).endswith(b"0\r\n\r\n")
        port = router.data.rpartition(":")[2]
        engine.recover()
        killed_at = time.monotonic()
        async with process(tmp_path / "second", "--instance", engine.url, "--port", port, environ=environ) as router:
            assert (await fetch(router.data, "POST", PATH, chat())).status == 200
            assert time.monotonic() - killed_at < STARTED_S
            router.terminate()
            assert await router.ended() == 0
        assert len(os.listdir(folder)) == 1


async def test_g4_death_of_a_router_keeps_streams_of_its_twin(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await call.stream(delta("a"), end=False)
        await go_on.wait()
        await call.send(chunk(DONE) + b"0\r\n\r\n")

    with listen("127.0.0.1", 0) as data:
        sockets, url = [("data", data)], address_of(data)
        async with (
            engine_of(script) as engine,
            process(tmp_path / "one", "--instance", engine.url, sockets=sockets) as one,
            process(tmp_path / "other", "--instance", engine.url, sockets=sockets) as other,
        ):
            clients = [await RawClient.connect(url) for _ in range(20)]
            for client in clients:
                await client.send(request("POST", PATH, chat(stream=True)))
            await until(lambda: len(engine.calls) == 20)
            (instance,) = orjson.loads((await fetch(one.admin, "GET", "/admin/instances")).body)["instances"]
            one.process.kill()
            assert await one.ended() not in (0, 4)
            await until(lambda: len(engine.aborted) == instance["own"])
            go_on.set()
            answers = await asyncio.gather(*(client.response() for client in clients))
            assert sum(answer.complete for answer in answers) == 20 - instance["own"]
            async with process(tmp_path / "again", "--instance", engine.url, sockets=sockets):
                assert (await fetch(url, "POST", PATH, chat(stream=True))).complete
            other.terminate()
            assert await other.ended() == 0
            for client in clients:
                client.leave()
