from __future__ import annotations

import asyncio
import gc
import gzip
import hashlib
import os
from dataclasses import dataclass

import orjson
import pytest

from smetric.config.settings import Forward
from smetric.errors import HttpError, UpstreamError
from smetric.proxy.delivery import Delivery
from smetric.proxy.error_response import error_event
from smetric.proxy.forward import Forwarding
from tests.fakes import (
    DONE,
    USAGE,
    Call,
    FakeEngine,
    RawClient,
    Script,
    capture,
    chunk,
    delta,
    hang,
    head,
    healthy,
    until,
)
from tests.faults.harness import chat, running

pytestmark = pytest.mark.slow

BODIES = {
    "/v1/chat/completions": chat(stream=True, messages=[{"role": "user", "content": "x"}]),
    "/v1/completions": b'{"model":"tiny","prompt":"x","stream":true}',
    "/v1/messages": b'{"model":"tiny","max_tokens":4,"stream":true,"messages":[{"role":"user","content":"x"}]}',
    "/v1/responses": b'{"model":"tiny","input":"x","stream":true}',
}


def breaking_off(*events: bytes, kind: bytes = b"text/event-stream") -> Script:
    """A stream whose connection ends after *events*."""

    async def script(call: Call) -> None:
        await call.stream(*events, kind=kind, end=False)
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
    async with running(FakeEngine(), script=breaking_off(b"data: {}\n\n", kind=b"Text/Event-Stream")) as router:
        answer = await router.ask("POST", path, BODIES[path])
        assert (answer.complete, answer.value("x-accel-buffering")) == (False, "no")
        event = answer.body.removeprefix(b"data: {}\n\n")
        named = path in ("/v1/messages", "/v1/responses")
        assert event.startswith(b"event: error\ndata: " if named else b'data: {"error":')
        assert event.count(b"\n\n") == 1
        for end in (b"[DONE]", b"message_stop", b"response.completed"):
            assert end not in answer.body


async def test_broken_stream_is_no_charge_while_the_client_reads_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(FakeEngine(), script=breaking_off(delta("a"))) as router:
        charges = []

        async def append_error(delivery: Delivery, error: HttpError) -> None:
            charges.append(router.instance_of(router.engines[0]).own)

        monkeypatch.setattr(Delivery, "append_error", append_error)
        assert not (await router.chat(stream=True)).complete
        assert charges == [0]


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


def event(type: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type.encode(), orjson.dumps({"type": type, **fields}))


@dataclass(frozen=True)
class Parts:
    """Parts of a stream: what an engine sends before its prefill ends, output, its last event with usage before it."""

    early: bytes
    output: bytes
    last: bytes

    async def send(self, call: Call, go_on: asyncio.Event) -> None:
        """Send the first part, and each further one once *go_on* is set. It is cleared then."""
        await call.stream(self.early, end=False)
        for part in (self.output, self.last):
            await go_on.wait()
            go_on.clear()
            await call.send(chunk(part))
        await hang(call)


COUNTED = {"input_tokens": 20, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 16}}
STREAMS = {
    "/v1/chat/completions": Parts(
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
        delta("a"),
        b'data: {"choices":[],%b}}\n\n' % USAGE + DONE,
    ),
    "/v1/completions": Parts(
        b": keep-alive\n\n", b'data: {"choices":[{"text":"a"}]}\n\n', b'data: {"choices":[],%b}}\n\n' % USAGE + DONE
    ),
    "/v1/messages": Parts(
        event("message_start", message={"usage": {"input_tokens": 4, "cache_read_input_tokens": 16}}) + event("ping"),
        event("content_block_delta", delta={"type": "text_delta", "text": "a"}),
        event("message_delta", usage={"output_tokens": 2}) + event("message_stop"),
    ),
    "/v1/responses": Parts(
        event("response.created", response={"id": "resp_1"}) + event("response.in_progress", response={"id": "resp_1"}),
        event("response.output_text.delta", delta="a"),
        event("response.completed", response={"id": "resp_1", "usage": COUNTED}),
    ),
}


