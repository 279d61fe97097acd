"""Asking the engine: the questions are such that its answers are the ids it works on; what goes wrong is unknown."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.sources.tokens.chat import ChatPrompt, Refused, TextPrompt, Unavailable
from smetric.sources.tokens.engine import FAILURES, MAX_ANSWER, OPEN_S, EngineEncoder
from smetric.sources.tokens.local import ModelFolder
from tests.fakes import Call, FakeEngine, Script, capture, hang
from tests.sources.tokens.recorded import TEMPLATES, ids_of, model_folder, recorded

JSON = (b"content-type", b"application/json")
HELLO = ChatPrompt([{"role": "user", "content": "hello world"}])

Now = Callable[[], float]


def answering(ids: list[int], count: int | None = None) -> Script:
    body = {"count": len(ids) if count is None else count, "max_model_len": 2048, "tokens": ids, "token_strs": None}
    return lambda call: call.answer(200, json.dumps(body).encode(), JSON)


def failing(status: int, body: bytes = b'{"error":{"message":"no"}}') -> Script:
    return lambda call: call.answer(status, body, JSON)


def rendering(model: ModelFolder) -> Script:
    """`/tokenize` as vLLM answers it, by the template and the tokenizer of *model*."""

    async def script(call: Call) -> None:
        assert call.target == b"/tokenize"
        asked = json.loads(call.body)
        assert asked.pop("model") == "tiny"
        if "prompt" in asked:
            prompt: TextPrompt | ChatPrompt = TextPrompt(asked["prompt"], asked["add_special_tokens"])
        else:
            asked["template_kwargs"] = asked.pop("chat_template_kwargs", {})
            prompt = ChatPrompt(**asked)
        try:
            ids = model.encode(prompt).tolist()
        except Refused:
            await failing(400)(call)
        else:
            await answering(ids)(call)

    return script


@asynccontextmanager
async def engines(
    *scripts: Script, timeout_s: float = 5.0, clock: Now | None = None
) -> AsyncIterator[tuple[EngineEncoder, list[FakeEngine]]]:
    running = [FakeEngine(script) for script in scripts]
    for engine in running:
        await engine.start()
    fleet = Fleet([Instance(f"gpu-{i}", engine.url, models=["tiny"]) for i, engine in enumerate(running)], VOCABULARY)
    encoder = (
        EngineEncoder(fleet, timeout_s=timeout_s)
        if clock is None
        else EngineEncoder(fleet, timeout_s=timeout_s, clock=clock)
    )
    await encoder.start()
    try:
        yield encoder, running
    finally:
        await encoder.stop()
        for engine in running:
            await engine.stop()


@pytest.mark.parametrize("template", TEMPLATES)
async def test_encoder_gets_the_ids_of_the_request(tmp_path: Path, template: str) -> None:
    model = ModelFolder(model_folder(tmp_path, template), max_bytes=1 << 20)
    async with engines(rendering(model)) as (encoder, _):
        for row in recorded(template):
            if not row.continues:
                ids = await ids_of(encoder, row.api, row.body)
                assert ids is not None, row.body
                assert ids.tolist() == row.ids, row.body


@pytest.mark.parametrize(
    ("name", "prompt"), [("tokenize", TextPrompt("def main(): return 1")), ("tokenize_chat", HELLO)]
)
async def test_encoder_reads_captured_answer(name: str, prompt: TextPrompt | ChatPrompt) -> None:
    body = capture(name)[1].partition(b"\r\n\r\n")[2]
    async with engines(lambda call: call.answer(200, body, JSON)) as (encoder, _):
        assert (await encoder.encode("tiny", prompt, 100)).tolist() == json.loads(body)["tokens"]


async def test_encoder_passes_all_arguments_of_the_rendering() -> None:
    chat = ChatPrompt(
        HELLO.messages,
        tools=[{"type": "function", "function": {"name": "f"}}],
        template_kwargs={"enable_thinking": False},
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
        chat_template="{{ messages }}",
    )
    async with engines(answering([1])) as (encoder, (engine,)):
        await encoder.encode("tiny", chat, 100)
        assert json.loads(engine.calls[0].body) == {
            "model": "tiny",
            "messages": HELLO.messages,
            "tools": chat.tools,
            "chat_template_kwargs": {"enable_thinking": False},
            "add_generation_prompt": False,
            "continue_final_message": True,
            "add_special_tokens": True,
            "chat_template": "{{ messages }}",
        }


async def test_encoder_rotates_over_instances() -> None:
    async with engines(answering([1]), answering([1])) as (encoder, asked):
        for _ in range(4):
            await encoder.encode("tiny", HELLO, 100)
        assert [len(engine.calls) for engine in asked] == [2, 2]


async def test_encoder_asks_second_instance_after_failure() -> None:
    async with engines(failing(500), answering([7])) as (encoder, _):
        assert [(await encoder.encode("tiny", HELLO, 100)).tolist() for _ in range(2)] == [[7], [7]]


async def test_encoder_asks_no_third_instance() -> None:
    async with engines(failing(500), failing(503), failing(500)) as (encoder, asked):
        with pytest.raises(Unavailable):
            await encoder.encode("tiny", HELLO, 100)
        assert sum(len(engine.calls) for engine in asked) == 2


async def test_encoder_asks_no_other_instance_after_refusal() -> None:
    async with engines(failing(400), failing(400)) as (encoder, asked):
        for _ in range(FAILURES + 2):
            with pytest.raises(Refused):
                await encoder.encode("tiny", HELLO, 100)
        assert sum(len(engine.calls) for engine in asked) == FAILURES + 2, "a refusal says nothing of the engine"


@pytest.mark.parametrize(
    "script",
    [
        failing(404),
        failing(500),
        failing(200, b"not json"),
        failing(200, b'{"more":' + b"[" * 9_000),
        failing(200, b'{"count":1,"tokens":[-1]}'),
        failing(200, b'{"count":1,"tokens":[4294967296]}'),
        failing(200, b'{"count":1,"tokens":[]}'),
        failing(200, b'{"tokens":[1]}'),
        answering([1, 2], count=3),
        lambda call: call.answer(200, b"", JSON, (b"content-encoding", b"gzip")),
        lambda call: call.answer(302, b"", (b"location", b"http://127.0.0.1:1/")),
        lambda call: call.send(b"nonsense\r\n\r\n"),
    ],
)
async def test_encoder_is_unavailable_on_nonsense(script: Script) -> None:
    async with engines(script) as (encoder, _):
        with pytest.raises(Unavailable):
            await encoder.encode("tiny", HELLO, 100)


async def test_encoder_accepts_empty_answer() -> None:
    async with engines(answering([])) as (encoder, asked):
        for _ in range(FAILURES + 2):
            assert not await encoder.encode("tiny", TextPrompt(""), 10)
        assert len(asked[0].calls) == FAILURES + 2


async def test_encoder_cuts_off_endless_answer() -> None:
    async def endless(call: Call) -> None:
        await call.stream(*[b" " * (1 << 20)] * ((MAX_ANSWER >> 20) + 64), kind=b"application/json", end=False)

    async with engines(endless) as (encoder, _):
        with pytest.raises(Unavailable):
            await encoder.encode("tiny", HELLO, 100)


async def test_encoder_times_out_on_hanging_engine() -> None:
    async with engines(hang, timeout_s=0.05) as (encoder, _):
        with pytest.raises(Unavailable):
            await encoder.encode("tiny", HELLO, 100)


async def test_encoder_suspends_failing_engine_and_tries_once() -> None:
    now = 0.0
    async with engines(failing(500), clock=lambda: now) as (encoder, (engine,)):
        for _ in range(FAILURES + 5):
            with pytest.raises(Unavailable):
                await encoder.encode("tiny", HELLO, 100)
        assert len(engine.calls) == FAILURES
        now += OPEN_S
        engine.script = answering([5])
        assert (await encoder.encode("tiny", HELLO, 100)).tolist() == [5]
        assert (await encoder.encode("tiny", HELLO, 100)).tolist() == [5]


async def test_encoder_suspends_per_model() -> None:
    async def only_tiny(call: Call) -> None:
        await (answering([5]) if b'"tiny"' in call.body else failing(500))(call)

    async with engines(only_tiny) as (encoder, (engine,)):
        encoder._fleet.instances[0].models = frozenset({"tiny", "broken"})
        for _ in range(FAILURES + 2):
            with pytest.raises(Unavailable):
                await encoder.encode("broken", HELLO, 100)
        assert len(engine.calls) == FAILURES
        assert (await encoder.encode("tiny", HELLO, 100)).tolist() == [5]


async def test_encoder_is_unavailable_for_unserved_model() -> None:
    async with engines(answering([1])) as (encoder, (engine,)):
        with pytest.raises(Unavailable):
            await encoder.encode("other", HELLO, 100)
        assert engine.calls == []


async def test_encoder_reads_long_answer() -> None:
    ids = list(range(100_000))
    async with engines(answering(ids)) as (encoder, _):
        assert (await encoder.encode("tiny", HELLO, 500_000)).tolist() == ids


async def test_encoder_sends_long_prompt() -> None:
    text = "word " * 400_000
    async with engines(answering([1])) as (encoder, (engine,)):
        await encoder.encode("tiny", TextPrompt(text), 2_000_000)
        (call,) = engine.calls
        assert json.loads(call.body)["prompt"] == text
        assert call.values(b"content-length") == [b"%d" % len(call.body)]
