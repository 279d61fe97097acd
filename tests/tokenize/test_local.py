"""Ids made in this process are those that vLLM made of the same bodies."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from smetric.errors import ConfigError
from smetric.request.request import Api
from smetric.sources.tokens.chat import Chat, Refused, Text, Unsupported
from smetric.sources.tokens.local import ANY_MODEL, INLINE_BYTES, LocalEncoder, ModelFolder
from tests.tokenize.recorded import TEMPLATES, ids_of, model_folder, recorded

ROOM = 1 << 20


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES])
@pytest.mark.parametrize("template", TEMPLATES)
async def test_ids_are_those_of_the_engine(tmp_path: Path, template: str, api: Api) -> None:
    encoder = LocalEncoder({ANY_MODEL: model_folder(tmp_path, template)}, max_bytes=ROOM)
    rows = [row for row in recorded(template) if row.api is api and not row.continues]
    assert len(rows) >= 20
    for row in rows:
        ids = await ids_of(encoder, api, row.body)
        assert ids is not None, row.body
        assert ids.tolist() == row.ids, row.body
    await encoder.stop()


async def test_a_message_that_is_to_be_continued_is_unknown_here(tmp_path: Path) -> None:
    encoder = LocalEncoder({ANY_MODEL: model_folder(tmp_path, "plain")}, max_bytes=ROOM)
    rows = [row for row in recorded("plain") if row.continues]
    assert {row.api for row in rows} == {Api.CHAT, Api.RESPONSES}
    assert [await ids_of(encoder, row.api, row.body) for row in rows] == [None, None]
    await encoder.stop()


async def test_each_model_has_its_own_folder_and_the_star_the_rest(tmp_path: Path) -> None:
    folders = {"a": model_folder(tmp_path, "plain"), ANY_MODEL: model_folder(tmp_path, "thinking")}
    encoder = LocalEncoder(folders, max_bytes=ROOM)
    chat = Chat([{"role": "user", "content": "q"}], template_kwargs={"enable_thinking": False})
    plain = await encoder.encode("a", chat, 10)
    assert plain != await encoder.encode("b", chat, 10)
    assert await encoder.encode("b", chat, 10) == await encoder.encode("c", chat, 10)
    alone = LocalEncoder({"a": folders["a"]}, max_bytes=ROOM)
    with pytest.raises(Unsupported):
        await alone.encode("b", chat, 10)
    await encoder.stop()
    await alone.stop()


async def test_long_prompts_are_encoded_in_a_thread_and_short_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    encode = ModelFolder.encode

    def noting(folder: ModelFolder, prompt: Text | Chat) -> object:
        seen.append(threading.current_thread().name)
        return encode(folder, prompt)

    monkeypatch.setattr(ModelFolder, "encode", noting)
    encoder = LocalEncoder({ANY_MODEL: model_folder(tmp_path, "plain")}, max_bytes=ROOM)
    await encoder.encode("m", Text("short"), INLINE_BYTES)
    await encoder.encode("m", Text("long"), INLINE_BYTES + 1)
    assert seen[0] == "MainThread"
    assert seen[1].startswith("tokenize")
    await encoder.stop()


@pytest.mark.parametrize("missing", ["tokenizer.json", "tokenizer_config.json"])
def test_a_folder_that_lacks_a_file_is_a_configuration_error_that_names_it(tmp_path: Path, missing: str) -> None:
    folder = model_folder(tmp_path, "plain")
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=rf"{missing}: cannot be read .* tokenizer\.folders"):
        LocalEncoder({ANY_MODEL: folder}, max_bytes=ROOM)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_in_a_folder_is_one_too(tmp_path: Path, name: str) -> None:
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
def test_a_file_that_cannot_be_understood_is_one_too(tmp_path: Path, name: str, text: str, said: str) -> None:
    folder = model_folder(tmp_path, "plain")
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        LocalEncoder({ANY_MODEL: folder}, max_bytes=ROOM)


@pytest.mark.parametrize("given", [5, ["text"], [{"name": "default"}], {"default": "text"}])
def test_what_is_no_template_in_the_configuration_is_said(tmp_path: Path, given: object) -> None:
    folder = model_folder(tmp_path, "plain")
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template must be a text, or a list"):
        ModelFolder(folder, max_bytes=ROOM)


def test_templates_in_the_configuration_are_chosen_as_transformers_does(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "plain")
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ eos_token }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    model = ModelFolder(folder, max_bytes=ROOM)
    chat = [{"role": "user", "content": "q"}]
    assert model.encode(Chat(chat)) == model.encode(Text("plain"))
    assert model.encode(Chat(chat, tools=[])) == model.encode(Text("<|im_end|>"))


def test_templates_in_files_are_chosen_as_transformers_does(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "plain")
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ eos_token }}")
    model = ModelFolder(folder, max_bytes=ROOM)
    chat = [{"role": "user", "content": "q"}]
    assert model.encode(Chat(chat)) == model.encode(Text("plain"))
    assert model.encode(Chat(chat, tools=[])) == model.encode(Text("<|im_end|>"))
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{% if")
    with pytest.raises(ConfigError, match="`tool_use` cannot be read"):
        ModelFolder(folder, max_bytes=ROOM)


def test_a_model_without_a_template_takes_texts_only(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "plain")
    (folder / "chat_template.jinja").unlink()
    model = ModelFolder(folder, max_bytes=ROOM)
    assert len(model.encode(Text("hello"))) > 0
    with pytest.raises(Unsupported):
        model.encode(Chat([{"role": "user", "content": "q"}]))


def test_a_prompt_that_the_template_refuses_is_refused(tmp_path: Path) -> None:
    model = ModelFolder(model_folder(tmp_path, "thinking"), max_bytes=ROOM)
    roles = ("user", "system")
    with pytest.raises(Refused):
        model.encode(Chat([{"role": role, "content": "t"} for role in roles]))
