"""HTTP interface of an emulated instance, compared with recorded answers of vLLM."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio

from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import EmulatedSettings
from smetric.lab.engine import EngineConfig
from tests.fakes import until

CAPTURES = Path(__file__).parents[2] / "data" / "vllm"
CHAT = "/v1/chat/completions"
LONG = "word " * 200
OPENAI_CACHED = ("prompt_tokens_details", "cached_tokens")
#: Settings of the vLLM that was recorded.
ENGINE = EngineConfig(block_size=32, blocks=200, max_model_len=2048, max_running=4)
SETTINGS = EmulatedSettings(model="tiny", aliases=("tiny-alias",), engine=ENGINE, time_scale=100)

ANSWERS = [
    *("chat", "chat_cached", "chat_reqid_body", "chat_alias", "chat_nomodel", "chat_cache_salt", "chat_toolmsgs"),
    *("chat_tools_auto", "chat_priority", "chat_unknown_field", "chat_return_token_ids", "orca_text", "orca_json"),
    *("compl_text", "compl_tokids", "compl_batch", "compl_batch_tokids", "compl_echo"),
    *("messages", "messages_cached", "messages_cached2", "messages_count", "responses", "responses_cached"),
    *("models", "tokenize", "tokenize_chat", "detokenize", "version", "load"),
    *("health", "health_head", "ping", "ping_post"),
]
STREAMS = [
    *("chat_stream", "chat_stream_contusage", "chat_stream_nousage", "chat_return_token_ids_stream"),
    *("compl_stream", "compl_batch_stream", "messages_stream", "responses_stream"),
]
ERRORS = [
    *sorted(path.stem for path in CAPTURES.glob("err_*.http")),
    *("messages_err_model", "responses_prev_404", "responses_get_404", "method_405"),
]


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    #: One item per HTTP chunk, or the whole body.
    chunks: list[bytes]

    @property
    def json(self) -> Any:
        return json.loads(b"".join(self.chunks))

    @property
    def events(self) -> list[tuple[str, Any]]:
        return [_event(chunk) for chunk in self.chunks]


def parse(data: bytes) -> Response:
    head, _, rest = data.partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    chunks = [rest] if rest else []
    if "transfer-encoding" in headers:
        chunks = []
        while rest:
            size_line, _, rest = rest.partition(b"\r\n")
            size = int(size_line, 16)
            if size:
                chunks.append(rest[:size])
            rest = rest[size + 2 :]
    return Response(int(status_line.split()[1]), headers, chunks)


def capture(name: str) -> tuple[bytes, Response]:
    request, _, response = (CAPTURES / f"{name}.http").read_bytes().partition(b"\n===== RESPONSE =====\n")
    # A recorded request ends with an extra line break.
    head, _, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return head + b"\r\n\r\n" + body[: int(length[1]) if length else 0], parse(response)


async def exchange(url: str, request: bytes) -> Response:
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    writer.write(request)
    data = await reader.read()
    writer.close()
    await writer.wait_closed()
    return parse(data)


def _event(chunk: bytes) -> tuple[str, Any]:
    *names, data = chunk.removesuffix(b"\n\n").decode().split("\n")
    payload = data.removeprefix("data: ")
    return "".join(names), "[DONE]" if payload == "[DONE]" else json.loads(payload)


def shape(value: Any) -> Any:
    """Return names in order and types of values; equal neighbours in a list count once."""
    if isinstance(value, dict):
        return [(name, shape(item)) for name, item in value.items()]
    if isinstance(value, list):
        return ["list", *(key for key, _ in groupby(shape(item) for item in value))]
    return type(value).__name__


def comparable(headers: dict[str, str]) -> dict[str, str]:
    """Return the headers; of those that vary from answer to answer the names alone."""
    varying = ("date", "content-length", "x-request-id", "endpoint-load-metrics")
    return {name: "" if name in varying else value for name, value in headers.items()}


async def post(url: str, path: str, body: dict[str, Any]) -> Any:
    async with aiohttp.ClientSession() as client, client.post(url + path, json=body) as response:
        assert response.status == 200
        return await response.json()


@pytest_asyncio.fixture
async def url() -> AsyncIterator[str]:
    async with EmulatedFleet(1, SETTINGS) as fleet:
        yield fleet.urls[0]


@pytest.mark.parametrize("name", ANSWERS)
async def test_server_answer_has_shape_and_headers_of_vllm(url: str, name: str) -> None:
    request, expected = capture(name)
    answer = await exchange(url, request)
    assert (answer.status, comparable(answer.headers)) == (expected.status, comparable(expected.headers))
    assert bool(answer.chunks) == bool(expected.chunks)
    if expected.chunks:
        assert shape(answer.json) == shape(expected.json)


@pytest.mark.parametrize("name", STREAMS)
async def test_server_stream_has_events_and_framing_of_vllm(url: str, name: str) -> None:
    request, expected = capture(name)
    answer = await exchange(url, request)
    assert (answer.status, comparable(answer.headers)) == (expected.status, comparable(expected.headers))

    def shapes_of(response: Response) -> list[Any]:
        # The number of chunks depends on speed: a reply may arrive in one piece.
        shapes = [(name, shape(value)) for name, value in response.events]
        return sorted({repr(item) for item in shapes})

    missing = set(shapes_of(expected)) - set(shapes_of(answer))
    assert set(shapes_of(answer)) <= set(shapes_of(expected))
    assert all("'finish_reason', 'NoneType'" in item for item in missing)
    assert shape(answer.events[0]) == shape(expected.events[0])
    assert shape(answer.events[-1]) == shape(expected.events[-1])


@pytest.mark.parametrize("name", ERRORS)
async def test_server_error_has_wording_of_vllm(url: str, name: str) -> None:
    request, expected = capture(name)
    answer = await exchange(url, request)
    assert (answer.status, comparable(answer.headers)) == (expected.status, comparable(expected.headers))
    # The emulator shows only kind and size of a wrong value.
    without_input = re.compile(r"'input': '.*?'")
    assert without_input.sub("", json.dumps(answer.json)) == without_input.sub("", json.dumps(expected.json))


@pytest.mark.parametrize("name", ["b_err_queue_full", "b_err_queue_full_stream", "b_err_queue_full_messages"])
async def test_server_answers_full_queue_with_503_without_retry_after(name: str) -> None:
    engine = EngineConfig(block_size=32, blocks=200, max_model_len=2048, max_running=1, max_waiting=0)
    async with EmulatedFleet(1, EmulatedSettings(model="tiny", engine=engine, time_scale=0.1)) as fleet:
        instance, url = fleet.instances[0], fleet.urls[0]
        request, expected = capture(name)
        first = asyncio.create_task(exchange(url, capture("chat")[0]))
        await until(lambda: instance.engine.busy)
        answer = await exchange(url, request)
        assert (answer.status, answer.json) == (expected.status, expected.json)
        assert "retry-after" not in answer.headers
        fleet.reset()
        assert (await first).json["choices"][0]["finish_reason"] == "abort"


async def test_server_uses_given_request_id(url: str) -> None:
    answer = await exchange(url, capture("chat_cached")[0])
    assert (answer.headers["x-request-id"], answer.json["id"]) == ("my-req-42", "chatcmpl-my-req-42")
    answer = await exchange(url, capture("chat_reqid_body")[0])
    assert answer.json["id"] == "chatcmpl-body-req-7"


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}, OPENAI_CACHED),
        ("/v1/completions", {"prompt": LONG, "max_tokens": 1}, OPENAI_CACHED),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1},
            ("cache_read_input_tokens",),
        ),
        ("/v1/responses", {"input": LONG, "max_output_tokens": 1}, ("input_tokens_details", "cached_tokens")),
    ],
)
async def test_server_reports_repeated_prompt_as_cached_in_every_api(
    url: str, path: str, body: dict[str, Any], place: tuple[str, ...]
) -> None:
    cached = []
    for _ in range(2):
        value = (await post(url, path, body))["usage"]
        for name in place:
            value = value[name]
        cached.append(value)
    # 1,000 bytes are 250 tokens; with those of the template they fill 7 or 8 blocks of 32.
    assert cached[0] == 0
    assert cached[1] in (224, 256)


async def test_server_next_turn_hits_history_and_reply(url: str) -> None:
    messages = [{"role": "user", "content": "question " * 50}]
    body = {"messages": messages, "max_tokens": 100, "ignore_eos": True}
    first = await post(url, CHAT, body)
    assert first["usage"]["completion_tokens"] == 100
    messages += [first["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    second = await post(url, CHAT, body)
    # All tokens but the last one of the reply are computed, and full blocks of 32 are shared.
    computed = first["usage"]["total_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // 32 * 32


async def test_server_disconnect_aborts_request_at_once() -> None:
    async with EmulatedFleet(1, EmulatedSettings(time_scale=0.5)) as fleet, aiohttp.ClientSession() as client:
        engine = fleet.instances[0].engine
        body = {"prompt": "once upon a time", "max_tokens": 100_000, "ignore_eos": True}
        for stream in (True, False):
            leaving = asyncio.create_task(
                client.post(fleet.urls[0] + "/v1/completions", json={**body, "stream": stream})
            )
            await until(lambda: bool(engine.running))
            leaving.cancel()
            await asyncio.wait([leaving])
            if not leaving.cancelled():
                leaving.result().close()
            await until(lambda: not engine.busy)
            assert engine.cache.used == 0


async def test_server_token_ids_of_tokenize_hit_blocks_of_chat(url: str) -> None:
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
    ids = (await post(url, "/tokenize", body))["tokens"]
    assert (await post(url, CHAT, body))["usage"]["prompt_tokens"] == len(ids)
    usage = (await post(url, "/v1/completions", {"prompt": ids, "max_tokens": 1}))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(ids) // 32 * 32


async def test_server_salt_separates_prompts(url: str) -> None:
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
    salts: list[dict[str, str]] = [{}, {"cache_salt": "a"}, {"cache_salt": "a"}]
    usages = [(await post(url, CHAT, {**body, **salt}))["usage"] for salt in salts]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 0, 256]


async def test_server_streams_each_of_several_replies_to_its_end(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "max_tokens": 50, "stream": True}
    texts = {0: "", 1: "", 2: ""}
    reasons = []
    async with aiohttp.ClientSession() as client, client.post(url + CHAT, json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["delta"]["content"]
                    reasons.append(choice["finish_reason"])
    assert [len(text) for text in texts.values()] == [200, 200, 200]
    assert len(set(texts.values())) == 3
    assert reasons.count("length") == 3


async def test_server_unlimited_reply_ends_by_itself_and_is_repeatable(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    first, second = [(await post(url, CHAT, body))["choices"][0] for _ in range(2)]
    assert first["finish_reason"] == "stop"
    assert first == second


async def test_server_load_counts_generating_requests() -> None:
    async with EmulatedFleet(1) as fleet, aiohttp.ClientSession() as client:
        body = {"prompt": "once", "max_tokens": 5000, "ignore_eos": True, "stream": True}
        async with client.post(fleet.urls[0] + "/v1/completions", json=body) as stream:
            await stream.content.readany()
            async with client.get(fleet.urls[0] + "/load") as response:
                assert await response.json() == {"server_load": 1}


async def test_server_errors_never_contain_prompt_text(url: str) -> None:
    bodies: list[tuple[str, Any]] = [
        (CHAT, {"messages": "my secret"}),
        (CHAT, {"messages": ["my secret"]}),
        (CHAT, {"messages": [{"role": "user", "content": {"text": "my secret"}}]}),
        ("/v1/completions", {"prompt": {"text": "my secret"}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": ["my secret"]}], "max_tokens": 1}),
        ("/v1/responses", {"input": ["my secret"]}),
    ]
    async with aiohttp.ClientSession() as client:
        for path, body in bodies:
            async with client.post(url + path, json=body) as response:
                assert response.status == 400, path
                assert "secret" not in await response.text()


@pytest.mark.parametrize(
    "body",
    [
        '{"messages":[{"role":"user","content":[{"type":"image_url","image_url":%s}]}]}',
        '{"messages":[{"role":"user","content":"x"}],"tools":[{"function":{"name":"f","parameters":%s}}]}',
    ],
)
async def test_server_body_of_any_depth_is_served_or_unreadable(url: str, body: str) -> None:
    headers = {"content-type": "application/json"}
    answers = {}
    async with aiohttp.ClientSession() as client:
        for depth in (1, 300, *range(980, 1030, 2), 200_000):
            data = body % ("[" * depth + "]" * depth)
            async with client.post(url + CHAT, data=data, headers=headers) as response:
                answers[depth] = response.status, "detail" in await response.json()
    assert (answers[1], answers[300]) == ((200, False), (200, False))
    assert set(answers.values()) == {(200, False), (400, True)}
