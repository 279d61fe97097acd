"""Token ids of requests: sharing, limits, ids as prompts, trust, template traits."""

from __future__ import annotations

import asyncio
import re
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.config import Settings
from smetric.config.settings import KvEventsSettings, TokenizerSettings
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.log_limit import LogLimit
from smetric.names import TOKENIZE_RESULTS
from smetric.request.request import Api, InferenceRequest, Usage
from smetric.sources.tokens import request_tokens as module
from smetric.sources.tokens.chat import ChatPrompt, Refused, TextPrompt, Unavailable
from smetric.sources.tokens.local import ANY_MODEL, LocalEncoder
from smetric.sources.tokens.request_tokens import (
    DISTRUST_S,
    MAX_BODY,
    MAX_COMMAS,
    MOST_AT_A_TIME,
    MOST_DIFFERENT,
    PIECE_BYTES,
    TTL_S,
    USELESS_AFTER,
    RequestTokens,
    TemplateTraits,
    Trust,
    body_of_ids,
    request_tokens,
)
from smetric.telemetry.metrics import Metrics
from tests.fakes import until
from tests.sources.tokens.recorded import model_folder, request_of, tokens_of

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
        self.asked: list[TextPrompt | ChatPrompt] = []

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def encode(self, model: str, prompt: TextPrompt | ChatPrompt, size: int) -> array[int]:
        self.asked.append(prompt)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.ids


def turn_2() -> InferenceRequest:
    return request_of(Api.CHAT, TURN_2)


async def test_request_tokens_encode_once_for_all_callers() -> None:
    encoder = FakeEncoder()
    tokens, request = tokens_of(encoder), turn_2()
    found = await asyncio.gather(*(tokens.of(request) for _ in range(3)))
    assert found == [IDS] * 3
    assert await tokens.of(request) is IDS
    assert len(encoder.asked) == 1


async def test_request_tokens_replace_estimated_lengths() -> None:
    request = turn_2()
    prompt = request.prompt
    assert prompt is not None
    share = prompt.history_bytes / prompt.size
    await tokens_of(FakeEncoder()).of(request)
    assert request.prompt_len == 1000
    assert request.est_hit == int(1000 * share) // 16 * 16
    assert prompt.counted
    assert prompt.tokens(prompt.size) == 1000, "sources that go by bytes count by the same tokens"


async def test_request_tokens_keep_late_ids_for_next_caller() -> None:
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


async def test_request_tokens_name_a_tokenizer_that_is_always_late(capsys: pytest.CaptureFixture[str]) -> None:
    encoder, results = FakeEncoder(), list[str]()
    encoder.gate.clear()
    tokens = tokens_of(encoder, results)
    for number in range(USELESS_AFTER + 1):
        request = turn_2()
        ids = tokens.begin(request)
        assert ids is not None
        tokens.late(request)
        encoder.gate.set()
        await ids
        encoder.gate.clear()
        tokens.late(request)  # too late itself: the ids are there
        if number == 0:
            tokens._log_limit = LogLimit(lines=1000)
    lines = [line for line in capsys.readouterr().out.splitlines() if "smetric.tokenize.late" in line]
    assert results == ["late"] * len(lines) == ["late"] * (USELESS_AFTER + 1)
    assert [re.findall(r"is_useless[^TFtf]*(\w)", line)[0].lower() for line in lines[-3:]] == ["f", "t", "t"]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_request_tokens_forget_late_task_that_ended(is_cancelled: bool) -> None:
    encoder, request = FakeEncoder(), turn_2()
    tokens = RequestTokens(
        encoder,
        block_size=16,
        # Called after the end of the task and before its callbacks.
        on_result=lambda *_: asyncio.get_running_loop().call_soon(tokens.late, request),  # type: ignore[arg-type]
        on_compared=lambda _: None,
    )
    if is_cancelled:
        encoder.gate.clear()
    tokens.begin(request)
    await until(lambda: len(encoder.asked) == 1)
    if is_cancelled:
        tokens.late(request)
        await tokens.stop()
    assert request.tokenising is not None
    await asyncio.wait([request.tokenising])
    assert (tokens._late, tokens._running) == (set(), set())


