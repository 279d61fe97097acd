"""Tokenisation by the best means at hand for each model: its files on this machine, else its engines."""

from __future__ import annotations

import asyncio
import os
import re
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog
from cachetools import LRUCache

from smetric.log_limit import CHANGE_LINES, LogLimit
from smetric.sources.tokens.chat import ChatPrompt, Encoder, TextPrompt, Unsupported

#: Most models that are tokenised from the hub's cache.
MOST_CACHED = 4
#: Most models whose choice is kept; the one not asked for longest is forgotten.
MOST_CHOICES = 256
#: Names that a folder of the hub's cache may stand for.
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)

log = structlog.get_logger("smetric.tokenize")


def hub_folder(model: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of *model* in the local cache of Hugging Face's hub; None if it has no tokenizer there.

    Nothing is downloaded. The revision is the one that `main` named when the model was downloaded.

    Args:
        model: name of a repository, such as `org/model`.
        environ: `HF_HUB_CACHE`, `HF_HOME` and `XDG_CACHE_HOME` move the cache.
    """
    if not _REPOSITORY.fullmatch(model):
        return None
    base = Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(environ.get("HF_HUB_CACHE") or Path(environ.get("HF_HOME") or base) / "hub")
    try:
        repository = cache.expanduser() / ("models--" + model.replace("/", "--"))
        folder = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
        return folder if (folder / "tokenizer.json").is_file() else None
    except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no home directory
        return None


class AutoEncoder:
    """`Encoder` that works in this process for models whose files lie here, and asks the engines otherwise.

    A model of the hub's cache is loaded in a thread when it is first asked for, and its engines answer until then. They
    also answer for what the files cannot render, for a model whose files proved to be the wrong ones, and whenever the
    choice fails.

    Args:
        engine: asks the engines.
        configured: encodes the models of configured folders; None if there are none, or no package to read them.
        names: the models that *configured* encodes; `*` for all.
        load: returns an encoder of a model's folder; None without the package.
        models: the served models as far as they are configured; they are looked for at start.
        find: returns the folder of a model on this machine.
    """

    def __init__(
        self,
        engine: Encoder,
        configured: Encoder | None,
        names: frozenset[str],
        load: Callable[[Path], Encoder] | None,
        *,
        models: frozenset[str] = frozenset(),
        find: Callable[[str], Path | None] = hub_folder,
    ) -> None:
        self._engine = engine
        self._configured = configured
        self._names = names
        self._load = load
        self._models = models
        self._find = find
        #: The encoder of each model, or its loading.
        self._chosen: LRUCache[str, asyncio.Task[Encoder]] = LRUCache(MOST_CHOICES)
        #: The encoders from the hub's cache by model, at most `MOST_CACHED`; None while one is loading.
        self._loaded: dict[str, Encoder | None] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._log_limit = LogLimit(lines=CHANGE_LINES)

    async def start(self) -> None:
        """Open the encoders, and look for the files of the configured models."""
        await self._engine.start()
        if self._configured is not None:
            await self._configured.start()
        for model in sorted(self._models):
            self._choice(model)

    async def stop(self) -> None:
        """Close the encoders."""
        for choice in self._chosen.values():
            choice.cancel()
        await asyncio.gather(*self._chosen.values(), *self._closing, return_exceptions=True)
        for encoder in (self._engine, self._configured, *self._loaded.values()):
            if encoder is not None:
                await encoder.stop()

    def distrust(self, model: str) -> None:
        """Leave *model* to its engines, which count other tokens than its files give."""
        choice = self._choice(model)
        if choice.done() and choice.result() is not self._engine:
            self._drop(model, choice)
            self._chosen[model] = asyncio.ensure_future(self._engines(model, "its files give other tokens"))

    async def encode(self, model: str, prompt: TextPrompt | ChatPrompt, size: int) -> array[int]:
        """Return the ids of *prompt* by the tokenizer of *model*."""
        choice = self._choice(model)
        encoder = choice.result() if choice.done() else self._engine
        try:
            return await encoder.encode(model, prompt, size)
        except Unsupported:
            if encoder is self._engine:
                raise
            return await self._engine.encode(model, prompt, size)

    def _choice(self, model: str) -> asyncio.Task[Encoder]:
        choice = self._chosen.get(model)
        if choice is None:
            if len(self._chosen) == MOST_CHOICES:
                self._drop(*self._chosen.popitem())
            choice = self._chosen[model] = asyncio.create_task(self._choose(model), name="tokenizer")
        return choice

    def _drop(self, model: str, choice: asyncio.Task[Encoder]) -> None:
        """Close the encoder that was loaded for *model*, and give its place back."""
        choice.cancel()
        encoder = self._loaded.pop(model, None)
        if encoder is not None:
            closing = asyncio.ensure_future(encoder.stop())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _choose(self, model: str) -> Encoder:
        if self._load is None:
            return await self._engines(model, "package `tokenizers` is missing")
        if self._configured is not None and not self._names.isdisjoint({model, "*"}):
            return self._configured
        try:
            folder = await asyncio.to_thread(self._find, model)
            if folder is None:
                return await self._engines(model, "no files on this machine")
            if len(self._loaded) >= MOST_CACHED:
                return await self._engines(model, f"{MOST_CACHED} models of the hub's cache are loaded")
            self._loaded[model] = None
            self._loaded[model] = encoder = await asyncio.to_thread(self._load, folder)
        except asyncio.CancelledError:
            self._loaded.pop(model, None)
            raise
        except Exception as error:  # noqa: BLE001 - whatever failed, the engines can be asked
            self._loaded.pop(model, None)
            return await self._engines(model, str(error) or type(error).__name__)
        log.info("smetric.tokenize.local", model=model, folder=str(folder))
        return encoder

    async def _engines(self, model: str, reason: str) -> Encoder:
        if (kept_back := self._log_limit.passes(reason)) is not None:
            log.warning("smetric.tokenize.by_engines", model=model, reason=reason, kept_back=kept_back)
        return self._engine
