"""Rows H: hostile headers, names and bodies."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

import orjson
import pytest

from smetric.config.settings import TokenizerSettings
from tests.fakes import Call, FakeEngine, RawClient, fetch, request, until
from tests.faults.harness import Running, Tell, chat, running
from tests.faults.stall import Stall

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
FORCED = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    "traceparent",
    ["", "junk", FORCED.upper(), "00-" + "0" * 32 + "-00f067aa0ba902b7-01", FORCED[:-1], "ff" + FORCED[2:], FORCED * 9],
)
async def test_h4_bad_traceparent_is_dropped(traceparent: str) -> None:
    async with running(FakeEngine()) as router:
        fields = [("traceparent", traceparent), ("tracestate", ",".join(f"k{i}=v" for i in range(500)))]
        answer = await router.ask("POST", "/v1/chat/completions", chat(), *fields, ("baggage", "a=" + "b" * 20_000))
        assert answer.status == 200
        (call,) = router.engines[0].calls
        assert call.values(b"traceparent") == call.values(b"tracestate") == call.values(b"baggage") == []


async def test_h4_untrusted_peer_cannot_force_a_trace() -> None:
    async with running(FakeEngine(), trusted_proxies=()) as router:
        answer = await router.ask("POST", "/v1/chat/completions", chat(), ("traceparent", FORCED))
        assert answer.status == 200
        (call,) = router.engines[0].calls
        assert not any(TRACE.encode() in value for value in call.values(b"traceparent"))


async def test_h4_trusted_trace_continues_without_a_long_tracestate() -> None:
    async with running(FakeEngine()) as router:
        fields = [("traceparent", FORCED), ("tracestate", ",".join(f"k{i}=v" for i in range(500)))]
        await router.ask("POST", "/v1/chat/completions", chat(), *fields)
        (call,) = router.engines[0].calls
        (passed,) = call.values(b"traceparent")
        assert TRACE.encode() in passed
        assert call.values(b"tracestate") == []


@pytest.mark.parametrize("by", ["127.0.0.1", "[::1]"])
async def test_h4_trusted_ipv4_peer_is_trusted_on_a_dual_stack_socket(by: str) -> None:
    """A connection by IPv4 then comes from `::ffff:127.0.0.1`."""
    async with running(FakeEngine(), host="::") as router:
        url = f"http://{by}:{router.url.rpartition(':')[2]}"
        answer = await fetch(url, "POST", "/v1/chat/completions", chat(), [("traceparent", FORCED)])
        assert answer.status == 200
        (passed,) = router.engines[0].calls[0].values(b"traceparent")
        assert TRACE.encode() in passed


async def no_models(call: Call) -> None:
    await call.answer(404, b"")


async def series(router: Running) -> int:
    page = (await router.admin("/metrics")).body
    return sum(not line.startswith(b"#") for line in page.splitlines())


async def test_h7_hostile_names_leave_one_json_line_and_no_series() -> None:
    engine = FakeEngine()
    engine.models = no_models
    async with running(engine) as router:
        names = ["tiny\r\nFAKE: line", "\x1b[31mred\x1b[0m", "\u2028", "x" * 10_000]
        await router.chat(model=names[0])
        before = await series(router)
        for name in names:
            assert (await router.chat(model=name)).status == 200
        await asyncio.sleep(1.05)  # a rendered page is shown for a second
        assert await series(router) == before
        for path in ("/v1/%0d%0aFAKE: x", "/ok%0d%0a%1b[31m"):
            assert (await router.ask("GET", path.replace(" ", "%20"))).status == 404
        lines = router.logged().splitlines()
        assert len([line for line in lines if orjson.loads(line)["event"] == "request"]) == len(names) + 4
        assert all(line.isprintable() for line in lines)
        assert not any(line.startswith("FAKE") for line in lines)


async def ask_for(router: Running, names: Sequence[str]) -> list[int]:
    """The statuses of requests for the models *names*, one after the other on one connection."""
    statuses = []
    async with await RawClient.connect(router.url) as client:
        for name in names:
            await client.send(request("POST", "/v1/chat/completions", chat(model=name)))
            statuses.append((await client.response()).status)
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize(("status", "count"), [(200, 10_000), (404, 1_000)], ids=["passed on", "refused"])
async def test_h7_model_names_of_clients_make_no_series(status: int, count: int) -> None:
    """Known models or not: the request is refused or passed on."""
    engine = FakeEngine()
    if status == 200:
        engine.models = no_models
    async with running(engine) as router:
        assert await ask_for(router, ["before"]) == [status]
        before = await series(router)
        names = [f"model-{i}" for i in range(count)]
        clients = [ask_for(router, names[first::8]) for first in range(8)]
        assert {each for statuses in await asyncio.gather(*clients) for each in statuses} == {status}
        engine.calls.clear()
        await asyncio.sleep(1.05)  # a rendered page is shown for a second
        assert await series(router) == before
        lines = router.logged().splitlines()
        assert sum(orjson.loads(line)["event"] == "request" for line in lines) == len(names) + 2


GOOD = b'{"model":"tiny","messages":[{"role":"user","content":"x"}]'
#: Longest that one body may hold up everything else, seconds of CPU.
STALL_S = 0.1
DOCUMENTS = {
    "depth 100,000": GOOD + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "10 MB of lists": GOOD + b',"x":[' + b"[]," * 3_300_000 + b"[]]}",
    "900,000 keys": b"{" + b",".join(b'"k%d":1' % i for i in range(900_000)) + b"}",
    "a name of 4 MB": GOOD + b',"' + b"k" * 4_000_000 + b'":1 }',
    "a name of 2 MB, escaped": GOOD + b',"' + b"\\n" * 1_000_000 + b'":1 }',
    "4 MB of spaces": GOOD.replace(b":[", b":" + b" " * 4_000_000 + b"[") + b"}",
    "NaN": GOOD + b',"temperature":NaN}',
    "1e400": GOOD + b',"temperature":1e400}',
    "an integer of 4,000 digits": GOOD + b',"seed":' + b"9" * 4000 + b"}",
    "a byte order mark": b"\xef\xbb\xbf" + GOOD + b"}",
    "UTF-16": (GOOD + b"}").decode().encode("utf-16"),
    "bad UTF-8": GOOD.replace(b'"x"', b'"\xff\xfe"') + b"}",
    "half a surrogate pair": GOOD.replace(b'"x"', b'"\\ud800"') + b"}",
    "a model twice": GOOD + b',"model":"other"}',
    "trailing junk": GOOD + b"} x",
    "two documents": GOOD + b"}" + GOOD + b"}",
    "empty": b"",
    "a list": b"[]",
    "a string": b'"x"',
}


@pytest.mark.parametrize("name", DOCUMENTS)
async def test_h8_hostile_body_is_refused_or_unchanged_without_a_stall(name: str, record_property: Tell) -> None:
    body = DOCUMENTS[name]
    async with running(FakeEngine()) as router:
        streams = [asyncio.create_task(router.chat(stream=True)) for _ in range(50 if "0" in name else 5)]
        headers = [] if body else [("Content-Length", "0")]
        await until(lambda: len(router.engines[0].calls) == len(streams))
        with Stall() as stall:
            answer = await router.ask("POST", "/v1/chat/completions", body, *headers)
        assert stall.seconds <= STALL_S
        if stall.seconds > STALL_S / 10:
            record_property("F7", f"{name}: {1000 * stall.seconds:.0f} ms")
        assert answer.status in (200, 400)
        if answer.status == 400:
            error = orjson.loads(answer.body)["error"]
            assert error["type"] == "invalid_request_error"
            assert len(error["message"]) < 300
        else:
            assert body in [call.body for call in router.engines[0].calls]
        assert all(stream.complete for stream in await asyncio.gather(*streams))


NUMBERS = b"1," * 2_000_000 + b"1]"
ODD_NUMBERS = {
    "as tools": ("chat/completions", GOOD + b',"tools":[' + NUMBERS + b"}"),
    "as a system prompt": ("messages", GOOD + b',"system":[' + NUMBERS + b"}"),
    "behind a text": ("completions", b'{"model":"tiny","prompt":["x",' + NUMBERS + b"}"),
    "behind token ids": ("completions", b'{"model":"tiny","prompt":[[1],' + NUMBERS + b"}"),
}


@pytest.mark.parametrize("name", ODD_NUMBERS)
async def test_h8_millions_of_misplaced_numbers_do_not_stall(name: str) -> None:
    """Numbers are not counted when a body is screened, for millions of them are a prompt."""
    path, body = ODD_NUMBERS[name]
    async with running(FakeEngine()) as router:
        with Stall() as stall:
            answer = await router.ask("POST", f"/v1/{path}", body)
        assert stall.seconds <= STALL_S
        assert answer.status == (400 if path == "completions" else 200)


async def test_h8_million_token_ids_do_not_stall(record_property: Tell) -> None:
    body = b'{"model":"tiny","prompt":[' + b"123456," * 1_000_000 + b"7]}"
    async with running(FakeEngine(), policy="smetric", tokenizer=TokenizerSettings(source="engine")) as router:
        counted = router.application.metrics.registry
        with Stall() as stall:
            answer = await router.ask("POST", "/v1/completions", body)
            labels = {"source": "engine", "result": "ok"}
            await until(lambda: counted.get_sample_value("smetric_tokenizations_total", labels) == 1)
        assert answer.status == 200
        assert stall.seconds <= STALL_S
        record_property("F7", f"a million token ids: {1000 * stall.seconds:.0f} ms")


async def test_h8_body_in_tiny_chunks_does_not_stall(record_property: Tell) -> None:
    text = GOOD + b"}" + b" " * 1_000_000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    sent = request("POST", "/v1/chat/completions", headers=[("Transfer-Encoding", "chunked")]) + chunks
    async with running(FakeEngine()) as router:

        def ask() -> bytes:
            """Send from a thread, so that there is always more to read."""
            parts = urlsplit(router.url)
            with socket.create_connection((parts.hostname or "", parts.port or 0)) as connection:
                connection.sendall(sent)
                return connection.recv(12)

        with Stall() as stall:
            assert await asyncio.to_thread(ask) == b"HTTP/1.1 200"
        assert stall.seconds <= STALL_S
        record_property("F7", f"1 MB in chunks of a byte: {1000 * stall.seconds:.0f} ms")
        assert router.engines[0].calls[0].body == text