async def test_request_tokens_continue_when_a_caller_gives_up() -> None:
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
async def test_request_tokens_do_not_retry_failed_prompt(error: Exception, result: str) -> None:
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
async def test_request_tokens_refuse_what_only_engines_look_into(tmp_path: Path, more: bytes) -> None:
    messages = b"" if b'"messages"' in more else b'"messages":[{"role":"user","content":"q"}],'
    request = InferenceRequest(api=Api.CHAT, model="tiny", body=b'{"model":"tiny",%b%b}' % (messages, more))
    results: list[str] = []
    encoder = LocalEncoder({"*": model_folder(tmp_path, "plain")}, max_bytes=1 << 20)
    assert await tokens_of(encoder, results).of(request) is None
    await encoder.stop()
    assert results == ["refused"]


async def test_request_tokens_refuse_prompt_without_tokens(tmp_path: Path) -> None:
    results: list[str] = []
    for encoder in (FakeEncoder(array("I")), LocalEncoder({"*": model_folder(tmp_path, "plain")}, max_bytes=1 << 20)):
        request = request_of(Api.COMPLETIONS, {"model": "tiny", "prompt": ""})
        assert await tokens_of(encoder, results).of(request) is None
        assert request.prompt_len == 1
    assert results == ["refused"] * 2


async def test_request_tokens_results_are_all_named() -> None:
    results: list[str] = []
    for error in (Unavailable(), Refused(), ValueError(), None):
        encoder = FakeEncoder()
        encoder.error = error
        await tokens_of(encoder, results).of(turn_2())
    assert {*results, "busy", "distrusted", "unsupported", "late"} == set(TOKENIZE_RESULTS)


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
async def test_request_tokens_do_not_support_what_only_engine_knows(api: Api, body: dict[str, Any]) -> None:
    results: list[str] = []
    encoder = FakeEncoder()
    assert await tokens_of(encoder, results).of(request_of(api, body)) is None
    assert results == ["unsupported"]
    assert encoder.asked == []


async def test_request_tokens_are_unknown_for_stored_response() -> None:
    request = request_of(Api.RESPONSES, {"input": "q", "previous_response_id": "resp_1"})
    assert await tokens_of(FakeEncoder()).of(request) is None


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7], [8]]])
async def test_request_tokens_read_ids_without_encoder(prompt: list[Any]) -> None:
    ids = await tokens_of(None).of(request_of(Api.COMPLETIONS, {"prompt": prompt}))
    assert ids is not None
    assert ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("prompt", [[5, -1], [5, 1 << 32], [5, "x"], [5, 1.5], [True, []]])
async def test_request_tokens_are_unknown_for_invalid_ids(prompt: list[Any]) -> None:
    assert await tokens_of(None).of(request_of(Api.COMPLETIONS, {"prompt": prompt})) is None


async def test_request_tokens_are_unknown_without_encoder() -> None:
    results: list[str] = []
    assert await tokens_of(None, results).of(turn_2()) is None
    assert results == []


async def test_request_tokens_encode_first_of_several_texts() -> None:
    request = request_of(Api.COMPLETIONS, {"prompt": ["first " * 100, "second " * 100]})
    estimated = request.prompt_len
    encoder = FakeEncoder()
    assert await tokens_of(encoder).of(request) is IDS
    assert encoder.asked == [TextPrompt("first " * 100)]
    assert request.prompt_len == estimated


async def test_request_tokens_do_not_support_too_large_body() -> None:
    results: list[str] = []
    request = request_of(Api.COMPLETIONS, {"prompt": "x" * MAX_BODY})
    assert await tokens_of(FakeEncoder(), results).of(request) is None
    assert results == ["unsupported"]


@pytest.mark.parametrize("is_text", [False, True])
async def test_request_tokens_do_not_support_too_many_numbers(
    is_text: bool,
) -> None:
    numbers = "1," * MAX_COMMAS + '1,\\"\\\\'
    results: list[str] = []
    body: dict[str, Any] = {"messages": [{"role": "user", "content": numbers if is_text else "x"}]}
    if not is_text:
        body["tools"] = [{"enum": [1] * (MAX_COMMAS + 2)}]
    await tokens_of(FakeEncoder(), results).of(request_of(Api.CHAT, body))
    assert results == ["ok" if is_text else "unsupported"]


