"""Token ids of requests: encoded once, shared by all sources, checked against the engines' own counts."""

from __future__ import annotations

import asyncio
import json
import re
import time
from array import array
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog
from cachetools import LRUCache, TTLCache
from msgspec import Raw

from smetric.config import Settings
from smetric.config.values import networks, odd_address
from smetric.errors import UNREADABLE, ConfigError
from smetric.fleet.exchange import Exchange, Listener
from smetric.fleet.fleet import Fleet
from smetric.http.addresses import resolve_unless
from smetric.log_limit import LogLimit
from smetric.request.request import Api, InferenceRequest, Usage
from smetric.sources.source import SourceCounts
from smetric.sources.tokens.chat import (
    ChatPrompt,
    Encoder,
    NotTokenised,
    Refused,
    TextPrompt,
    chat_of_chat,
    chat_of_messages,
    chat_of_responses,
    disables_thinking,
    has_inline_system,
    prompt_of_completion,
)

#: Most prompts that are encoded at a time; the ids of further ones are unknown.
MOST_AT_A_TIME = 64
#: Largest body that is decoded, in bytes: about two million tokens.
MAX_BODY = 8 << 20
#: Most commas outside of strings in a body that is decoded. The number of strings, objects and lists is bounded before,
#: so most of these commas separate numbers, e.g. in the enumeration of a tool's parameters.
MAX_COMMAS = 1 << 18
#: Bytes of a list of token ids that are decoded before other tasks run: about a millisecond.
PIECE_BYTES = 32 * 1024
#: Wrong counts in a row after which a model's ids are distrusted, and seconds until they are tried again.
MOST_DIFFERENT = 3
DISTRUST_S = 60.0
#: Late prompts of a model in a row after which its tokenizer counts as useless.
USELESS_AFTER = 20
#: Seconds after which a template is probed again: engines may have restarted with another one.
TTL_S = 600.0
#: Probes of vLLM 0.32 (`entrypoints/anthropic/serving.py`), which engines render when they start.
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_ALTERNATING = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]

_NESTED = re.compile(rb"\[[ \t\r\n]*\[")
_MEMBERS = msgspec.json.Decoder(dict[str, Raw])
_LISTS = msgspec.json.Decoder(list[Raw])
_IDS = msgspec.json.Decoder(list[int])

log = structlog.get_logger("smetric.tokenize")


def token_source(settings: Settings) -> Literal["auto", "estimated", "engine", "local"]:
    """Return where token ids come from: as configured, and for `auto` from nowhere unless a source needs them."""
    source = settings.tokenizer.source
    is_needed = settings.kv_events.enabled or settings.lmcache.url
    return "estimated" if source == "auto" and not is_needed else source


