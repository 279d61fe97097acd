"""Ids put together from remembered segments are those of the whole text, with tokenizers of several makes."""

from __future__ import annotations

import sysconfig
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from smetric.sources.tokens.local import CachedTokenizer

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|im", "<tool_call>", "</tool_call>", "<s>"]
ROOM = 1 << 20


def trained(pre_tokenizer: object, normalizer: object = None, *added: AddedToken) -> Tokenizer:
    """A BPE trained on a few files of the standard library."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer  # type: ignore[assignment]
    if normalizer is not None:
        tokenizer.normalizer = normalizer  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<unk>", *SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_path("stdlib"))
    tokenizer.train([str(library / name) for name in ("bisect.py", "heapq.py", "textwrap.py")], trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def byte_level() -> Tokenizer:
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False))


def prefixed_byte_level() -> Tokenizer:
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=True))


def metaspace_first() -> Tokenizer:
    return trained(pre_tokenizers.Metaspace(prepend_scheme="first"))


def metaspace_always() -> Tokenizer:
    return trained(pre_tokenizers.Metaspace(prepend_scheme="always"), normalizers.NFC())


def prepending() -> Tokenizer:
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), prepend)


def stripping() -> Tokenizer:
    return trained(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        None,
        AddedToken("<|user|>", rstrip=True, normalized=False),
        AddedToken("<mask>", lstrip=True, normalized=False),
        AddedToken("plain", normalized=True),
    )


MAKES: list[Callable[[], Tokenizer]] = [
    byte_level,
    prefixed_byte_level,
    metaspace_first,
    metaspace_always,
    prepending,
    stripping,
]


@cache
def pair(make: Callable[[], Tokenizer]) -> tuple[CachedTokenizer, Tokenizer]:
    """A tokenizer that remembers, and the same one that does not."""
    whole = make()
    return CachedTokenizer(Tokenizer.from_str(whole.to_str()), max_bytes=ROOM), whole


#: What tokenizers treat apart, side by side: special tokens, their beginnings and ends, blanks, words.
PIECES = [*SPECIALS, "<|user|>", "<mask>", "plain", "user\n", "  ", " ", "\n\n", "<|", "|>", "im_end", "é", "🚀", "12"]
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=40).map("".join),
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=12)), max_size=24).map("".join),
)


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
@example(texts=["a  <mask> b", "<|user|>  \n<s> x <mask>"])
@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
@settings(max_examples=150)
def test_ids_are_those_of_the_whole_text(make: Callable[[], Tokenizer], texts: list[str]) -> None:
    cached, whole = pair(make)
    assert cached.remembers
    growing = ""
    for text in texts:  # each a prefix of the next, as turns are
        growing += text
        assert (
            cached.encode(growing, add_special_tokens=False).tolist()
            == whole.encode(growing, add_special_tokens=False).ids
        )


@given(text=TEXTS)
@settings(max_examples=60)
def test_what_the_tokenizer_adds_around_a_text_is_added(text: str) -> None:
    cached, whole = surrounded()
    for add in (True, False):
        expected = whole.encode(text, add_special_tokens=add).ids
        assert cached.encode(text, add_special_tokens=add).tolist() == expected


@cache
def surrounded() -> tuple[CachedTokenizer, Tokenizer]:
    tokenizer = byte_level()
    bos, eos = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("<|im_end|>")
    assert bos is not None
    assert eos is not None
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=[("<s>", bos), ("<|im_end|>", eos)]
    )
    return CachedTokenizer(Tokenizer.from_str(tokenizer.to_str()), max_bytes=ROOM), tokenizer


def counted(cached: CachedTokenizer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The segments that *cached* really encodes from now on."""
    encoded: list[str] = []
    real = cached._tokenizer

    class Counting:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> object:
            encoded.extend(texts)
            return real.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(cached, "_tokenizer", Counting())
    return encoded


def turn(number: int) -> str:
    return f"<|im_start|>user\nquestion {number}<|im_end|>\n<|im_start|>assistant\nanswer {number}<|im_end|>\n"


def test_a_follow_up_encodes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = CachedTokenizer(byte_level(), max_bytes=ROOM)
    encoded = counted(cached, monkeypatch)
    system = "<|im_start|>system\n" + "Be terse. " * 100 + "<|im_end|>\n"
    cached.encode(system + turn(1), add_special_tokens=False)
    encoded.clear()
    cached.encode(system + turn(1) + turn(2), add_special_tokens=False)
    assert encoded == ["<|im_start|>user\nquestion 2", "<|im_start|>assistant\nanswer 2"]
    encoded.clear()
    cached.encode(system + turn(3), add_special_tokens=False)
    assert "".join(encoded).count("terse") == 0, "another session shares the system prompt"


def test_memory_is_bounded_and_what_is_forgotten_is_encoded_again() -> None:
    cached = CachedTokenizer(byte_level(), max_bytes=5000)
    first = cached.encode(turn(0), add_special_tokens=False)
    for number in range(1, 50):
        cached.encode(turn(number), add_special_tokens=False)
        assert cached.memory_bytes <= 5000
    assert cached.encode(turn(0), add_special_tokens=False) == first
    large = "<|im_start|>" + "word " * 5000
    assert len(cached.encode(large, add_special_tokens=False)) > 5000
    assert cached.memory_bytes <= 5000


def test_a_tokenizer_whose_tokens_must_stand_alone_is_not_remembered() -> None:
    tokenizer = trained(
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        None,
        AddedToken("alone", single_word=True, normalized=False),
    )
    cached = CachedTokenizer(Tokenizer.from_str(tokenizer.to_str()), max_bytes=ROOM)
    text = "<|im_start|>alone<|im_end|> alone aloned"
    assert not cached.remembers
    assert (
        cached.encode(text, add_special_tokens=False).tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    )


def test_truncation_and_padding_of_the_file_do_not_count() -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    cached = CachedTokenizer(tokenizer, max_bytes=ROOM)
    assert 4 < len(cached.encode("def main(path): return 1", add_special_tokens=False)) < 64


def test_threads_get_the_same_ids() -> None:
    cached = CachedTokenizer(byte_level(), max_bytes=20_000)
    texts = ["".join(turn(n) for n in range(start, start + 20)) for start in range(8)]
    expected = [cached.encode(text, add_special_tokens=False) for text in texts]
    wrong: list[str] = []

    def work() -> None:
        wrong.extend(
            text
            for _ in range(5)
            for text, ids in zip(texts, expected, strict=True)
            if cached.encode(text, add_special_tokens=False) != ids
        )

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