async def test_request_tokens_are_unknown_when_busy() -> None:
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


async def test_request_tokens_stop_cancels_encoding() -> None:
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
        self.distrusted: list[str] = []
        self.results: list[str] = []
        self.tokens = RequestTokens(
            FakeEncoder(),
            block_size=16,
            on_result=lambda result, _: self.results.append(result),
            on_compared=self.compared.append,
            on_distrusted=self.distrusted.append,
            clock=lambda: self.now,
        )

    async def answer(self, counted: int | None) -> array[int] | None:
        request = turn_2()
        ids = await self.tokens.of(request)
        self.tokens.answered(request, Usage(counted, 1, None))
        return ids


async def test_request_tokens_distrust_model_with_wrong_counts() -> None:
    counted = Counted()
    for _ in range(MOST_DIFFERENT):
        assert await counted.answer(999) is IDS
    assert await counted.answer(1000) is None
    assert counted.results[-1] == "distrusted"
    assert counted.compared == [False] * MOST_DIFFERENT
    assert counted.distrusted == ["tiny"]
    counted.now += DISTRUST_S
    assert await counted.answer(1000) is IDS
    assert counted.compared[-1] is True


async def test_request_tokens_keep_nothing_after_exchange() -> None:
    request = turn_2()
    await tokens_of(FakeEncoder()).of(request)
    request.let_go()
    assert (request.body, request.prompt, request.tokenising, request.token_ids) == (None, None, None, None)
    assert "xxx" not in repr(request)
    assert await tokens_of(FakeEncoder()).of(request) is None


def built(make: Callable[[], TokenizerSettings]) -> RequestTokens:
    return request_tokens(Settings(tokenizer=make()), Fleet([], VOCABULARY), Metrics())


async def test_settings_choose_the_encoder() -> None:
    request = turn_2()
    assert await built(TokenizerSettings).of(request) is None
    engine = built(lambda: TokenizerSettings(source="engine"))
    await engine.start()
    assert await engine.of(request) is None, "there is no instance to ask"
    assert request.tokenising is not None
    await engine.stop()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read"):
        built(lambda: TokenizerSettings(source="local", folders={"*": "/nowhere"}))


@pytest.mark.parametrize("has_package", [True, False])
async def test_settings_choose_files_by_themselves_if_a_source_needs_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_package: bool
) -> None:
    folders = {"tiny": str(model_folder(tmp_path, "plain"))}
    needing = Settings(kv_events=KvEventsSettings(enabled=True), tokenizer=TokenizerSettings(folders=folders))
    if not has_package:
        monkeypatch.setitem(sys.modules, "smetric.sources.tokens.local", None)
    made = request_tokens(needing, Fleet([], VOCABULARY), Metrics())
    await made.start()
    by_engines, request = await made.of(turn_2()), turn_2()  # the first request begins to look for files
    await asyncio.sleep(0)
    found = await made.of(request)
    await made.stop()
    assert by_engines is None, "there is no instance to ask"
    assert (found is not None and len(found) > 100) is has_package


def test_local_encoder_without_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smetric.sources.tokens.local", None)
    with pytest.raises(ConfigError, match=r"pip install 'smetric-router\[tokenizers\]'"):
        built(lambda: TokenizerSettings(source="local", folders={"*": "/nowhere"}))


ID = st.integers(0, 2**32 - 1)


@given(st.lists(ID), st.booleans(), st.sampled_from([None, 1]), st.integers(1, 8))
def test_body_of_ids_reads_first_list_in_any_pieces(
    ids: list[int], is_nested: bool, indent: int | None, piece: int
) -> None:
    prompt = [ids, [7]] if is_nested and ids else ids
    body = msgspec.json.format(msgspec.json.encode({"prompt": prompt, "echo": True}), indent=indent or -1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "PIECE_BYTES", piece)
        found = asyncio.run(body_of_ids(body))
    assert (found["prompt"].tolist(), found["echo"]) == (ids, True)


@pytest.mark.parametrize("wrong", ["-1", str(1 << 32), '"x"', "1.5", "[]", "null"])
async def test_body_of_ids_refuses_invalid_id(wrong: str) -> None:
    with pytest.raises(Refused):
        await body_of_ids(b'{"prompt": [%b%b]}' % (b"5, " * PIECE_BYTES, wrong.encode()))


