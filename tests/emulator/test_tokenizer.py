from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smetric.emulator import tokenizer

# Padding is made of zero bytes, so that a text that has its own comes back without them.
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@given(texts)
def test_a_text_comes_back_from_its_tokens(text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.count(tokens) == -(-len(text.encode()) // 4)


@given(texts)
def test_tokens_come_back_from_their_ids(text: str) -> None:
    tokens = tokenizer.encode(text)
    ids = tokenizer.to_ids(tokens)
    assert tokenizer.from_ids(ids) == tokens
    assert all(0 <= token < tokenizer.VOCABULARY for token in ids)


def test_markers_are_one_token_each_and_are_written_out() -> None:
    tokens = tokenizer.START + tokenizer.encode("user\n") + tokenizer.END
    assert tokenizer.decode(tokens) == "<|im_start|>user\n<|im_end|>"
    assert tokenizer.strings(tokens) == ["<|im_start|>", "user", "\n", "<|im_end|>"]
