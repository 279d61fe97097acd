"""Rows D: broken and unusual answers of engines."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import ssl
from collections.abc import Awaitable, Callable

import orjson
import pytest
import trustme

from smetric.config.settings import Forward, HealthSettings, ScrapeSettings
from tests.fakes import DONE, Call, FakeEngine, Script, chunk, delta, hang, head, until
from tests.faults.harness import Running, chat, running
from tests.faults.shapes import SHAPES, events_of, streaming

#: So seldom that what a row does to an engine is met by requests first.
SELDOM = ScrapeSettings(interval=60.0, timeout=1.0)
#: One failure is enough: that a fault counts as one is seen by the ejection.
STRICT = HealthSettings(failures=1)


async def ejections(router: Running, reason: str) -> int:
    """How often an instance was left out for *reason*."""
    return int(await router.figure("smetric_instance_ejections_total{", f'reason="{reason}"'))


async def close_at_once(call: Call) -> None:
    call.close()


async def reset_at_once(call: Call) -> None:
    call.reset()


def dying(how: Callable[[Call], Awaitable[None]], framing: tuple[bytes, bytes] | None, raw: bytes) -> Script:
    """A stream of two events that then dies."""

    async def script(call: Call) -> None:
        fields = [(b"content-type", b"text/event-stream"), *([framing] if framing else [])]
        await call.send(head(200, *fields) + raw)
        await asyncio.sleep(0.05)
        await how(call)

    return script


CHUNKED = (b"transfer-encoding", b"chunked")
TWO = delta("one") + delta("two")


async def send_nonsense(call: Call) -> None:
    await call.send(b"zz-no-size\r\n" + b"x" * 100)
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    "script",
    [
        dying(close_at_once, CHUNKED, chunk(TWO)),
        dying(reset_at_once, CHUNKED, chunk(TWO)),
        dying(close_at_once, (b"content-length", b"100000"), TWO),
        dying(send_nonsense, CHUNKED, chunk(TWO)),
        dying(close_at_once, None, TWO),
    ],
    ids=["FIN", "RST", "short of its length", "bad chunk", "end without [DONE]"],
)
async def test_d4_broken_stream_ends_with_one_error_event_unretried(script: Script) -> None:
    async with running(FakeEngine(), FakeEngine(), health=STRICT, script=script) as router:
        answer = await router.chat(stream=True)
        assert answer.status == 200
        assert not answer.complete
        assert answer.body.startswith(TWO)
        event = answer.body[len(TWO) :]
        assert event.startswith(b'data: {"error":')
        assert orjson.loads(event[6:])["error"]["type"] == "upstream_error"
        assert event.count(b"data:") == 1
        assert b"[DONE]" not in answer.body
        assert sum(len(engine.calls) for engine in router.engines) == 1
        assert await router.attempts("closed") == 1
        assert await ejections(router, "closed") == 1


async def test_d4_broken_whole_answer_is_cut_off() -> None:
    async def script(call: Call) -> None:
        await call.send(head(200, (b"content-type", b"application/json"), (b"content-length", b"100")) + b'{"id":"c')
        call.close()

    async with running(FakeEngine(), script=script) as router:
        answer = await router.chat()
        assert (answer.status, answer.complete, answer.body) == (200, False, b'{"id":"c')


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'


@pytest.mark.parametrize(
    ("begun", "forward"),
    [(TWO, Forward(idle_timeout=0.3)), (ROLE + b": ping\n\n", Forward(first_byte_timeout=0.3))],
    ids=["behind output", "before output"],
)
async def test_d6_stalled_stream_ends_at_its_deadline(begun: bytes, forward: Forward) -> None:
    async def script(call: Call) -> None:
        await call.stream(begun, end=False)
        await hang(call)

    async with running(FakeEngine(), FakeEngine(), forward=forward, health=STRICT) as router:
        for engine in router.engines:
            engine.script = script
        answer = await router.chat(stream=True)
        assert not answer.complete
        assert answer.body.startswith(begun + b'data: {"error":')
        assert answer.body.count(b"data:") == begun.count(b"data:") + 1
        assert b"[DONE]" not in answer.body
        await until(lambda: sum(len(engine.aborted) for engine in router.engines) == 1)
        assert sum(len(engine.calls) for engine in router.engines) == 1
        assert await router.attempts("timeout") == 1
        assert await ejections(router, "timeout") == 1


@pytest.mark.parametrize(
    ("code", "result"), [(b"500", "engine_error"), (b"400", "ok")], ids=["of the engine", "of the request"]
)
async def test_d4_error_inside_a_200_passes_and_counts_against_its_engine(code: bytes, result: str) -> None:
    error = b'data: {"error": {"message": "x", "type": "t", "param": null, "code": %b}}\n\n' % code

    async def endless(call: Call) -> None:
        await call.stream(error, end=False)
        await hang(call)

    async with running(*(FakeEngine() for _ in range(4)), health=STRICT) as router:
        for sent in ((delta("a"), error, DONE), (error,)):
            for engine in router.engines:
                engine.script = lambda call, sent=sent: call.stream(*sent)  # type: ignore[misc]
            answer = await router.chat(stream=True)
            assert (answer.status, answer.complete, answer.body) == (200, True, b"".join(sent))
        for engine in router.engines:
            engine.script = endless
        async with await router.client(chat(stream=True)) as client:  # official clients leave at the error
            await client.reader.readuntil(error)
        await until(lambda: len(router.lines("request")) == 7)
        is_engines = result == "engine_error"
        assert await router.attempts(result) == (3 if is_engines else 7)  # the warm-up's too
        assert await ejections(router, "engine_error") == is_engines
        lines = router.lines("request")[4:]
        assert {line.get("error_type") for line in lines} == {f"upstream_{result}" if is_engines else None}


def many_fields(count: int) -> bytes:
    return head(200, *[(b"x-%d" % n, b"v") for n in range(count)], (b"content-length", b"2")) + b"ok"


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01 garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-big: " + b"a" * 70_000 + b"\r\ncontent-length: 2\r\n\r\nok",
        many_fields(300),
    ],
    ids=["garbage", "two framings", "two lengths", "101", "70 KB header", "300 fields"],
)
async def test_d7_answer_that_is_not_http_is_502_unretried(raw: bytes) -> None:
    async with running(FakeEngine(), FakeEngine(), health=STRICT, script=lambda call: call.send(raw)) as router:
        answer = await router.chat()
        assert answer.status == 502
        assert b"garbage" not in answer.body
        assert sum(len(engine.calls) for engine in router.engines) == 1
        assert await router.attempts("protocol") == 1
        assert await ejections(router, "protocol") == 1
        for engine in router.engines:
            engine.script = lambda call: call.send(many_fields(60))
        assert (await router.chat()).status == 200


async def test_d8_trailing_bytes_of_a_response_reach_no_client() -> None:
    async def script(call: Call) -> None:
        await call.answer(200, b"{}", (b"content-type", b"application/json"))
        await call.answer(200, b"MARKER", (b"content-type", b"application/json"))

    async with running(FakeEngine(), script=script) as router:
        for _ in range(20):
            assert (await router.chat()).body == b"{}"


@pytest.mark.parametrize("status", [429, 503])
async def test_d9_overload_is_retried_and_the_last_answer_returned(status: int) -> None:
    async def overloaded(call: Call) -> None:
        body = b'{"error":{"message":"busy","type":"x","param":null,"code":%d}}' % status
        await call.answer(status, body, (b"retry-after", b"7"), (b"content-type", b"application/json"))

    async with running(FakeEngine(), FakeEngine(), FakeEngine()) as router:
        first = router.engines[0]
        first.script = overloaded
        for _ in range(6):
            assert (await router.chat()).status == 200
        assert first.calls
        for engine in router.engines:
            engine.script = overloaded
            engine.calls.clear()
        answer = await router.chat()
        assert (answer.status, answer.value("retry-after")) == (status, "7")
        assert orjson.loads(answer.body)["error"]["message"] == "busy"
        assert sum(len(engine.calls) for engine in router.engines) == 2
        assert all(router.instance_of(engine).healthy for engine in router.engines)


async def test_d9_long_error_passes_whole() -> None:
    body = orjson.dumps({"error": {"message": "x" * 100_000}})

    async with running(FakeEngine(), FakeEngine(), script=lambda call: call.answer(500, body)) as router:
        answer = await router.chat()
        assert (answer.status, answer.body) == (500, body)


async def test_d7_connection_with_an_invalid_answer_is_not_reused() -> None:
    async with running(FakeEngine()) as router:
        engine = router.engines[0]
        engine.script = lambda call: call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok")
        for _ in range(3):
            assert (await router.chat()).status == 502
        assert [call.nth for call in engine.calls[1:]] == [1, 1]


@pytest.mark.parametrize("shape", SHAPES)
async def test_d10_stream_of_any_shape_passes_unchanged(shape: str) -> None:
    events = events_of(shape)
    async with running(FakeEngine(), script=streaming(events)) as router:
        answer = await router.chat(stream=True)
        assert (answer.status, answer.complete) == (200, True)
        assert hashlib.sha256(answer.body).digest() == hashlib.sha256(b"".join(events)).digest()


async def test_d11_bodies_and_headers_pass_except_hop_by_hop_ones() -> None:
    body = gzip.compress(b'{"id":"x"}')

    async def script(call: Call) -> None:
        await call.answer(
            200,
            body,
            (b"Content-Encoding", b"gzip"),
            (b"Set-Cookie", b"a=1; Path=/"),
            (b"set-cookie", b"b=2"),
            (b"X-MiXed", b"CaSe"),
            (b"Connection", b"X-Hop"),
            (b"X-Hop", b"1"),
            (b"Keep-Alive", b"timeout=5"),
            (b"Location", b"http://169.254.169.254/"),
        )

    async with running(FakeEngine()) as router:
        # By name, as a cookie is kept for a name and not for a number.
        engine = router.engines[0]
        router.instance_of(engine).url = engine.url.replace("127.0.0.1", "localhost")
        engine.script = script
        first = await router.ask("POST", "/v1/chat/completions", chat(), ("Cookie", "mine=1"), ("X-Own", "a"))
        second = await router.ask("POST", "/v1/chat/completions", chat())
        assert first.body == second.body == body
        assert first.values("set-cookie") == ["a=1; Path=/", "b=2"]
        assert (first.value("x-mixed"), first.value("content-encoding")) == ("CaSe", "gzip")
        assert not first.values("x-hop")
        assert not first.values("keep-alive")
        sent, after = engine.calls
        assert (sent.values(b"cookie"), sent.values(b"x-own")) == ([b"mine=1"], [b"a"])
        names = {name.lower() for name, _ in after.headers}
        assert names - {b"traceparent", b"x-smetric-via"} == {b"host", b"content-type", b"content-length"}
        assert after.nth == 2


async def test_d11_redirect_passes_and_is_not_followed() -> None:
    async with running(FakeEngine(), FakeEngine()) as router:
        target = (b"location", router.engines[1].url.encode() + b"/elsewhere")
        for engine in router.engines:
            engine.script = lambda call: call.answer(307, b"", target)
        answer = await router.chat()
        assert (answer.status, answer.value("location")) == (307, target[1].decode())
        assert sum(len(engine.calls) for engine in router.engines) == 1


async def test_d12_instance_with_untrusted_certificate_gets_no_request() -> None:
    asked = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.read(1))
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with running(FakeEngine(), scrape=SELDOM) as router:
        engine = router.engines[0]
        instance = router.instance_of(engine)
        url, instance.url = instance.url, f"https://localhost:{server.sockets[0].getsockname()[1]}"
        answer = await router.chat()
        assert answer.status == 502
        assert b"certificate" not in answer.body
        assert await router.attempts("connect_error") == 1
        assert not asked
        instance.url = url
        server.close()
        await until(lambda: router.instance_of(engine).healthy)
