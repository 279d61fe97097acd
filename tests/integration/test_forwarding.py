from __future__ import annotations

import asyncio
import gc
import gzip
import hashlib
import os

import orjson
import pytest

from smetric.config.settings import Forward
from smetric.errors import UpstreamError
from smetric.proxy.error_response import error_event
from smetric.proxy.forward import Forwarding
from tests.fakes import DONE, Call, FakeEngine, RawClient, Script, capture, chunk, delta, hang, head, healthy, until
from tests.faults.harness import chat, running

pytestmark = pytest.mark.slow

BODIES = {
    "/v1/chat/completions": chat(stream=True),
    "/v1/completions": b'{"model":"tiny","prompt":"x","stream":true}',
    "/v1/messages": b'{"model":"tiny","max_tokens":4,"stream":true,"messages":[{"role":"user","content":"x"}]}',
    "/v1/responses": b'{"model":"tiny","input":"x","stream":true}',
}


def breaking_off(*events: bytes) -> Script:
    """A stream whose connection ends after *events*."""

    async def script(call: Call) -> None:
        await call.stream(*events, end=False)
        call.close()

    return script


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def body_of_capture(response: bytes) -> bytes:
    head_, _, rest = response.partition(b"\r\n\r\n")
    body = b""
    while b"chunked" in head_ and rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body or rest


@pytest.mark.parametrize(
    "name",
    [
        *("chat", "chat_stream", "chat_toolmsgs", "chat_unknown_field", "compl_batch", "compl_stream"),
        *("messages", "messages_stream", "responses", "responses_stream", "err_model", "err_toolong"),
    ],
)
async def test_captured_exchange_passes_untouched_in_both_directions(name: str) -> None:
    sent, answer = capture(name)
    sent_head, _, sent_body = sent.partition(b"\r\n\r\n")
    async with running(FakeEngine()) as router:
        engine = router.engines[0]

        async def replay(call: Call) -> None:
            await call.send(answer)
            call.close()

        router.instance_of(engine).models = None
        engine.script = replay
        async with await RawClient.connect(router.url) as client:
            await client.send(sent)
            got = await client.response()
        (call,) = engine.calls
        assert call.target == sent_head.split(b" ")[1]
        assert sha(call.body) == sha(sent_body)
        assert got.complete
        assert sha(got.body) == sha(body_of_capture(answer))
        expected = [line.partition(b": ") for line in answer.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]]
        for key, _, value in expected:
            if key not in (b"connection", b"transfer-encoding"):
                assert (key, value) in got.headers


async def test_binary_bodies_pass_untouched() -> None:
    answer = os.urandom(3_000_000)

    async def script(call: Call) -> None:
        await call.send(head(200, (b"content-encoding", b"gzip"), (b"transfer-encoding", b"chunked")))
        for at in range(0, len(answer), 70_001):
            await call.send(chunk(answer[at : at + 70_001]))
        await call.send(b"0\r\n\r\n")

    async with running(FakeEngine(), script=script) as router:
        got = await router.ask("POST", "/v1/audio/transcriptions", body := os.urandom(2_000_000))
        assert sha(router.engines[0].calls[0].body) == sha(body)
        assert sha(got.body) == sha(answer)
        assert got.value("content-encoding") == "gzip"


async def test_request_head_reaches_the_engine_as_the_client_sent_it() -> None:
    fields = [
        *(("anthropic-version", "2023-06-01"), ("anthropic-beta", "a"), ("anthropic-beta", "b"), ("x-api-key", "k")),
        *(("X-Smetric-Rule", "forged"), ("x_smetric_rule", "forged"), ("Connection", "x-hop"), ("X-Hop", "1")),
    ]
    async with running(FakeEngine()) as router:
        await router.ask("POST", "/v1/messages?beta=true&x=%2F%zz", BODIES["/v1/messages"], *fields)
        (call,) = router.engines[0].calls
        assert call.target == b"/v1/messages?beta=true&x=%2F%zz"
        assert call.values(b"anthropic-beta") == [b"a", b"b"]
        assert call.values(b"x-api-key") == [b"k"]
        assert call.values(b"host") == [router.engines[0].url.removeprefix("http://").encode()]
        assert call.values(b"x-smetric-rule") == call.values(b"x_smetric_rule") == call.values(b"x-hop") == []
        added = {name.lower() for name, _ in call.headers} & {b"user-agent", b"accept", b"accept-encoding", b"cookie"}
        assert added == set()


@pytest.mark.parametrize("path", BODIES)
async def test_broken_stream_ends_with_one_error_event_of_its_api(path: str) -> None:
    async with running(FakeEngine(), script=breaking_off(b"data: {}\n\n")) as router:
        answer = await router.ask("POST", path, BODIES[path])
        assert not answer.complete
        event = answer.body.removeprefix(b"data: {}\n\n")
        named = path in ("/v1/messages", "/v1/responses")
        assert event.startswith(b"event: error\ndata: " if named else b'data: {"error":')
        assert event.count(b"\n\n") == 1
        for end in (b"[DONE]", b"message_stop", b"response.completed"):
            assert end not in answer.body


