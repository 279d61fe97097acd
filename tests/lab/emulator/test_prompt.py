"""Tokenizer and chat template of the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.lab.emulator import instance
from smetric.lab.emulator import prompt as tokenizer
from smetric.lab.emulator.call import EmulatedCall, EngineError, EngineLimits, Fields, InvalidBodyError
from smetric.lab.emulator.completions import parse_chat
from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import EmulatedSettings
from smetric.lab.emulator.messages import parse_message
from smetric.lab.emulator.prompt import IMAGE_TOKENS, render
from smetric.lab.emulator.responses import ResponseStore
from smetric.request.request import Api
from smetric.sources.tokens.engine import EngineEncoder
from tests.sources.tokens.recorded import DATA, Recorded, ids_of, recorded

texts = st.text(st.characters(codec="utf-8"), max_size=30)


#: Padding is zero bytes, so decoding drops those of the text itself.
plain_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@given(plain_texts)
def test_tokenizer_decodes_what_it_encodes(text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.count(tokens) == -(-len(text.encode()) // 4)


@given(plain_texts)
def test_tokenizer_ids_convert_back_to_tokens(text: str) -> None:
    tokens = tokenizer.encode(text)
    ids = tokenizer.to_ids(tokens)
    assert tokenizer.from_ids(ids) == tokens
    assert all(0 <= token < tokenizer.VOCABULARY for token in ids)


def test_tokenizer_markers_are_single_tokens_and_are_written_out() -> None:
    tokens = tokenizer.START + tokenizer.encode("user\n") + tokenizer.END
    assert tokenizer.decode(tokens) == "<|im_start|>user\n<|im_end|>"
    assert tokenizer.strings(tokens) == ["<|im_start|>", "user", "\n", "<|im_end|>"]


def test_template_renders_tools_then_messages_in_order() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "f"}}
    assert tokenizer.decode(render(messages, [tool])) == (
        "<|im_start|>system\n# Tools\n"
        '{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}\n<|im_end|>\n'
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
@given(st.lists(texts, min_size=1, max_size=4), st.integers(1, 20), texts)
def test_template_prompt_and_reply_are_prefix_of_next_prompt(history: list[str], length: int, after: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": text} for text in history]
    prompt = render(messages)
    answer = instance.text(instance.digest(prompt, None, 0), length)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": after}]
    assert render(messages).startswith(prompt + answer.encode())


def test_template_joins_content_parts() -> None:
    parts = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}]
    assert render([{"role": "user", "content": parts}]) == render([{"role": "user", "content": "onetwo"}])


def test_template_image_tokens_depend_on_image_but_not_on_cache_marks() -> None:
    def prompt(url: str, **marks: Any) -> bytes:
        part = {"type": "image_url", "image_url": {"url": url}, **marks}
        return render([{"role": "user", "content": [part]}])

    assert len(prompt("a")) - len(render([{"role": "user", "content": None}])) == IMAGE_TOKENS * 4
    assert prompt("a") != prompt("b")
    assert prompt("a") == prompt("a", cache_control={"type": "ephemeral"})


def test_template_renders_tool_calls_without_ids() -> None:
    def prompt(identity: str, arguments: str) -> bytes:
        call = {"id": identity, "type": "function", "function": {"name": "f", "arguments": arguments}}
        return render([{"role": "assistant", "content": None, "tool_calls": [call]}])

    assert prompt("1", "{}") == prompt("2", "{}")
    assert prompt("1", "{}") == prompt("1", "[]")  # arguments are an object, or none
    assert prompt("1", "{}") != prompt("1", '{"a": 1}')


def test_template_errors_name_the_place() -> None:
    with pytest.raises(EngineError, match="empty conversation"):
        render([])
    with pytest.raises(InvalidBodyError, match=r"body\.messages\.0\.role"):
        render([{"content": "x"}])
    with pytest.raises(InvalidBodyError, match=r"body\.messages\.0\.content"):
        render([{"role": "user", "content": 5}])
    with pytest.raises(InvalidBodyError, match=r"body\.tools\.1\.function\.name"):
        render([{"role": "user", "content": ""}], [{"function": {"name": "f"}}, {"name": "g"}])


def test_template_leaves_last_message_open_on_request() -> None:
    messages = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "One, "}]
    assert tokenizer.decode(render(messages, is_open=True)).endswith("<|im_start|>assistant\nOne, ")


LIMITS = EngineLimits(("tiny",), 8192)
PARSERS: dict[Api, Callable[[Fields, EngineLimits], EmulatedCall]] = {
    Api.CHAT: parse_chat,
    Api.MESSAGES: parse_message,
    Api.RESPONSES: ResponseStore().parse,
}
#: Recorded conversations under the emulated chat template.
ROWS = [row for row in recorded("plain") if row.api in PARSERS]


def prompt_of(row: Recorded) -> bytes:
    """Return the emulated prompt of a recorded request."""
    return PARSERS[row.api](Fields({"max_tokens": 1, **row.body}), LIMITS).prompts[0]


@pytest.mark.parametrize("api", PARSERS)
def test_template_renders_recorded_requests_as_real_engine(api: Api) -> None:
    real = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    rows = [row for row in ROWS if row.api is api]
    assert len(rows) >= 20
    for row in rows:
        assert tokenizer.decode(prompt_of(row)) == real.decode(row.ids, skip_special_tokens=False), row.body


async def test_template_ids_equal_those_of_the_router() -> None:
    async with EmulatedFleet(1, EmulatedSettings(model="tiny")) as emulated:
        encoder = EngineEncoder(Fleet([Instance("a", emulated.urls[0])], VOCABULARY), timeout_s=10.0)
        await encoder.start()
        for row in ROWS:
            ids = await ids_of(encoder, row.api, row.body)
            assert ids is not None, row.body
            assert ids.tolist() == tokenizer.to_ids(prompt_of(row)), row.body
        await encoder.stop()
