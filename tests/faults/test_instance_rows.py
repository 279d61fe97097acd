"""Rows D: what an engine may do to the requests that are sent to it."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from statistics import median
from urllib.parse import urlsplit

import orjson
import pytest
import trustme

from smetric.config.instances import HealthSettings
from smetric.config.settings import Forward, Scrape
from tests.fakes import DONE, Call, FakeEngine, Script, chunk, delta, hang, head, healthy, until
from tests.faults.harness import CANARY, Running, Tell, chat, running
from tests.faults.shapes import SHAPES, events_of, streaming

#: So seldom that what a row does to an engine is met by requests first.
SELDOM = Scrape(interval=60.0, timeout=1.0)


#: One failure is enough: that a fault counts as one is seen by the ejection.
STRICT = HealthSettings(failures=1)


async def figure(router: Running, start: str, part: str = "") -> int:
    """The sum of the router's series that start with *start* and hold *part*."""
    page = (await router.admin("/metrics")).body.decode()
    lines = [line for line in page.splitlines() if line.startswith(start)]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if part in line))


async def attempts(router: Running, result: str) -> int:
    """How many attempts ended with *result*, by the router's own count."""
    return await figure(router, "smetric_upstream_attempts_total{", f'result="{result}"')


async def ejections(router: Running, reason: str) -> int:
    """How often an instance was left out for *reason*."""
    return await figure(router, "smetric_instance_ejections_total{", f'reason="{reason}"')


async def test_d1_a_refused_connection_costs_no_request() -> None:
    async with running(FakeEngine(), FakeEngine(), scrape=SELDOM) as router:
        await router.engines[0].stop()
        answers = [await router.chat() for _ in range(6)]
        assert [answer.status for answer in answers] == [200] * 6
        assert {answer.value("x-smetric-instance") for answer in answers} == {"e1"}
        assert not router.instance_of(router.engines[0]).healthy
        assert await attempts(router, "connect_error") == 1


async def test_d1_a_connection_that_is_never_accepted_costs_no_request() -> None:
    async with running(FakeEngine(), FakeEngine(), scrape=SELDOM, forward=Forward(connect_timeout=0.3)) as router:
        await router.engines[0].stop()
        address = ("127.0.0.1", urlsplit(router.engines[0].url).port)
        with socket.socket() as full:
            full.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            full.bind(address)
            full.listen(0)
            waiting = [socket.socket() for _ in range(4)]
            for each in waiting:
                each.setblocking(False)
                each.connect_ex(address)
            loop = asyncio.get_running_loop()
            began = loop.time()
            answers = await asyncio.gather(*(router.chat() for _ in range(6)))
            assert loop.time() - began < 0.3 + 1.0, "the deadline once, and what a busy machine adds"
            for each in waiting:
                each.close()
        assert [answer.status for answer in answers] == [200] * 6
        assert await attempts(router, "connect_timeout") >= 1


async def test_d1_when_nobody_can_be_reached_the_answer_is_503_and_the_next_success_ends_it() -> None:
    async with running(FakeEngine(), FakeEngine()) as router:
        ports = [urlsplit(engine.url).port or 0 for engine in router.engines]
        for engine in router.engines:
            await engine.stop()
        answer = await router.chat()
        assert (answer.status, answer.value("retry-after")) == (503, "1")
        assert orjson.loads(answer.body)["error"]["type"] == "upstream_error"
        for engine, port in zip(router.engines, ports, strict=True):
            await engine.start(port)
        await until(lambda: all(router.instance_of(engine).healthy for engine in router.engines))


async def close_after_answer(call: Call) -> None:
    await healthy(call)
    call.close()


async def close_on_reuse(call: Call) -> None:
    if call.nth == 1:
        await healthy(call)
    call.close() if call.nth > 1 else None


async def reset_on_reuse(call: Call) -> None:
    if call.nth == 1:
        await healthy(call)
    else:
        call.reset()


@pytest.mark.parametrize("script", [close_after_answer, close_on_reuse, reset_on_reuse])
async def test_d2_a_reused_connection_that_dies_before_a_byte_costs_no_request(script: Script) -> None:
    async with running(FakeEngine()) as router:
        engine = router.engines[0]
        engine.script = script
        statuses = [(await router.chat()).status for _ in range(200)]
        assert statuses == [200] * 200
        resent = await attempts(router, "resent")
        assert resent <= 200
        assert resent or script is close_after_answer  # there the end is mostly seen before the next request
        assert len(engine.calls) <= 200 + resent
        assert await attempts(router, "closed") == 0


async def close_at_once(call: Call) -> None:
    call.close()


async def reset_at_once(call: Call) -> None:
    call.reset()


