"""Rows A: invalid and ambiguous requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import orjson
import pytest

from smetric.config.settings import Forward, LimitSettings
from smetric.errors import HttpError
from smetric.http.headers import Receive, Scope, Send
from smetric.http.limits import HttpLimits
from smetric.log_limit import CHANGE_LINES
from smetric.proxy.error_response import send_error
from smetric.proxy.intake import Intake
from tests.fakes import Call, FakeEngine, RawClient, Response, listening, live, request
from tests.faults.harness import CANARY, Count, Running, chat, running

MIB = 1024 * 1024
HOST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HOST + b"Transfer-Encoding: chunked\r\n\r\n"


async def only_answer(router: Running, raw: bytes) -> Response:
    """The answer to *raw*; nothing follows it but the end of the connection."""
    async with await RawClient.connect(router.url) as client:
        await client.send(raw)
        answer = await client.response()
        assert await client.at_end()
    return answer


def answered(router: Running, status: int, route: str = "other") -> float:
    """Return the number of requests counted with *status*."""
    labels = {"route": route, "code": str(status)}
    return router.application.metrics.registry.get_sample_value("smetric_requests_total", labels) or 0.0


async def test_a1_content_length_with_transfer_encoding_is_refused() -> None:
    async with running(FakeEngine()) as router:
        body = chat()
        chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        second = request("POST", "/v1/chat/completions", body)
        fields = [b"Content-Length: %d\r\n" % len(chunked), b"Transfer-Encoding: chunked\r\n"]
        for order in (fields, fields[::-1]):
            raw = HOST + b"".join(order) + b"\r\n" + chunked + second
            answer = await only_answer(router, raw)
            assert answer.status == 400
            assert orjson.loads(answer.body)["error"]["type"] == "invalid_request_error"
            assert answer.values("connection") == ["close"]
        assert router.engines[0].calls == []


#: Requests refused before an endpoint sees them, with their statuses.
UNSEEN = {
    "no request": (b"hello\r\n\r\n", 405),
    "two lengths": (HOST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
    "a body that is too long": (HOST + b"Content-Length: 9000000000\r\n\r\n", 413),
    "a target that is too long": (b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (CANARY.encode() * 900), 414),
    "too many fields": (HOST + b"a: b\r\n" * 200 + b"\r\n", 431),
    "a field that is too long": (HOST + b"a: " + b"b" * 50_000, 431),
    "half a head": (HOST, 408),
}


async def test_early_refusal_is_counted_and_logged_with_peer_and_reason() -> None:
    async with running(FakeEngine(), limits=LimitSettings(head_timeout=0.2)) as router:
        for what, (raw, status) in UNSEEN.items():
            before = answered(router, status)
            answer = await only_answer(router, raw)
            assert answer.status == status, what
            assert answered(router, status) == before + 1, what
            line = router.lines("smetric.request.refused")[-1]
            assert (line["status"], line["client"]) == (status, "127.0.0.1"), what
            assert line["reason"] == orjson.loads(answer.body)["error"]["message"], what


async def test_broken_framing_is_logged_and_counted_once() -> None:
    async with running(FakeEngine()) as router:
        answer = await only_answer(router, CHUNKED + b"zz\r\n")
        assert answer.status == 400
        (line,) = router.lines("smetric.request.refused")
        assert line["status"] == 400
        assert answered(router, 400) == 0
        assert answered(router, 400, "/v1/chat/completions") == 1


async def test_broken_framing_of_a_pipelined_request_is_counted() -> None:
    async with running(FakeEngine()) as router, await RawClient.connect(router.url) as client:
        await client.send(request("GET", "/healthz") + CHUNKED + b"zz\r\n")
        assert [(await client.response()).status for _ in range(2)] == [200, 400]
        assert len(router.lines("smetric.request.refused")) == 1
        assert answered(router, 400) == 1


async def test_repeated_invalid_requests_do_not_fill_the_log() -> None:
    async with running(FakeEngine()) as router:
        for _ in range(CHANGE_LINES + 5):
            await only_answer(router, b"hello\r\n\r\n")
        assert len(router.lines("smetric.request.refused")) == CHANGE_LINES
        assert answered(router, 405) == CHANGE_LINES + 5


LENGTHS = (
    "Content-Length: 3\r\nContent-Length: 4",
    "Content-Length: 3\r\nContent-Length: 3",
    "Content-Length: +3",
    "Content-Length: 0x3",
    "Content-Length: -1",
    "Content-Length: 3, 4",
    "Content-Length: 3 3",
    "Content-Length: ",
    f"Content-Length: {10**24}",
    f"Content-Length: {3:05000}",
)
CODINGS = (
    "Transfer-Encoding: identity",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: chunked, chunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: \x0bchunked",
    "Transfer-Encoding: xchunked",
    "Transfer-Encoding:",
    "Transfer-Encoding : chunked",
)


async def test_a2_ambiguous_lengths_and_codings_are_refused() -> None:
    """Equal lengths twice are refused too, as engines on uvicorn and nginx do."""
    async with running(FakeEngine()) as router:
        body = b"3\r\nabc\r\n0\r\n\r\n" + request("POST", "/v1/chat/completions", chat())
        for framing in (*LENGTHS, *CODINGS):
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode()
            assert (await only_answer(router, head + body)).status in (400, 501), framing
        head = b"POST /v1/chat/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert (await only_answer(router, head + body)).status == 400
        assert router.engines[0].calls == []


async def test_a3_ambiguous_lines_are_refused() -> None:
    heads = (
        b"POST /v1/chat/completions HTTP/1.1\nHost: x\nContent-Length: 2\n\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nA: b\rc\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nA: b\0c\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/chat/completions HTTP/1.1\r\n Host: x\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/chat/completions\xff HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    )
    async with running(FakeEngine()) as router:
        for head in heads:
            assert (await only_answer(router, head)).status == 400, head
        assert router.engines[0].calls == []


#: Malformed chunked bodies.
BODIES = {
    "bare LF behind a size": b"3\nabc\r\n0\r\n\r\n",
    "bare LF behind data": b"3\r\nabc\n0\r\n\r\n",
    "wrong terminator": b"3\r\nabcd\r\n0\r\n\r\n",
    "no number": b"g\r\n",
    "negative": b"-3\r\nabc\r\n",
    "0x": b"0x3\r\nabc\r\n",
    "overflow": b"f" * 20 + b"\r\n",
    "1 MB extension": b"3;" + b"x" * MIB + b"\r\nabc\r\n0\r\n\r\n",
    "Content-Length as a trailer": b"2\r\n{}\r\n0\r\nContent-Length: 5\r\n\r\n",
    "1 MB of trailers": b"2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 200_000 + b"\r\n",
}


async def test_a4_malformed_chunked_body_is_refused() -> None:
    async with running(FakeEngine(), limits=LimitSettings(body_timeout=1.0)) as router:
        for what, body in BODIES.items():
            for pieces in ([CHUNKED + body], [CHUNKED, body]):
                async with await RawClient.connect(router.url) as client:
                    for piece in pieces:
                        await client.send(piece)
                        await asyncio.sleep(0.01)
                    answer = await client.response()
                    assert (answer.status, answer.complete) == (400, True), what
                    assert await client.at_end()
        assert router.engines[0].calls == []


async def test_a4_trailers_are_dropped() -> None:
    async with running(FakeEngine()) as router, await RawClient.connect(router.url) as client:
        body = chat()
        await client.send(CHUNKED + b"%x;a=b\r\n%b\r\n0\r\nX-Trailer: t\r\n\r\n" % (len(body), body))
        assert (await client.response()).status == 200
        (call,) = router.engines[0].calls
        assert call.body == body
        assert call.values(b"x-trailer") == []


async def upload(client: RawClient, head: bytes, size: int, *, chunked: bool) -> None:
    """Send *size* bytes of a body, for as long as the server takes them."""
    piece = b" " * 65536
    with contextlib.suppress(ConnectionError, RuntimeError):  # uvloop raises the latter once the transport is closed
        await client.send(head)
        while size:
            data = piece[:size]
            size -= len(data)
            await client.send(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
        if chunked:
            await client.send(b"0\r\n\r\n")


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a5_body_over_the_limit_is_413_while_being_sent(framing: str) -> None:
    async with running(FakeEngine(), forward=Forward(max_body=MIB)) as router:
        for size in (MIB + 1, 100 * MIB):
            length = f"Content-Length: {size}" if framing == "length" else "Transfer-Encoding: chunked"
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode()
            async with await RawClient.connect(router.url) as client:
                sending = asyncio.create_task(upload(client, head, size, chunked=framing == "chunked"))
                async with asyncio.timeout(5):
                    answer = await client.response()
                    await sending
            assert (answer.status, answer.complete) == (413, True)
            assert orjson.loads(answer.body)["error"]["type"] == "request_too_large"
            assert str(MIB) in orjson.loads(answer.body)["error"]["message"]
        assert router.engines[0].calls == []


async def test_a5_body_of_exactly_the_limit_passes_untouched() -> None:
    async with running(FakeEngine(), forward=Forward(max_body=4 * MIB)) as router:
        body = chat(padding="")
        body = body[:-2] + b"x" * (4 * MIB - len(body)) + body[-2:]
        answer = await router.ask("POST", "/v1/chat/completions", body)
        assert answer.status == 200
        assert router.engines[0].calls[0].body == body


@pytest.mark.slow
async def test_a6_early_refusals_of_20_mb_bodies_leave_nothing_behind() -> None:
    async with running(FakeEngine()) as router:
        head = b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (20 * MIB)
        statuses = await asyncio.gather(*(refused_upload(router.url, head, 0.05 * i) for i in range(100)))
        assert statuses == [404] * 100


async def refused_upload(url: str, head: bytes, after_s: float) -> int:
    await asyncio.sleep(after_s % 1.0)
    async with await RawClient.connect(url) as client:
        sending = asyncio.create_task(upload(client, head, 20 * MIB, chunked=False))
        async with asyncio.timeout(30):
            answer = await client.response()
            client.reset()
            await sending
    return answer.status


@pytest.mark.slow
async def test_a6_delayed_refusals_leave_nothing_behind() -> None:
    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(receive, send)
            return
        await asyncio.sleep(0.5)
        await send_error(send, scope["path"], HttpError(401, "no", "authentication_error"))

    first = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    first.close()  # with its first server the loop opens a descriptor for itself
    await first.wait_closed()
    await asyncio.sleep(0)
    before = Count()
    head = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (20 * MIB)
    async with listening(Intake(refusing, HttpLimits())) as listener:
        statuses = await asyncio.gather(*(refused_upload(listener.url, head, 0.02 * i) for i in range(100)))
        assert statuses == [401] * 100
    gc.collect()
    assert not before.exceeded()


async def test_a7_oversized_heads_are_refused_and_the_connection_closed() -> None:
    async with running(FakeEngine()) as router:
        assert (await only_answer(router, HOST + b"X-Big: " + b"a" * 70_000 + b"\r\n\r\n")).status == 431
        assert (await only_answer(router, HOST + b"a: b\r\n" * 5000 + b"\r\n")).status == 431
        target = b"/v1/models?" + b"q" * 16_384
        assert (await only_answer(router, b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % target)).status == 414


async def test_a8_cleartext_upgrade_to_http2_is_ignored() -> None:
    async with running(FakeEngine()) as router:
        upgrade = b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
        async with await RawClient.connect(router.url) as client:
            await client.send(b"GET /admin/policy HTTP/1.1\r\nHost: x\r\n" + upgrade)
            assert (await client.response("GET")).status == 404
            await client.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + upgrade)
            answer = await client.response("GET")
            assert (answer.status, answer.body) == (200, b"ok\n")


async def test_a8_http2_preface_is_refused_in_http1() -> None:
    async with running(FakeEngine()) as router, await RawClient.connect(router.url) as client:
        await client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        assert (await client.response()).status == 505
        assert await client.at_end()


async def test_a8_websocket_upgrade_is_426() -> None:
    """Codex and others try a WebSocket first, and send the same request by HTTP at once after a 426 only."""
    async with running(FakeEngine()) as router:
        key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
        for path in (b"/v1/responses", b"/v1/realtime", b"http://x/v1/models"):
            for option, protocol in ((b"Upgrade", b"websocket"), (b"keep-alive, upgrade", b"WebSocket")):
                head = b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: %b\r\nUpgrade: %b\r\n" % (path, option, protocol)
                answer = await only_answer(router, head + key + b"\r\n")
                assert (answer.status, answer.value("upgrade")) == (426, "HTTP/1.1")
                assert answer.value("connection") == "close, upgrade"
        assert router.engines[0].calls == []


async def test_a9_invalid_request_lines_are_refused() -> None:
    lines = {
        b"GET /v1/models HTTP/1.2": 505,
        b"GET /v1/models HTTP/2.0": 505,
        b"GET /v1/models": 400,
        b"CONNECT 127.0.0.1:80 HTTP/1.1": 405,
        b"TRACE /v1/models HTTP/1.1": 405,
        b"OPTIONS * HTTP/1.1": 400,
        b"PATCH /v1/models HTTP/1.1": 405,
        b"get /v1/models HTTP/1.1": 405,
        b"GET http:///v1/models HTTP/1.1": 400,
        b"GET http://user@other/v1/models HTTP/1.1": 400,
        b"GET http://other:port/v1/models HTTP/1.1": 400,
        b"GET ftp://other/v1/models HTTP/1.1": 400,
        b"GET other/v1/models HTTP/1.1": 400,
        b"GET /v1/models#x HTTP/1.1": 400,
        b"GET /v1/models?a#x HTTP/1.1": 400,
        b"GET * HTTP/1.1": 400,
    }
    async with running(FakeEngine()) as router:
        for line, status in lines.items():
            assert (await only_answer(router, line + b"\r\nHost: x\r\n\r\n")).status == status, line
        assert router.engines[0].calls == []


async def test_a9_target_in_absolute_form_is_served_by_its_path() -> None:
    async with running(FakeEngine()) as router:
        for start in ("http://other", "https://other:8443", "HTTP://[::1]:80"):
            answer = await router.ask("POST", f"{start}/v1/chat/completions?a=http://b/", chat())
            assert answer.status == 200
        assert {call.target for call in router.engines[0].calls} == {b"/v1/chat/completions?a=http://b/"}
        assert (await router.ask("GET", "http://other/healthz")).status == 200
        for target in ("http://other", "http://other?a"):
            assert (await router.ask("GET", target)).status == 404


async def test_a9_connection_that_names_an_end_to_end_field_is_refused() -> None:
    """A client would strip what the gateway in front has set, and the engine would take the request for another's."""
    names = ["authorization", "X-Api-Key", "close, cookie", "Content-Length", "accept-encoding", "X-Forwarded-For"]
    names += ["x_forwarded_for", "host", "traceparent", "x-request-id", "X-Team", "x-smetric-via"]
    async with running(FakeEngine(), tenant_header="X-Team") as router:
        for named in names:
            usual, bad = ("Connection", "keep-alive"), ("Connection", named)
            for fields in ([bad], [usual, bad], [bad, usual]):
                answer = await router.ask("POST", "/v1/chat/completions", chat(), *fields)
                assert answer.status == 400
                assert "names `" in orjson.loads(answer.body)["error"]["message"]
        assert router.engines[0].calls == []


