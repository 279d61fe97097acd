from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smetric.lab.emulator import call

# Padding is made of zero bytes, so that a text that has its own comes back without them.
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@given(texts)
def test_a_text_comes_back_from_its_tokens(text: str) -> None:
    tokens = call.encode(text)
    assert call.decode(tokens) == text
    assert call.count(tokens) == -(-len(text.encode()) // 4)


@given(texts)
def test_tokens_come_back_from_their_ids(text: str) -> None:
    tokens = call.encode(text)
    ids = call.to_ids(tokens)
    assert call.from_ids(ids) == tokens
    assert all(0 <= token < call.VOCABULARY for token in ids)


def test_markers_are_one_token_each_and_are_written_out() -> None:
    tokens = call.START + call.encode("user\n") + call.END
    assert call.decode(tokens) == "<|im_start|>user\n<|im_end|>"
    assert call.strings(tokens) == ["<|im_start|>", "user", "\n", "<|im_end|>"]
