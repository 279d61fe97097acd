"""Tokenisation in this process: segment cache, model folders, threads."""

from __future__ import annotations

import json
import os
import sysconfig
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from smetric.errors import ConfigError
from smetric.request.request import Api
from smetric.sources.tokens.chat import ChatPrompt, Refused, TextPrompt, Unsupported
from smetric.sources.tokens.local import ANY_MODEL, INLINE_BYTES, CachedTokenizer, LocalEncoder, ModelFolder
from tests.sources.tokens.recorded import TEMPLATES, ids_of, model_folder, recorded

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
def test_tokenizer_cache_gives_ids_of_whole_text(make: Callable[[], Tokenizer], texts: list[str]) -> None:
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
def test_tokenizer_cache_adds_special_tokens_around_text(text: str) -> None:
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


def test_tokenizer_cache_encodes_only_new_text_of_follow_up(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_tokenizer_cache_is_bounded() -> None:
    cached = CachedTokenizer(byte_level(), max_bytes=5000)
    first = cached.encode(turn(0), add_special_tokens=False)
    for number in range(1, 50):
        cached.encode(turn(number), add_special_tokens=False)
        assert cached.memory_bytes <= 5000
    assert cached.encode(turn(0), add_special_tokens=False) == first
    large = "<|im_start|>" + "word " * 5000
    assert len(cached.encode(large, add_special_tokens=False)) > 5000
    assert cached.memory_bytes <= 5000


def test_tokenizer_cache_is_off_with_single_word_tokens() -> None:
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


def test_tokenizer_cache_disables_truncation_and_padding() -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    cached = CachedTokenizer(tokenizer, max_bytes=ROOM)
    assert 4 < len(cached.encode("def main(path): return 1", add_special_tokens=False)) < 64


def test_tokenizer_cache_is_thread_safe() -> None:
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


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES])
@pytest.mark.parametrize("template", TEMPLATES)
async def test_encoder_gives_ids_of_the_engine(tmp_path: Path, template: str, api: Api) -> None:
    encoder = LocalEncoder({ANY_MODEL: model_folder(tmp_path, template)}, max_bytes=ROOM)
    rows = [row for row in recorded(template) if row.api is api and not row.continues]
    assert len(rows) >= 20
    for row in rows:
        ids = await ids_of(encoder, api, row.body)
        assert ids is not None, row.body
        assert ids.tolist() == row.ids, row.body
    await encoder.stop()


async def test_encoder_does_not_support_open_last_message(tmp_path: Path) -> None:
    encoder = LocalEncoder({ANY_MODEL: model_folder(tmp_path, "plain")}, max_bytes=ROOM)
    rows = [row for row in recorded("plain") if row.continues]
    assert {row.api for row in rows} == {Api.CHAT, Api.RESPONSES}
    assert [await ids_of(encoder, row.api, row.body) for row in rows] == [None, None]
    await encoder.stop()


async def test_encoder_uses_folder_of_model_or_star(tmp_path: Path) -> None:
    folders = {"a": model_folder(tmp_path, "plain"), ANY_MODEL: model_folder(tmp_path, "thinking")}
    encoder = LocalEncoder(folders, max_bytes=ROOM)
    chat = ChatPrompt([{"role": "user", "content": "q"}], template_kwargs={"enable_thinking": False})
    plain = await encoder.encode("a", chat, 10)
    assert plain != await encoder.encode("b", chat, 10)
    assert await encoder.encode("b", chat, 10) == await encoder.encode("c", chat, 10)
    alone = LocalEncoder({"a": folders["a"]}, max_bytes=ROOM)
    with pytest.raises(Unsupported):
        await alone.encode("b", chat, 10)
    await encoder.stop()
    await alone.stop()


async def test_encoder_encodes_long_prompts_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    encode = ModelFolder.encode

    def noting(folder: ModelFolder, prompt: TextPrompt | ChatPrompt) -> object:
        seen.append(threading.current_thread().name)
        return encode(folder, prompt)

    monkeypatch.setattr(ModelFolder, "encode", noting)
    encoder = LocalEncoder({ANY_MODEL: model_folder(tmp_path, "plain")}, max_bytes=ROOM)
    await encoder.encode("m", TextPrompt("short"), INLINE_BYTES)
    await encoder.encode("m", TextPrompt("long"), INLINE_BYTES + 1)
    assert seen[0] == "MainThread"
    assert seen[1].startswith("tokenize")
    await encoder.stop()


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json"])
def test_folder_names_missing_file(tmp_path: Path, missing: str) -> None:
    folder = model_folder(tmp_path, "plain")
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=rf"{missing}: cannot be read .* tokenizer\.folders"):
        LocalEncoder({ANY_MODEL: folder}, max_bytes=ROOM)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_folder_refuses_pipe(tmp_path: Path, name: str) -> None:
    folder = model_folder(tmp_path, "plain")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match=rf"{name}: cannot be read .*not a regular file"):
        LocalEncoder({ANY_MODEL: folder}, max_bytes=ROOM)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", "{", "not a JSON object"),
        ("chat_template.jinja", "{% if %}", "chat template `default` cannot be read"),
    ],
)
def test_folder_names_unreadable_file(tmp_path: Path, name: str, text: str, said: str) -> None:
    folder = model_folder(tmp_path, "plain")
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        LocalEncoder({ANY_MODEL: folder}, max_bytes=ROOM)


@pytest.mark.parametrize("given", [5, ["text"], [{"name": "default"}], {"default": "text"}])
def test_folder_refuses_invalid_chat_template(tmp_path: Path, given: object) -> None:
    folder = model_folder(tmp_path, "plain")
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template must be a text, or a list"):
        ModelFolder(folder, max_bytes=ROOM)


def test_folder_chooses_template_of_config_as_transformers(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "plain")
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ eos_token }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    model = ModelFolder(folder, max_bytes=ROOM)
    chat = [{"role": "user", "content": "q"}]
    assert model.encode(ChatPrompt(chat)) == model.encode(TextPrompt("plain"))
    assert model.encode(ChatPrompt(chat, tools=[])) == model.encode(TextPrompt("<|im_end|>"))


def test_folder_chooses_template_file_as_transformers(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "plain")
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ eos_token }}")
    model = ModelFolder(folder, max_bytes=ROOM)
    chat = [{"role": "user", "content": "q"}]
    assert model.encode(ChatPrompt(chat)) == model.encode(TextPrompt("plain"))
    assert model.encode(ChatPrompt(chat, tools=[])) == model.encode(TextPrompt("<|im_end|>"))
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{% if")
    with pytest.raises(ConfigError, match="`tool_use` cannot be read"):
        ModelFolder(folder, max_bytes=ROOM)


def test_folder_without_template_encodes_only_text(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "plain")
    (folder / "chat_template.jinja").unlink()
    model = ModelFolder(folder, max_bytes=ROOM)
    assert len(model.encode(TextPrompt("hello"))) > 0
    with pytest.raises(Unsupported):
        model.encode(ChatPrompt([{"role": "user", "content": "q"}]))


def test_folder_refuses_prompt_that_template_refuses(tmp_path: Path) -> None:
    model = ModelFolder(model_folder(tmp_path, "thinking"), max_bytes=ROOM)
    roles = ("user", "system")
    with pytest.raises(Refused):
        model.encode(ChatPrompt([{"role": role, "content": "t"} for role in roles]))
