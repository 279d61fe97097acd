from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.lab.emulator import call as tokenizer
from smetric.lab.emulator import instance
from smetric.lab.emulator.call import EngineError, InvalidBodyError
from smetric.lab.emulator.chat import IMAGE_TOKENS, render

texts = st.text(st.characters(codec="utf-8"), max_size=30)


def test_tools_come_first_then_the_messages_in_their_order() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "f"}}
    assert tokenizer.decode(render(messages, [tool])) == (
        "<|im_start|>system\n# Tools\n"
        '{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}\n<|im_end|>\n'
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
@given(st.lists(texts, min_size=1, max_size=4), st.integers(1, 20), texts)
def test_prompt_and_reply_are_a_prefix_of_the_next_turns_prompt(history: list[str], length: int, after: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": text} for text in history]
    prompt = render(messages)
    answer = instance.text(instance.digest(prompt, None, 0), length)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": after}]
    assert render(messages).startswith(prompt + answer.encode())


def test_content_in_parts_is_the_same_as_in_one_string() -> None:
    parts = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two"}]
    assert render([{"role": "user", "content": parts}]) == render([{"role": "user", "content": "onetwo"}])


def test_an_image_takes_its_room_and_differs_from_another_but_not_by_cache_marks() -> None:
    def prompt(url: str, **marks: Any) -> bytes:
        part = {"type": "image_url", "image_url": {"url": url}, **marks}
        return render([{"role": "user", "content": [part]}])

    assert len(prompt("a")) - len(render([{"role": "user", "content": None}])) == IMAGE_TOKENS * 4
    assert prompt("a") != prompt("b")
    assert prompt("a") == prompt("a", cache_control={"type": "ephemeral"})


def test_tool_calls_are_part_of_the_prompt_without_their_ids() -> None:
    def prompt(identity: str, arguments: str) -> bytes:
        call = {"id": identity, "type": "function", "function": {"name": "f", "arguments": arguments}}
        return render([{"role": "assistant", "content": None, "tool_calls": [call]}])

    assert prompt("1", "{}") == prompt("2", "{}")
    assert prompt("1", "{}") == prompt("1", "[]")  # arguments are an object, or none
    assert prompt("1", "{}") != prompt("1", '{"a": 1}')


def test_what_cannot_be_rendered_is_an_error_that_names_the_place() -> None:
    with pytest.raises(EngineError, match="empty conversation"):
        render([])
    with pytest.raises(InvalidBodyError, match=r"body\.messages\.0\.role"):
        render([{"content": "x"}])
    with pytest.raises(InvalidBodyError, match=r"body\.messages\.0\.content"):
        render([{"role": "user", "content": 5}])
    with pytest.raises(InvalidBodyError, match=r"body\.tools\.1\.function\.name"):
        render([{"role": "user", "content": ""}], [{"function": {"name": "f"}}, {"name": "g"}])


def test_the_last_message_may_be_left_open() -> None:
    messages = [{"role": "user", "content": "go on"}, {"role": "assistant", "content": "One, "}]
    assert tokenizer.decode(render(messages, is_open=True)).endswith("<|im_start|>assistant\nOne, ")