async def test_body_of_ids_yields_within_long_list() -> None:
    reading = asyncio.create_task(body_of_ids(b'{"prompt": [%b5]}' % (b"5, " * PIECE_BYTES)))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert len((await reading)["prompt"]) == PIECE_BYTES + 1
    assert turns >= 3


@pytest.mark.parametrize(
    ("counts", "believed"),
    [
        ([11] * (MOST_DIFFERENT - 1), True),
        ([11] * MOST_DIFFERENT, False),
        ([11, 11, 10, 11, 11], True),
        ([11] * MOST_DIFFERENT + [None], True),
        ([11] * MOST_DIFFERENT + [None, 11], False),
        ([11] * MOST_DIFFERENT + [None, 11, None, 10, 11], True),
        ([11] * (MOST_DIFFERENT + 1) + [None], True),
    ],
    ids=["few", "several", "equal between", "later", "once more", "equal again", "a late answer delays nothing"],
)
def test_trust_ends_for_a_while_after_several_differences_in_a_row(counts: list[int | None], believed: bool) -> None:
    """None lets the time of distrust pass."""
    now = 0.0
    trust = Trust(clock=lambda: now)
    for number, counted in enumerate(counts):
        if counted is None:
            now = (now // DISTRUST_S + 1) * DISTRUST_S
        else:
            assert trust.compare("m", 10, counted) is (counted == 10)
            now += number == MOST_DIFFERENT - 1
    assert trust.believes("m") is believed
    assert trust.believes("another")


class Template:
    """An encoder whose template refuses the efforts in `refused` and gives those in `ids` the ids named there."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.refused: set[str] = set()
        self.is_away = False
        self.asked = 0

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def encode(self, model: str, prompt: TextPrompt | ChatPrompt, size: int) -> array[int]:
        self.asked += 1
        if self.is_away:
            raise Unavailable
        assert isinstance(prompt, ChatPrompt)
        effort = prompt.template_kwargs.get("reasoning_effort", "")
        if effort in self.refused:
            raise Refused
        return array("I", [self.ids.get(effort, 0)])


@pytest.mark.parametrize(("template", "merges"), [("plain", False), ("thinking", True)])
async def test_traits_merge_system_messages_for_strict_templates(tmp_path: Path, template: str, merges: bool) -> None:
    encoder = LocalEncoder({ANY_MODEL: model_folder(tmp_path, template)}, max_bytes=1 << 20)
    assert await TemplateTraits(encoder).merges_inline_system("tiny") is merges
    await encoder.stop()


@pytest.mark.parametrize(
    ("ids", "refused", "effort"),
    [
        ({"none": 1}, set(), "none"),
        ({}, set(), "low"),
        ({"none": 1, "max": 1}, set(), "low"),
        ({"none": 1}, {"none"}, "low"),
        ({"none": 1}, {"xhigh", "max"}, "none"),
    ],
)
async def test_traits_disabled_effort_follows_the_template(ids: dict[str, int], refused: set[str], effort: str) -> None:
    template = Template()
    template.ids, template.refused = ids, refused
    assert await TemplateTraits(template).disabled_effort("m") == effort


async def test_traits_are_cached() -> None:
    now = 0.0
    template = Template()
    traits = TemplateTraits(template, clock=lambda: now)
    await traits.merges_inline_system("m")
    await traits.disabled_effort("m")
    asked = template.asked
    template.refused = {"", "none"}
    assert await traits.merges_inline_system("m") is False
    await traits.disabled_effort("m")
    assert template.asked == asked
    now += TTL_S
    assert await traits.merges_inline_system("m") is True
    assert await traits.disabled_effort("m") == "low"


async def test_traits_are_unavailable_without_engine() -> None:
    template = Template()
    traits = TemplateTraits(template)
    template.is_away = True
    with pytest.raises(Unavailable):
        await traits.merges_inline_system("m")
    with pytest.raises(Unavailable):
        await traits.disabled_effort("m")
    template.is_away = False
    assert await traits.merges_inline_system("m") is False
