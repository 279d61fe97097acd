"""Tokenises in this process, from a model's folder: its chat template and its `tokenizer.json`; extra `tokenizers`.

Exact where the engine renders by that chat template; models that engines render by code of their own (gpt-oss,
DeepSeek V4, Kimi K3, Mistral's own tokenizers) need `engine.py`. What is new in a text is found in `cache.py`.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
import structlog
from tokenizers import Tokenizer

from smetric.errors import ConfigError
from smetric.file_bytes import read_regular
from smetric.tokenize.cache import CachedTokenizer
from smetric.tokenize.chat import Chat, Text, Unsupported
from smetric.tokenize.template import ChatTemplate

#: Prompts whose bodies are larger than this, in bytes, are encoded in a thread: a few thousand tokens.
INLINE_BYTES = 8 << 10
#: Threads that encode.
THREADS = 2
#: Largest file that is read of a folder, in bytes.
MAX_FILE = 256 << 20
#: The name that stands for every model without a folder of its own.
ANY_MODEL = "*"

log = structlog.get_logger("smetric.tokenize")


class ModelFolder:
    """What is needed of a model's folder: `tokenizer.json`, `tokenizer_config.json`, chat templates.

    Args:
        folder: where they lie.
        max_bytes: memory of remembered segments.

    Raises:
        ConfigError: a file is missing or cannot be read.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        path = folder / "tokenizer.json"
        text = _read(path)
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # noqa: BLE001 - it is Exception that the library raises
            raise ConfigError(f"{path}: not a tokenizer that the package `tokenizers` can read ({error})") from None
        self.tokenizer = CachedTokenizer(tokenizer, max_bytes=max_bytes)
        if not self.tokenizer.remembers:
            log.warning("smetric.tokenize.whole", folder=str(folder))
        self._config = _read_config(folder / "tokenizer_config.json")
        special = {name: text for name, value in self._config.items() if (text := _special(name, value))}
        self._templates: dict[str, ChatTemplate] = {}
        for name, source in self._sources(folder).items():
            try:
                self._templates[name] = ChatTemplate(source, special)
            except jinja2.TemplateError as error:
                raise ConfigError(f"{folder}: its chat template `{name}` cannot be read: {error}") from None

    def _sources(self, folder: Path) -> dict[str, str]:
        """The chat templates by name; files of their own win over `tokenizer_config.json`, as transformers has it."""
        files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
        if (file := folder / "chat_template.jinja").exists():
            files["default"] = file
        if files:
            return {name: _read(path) for name, path in files.items()}
        given = self._config.get("chat_template")
        if given is None or isinstance(given, str):
            return {} if given is None else {"default": given}
        try:
            return {str(one["name"]): str(one["template"]) for one in given}
        except (KeyError, TypeError):
            raise ConfigError(
                f"{folder / 'tokenizer_config.json'}: chat_template must be a text, or a list of objects with `name` "
                "and `template`"
            ) from None

    def encode(self, prompt: Text | Chat) -> array[int]:
        """The ids of *prompt*."""
        if isinstance(prompt, Text):
            return self.tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
        name = "tool_use" if prompt.tools is not None and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise Unsupported
        return self.tokenizer.encode(template.render(prompt), add_special_tokens=prompt.add_special_tokens)


class LocalEncoder:
    """An `Encoder` that needs nobody.

    Args:
        folders: model names and their folders, at least one; `*` for every other model.
        max_bytes: memory of remembered segments, in all.

    Raises:
        ConfigError: a folder lacks a file.
    """

    def __init__(self, folders: Mapping[str, Path], *, max_bytes: int) -> None:
        loaded = {
            path: ModelFolder(path, max_bytes=max_bytes // len(set(folders.values()))) for path in set(folders.values())
        }
        self._models = {model: loaded[path] for model, path in folders.items()}
        self._threads = ThreadPoolExecutor(THREADS, "tokenize")

    async def start(self) -> None:
        """Nothing is opened."""

    async def stop(self) -> None:
        """Let the threads end; what waits for one is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, model: str, prompt: Text | Chat, size: int) -> array[int]:
        """The ids of *prompt* by the tokenizer of *model*."""
        folder = self._models.get(model) or self._models.get(ANY_MODEL)
        if folder is None:
            raise Unsupported
        if size <= INLINE_BYTES:
            return folder.encode(prompt)
        return await asyncio.get_running_loop().run_in_executor(self._threads, folder.encode, prompt)


def _read(path: Path) -> str:
    try:
        data = read_regular(path, MAX_FILE + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); tokenizer.folders needs each model's tokenizer.json and "
            "tokenizer_config.json"
        ) from None
    if len(data) > MAX_FILE:
        raise ConfigError(f"{path}: larger than {MAX_FILE >> 20} MiB")
    return text


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read(path))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return config


def _special(name: str, value: Any) -> str:
    """The text of a special token of `tokenizer_config.json`, such as `bos_token`; empty for what is none."""
    if not name.endswith("_token"):
        return ""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""