@pytest.mark.parametrize("script", [close_at_once, reset_at_once])
async def test_d3_a_fresh_connection_that_dies_before_a_byte_fails_over_once(script: Script) -> None:
    async with running(FakeEngine(), FakeEngine()) as router:
        bad, good = router.engines
        bad.script = script
        for _ in range(4):
            assert (await router.chat()).status == 200
        good.script = script
        bad.calls.clear()
        good.calls.clear()
        answer = await router.chat()
        assert answer.status == 502
        # A pooled connection may be reused first, and is worth one resend.
        assert len({call.body for call in bad.calls + good.calls}) == 1
        assert len(bad.calls) <= 2
        assert len(good.calls) <= 2
        assert CANARY.encode() not in answer.body


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
async def test_d4_a_stream_that_dies_ends_with_one_error_event_and_is_not_retried(script: Script) -> None:
    async with running(FakeEngine(), FakeEngine(), health=STRICT) as router:
        for engine in router.engines:
            engine.script = script
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
        assert await attempts(router, "closed") == 1
        assert await ejections(router, "closed") == 1


async def test_d4_an_answer_that_is_no_stream_and_dies_is_cut_off() -> None:
    async def script(call: Call) -> None:
        await call.send(head(200, (b"content-type", b"application/json"), (b"content-length", b"100")) + b'{"id":"c')
        call.close()

    async with running(FakeEngine()) as router:
        router.engines[0].script = script
        answer = await router.chat()
        assert (answer.status, answer.complete, answer.body) == (200, False, b'{"id":"c')


async def test_d5_an_engine_that_never_answers_is_given_up_at_the_deadline_and_delays_nobody() -> None:
    async def script(call: Call) -> None:
        await (hang(call) if b'"slow"' in call.body else healthy(call))

    async with running(FakeEngine(), FakeEngine(), forward=Forward(first_byte_timeout=2.0)) as router:
        for engine in router.engines:
            engine.script = script
        slow = [asyncio.create_task(router.chat(user="slow")) for _ in range(150)]
        await until(lambda: router.counted()[0] == 150)
        assert [(await router.chat()).status for _ in range(20)] == [200] * 20
        assert not any(task.done() for task in slow), "nobody waited for those that wait"
        answers = await asyncio.gather(*slow)
        assert {answer.status for answer in answers} == {504}
        assert orjson.loads(answers[0].body)["error"]["message"] == "no answer within 2 s"
        await until(lambda: sum(len(engine.aborted) for engine in router.engines) == 150)
        assert await attempts(router, "timeout") == 150


@pytest.mark.slow
async def test_d5_an_engine_that_hangs_altogether_is_left_out_within_seconds(record_property: Tell) -> None:
    """With the probes' own defaults: neither `/health` nor anything else is answered, connections are taken."""
    async with running(FakeEngine(), FakeEngine(), FakeEngine(), check_after=False) as router:
        ill = router.engines[0]
        ill.script = ill.health = ill.metrics = hang
        began = asyncio.get_running_loop().time()
        await until(lambda: not router.instance_of(ill).healthy, within_s=10.0)
        seconds = asyncio.get_running_loop().time() - began
        ill.calls.clear()
        assert [(await router.chat()).status for _ in range(30)] == [200] * 30
        assert ill.calls == []
        record_property("F12", f"hangs: {seconds:.1f} s")


async def test_d6_a_stream_that_stalls_ends_at_the_idle_deadline() -> None:
    async def script(call: Call) -> None:
        await call.stream(TWO, end=False)
        await hang(call)

    async with running(FakeEngine(), forward=Forward(idle_timeout=0.3)) as router:
        router.engines[0].script = script
        answer = await router.chat(stream=True)
        assert not answer.complete
        assert answer.body.startswith(TWO + b'data: {"error":')
        await until(lambda: len(router.engines[0].aborted) == 1)
        assert await attempts(router, "timeout") == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01 garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-big: " + b"a" * 70_000 + b"\r\ncontent-length: 2\r\n\r\nok",
    ],
    ids=["garbage", "two framings", "two lengths", "101", "70 KB header"],
)
async def test_d7_what_is_not_http_is_answered_502_and_tried_nowhere_else(raw: bytes) -> None:
    async with running(FakeEngine(), FakeEngine(), health=STRICT) as router:
        for engine in router.engines:
            engine.script = lambda call: call.send(raw)
        answer = await router.chat()
        assert answer.status == 502
        assert b"garbage" not in answer.body
        assert sum(len(engine.calls) for engine in router.engines) == 1
        assert await attempts(router, "protocol") == 1
        assert await ejections(router, "protocol") == 1


async def test_d8_bytes_behind_a_complete_response_reach_nobody() -> None:
    async def script(call: Call) -> None:
        await call.answer(200, b"{}", (b"content-type", b"application/json"))
        await call.answer(200, b"MARKER", (b"content-type", b"application/json"))

    async with running(FakeEngine()) as router:
        router.engines[0].script = script
        for _ in range(20):
            assert (await router.chat()).body == b"{}"


@pytest.mark.parametrize("status", [429, 503])
async def test_d9_an_overloaded_instance_is_passed_over_and_the_last_answer_told_if_all_are(status: int) -> None:
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