@pytest.mark.parametrize("begun", [b'data: {"choi', b"data: {}\r\n\r", b"data: {}\n", b"event: x\n"])
async def test_stream_that_breaks_within_an_event_gets_no_error_event(begun: bytes) -> None:
    async with running(FakeEngine(), script=breaking_off(delta("a"), begun)) as router:
        answer = await router.chat(stream=True)
        assert (answer.body, answer.complete) == (delta("a") + begun, False)


@pytest.mark.parametrize(("room", "is_sent"), [(-1, False), (0, False), (1, True)])
async def test_error_event_leaves_a_stream_shorter_than_its_announced_length(room: int, is_sent: bool) -> None:
    event = error_event("/v1/chat/completions", UpstreamError("the instance broke off its answer", reason="closed"))

    async def script(call: Call) -> None:
        length = b"%d" % (len(delta("a") + event) + room)
        await call.send(head(200, (b"content-type", b"text/event-stream"), (b"content-length", length)) + delta("a"))
        call.close()

    async with running(FakeEngine(), script=script) as router:
        answer = await router.chat(stream=True)
        assert not answer.complete
        assert answer.body == delta("a") + (event if is_sent else b"")
    assert "smetric.request.failed" not in router.logged()


async def test_content_type_of_a_stream_is_compared_without_case() -> None:
    async def script(call: Call) -> None:
        await call.send(head(200, (b"Content-Type", b"Text/Event-Stream"), (b"Transfer-Encoding", b"chunked")))
        await call.send(chunk(delta("a")))
        call.close()

    async with running(FakeEngine(), script=script) as router:
        answer = await router.chat(stream=True)
        assert not answer.complete
        assert answer.value("x-accel-buffering") == "no"
        assert answer.body.startswith(delta("a") + b'data: {"error":')


@pytest.mark.parametrize("how", ["whole", "cut"])
async def test_compressed_stream_passes_as_it_is_and_ends_by_its_framing(how: str) -> None:
    """Clients ask for compression by default. Its bytes cannot be read, nor can an event be added."""
    sent = gzip.compress(delta("a") + DONE)

    async def script(call: Call) -> None:
        fields = ((b"content-type", b"text/event-stream"), (b"content-encoding", b"gzip"))
        await call.send(head(200, *fields, (b"transfer-encoding", b"chunked")) + chunk(sent[:20]))
        if how == "cut":
            call.close()
        else:
            await call.send(chunk(sent[20:]) + b"0\r\n\r\n")

    async with running(FakeEngine(), script=script) as router:
        answer = await router.ask("POST", "/v1/chat/completions", chat(stream=True), ("Accept-Encoding", "gzip"))
        is_whole = how == "whole"
        assert router.engines[0].calls[0].values(b"accept-encoding") == [b"gzip"]
        assert (answer.complete, answer.body) == (is_whole, sent if is_whole else sent[:20])
        assert answer.value("x-accel-buffering") == "no"
        assert await router.attempts("closed") == (not is_whole)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [(b"", "ended the connection before it answered"), (b"SSH-2.0-x\r\n\r\n", "is not HTTP/1.1")],
    ids=["nothing", "another protocol"],
)
async def test_error_text_names_the_failure_of_the_instance(raw: bytes, reason: str) -> None:
    async def script(call: Call) -> None:
        await call.send(raw)
        call.close()

    async with running(FakeEngine(), script=script) as router:
        answer = await router.chat()
        assert answer.status == 502
        assert orjson.loads(answer.body)["error"]["message"].endswith(reason)


@pytest.mark.parametrize("path", BODIES)
async def test_stream_past_its_end_marker_gets_no_error_event(path: str) -> None:
    """A client that reads to the end marker has the whole answer; its connection ends abnormally too."""
    end = {
        "/v1/messages": b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
        "/v1/responses": b'event: response.completed\ndata: {"type":"response.completed"}\n\n',
    }.get(path, DONE)

    async with running(FakeEngine(), script=breaking_off(b"data: {}\n\n", end)) as router:
        answer = await router.ask("POST", path, BODIES[path])
        assert (answer.complete, answer.body) == (False, b"data: {}\n\n" + end)
        assert await router.attempts("closed") == 1


async def test_error_event_of_an_engine_passes_as_it_is() -> None:
    events = (delta("a"), b'data: {"error": {"message": "engine died", "code": 500}}\n\n', DONE)

    async with running(FakeEngine()) as router:
        for sent in (events, events[:2]):
            router.engines[0].script = lambda call, sent=sent: call.stream(*sent)  # type: ignore[misc]
            answer = await router.chat(stream=True)
            assert (answer.complete, answer.body) == (True, b"".join(sent))