async def test_a9_invalid_host_is_refused() -> None:
    async with running(FakeEngine()) as router:
        for host in (b"Host: a b/..@c\r\n", b"Host: x\r\nHost: y\r\n", b"", b"Host: a,b\r\n"):
            answer = await only_answer(router, b"POST /v1/chat/completions HTTP/1.1\r\n" + host + b"\r\n")
            assert answer.status == 400
        assert router.engines[0].calls == []


async def test_a10_admin_paths_are_404_on_the_data_port_in_any_spelling() -> None:
    async with running(FakeEngine()) as router:
        for path in (
            "/admin/policy",
            "//admin/policy",
            "///admin//policy",
            "/%61dmin/policy",
            "/%2561dmin/policy",
            "/admin%2fpolicy",
            "/v1/..%2fadmin/policy",
            "/v1/../admin/policy",
            "/v1/models/../../admin/policy",
            "/metrics",
            "/%6detrics",
        ):
            for target in (path, router.url + path):
                assert (await router.ask("GET", target)).status == 404, target


async def test_a11_expect_continue_is_answered_before_the_body() -> None:
    async with running(FakeEngine()) as router, await RawClient.connect(router.url) as client:
        whole = request("POST", "/v1/chat/completions", chat(), [("Expect", "100-continue")])
        head, _, body = whole.partition(b"\r\n\r\n")
        await client.send(head + b"\r\n\r\n")
        assert (await client.head()).status == 100
        await client.send(body)
        assert (await client.response()).status == 200


