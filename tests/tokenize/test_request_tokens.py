"""What sources get when they ask for a request's ids: once encoded, shared, exact or nothing."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smetric.config import Settings
from smetric.config.settings import TokenizerSettings
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.names import TOKENIZE_RESULTS
from smetric.request.request import Api, InferenceRequest, Usage
from smetric.sources.tokens.chat import Chat, Refused, Text, Unavailable
from smetric.sources.tokens.local import LocalEncoder
from smetric.sources.tokens.request_tokens import (
    DISTRUST_S,
    MAX_BODY,
    MAX_COMMAS,
    MOST_AT_A_TIME,
    MOST_DIFFERENT,
    RequestTokens,
    request_tokens,
)
from smetric.telemetry.metrics import Metrics
from tests.fakes import until
from tests.tokenize.recorded import model_folder, request_of, tokens_of

TURN_2 = {
    "model": "tiny",
    "messages": [
        {"role": "user", "content": "x" * 600},
        {"role": "assistant", "content": "y" * 200},
        {"role": "user", "content": "z" * 200},
    ],
}
IDS = array("I", range(1000))


class FakeEncoder:
    """Answers with `ids`, or raises `error`, once `gate` is open."""

    def __init__(self, ids: array[int] = IDS) -> None:
        self.ids = ids
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[Text | Chat] = []

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def encode(self, model: str, prompt: Text | Chat, size: int) -> array[int]:
        self.asked.append(prompt)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.ids


def turn_2() -> InferenceRequest:
    return request_of(Api.CHAT, TURN_2)


async def test_callers_share_one_encoding() -> None:
    encoder = FakeEncoder()
    tokens, request = tokens_of(encoder), turn_2()
    found = await asyncio.gather(*(tokens.of(request) for _ in range(3)))
    assert found == [IDS] * 3
    assert await tokens.of(request) is IDS
    assert len(encoder.asked) == 1


async def test_lengths_are_counted_by_the_ids_from_then_on() -> None:
    request = turn_2()
    prompt = request.prompt
    assert prompt is not None
    share = prompt.history_bytes / prompt.size
    await tokens_of(FakeEncoder()).of(request)
    assert request.prompt_len == 1000
    assert request.est_hit == int(1000 * share) // 16 * 16
    assert prompt.counted
    assert prompt.tokens(prompt.size) == 1000, "sources that go by bytes count by the same tokens"


async def test_ids_that_come_too_late_change_nothing_but_serve_the_next_who_asks() -> None:
    encoder = FakeEncoder()
    encoder.gate.clear()
    tokens, request = tokens_of(encoder), turn_2()
    estimated = request.prompt_len, request.est_hit
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await tokens.of(request)
    encoder.gate.set()
    assert request.tokenising is not None
    await request.tokenising
    assert (request.prompt_len, request.est_hit, request.token_ids) == (*estimated, None)
    assert await tokens.of(request) is IDS
    assert len(encoder.asked) == 1


async def test_who_gives_up_does_not_stop_the_others() -> None:
    encoder = FakeEncoder()
    encoder.gate.clear()
    tokens, request = tokens_of(encoder), turn_2()
    leaving, staying = (asyncio.create_task(tokens.of(request)) for _ in range(2))
    await until(lambda: len(encoder.asked) == 1)
    leaving.cancel()
    encoder.gate.set()
    assert await staying is IDS
    assert leaving.cancelled() or leaving.cancelling()


@pytest.mark.parametrize(
    ("error", "result"),
    [(Unavailable(), "unavailable"), (Refused(), "refused"), (RuntimeError("a fault"), "failed")],
)
async def test_what_cannot_be_encoded_is_unknown_and_not_tried_again(error: Exception, result: str) -> None:
    encoder, results = FakeEncoder(), list[str]()
    encoder.error = error
    tokens, request = tokens_of(encoder, results), turn_2()
    assert [await tokens.of(request), await tokens.of(request)] == [None, None]
    assert results == [result]
    assert len(encoder.asked) == 1
    assert request.token_ids is None


#: Deeper than any version of Python goes.
DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    "more",
    [
        b'"tools":[{"type":"function","function":{"name":"f","parameters":{"x":%b}}}]' % DEEP,
        b'"seed":' + b"9" * 5000,
        b'"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":\\"\\\\ud83d\\"}"}}]}]',
    ],
    ids=["too deep", "too long a number", "half a surrogate pair"],
)
async def test_what_only_an_engine_looks_into_and_refuses_is_refused(tmp_path: Path, more: bytes) -> None:
    messages = b"" if b'"messages"' in more else b'"messages":[{"role":"user","content":"q"}],'
    request = InferenceRequest(api=Api.CHAT, model="tiny", body=b'{"model":"tiny",%b%b}' % (messages, more))
    results: list[str] = []
    encoder = LocalEncoder({"*": model_folder(tmp_path, "plain")}, max_bytes=1 << 20)
    assert await tokens_of(encoder, results).of(request) is None
    await encoder.stop()
    assert results == ["refused"]


async def test_a_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    results: list[str] = []
    for encoder in (FakeEncoder(array("I")), LocalEncoder({"*": model_folder(tmp_path, "plain")}, max_bytes=1 << 20)):
        request = request_of(Api.COMPLETIONS, {"model": "tiny", "prompt": ""})
        assert await tokens_of(encoder, results).of(request) is None
        assert request.prompt_len == 1
    assert results == ["refused"] * 2


async def test_every_result_is_in_the_table() -> None:
    results: list[str] = []
    for error in (Unavailable(), Refused(), ValueError(), None):
        encoder = FakeEncoder()
        encoder.error = error
        await tokens_of(encoder, results).of(turn_2())
    assert {*results, "busy", "distrusted", "unsupported"} == set(TOKENIZE_RESULTS)


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (Api.CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
        (Api.CHAT, {"messages": [{"role": "user", "content": "q"}], "truncate_prompt_tokens": 5}),
        (Api.COMPLETIONS, {"prompt": "q", "truncate_prompt_tokens": -1}),
        (Api.MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {"data": "x"}}]}]}),
        (Api.RESPONSES, {"input": "q", "truncation": "auto"}),
        (Api.RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
    ],
)
async def test_what_only_the_engine_can_know_is_unsupported(api: Api, body: dict[str, Any]) -> None:
    results: list[str] = []
    encoder = FakeEncoder()
    assert await tokens_of(encoder, results).of(request_of(api, body)) is None
    assert results == ["unsupported"]
    assert encoder.asked == []


async def test_a_response_that_continues_a_stored_one_is_unknown() -> None:
    request = request_of(Api.RESPONSES, {"input": "q", "previous_response_id": "resp_1"})
    assert await tokens_of(FakeEncoder()).of(request) is None


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8]]])
async def test_a_prompt_that_came_as_ids_needs_no_encoder(prompt: list[Any]) -> None:
    ids = await tokens_of(None).of(request_of(Api.COMPLETIONS, {"prompt": prompt}))
    assert ids is not None
    assert ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("prompt", [[5, -1], [5, 1 << 32], [5, "x"], [5, 1.5], [True, []]])
async def test_what_is_no_token_id_is_unknown(prompt: list[Any]) -> None:
    assert await tokens_of(None).of(request_of(Api.COMPLETIONS, {"prompt": prompt})) is None


async def test_without_an_encoder_the_others_have_none() -> None:
    results: list[str] = []
    assert await tokens_of(None, results).of(turn_2()) is None
    assert results == []


async def test_of_several_texts_the_first_is_encoded_and_the_length_stays_theirs() -> None:
    request = request_of(Api.COMPLETIONS, {"prompt": ["first " * 100, "second " * 100]})
    estimated = request.prompt_len
    encoder = FakeEncoder()
    assert await tokens_of(encoder).of(request) is IDS
    assert encoder.asked == [Text("first " * 100)]
    assert request.prompt_len == estimated


async def test_a_body_too_large_to_be_decoded_is_unsupported() -> None:
    results: list[str] = []
    request = request_of(Api.COMPLETIONS, {"prompt": "x" * MAX_BODY})
    assert await tokens_of(FakeEncoder(), results).of(request) is None
    assert results == ["unsupported"]


@pytest.mark.parametrize("is_text", [False, True])
async def test_a_body_of_hundreds_of_thousands_of_numbers_is_unsupported_and_a_text_of_them_is_not(
    is_text: bool,
) -> None:
    numbers = "1," * MAX_COMMAS + '1,\\"\\\\'
    results: list[str] = []
    body: dict[str, Any] = {"messages": [{"role": "user", "content": numbers if is_text else "x"}]}
    if not is_text:
        body["tools"] = [{"enum": [1] * (MAX_COMMAS + 2)}]
    await tokens_of(FakeEncoder(), results).of(request_of(Api.CHAT, body))
    assert results == ["ok" if is_text else "unsupported"]


async def test_more_than_can_be_encoded_at_a_time_are_unknown_at_once() -> None:
    encoder, results = FakeEncoder(), list[str]()
    encoder.gate.clear()
    tokens = tokens_of(encoder, results)
    waiting = [asyncio.create_task(tokens.of(turn_2())) for _ in range(MOST_AT_A_TIME)]
    await until(lambda: len(encoder.asked) == MOST_AT_A_TIME)
    one_more = turn_2()
    assert [await tokens.of(one_more), await tokens.of(one_more)] == [None, None]
    late = tokens.begin(one_more)
    assert late is not None
    assert await late is None
    assert results == ["busy"], "a prompt is counted once, however many ask for its ids"
    encoder.gate.set()
    assert await asyncio.gather(*waiting) == [IDS] * MOST_AT_A_TIME


async def test_stopping_gives_up_what_is_being_encoded() -> None:
    encoder = FakeEncoder()
    encoder.gate.clear()
    tokens = tokens_of(encoder)
    waiting = asyncio.create_task(tokens.of(turn_2()))
    await until(lambda: len(encoder.asked) == 1)
    await tokens.stop()
    with pytest.raises(asyncio.CancelledError):
        await waiting


class Counted:
    """Ids checked against what engines count, on a clock that stands still."""

    def __init__(self) -> None:
        self.now = 0.0
        self.compared: list[bool] = []
        self.results: list[str] = []
        self.tokens = RequestTokens(
            FakeEncoder(),
            block_size=16,
            on_result=lambda result, _: self.results.append(result),
            on_compared=self.compared.append,
            clock=lambda: self.now,
        )

    async def answer(self, counted: int | None) -> array[int] | None:
        request = turn_2()
        ids = await self.tokens.of(request)
        self.tokens.answered(request, Usage(counted, 1, None))
        return ids


async def test_a_model_whose_ids_are_not_as_many_as_its_engine_counts_is_not_believed_for_a_while() -> None:
    counted = Counted()
    for _ in range(MOST_DIFFERENT):
        assert await counted.answer(999) is IDS
    assert await counted.answer(1000) is None
    assert counted.results[-1] == "distrusted"
    assert counted.compared == [False] * MOST_DIFFERENT
    counted.now += DISTRUST_S
    assert await counted.answer(1000) is IDS
    assert counted.compared[-1] is True


async def test_equal_numbers_in_between_keep_a_model_believed() -> None:
    counted = Counted()
    for number in (999, 999, 1000, 999, 999, None):
        assert await counted.answer(number) is IDS
    assert counted.compared == [False, False, True, False, False]


async def test_a_finished_exchange_keeps_nothing_of_the_prompt() -> None:
    request = turn_2()
    await tokens_of(FakeEncoder()).of(request)
    request.let_go()
    assert (request.body, request.prompt, request.tokenising, request.token_ids) == (None, None, None, None)
    assert "xxx" not in repr(request)
    assert await tokens_of(FakeEncoder()).of(request) is None


def built(make: Callable[[], TokenizerSettings]) -> RequestTokens:
    return request_tokens(Settings(tokenizer=make()), Fleet([], VOCABULARY), Metrics())


async def test_the_settings_choose_the_encoder() -> None:
    request = turn_2()
    assert await built(TokenizerSettings).of(request) is None
    engine = built(lambda: TokenizerSettings(source="engine"))
    await engine.start()
    assert await engine.of(request) is None, "there is no instance to ask"
    assert request.tokenising is not None
    await engine.stop()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read"):
        built(lambda: TokenizerSettings(source="local", folders={"*": "/nowhere"}))


def test_local_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smetric.sources.tokens.local", None)
    with pytest.raises(ConfigError, match=r"pip install 'smetric-router\[tokenizers\]'"):
        built(lambda: TokenizerSettings(source="local", folders={"*": "/nowhere"}))