async def test_d9_an_error_too_long_to_hold_back_is_passed_on_whole() -> None:
    body = orjson.dumps({"error": {"message": "x" * 100_000}})

    async with running(FakeEngine(), FakeEngine()) as router:
        for engine in router.engines:
            engine.script = lambda call: call.answer(500, body)
        answer = await router.chat()
        assert (answer.status, answer.body) == (500, body)


async def test_a_stream_that_ends_well_is_not_mistaken() -> None:
    async def script(call: Call) -> None:
        await call.stream(TWO, DONE[:6], DONE[6:9], DONE[9:])

    async with running(FakeEngine()) as router:
        router.engines[0].script = script
        answer = await router.chat(stream=True)
        assert (answer.complete, answer.body) == (True, TWO + DONE)


def many_fields(count: int) -> bytes:
    return head(200, *[(b"x-%d" % n, b"v") for n in range(count)], (b"content-length", b"2")) + b"ok"


async def test_d7_an_answer_of_300_fields_is_answered_502() -> None:
    async with running(FakeEngine()) as router:
        router.engines[0].script = lambda call: call.send(many_fields(300))
        assert (await router.chat()).status == 502
        router.engines[0].script = lambda call: call.send(many_fields(60))
        assert (await router.chat()).status == 200


async def test_d7_a_connection_that_brought_nonsense_is_never_used_again() -> None:
    async with running(FakeEngine()) as router:
        engine = router.engines[0]
        engine.script = lambda call: call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok")
        for _ in range(3):
            assert (await router.chat()).status == 502
        assert [call.nth for call in engine.calls[1:]] == [1, 1]


@pytest.mark.parametrize("shape", SHAPES)
async def test_d10_whatever_the_shape_of_a_stream_its_bytes_pass_unchanged(shape: str) -> None:
    events = events_of(shape)
    async with running(FakeEngine()) as router:
        router.engines[0].script = streaming(events)
        answer = await router.chat(stream=True)
        assert (answer.status, answer.complete) == (200, True)
        assert hashlib.sha256(answer.body).digest() == hashlib.sha256(b"".join(events)).digest()


async def test_d11_bodies_and_fields_pass_as_they_are_and_what_belongs_to_a_connection_does_not() -> None:
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


async def test_d11_a_redirect_is_passed_on_and_never_followed() -> None:
    async with running(FakeEngine(), FakeEngine()) as router:
        target = (b"location", router.engines[1].url.encode() + b"/elsewhere")
        for engine in router.engines:
            engine.script = lambda call: call.answer(307, b"", target)
        answer = await router.chat()
        assert (answer.status, answer.value("location")) == (307, target[1].decode())
        assert sum(len(engine.calls) for engine in router.engines) == 1


async def test_d12_an_instance_whose_certificate_nobody_trusts_gets_no_request() -> None:
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
        assert await attempts(router, "connect_error") == 1
        assert not asked
        instance.url = url
        server.close()
        await until(lambda: router.instance_of(engine).healthy)


async def test_d16_an_outage_of_all_instances_is_not_multiplied_and_ends_with_them(
    record_property: Tell,
) -> None:
    async def overloaded(call: Call) -> None:
        await call.answer(503, b'{"error":{"message":"busy"}}', (b"retry-after", b"3"))

    async with running(FakeEngine(), FakeEngine(), FakeEngine()) as router:
        for engine in router.engines:
            engine.script = overloaded
        answers = [answer for _ in range(40) for answer in await asyncio.gather(*(router.chat() for _ in range(15)))]
        assert {(answer.status, answer.value("retry-after")) for answer in answers} == {(503, "3")}
        asked = sum(len(engine.calls) for engine in router.engines)
        assert asked <= 1.2 * (len(answers) + len(router.engines)), "the budget counts the warm-up's too"
        record_property("F11", f"{asked / len(answers):.3f} in {len(answers)} requests")
        assert await figure(router, "smetric_retries_refused_total ") > 0
        for engine in router.engines:
            engine.recover()
        assert [(await router.chat()).status for _ in range(6)] == [200] * 6


async def test_d16_when_all_instances_are_gone_the_answer_is_a_fast_503_and_they_are_asked_again_when_back() -> None:
    async with running(FakeEngine(), FakeEngine()) as router:
        ports = [urlsplit(engine.url).port or 0 for engine in router.engines]
        for engine in router.engines:
            await engine.stop()
        loop = asyncio.get_running_loop()
        answers, seconds = [], []
        for _ in range(60):
            began = loop.time()
            answers.append(await router.chat())
            seconds.append(loop.time() - began)
        assert {(answer.status, answer.value("retry-after")) for answer in answers} == {(503, "1")}
        assert median(seconds) < 0.05
        assert await attempts(router, "connect_error") <= 1.2 * len(answers) + 1
        for engine, port in zip(router.engines, ports, strict=True):
            await engine.start(port)
        await until(lambda: all(router.instance_of(engine).healthy for engine in router.engines))
        assert [(await router.chat()).status for _ in range(6)] == [200] * 6