async def test_a11_expect_continue_of_a_body_that_is_not_read_gets_the_answer_alone() -> None:
    async with running(FakeEngine(), forward=Forward(max_body=MIB)) as router:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        for unread, status in ((head % (2 * MIB), 413), (head.replace(b"chat", b"no", 1) % 5, 404)):
            answer = await only_answer(router, unread)
            assert (answer.status, answer.complete) == (status, True)


async def test_a11_head_is_answered_without_a_body() -> None:
    async with running(FakeEngine()) as router, await RawClient.connect(router.url) as client:
        for _ in range(2):
            await client.send(request("HEAD", "/healthz"))
            answer = await client.response("HEAD")
            assert (answer.status, answer.value("content-length")) == (200, "3")


@pytest.mark.parametrize("stream", [False, True])
async def test_a11_http10_client_is_answered_until_close(stream: bool) -> None:
    async with running(FakeEngine()) as router, await RawClient.connect(router.url) as client:
        body = chat(stream=stream)
        await client.send(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        answer = await client.response()
        assert answer.status == 200
        assert answer.values("transfer-encoding") == []
        assert answer.body
        assert await client.at_end()


async def test_a11_pipelined_requests_are_answered_in_order() -> None:
    async def echo(call: Call) -> None:
        await asyncio.sleep(0.05 if b"first" in call.body else 0)
        await call.answer(200, call.body, (b"content-type", b"application/json"))

    async with running(FakeEngine()) as router, await RawClient.connect(router.url) as client:
        router.engines[0].script = echo
        bodies = [chat(user=user) for user in ("first", "second", "third")]
        await client.send(b"".join(request("POST", "/v1/chat/completions", body) for body in bodies))
        assert [(await client.response()).body for _ in bodies] == bodies