async def test_response_headers_are_on_answers_and_errors_unless_switched_off() -> None:
    receipt = ("x-smetric-decision-id", "x-smetric-policy", "x-smetric-instance", "x-smetric-rule")
    async with running(FakeEngine()) as router:
        answer = await router.chat()
        assert all(answer.value(name) for name in receipt)
        assert (await router.admin(f"/admin/decisions/{answer.value(receipt[0])}")).status == 200
        router.engines[0].script = lambda call: call.answer(503, b"{}")
        assert (await router.chat()).values("x-smetric-decision-id")
    async with running(FakeEngine(), response_headers=False) as router:
        answer = await router.chat()
        assert not any(name.startswith(b"x-smetric") for name, _ in answer.headers)


async def test_slow_client_gets_every_byte() -> None:
    events = [delta("x" * 1000)] * 2000

    async with running(FakeEngine(), script=lambda call: call.stream(*events, DONE)) as router:
        async with await router.client(chat(stream=True)) as client:
            await asyncio.sleep(0.2)
            answer = await client.response()
        assert answer.complete
        assert sha(answer.body) == sha(b"".join(events) + DONE)


async def test_generated_tokens_are_counted_during_the_stream() -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await call.stream(*[delta("a")] * 40, end=False)
        await go_on.wait()
        await call.send(chunk(DONE) + b"0\r\n\r\n")

    async with running(FakeEngine(), script=script) as router:
        instance = router.instance_of(router.engines[0])
        async with await router.client(chat(stream=True)) as client:
            await client.head()
            await until(lambda: instance.generated() == 40)
            assert instance.inflight_tokens() == instance.sent_tokens + 40
            assert instance.decode_blocks() == (instance.sent_tokens + 40) / 16
            go_on.set()
            await until(lambda: instance.inflight_tokens() == instance.decode_blocks() == 0)


async def test_unprefilled_tokens_are_counted_until_the_first_byte() -> None:
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        await go_on.wait()
        go_on.clear()
        await call.stream(delta("a"), end=False)
        await go_on.wait()
        await call.send(chunk(DONE) + b"0\r\n\r\n")

    async with running(FakeEngine(), script=script) as router:
        engine = router.engines[0]
        async with await router.client(chat(stream=True)) as client:
            await until(lambda: len(engine.calls) == 1)
            own, unprefilled, sent = router.counted()
            assert own == 1
            assert unprefilled == sent > 0
            go_on.set()
            await client.head()
            await until(lambda: router.counted() == (1, 0, sent))
            go_on.set()
            await until(lambda: router.counted() == (0, 0, 0))


@pytest.mark.parametrize("sees_first_byte", [False, True], ids=["before its first byte", "before its end"])
async def test_answer_of_a_past_process_does_not_change_the_state_of_its_successor(sees_first_byte: bool) -> None:
    body = b'{"id":"resp_1","object":"response","output":[],"usage":{"input_tokens":900,"output_tokens":1}}'
    go_on = asyncio.Event()

    async def script(call: Call) -> None:
        begun = 20 if sees_first_byte else 0
        length = b"%d" % len(body)
        await call.send(head(200, (b"Content-Type", b"application/json"), (b"Content-Length", length)) + body[:begun])
        await go_on.wait()
        await call.send(body[begun:])

    async with running(FakeEngine(), policy="smetric") as router:
        engine, application = router.engines[0], router.application
        engine.script = script
        instance = router.instance_of(engine)
        sent = b'{"model":"tiny","input":"%s"}' % (b"what was sent before " * 200)
        async with await router.client(sent, "/v1/responses") as client:
            if sees_first_byte:
                await client.head()
            else:
                await until(lambda: len(engine.calls) == 1)
            instance.restarted()
            application._restarted(instance)
            go_on.set()
            await until(lambda: router.counted() == (0, 0, 0))
        assert application.sources.indexes
        assert application.sources.indexes.figures().blocks == 0
        # The new process may have stored it before the restart was seen.
        assert (await router.ask("GET", "/v1/responses/resp_1")).value("x-smetric-instance") == "e0"


async def nonsense(call: Call) -> None:
    await call.send(b"no HTTP\r\n\r\n")


REFUSED: dict[str, tuple[Script, dict[str, object], int]] = {
    "its model is not served": (healthy, {"model": "unknown"}, 404),
    "its answer is no HTTP": (nonsense, {}, 502),
    "its engine says nothing": (hang, {}, 504),
    "its engine is too busy": (lambda call: call.answer(503, b"{}"), {}, 503),
}


@pytest.mark.parametrize("why", REFUSED)
async def test_failed_request_is_freed_at_once(why: str) -> None:
    """The bound on bodies excludes one that waits for the garbage collector."""
    script, fields, status = REFUSED[why]
    async with running(FakeEngine(), policy="smetric", forward=Forward(first_byte_timeout=0.1)) as router:
        router.engines[0].script = script
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                assert (await router.chat(**fields)).status == status
            assert not [each for each in gc.get_objects() if isinstance(each, Forwarding)]
        finally:
            gc.enable()
