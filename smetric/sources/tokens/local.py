"""Tokenisation in this process, from a model's folder; needs the extra `tokenizers`.

It is exact if the engine renders by the folder's chat template. Models that engines render by code of their own
(gpt-oss, DeepSeek V4, Kimi K3, Mistral's own tokenizers) need `engine.py`.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from array import array
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jinja2
import structlog
from cachetools import LRUCache
from tokenizers import AddedToken, Tokenizer

from smetric.errors import ConfigError
from smetric.files import read_regular
from smetric.sources.tokens.chat import ChatPrompt, TextPrompt, Unsupported
from smetric.sources.tokens.template import ChatTemplate

#: Prompts in bodies above this many bytes, a few thousand tokens, are encoded in a thread.
INLINE_BYTES = 8 << 10
#: Threads that encode.
THREADS = 2
#: Largest file that is read from a folder, in bytes.
MAX_FILE = 256 << 20
#: The model name that stands for every model without a folder of its own.
ANY_MODEL = "*"
#: Memory of a cached segment besides its ids, in bytes: key, array, list node.
ENTRY_BYTES = 300

log = structlog.get_logger("smetric.tokenize")


class CachedTokenizer:
    """Tokenizer with a cache of text segments, so that a follow-up turn encodes only its new text. Thread-safe.

    A tokenizer finds its special tokens first and encodes the text between two of them by itself: no merge crosses a
    special token. So the ids of a text are the ids of its segments in order, if every segment but the first begins
    with a special token. (Some tokenizers encode the beginning of a text differently from its middle; the special token
    in front keeps a segment in the middle.) Segments are cached by a cryptographic hash of their text. Tokens that
    depend on their neighbours are no cut points. A probe compares both ways at the start; if they differ, texts are
    encoded whole.

    Args:
        tokenizer: as loaded from `tokenizer.json`; its truncation and padding are switched off.
        max_bytes: memory of the cached segments.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._known: LRUCache[bytes, array[int]] = LRUCache(max_bytes, getsizeof=_size)
        self._lock = threading.Lock()
        self._specials, self._cuts = _pattern(list(tokenizer.get_added_tokens_decoder().values()))
        self._around = self._find_around()
        if self._cuts and not self._segments_agree():
            self._cuts = frozenset()

    @property
    def remembers(self) -> bool:
        """Whether segments are cached; some tokenizers do not allow that."""
        return bool(self._cuts)

    @property
    def memory_bytes(self) -> int:
        """Memory of the cached segments."""
        return int(self._known.currsize)

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """Return the ids of *text*."""
        if add_special_tokens and self._around is None:
            return array("I", self._tokenizer.encode(text, add_special_tokens=True).ids)
        before, after = self._around if add_special_tokens and self._around else ([], [])
        ids = array("I", before)
        for segment in self._encode_segments(list(self._segments(text))):
            ids.extend(segment)
        ids.extend(after)
        return ids

    def _segments(self, text: str) -> Iterator[str]:
        """Yield *text* in segments, cut before every special token that allows it."""
        start = 0
        if self._cuts:
            for match in self._specials.finditer(text):
                if match[0] in self._cuts and match.start() > start:
                    yield text[start : match.start()]
                    start = match.start()
        if start < len(text):
            yield text[start:]

    def _encode_segments(self, segments: list[str]) -> list[array[int]]:
        keys = [blake2b(segment.encode(), digest_size=16).digest() for segment in segments]
        found: dict[bytes, array[int]] = {}
        with self._lock:
            for key in keys:
                ids = self._known.get(key)
                if ids is not None:
                    found[key] = ids
        missing = {key: segment for key, segment in zip(keys, segments, strict=True) if key not in found}
        if missing:
            encoded = self._tokenizer.encode_batch_fast(list(missing.values()), add_special_tokens=False)
            for key, one in zip(missing, encoded, strict=True):
                found[key] = array("I", one.ids)
            with self._lock:
                for key in missing:
                    if _size(found[key]) <= self._known.maxsize:
                        self._known[key] = found[key]
        return [found[key] for key in keys]

    def _find_around(self) -> tuple[list[int], list[int]] | None:
        """Return the ids that the tokenizer adds before and after a text; None if they depend on the text."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for at in range(len(full) - len(plain) + 1):
            if plain and full[at : at + len(plain)] == plain:
                return full[:at], full[at + len(plain) :]
        return None

    def _segments_agree(self) -> bool:
        """Return whether a text with all special tokens has the same ids whole and in segments."""
        fillers = ("user\n Hello,  world ", "\n", " é", "a", "")
        probe = "start " + "".join(cut + fillers[i % len(fillers)] for i, cut in enumerate(sorted(self._cuts) * 2))
        whole = self._tokenizer.encode(probe, add_special_tokens=False).ids
        parts = self._tokenizer.encode_batch_fast(list(self._segments(probe)), add_special_tokens=False)
        return whole == [id for part in parts for id in part.ids]


def _pattern(added: list[AddedToken]) -> tuple[re.Pattern[str], frozenset[str]]:
    """Return the pattern that finds tokens as the tokenizer does (leftmost, then longest), and the cut points.

    Tokens that are found only after normalisation do not matter: the tokenizer looks for them between the others.
    """
    tokens = [token for token in added if not token.normalized and token.content]
    # A single-word token depends on its neighbours, wherever the others are cut.
    if any(token.single_word for token in tokens):
        tokens = []
    words = sorted((token.content for token in tokens), key=len, reverse=True)
    cuts = frozenset(
        token.content
        for token in tokens
        if not (token.lstrip or token.rstrip) and token.content == token.content.strip()
    )
    return re.compile("|".join(map(re.escape, words)) or r"(?!)"), cuts


def _size(ids: array[int]) -> int:
    return len(ids) * ids.itemsize + ENTRY_BYTES


class ModelFolder:
    """Tokenizer and chat templates of a model's folder: `tokenizer.json`, `tokenizer_config.json`, templates.

    Args:
        folder: its path.
        max_bytes: memory of cached segments.

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
        """Return the chat templates by name; as in transformers, files win over `tokenizer_config.json`."""
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

    def encode(self, prompt: TextPrompt | ChatPrompt) -> array[int]:
        """Return the ids of *prompt*."""
        if isinstance(prompt, TextPrompt):
            return self.tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
        name = "tool_use" if prompt.tools is not None and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise Unsupported
        return self.tokenizer.encode(template.render(prompt), add_special_tokens=prompt.add_special_tokens)


class LocalEncoder:
    """`Encoder` that works in this process.

    Args:
        folders: model names and their folders, at least one; `*` for every other model.
        max_bytes: memory of cached segments in total.

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
        """Do nothing; the threads start with the first prompt."""

    async def stop(self) -> None:
        """Let the threads end after the queued prompts, for which callers may still wait."""
        self._threads.shutdown(wait=False)

    async def encode(self, model: str, prompt: TextPrompt | ChatPrompt, size: int) -> array[int]:
        """Return the ids of *prompt* by the tokenizer of *model*."""
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
    """Return the text of a special token of `tokenizer_config.json`, such as `bos_token`; empty for other values."""
    if not name.endswith("_token"):
        return ""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""