@pytest.mark.parametrize("path", STREAMS)
async def test_prefill_ends_with_the_first_output(path: str) -> None:
    go_on, parts = asyncio.Event(), STREAMS[path]
    body = BODIES[path].replace(b'"x"', b'"%b"' % (b"what was asked before " * 200))
    async with running(FakeEngine(), policy="smetric", forward=Forward(idle_timeout=0.1)) as router:
        router.engines[0].script = lambda call: parts.send(call, go_on)
        indexes = router.application.sources.indexes
        assert indexes
        before = indexes.figures().blocks
        for sees_output in (False, True):
            async with await router.client(body, path) as client:
                await client.head()
                await client.reader.readuntil(parts.early)
                await asyncio.sleep(0.2)  # longer than a stream may be silent
                own, unprefilled, sent = router.counted()
                assert (own, unprefilled) == (1, sent)
                assert sent > 0
                assert indexes.figures().blocks == before
                if sees_output:
                    go_on.set()
                    await client.reader.readuntil(parts.output)
                    assert router.counted() == (1, 0, sent)
                    assert indexes.figures().blocks > before
            await until(lambda: router.counted() == (0, 0, 0))
            seen = router.lines("request")[-1]
            assert (seen["status"], seen["error_type"]) == (499, "client_gone")
            assert ("ttft_s" in seen) is sees_output
            if sees_output:
                assert seen["ttft_s"] > 0.2
        # Messages reports its usage before the output. It counts although the client left.
        assert await router.figure("smetric_prefix_actual_hit_tokens_total{") == (48 if path == "/v1/messages" else 16)


async def test_answer_other_than_200_has_no_time_to_first_token() -> None:
    async with running(FakeEngine(), policy="smetric") as router:
        counted = await router.figure("smetric_time_to_first_chunk_seconds_count{")
        router.engines[0].script = lambda call: call.answer(400, b"{}")
        async with await router.client(BODIES["/v1/chat/completions"], "/v1/chat/completions") as client:
            assert (await client.response()).status == 400
        await until(lambda: router.lines("request")[-1]["status"] == 400)
        assert "ttft_s" not in router.lines("request")[-1]
        assert await router.figure("smetric_time_to_first_chunk_seconds_count{") == counted


@pytest.mark.parametrize("path", STREAMS)
async def test_client_that_leaves_behind_the_last_event_was_served(path: str) -> None:
    """Official clients close as soon as they have read it, before the engine ends the body."""
    go_on, parts = asyncio.Event(), STREAMS[path]
    async with running(FakeEngine(), script=lambda call: parts.send(call, go_on)) as router:
        async with await router.client(BODIES[path], path) as client:
            await client.head()
            for part in (parts.early, parts.output, parts.last):
                await client.reader.readuntil(part)
                go_on.set()
        await until(lambda: len(router.lines("request")) == 2)
        line = router.lines("request")[-1]
        assert (line["status"], line.get("error_type")) == (200, None)
        assert await router.figure("smetric_prefix_actual_hit_tokens_total{") == 32  # 16 of them at the start
        assert await router.attempts("aborted") == 0
        assert router.application.router._pins.get("resp_1") is (
            router.instance_of(router.engines[0]) if path == "/v1/responses" else None
        )


@pytest.mark.parametrize("path", STREAMS)
async def test_stream_past_its_last_event_gets_no_error_event(path: str) -> None:
    """A client that reads to the last event has the whole answer; its connection ends abnormally too."""
    output, last = STREAMS[path].output, STREAMS[path].last
    async with running(FakeEngine(), script=breaking_off(output, last)) as router:
        answer = await router.ask("POST", path, BODIES[path])
        assert (answer.complete, answer.body) == (False, output + last)
        assert await router.attempts("closed") == 1


async def test_response_is_tied_to_its_instance_while_it_streams() -> None:
    go_on, parts = asyncio.Event(), STREAMS["/v1/responses"]

    async def script(call: Call) -> None:
        await (parts.send(call, go_on) if call.body else call.answer(200, b"{}"))

    async with (
        running(FakeEngine(), FakeEngine(), script=script) as router,
        await router.client(BODIES["/v1/responses"], "/v1/responses") as client,
    ):
        holder = (await client.head()).value("x-smetric-instance")
        await client.reader.readuntil(parts.early)
        for method, target in (("GET", "/v1/responses/resp_1"), ("POST", "/v1/responses/resp_1/cancel")):
            answer = await router.ask(method, target)
            assert (answer.status, answer.value("x-smetric-instance")) == (200, holder)


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
    async with running(FakeEngine(), policy="smetric", forward=Forward(answer_timeout=0.1)) as router:
        router.engines[0].script = script
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                assert (await router.chat(**fields)).status == status
            assert not [each for each in gc.get_objects() if isinstance(each, Forwarding)]
        finally:
            gc.enable()