def request_tokens(settings: Settings, fleet: Fleet, counts: SourceCounts) -> RequestTokens:
    """Return the token ids as the settings section `tokenizer` configures them.

    Raises:
        ConfigError: a model's folder is unusable, or a package is missing.
    """
    source, tokenizer = token_source(settings), settings.tokenizer
    engine: Encoder | None = None
    if source in ("auto", "engine"):
        from smetric.sources.tokens.engine import EngineEncoder  # most routers estimate

        resolve = resolve_unless(partial(odd_address, allowed=networks(settings.instance_networks)))
        engine = EngineEncoder(fleet, timeout_s=tokenizer.timeout, resolve=resolve)
    encoder, distrust = engine, None
    if source in ("auto", "local"):
        from smetric.sources.tokens.auto import MOST_CACHED, AutoEncoder

        folders = {model: Path(folder) for model, folder in tokenizer.folders.items()}
        load: Callable[[Path], Encoder] | None = None
        try:
            from smetric.sources.tokens.local import ANY_MODEL, LocalEncoder  # needs an extra
        except ImportError as error:
            if source == "local":
                raise ConfigError(
                    f"tokenizer.source is local, but the package {error.name} is missing: "
                    "pip install 'smetric-router[tokenizers]'"
                ) from None
            folders = {}
        else:
            parts = len(set(folders.values())) + (MOST_CACHED if engine is not None else 0)

            def load(folder: Path) -> Encoder:
                return LocalEncoder({ANY_MODEL: folder}, max_bytes=tokenizer.max_bytes // parts)

            if folders:
                most = tokenizer.max_bytes * len(set(folders.values())) // parts
                encoder = LocalEncoder(folders, max_bytes=most)
        if engine is not None:
            models = frozenset(model for instance in settings.instances for model in instance.models or ())
            configured = encoder if folders else None
            encoder = auto = AutoEncoder(engine, configured, frozenset(folders), load, models=models)
            distrust = auto.distrust
    return RequestTokens(
        encoder,
        block_size=settings.block_size,
        on_result=lambda result, seconds: counts.tokenized(source, result, seconds),
        on_compared=counts.ids_compared,
        on_distrusted=distrust,
    )


class RequestTokens(Listener):
    """The router's `TokenIds`. Without an encoder, only prompts that came as ids have any.

    Args:
        encoder: encodes prompts; None for none.
        block_size: tokens per KV block, to which expected hits are floored.
        on_result: called with the result (one of `names.TOKENIZE_RESULTS`) and the seconds of each prompt.
        on_compared: called with whether an answer counted as many prompt tokens as there were ids.
        on_distrusted: called with a model whose ids proved wrong several times.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        encoder: Encoder | None,
        *,
        block_size: int,
        on_result: Callable[[str, float], None],
        on_compared: Callable[[bool], None],
        on_distrusted: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encoder = encoder
        self._traits = TemplateTraits(encoder, clock=clock) if encoder is not None else None
        self._trust = Trust(clock=clock)
        self._block_size = block_size
        self._on_result = on_result
        self._on_compared = on_compared
        self._on_distrusted = on_distrusted
        self._log_limit = LogLimit(clock)
        self._running: set[asyncio.Future[array[int] | None]] = set()
        #: Those of them that a decision waited for in vain, and how many in a row each model had.
        self._late: set[asyncio.Future[array[int] | None]] = set()
        self._late_in_a_row: LRUCache[str, int] = LRUCache(256)

    @property
    def compares(self) -> bool:
        """Whether there are ids to compare with the counts of engines; else it need not hear of exchanges."""
        return self._encoder is not None

    async def start(self) -> None:
        """Open the encoder."""
        if self._encoder is not None:
            await self._encoder.start()

    async def stop(self) -> None:
        """Cancel the running tasks and close the encoder."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._encoder is not None:
            await self._encoder.stop()

    async def of(self, request: InferenceRequest) -> array[int] | None:
        """Return the ids of the request's first prompt, exactly as its engine will see them; None if unknown.

        The first call starts the task and all calls await it. A caller that gives up leaves it running, since its
        result serves the next decision or turn. Known ids replace the estimated lengths of the request.
        """
        if request.token_ids is not None:
            return request.token_ids
        task = self._task(request)
        ids = await asyncio.shield(task) if task is not None else None
        if ids is not None:
            request.count_by(ids, self._block_size)
        return ids

    def begin(self, request: InferenceRequest) -> Awaitable[array[int] | None] | None:
        """Start the same task for use after the decision; None if there will be no ids."""
        task = self._task(request)
        return asyncio.shield(task) if task is not None else None

    def _task(self, request: InferenceRequest) -> asyncio.Future[array[int] | None] | None:
        """Return the task that finds the ids of *request*, started by the first call; None if there will be no ids."""
        if request.tokenising is not None or request.body is None:
            return request.tokenising
        is_counted = _is_counted(request)
        if not is_counted and (self._encoder is None or request.api is Api.OTHER or request.pinned_to):
            return None
        obstacle = ""
        if not is_counted:
            if not self._trust.believes(request.model):
                obstacle = "distrusted"
            elif len(self._running) >= MOST_AT_A_TIME:
                obstacle = "busy"
        if obstacle:
            self._on_result(obstacle, 0.0)
            request.tokenising = asyncio.get_running_loop().create_future()
            request.tokenising.set_result(None)
        else:
            # The request drops its prompt when it is answered, so the task gets all it needs now.
            ids = self._tokenise(request.api, request.model, request.body, is_counted=is_counted)
            request.tokenising = task = asyncio.create_task(ids, name="tokenise")
            self._running.add(task)
            task.add_done_callback(self._forget)
        return request.tokenising

    def late(self, request: InferenceRequest) -> None:
        """Note that the decision of *request* could wait no longer."""
        task = request.tokenising
        if task in self._running and not task.done():
            self._late.add(task)

    def _forget(self, task: asyncio.Future[array[int] | None]) -> None:
        """Drop *task*, which ended; the sets would keep its ids."""
        self._running.discard(task)
        self._late.discard(task)

    def ended(self, exchange: Exchange) -> None:
        """Compare the prompt tokens that the engine counted with the known ids."""
        if exchange.record is not None and exchange.usage is not None:
            self.answered(exchange.record.request, exchange.usage)

    def answered(self, request: InferenceRequest, usage: Usage) -> None:
        """Compare the count in *usage* with the ids of *request*, if they were known."""
        ids = request.token_ids
        # Engines report the sum of the counts of several prompts.
        if self._encoder is None or ids is None or usage.prompt_tokens is None or request.prompt_len != len(ids):
            return
        self._on_compared(self._trust.compare(request.model, len(ids), usage.prompt_tokens))
        if self._on_distrusted is not None and not self._trust.believes(request.model):
            self._on_distrusted(request.model)

    async def _tokenise(self, api: Api, model: str, body: bytes, *, is_counted: bool) -> array[int] | None:
        started = time.perf_counter()
        ids = None
        try:
            ids = await self._encode(api, model, body, is_counted)
            result = "ok"
        except NotTokenised as reason:
            result = reason.result
        except (RecursionError, UnicodeEncodeError):
            # Nested too deeply, or half of a surrogate pair. The router reads no deeper than it must, but engines do.
            result = Refused.result
        except Exception:
            # A bug: the hit lengths of this request stay unknown, and it is served nevertheless.
            if (kept_back := self._log_limit.passes(api)) is not None:
                log.exception("smetric.tokenize.failed", api=api.value, kept_back=kept_back)
            result = "failed"
        seconds = time.perf_counter() - started
        if asyncio.current_task() in self._late:
            result = self._too_late(model, seconds) if result == "ok" else result
        elif result == "ok" and self._late_in_a_row:
            self._late_in_a_row.pop(model, None)
        self._on_result(result, seconds)
        return ids

    def _too_late(self, model: str, seconds: float) -> str:
        """Count and log ids that came too late for their decision; return the result."""
        in_a_row = self._late_in_a_row[model] = self._late_in_a_row.get(model, 0) + 1
        if (kept_back := self._log_limit.passes(("late", model))) is not None:
            log.warning(
                "smetric.tokenize.late",
                model=model,
                seconds=round(seconds, 3),
                in_a_row=in_a_row,
                is_useless=in_a_row >= USELESS_AFTER,
                kept_back=kept_back,
            )
        return "late"

    async def _encode(self, api: Api, model: str, body: bytes, is_counted: bool) -> array[int]:
        if len(body) > MAX_BODY or (not is_counted and _commas(body) > MAX_COMMAS):
            raise NotTokenised
        try:
            found = await body_of_ids(body) if is_counted else json.loads(body)
        except ValueError:  # e.g. a number of thousands of digits, which msgspec takes and json does not
            raise Refused from None
        prompt: TextPrompt | ChatPrompt | array[int]
        if api is Api.COMPLETIONS:
            prompt = prompt_of_completion(found)
        elif api is Api.CHAT:
            prompt = chat_of_chat(found)
        elif api is Api.RESPONSES:
            prompt = chat_of_responses(found)
        else:
            assert self._traits is not None
            prompt = chat_of_messages(
                found,
                merge_inline_system=has_inline_system(found) and await self._traits.merges_inline_system(model),
                disabled_effort=await self._traits.disabled_effort(model) if disables_thinking(found) else "none",
            )
        if isinstance(prompt, array):
            return prompt
        assert self._encoder is not None
        ids = await self._encoder.encode(model, prompt, len(body))
        if not ids:  # e.g. of an empty text, which engines refuse
            raise Refused
        return ids


def _is_counted(request: InferenceRequest) -> bool:
    """Return whether the prompt came as token ids."""
    return request.api is Api.COMPLETIONS and request.prompt is not None and request.prompt.counted


def _commas(body: bytes) -> int:
    """Return the number of commas outside of strings, or a larger number that is at most `MAX_COMMAS`."""
    commas = body.count(b",")
    if commas > MAX_COMMAS:
        # Without escapes, every second piece is inside a string.
        outside = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
        commas = sum(piece.count(b",") for piece in outside)
    return commas


async def body_of_ids(body: bytes) -> dict[str, Any]:
    """Decode a completions body whose `prompt` is token ids, or lists of them; the first list becomes an array.

    The list is decoded in pieces, because a million ids at once would stop every stream.

    Raises:
        Refused: the ids are not 32-bit unsigned integers.
    """
    try:
        found = _MEMBERS.decode(body)
        prompt = bytes(found.pop("prompt"))
        if _NESTED.match(prompt):
            prompt = bytes(_LISTS.decode(prompt)[0])
        ids: array[int] = array("I")
        at, last = 1, len(prompt) - 1
        while at < last:
            comma = prompt.find(b",", at + PIECE_BYTES)
            end = comma if comma >= 0 else last
            ids.extend(_IDS.decode(b"[%b]" % prompt[at:end]))
            at = end + 1
            await asyncio.sleep(0)
        return {name: msgspec.json.decode(value) for name, value in found.items()} | {"prompt": ids}
    except (*UNREADABLE, OverflowError):
        raise Refused from None


class Trust:
    """Trust in the ids of each model, by comparing their number with the prompt tokens that answers report.

    Equal numbers prove little. Unequal ones prove a difference, such as another chat template. Such ids are worse than
    none, because every hit counted by them is wrong.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Unequal numbers in a row, and the time until which the model is distrusted.
        self._different: LRUCache[str, tuple[int, float]] = LRUCache(256)

    def believes(self, model: str) -> bool:
        """Return whether the ids of *model* may be used now."""
        _, until = self._different.get(model, (0, 0.0))
        return self._clock() >= until

    def compare(self, model: str, tokenised: int, counted: int) -> bool:
        """Learn that the engine *counted* a prompt of *tokenised* ids; returns whether the numbers are equal."""
        if tokenised == counted:
            self._different.pop(model, None)
            return True
        times, until = self._different.get(model, (0, 0.0))
        times += 1
        now = self._clock()
        if times >= MOST_DIFFERENT and now >= until:
            until = now + DISTRUST_S
            log.warning("smetric.tokenize.distrusted", model=model, tokenised=tokenised, counted=counted)
        self._different[model] = times, until
        return False


class TemplateTraits:
    """Properties of the models' chat templates that decide how a Messages body is converted, found by probes.

    Args:
        encoder: renders the probes.
        clock: monotonic seconds.
    """

    def __init__(self, encoder: Encoder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._encoder = encoder
        self._merging: TTLCache[str, bool] = TTLCache(256, TTL_S, timer=clock)
        self._efforts: TTLCache[str, str] = TTLCache(256, TTL_S, timer=clock)

    async def merges_inline_system(self, model: str) -> bool:
        """Return whether engines merge system messages into the first, as the template of *model* refuses others.

        Raises:
            Unavailable: no encoder can answer now.
        """
        known = self._merging.get(model)
        if known is None:
            known = await self._render(model, ChatPrompt(_ALTERNATING, add_generation_prompt=False)) is None
            self._merging[model] = known
        return known

    async def disabled_effort(self, model: str) -> str:
        """Return the effort that stands for disabled thinking: `low` if the template refuses or ignores `none`.

        Raises:
            Unavailable: no encoder can answer now.
        """
        known = self._efforts.get(model)
        if known is None:
            known = "none"
            without = await self._render(model, _thinking("none"))
            if without is None:
                known = "low"
            else:
                for effort in _EFFORTS:
                    if await self._render(model, _thinking(effort)) == without:
                        known = "low"
                        break
            self._efforts[model] = known
        return known

    async def _render(self, model: str, chat: ChatPrompt) -> list[int] | None:
        """Return the ids of a probe; None if the template refuses it."""
        try:
            return list(await self._encoder.encode(model, chat, 0))
        except Refused:
            return None


def _thinking(effort: str) -> ChatPrompt:
    kwargs = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return ChatPrompt([{"role": "user", "content": "Hi"}], template_kwargs=kwargs)
