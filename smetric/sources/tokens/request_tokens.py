"""Token ids of requests."""

from __future__ import annotations

import asyncio
import json
import re
import time
from array import array
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

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
    Chat,
    Encoder,
    NotTokenised,
    Refused,
    Text,
    chat_of_chat,
    chat_of_messages,
    chat_of_responses,
    disables_thinking,
    has_inline_system,
    prompt_of_completion,
)
from smetric.sources.tokens.engine import EngineEncoder

# The token ids of a prompt that came as a list of them, read in pieces: a million at once would stop every stream.
#
# A prompt that is a text is encoded (`encoder.py`).

#: Bytes of the list's text that are read before others have their turn: about a millisecond.
PIECE_BYTES = 32 * 1024

_NESTED = re.compile(rb"\[[ \t\r\n]*\[")
_MEMBERS = msgspec.json.Decoder(dict[str, Raw])
_LISTS = msgspec.json.Decoder(list[Raw])
_IDS = msgspec.json.Decoder(list[int])


async def body_of_ids(body: bytes) -> dict[str, Any]:
    """What a completions body says whose `prompt` is token ids, or lists of them: its first list, as an array.

    Raises:
        Refused: what stands there are no ids of 32 bits.
    """
    try:
        found = _MEMBERS.decode(body)
        prompt = bytes(found.pop("prompt"))
        if _NESTED.match(prompt):
            prompt = bytes(_LISTS.decode(prompt)[0])
        return {name: msgspec.json.decode(value) for name, value in found.items()} | {"prompt": await _ids(prompt)}
    except (*UNREADABLE, OverflowError):
        raise Refused from None


async def _ids(text: bytes) -> array[int]:
    """The ids of a JSON list."""
    ids: array[int] = array("I")
    at, last = 1, len(text) - 1
    while at < last:
        comma = text.find(b",", at + PIECE_BYTES)
        end = comma if comma >= 0 else last
        ids.extend(_IDS.decode(b"[%b]" % text[at:end]))
        at = end + 1
        await asyncio.sleep(0)
    return ids


# Whether a model's ids may be believed: their number is compared with the prompt tokens that answers report.
#
# Equal numbers prove little, unequal ones prove that something differs (another chat template, a flag, a renderer of
# the engine's own); then ids are worse than none, because every hit counted by them is wrong.

#: Unequal numbers in a row after which a model's ids are not used, and seconds until they are tried again.
MOST_DIFFERENT = 3
DISTRUST_S = 60.0

log = structlog.get_logger("smetric.tokenize")


class Trust:
    """Keeps score for each model.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Unequal numbers in a row, and until when the model is distrusted.
        self._different: LRUCache[str, tuple[int, float]] = LRUCache(256)

    def believes(self, model: str) -> bool:
        """Whether *model*'s ids may be used now."""
        _, until = self._different.get(model, (0, 0.0))
        return self._clock() >= until

    def compare(self, model: str, tokenised: int, counted: int) -> bool:
        """Take in that a prompt of *tokenised* ids was *counted* by its engine; returns whether they are equal."""
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


# What the conversion of a Messages body depends on in a model's chat template, found out by rendering probes.
#
# The probes are those of vLLM 0.32 (`entrypoints/anthropic/serving.py`): engines make the same ones when they start.

#: Seconds after which a template is probed again: engines may have been restarted with another one.
TTL_S = 600.0
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_ALTERNATING = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]


class TemplateTraits:
    """Traits of the models' chat templates.

    Args:
        encoder: renders the probes.
        clock: monotonic seconds.
    """

    def __init__(self, encoder: Encoder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._encoder = encoder
        self._merging: TTLCache[str, bool] = TTLCache(256, TTL_S, timer=clock)
        self._efforts: TTLCache[str, str] = TTLCache(256, TTL_S, timer=clock)

    async def merges_inline_system(self, model: str) -> bool:
        """Whether *model*'s template refuses system messages after the first place, so that engines merge them.

        Raises:
            Unavailable: nobody can tell now.
        """
        known = self._merging.get(model)
        if known is None:
            known = await self._render(model, Chat(_ALTERNATING, add_generation_prompt=False)) is None
            self._merging[model] = known
        return known

    async def disabled_effort(self, model: str) -> str:
        """The effort that stands for disabled thinking: `low` where *model*'s template refuses or ignores `none`.

        Raises:
            Unavailable: nobody can tell now.
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

    async def _render(self, model: str, chat: Chat) -> list[int] | None:
        """The ids of a probe; None where the template refuses it."""
        try:
            return list(await self._encoder.encode(model, chat, 0))
        except Refused:
            return None


def _thinking(effort: str) -> Chat:
    kwargs = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return Chat([{"role": "user", "content": "Hi"}], template_kwargs=kwargs)


# Token ids of requests: read once, encoded once, shared by all sources that ask, checked against what engines count.
#
# How a prompt is encoded is behind `encoder.py`. Without an encoder only prompts that come as ids have any.

#: Most prompts that are encoded at a time; one more is unknown.
MOST_AT_A_TIME = 64
#: Bodies above this many bytes are not decoded: about two million tokens.
MAX_BODY = 8 << 20
#: Nor are those with more commas than this outside of strings: of strings, objects and lists not so many are let in, so
#: most of what they divide are numbers, which may be millions, as in the enumeration of a tool's parameters.
MAX_COMMAS = 1 << 18


def request_tokens(settings: Settings, fleet: Fleet, counts: SourceCounts) -> RequestTokens:
    """What the section `tokenizer` asks for.

    Raises:
        ConfigError: a model's folder cannot be used, or a package is missing.
    """
    source = settings.tokenizer.source
    encoder: Encoder | None = None
    if source == "engine":
        resolve = resolve_unless(partial(odd_address, allowed=networks(settings.instance_networks)))
        encoder = EngineEncoder(fleet, timeout_s=settings.tokenizer.timeout, resolve=resolve)
    elif source == "local":
        try:
            # Not a module of the base installation: only who chooses it needs the extra.
            from smetric.sources.tokens.local import LocalEncoder
        except ImportError as error:
            raise ConfigError(
                f"tokenizer.source is local, but the package {error.name} is missing: "
                "pip install 'smetric-router[tokenizers]'"
            ) from None
        folders = {model: Path(folder) for model, folder in settings.tokenizer.folders.items()}
        encoder = LocalEncoder(folders, max_bytes=settings.tokenizer.max_bytes)
    return RequestTokens(
        encoder,
        block_size=settings.block_size,
        on_result=lambda result, seconds: counts.tokenized(source, result, seconds),
        on_compared=counts.ids_compared,
    )


class RequestTokens(Listener):
    """The `TokenIds` of the router.

    Args:
        encoder: how prompts are encoded; None for not at all.
        block_size: tokens per KV block, to which expected hits are floored.
        on_result: called with the result (one of `names.TOKENIZE_RESULTS`) and the seconds of each prompt.
        on_compared: called with whether an answer counted as many prompt tokens as there were ids.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        encoder: Encoder | None,
        *,
        block_size: int,
        on_result: Callable[[str, float], None],
        on_compared: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encoder = encoder
        self._traits = TemplateTraits(encoder, clock=clock) if encoder is not None else None
        self._trust = Trust(clock=clock)
        self._block_size = block_size
        self._on_result = on_result
        self._on_compared = on_compared
        self._log_limit = LogLimit(clock)
        self._running: set[asyncio.Task[array[int] | None]] = set()

    async def start(self) -> None:
        """Open what the encoder needs."""
        if self._encoder is not None:
            await self._encoder.start()

    async def stop(self) -> None:
        """Give up what is being encoded, and close."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._encoder is not None:
            await self._encoder.stop()

    async def of(self, request: InferenceRequest) -> array[int] | None:
        """Ids of the request's first prompt, exactly as its engine will see them; None where that is not known.

        The first to ask starts the work, everybody waits for it, and whoever gives up waiting leaves it running: its
        result serves the next decision or the next turn. When the ids are there, the request's lengths are counted
        by them.
        """
        if request.token_ids is not None:
            return request.token_ids
        task = self._task(request)
        ids = await asyncio.shield(task) if task is not None else None
        if ids is not None:
            request.count_by(ids, self._block_size)
        return ids

    def begin(self, request: InferenceRequest) -> Awaitable[array[int] | None] | None:
        """Start the same work for whoever needs its result after the decision; None where there will be none."""
        task = self._task(request)
        return asyncio.shield(task) if task is not None else None

    def _task(self, request: InferenceRequest) -> asyncio.Future[array[int] | None] | None:
        """What finds the ids of *request*, begun by whoever asks first; None where they will not be known."""
        if request.tokenising is None and request.body is not None and self._is_wanted(request):
            obstacle = self._obstacle(request)
            if obstacle:
                self._on_result(obstacle, 0.0)
                request.tokenising = asyncio.get_running_loop().create_future()
                request.tokenising.set_result(None)
            else:
                # What it needs of the request is taken now: the request lets go of its prompt when it is answered.
                ids = self._tokenise(request.api, request.model, request.body, is_counted=_is_counted(request))
                request.tokenising = task = asyncio.create_task(ids, name="tokenise")
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        return request.tokenising

    def ended(self, exchange: Exchange) -> None:
        """Compare the tokens that an engine has counted with those that were known."""
        if exchange.record is not None and exchange.usage is not None:
            self.answered(exchange.record.request, exchange.usage)

    def answered(self, request: InferenceRequest, usage: Usage) -> None:
        """An engine has counted the prompt of *request*: compare, if its ids were known."""
        ids = request.token_ids
        # The counts of several prompts are summed up.
        if self._encoder is None or ids is None or usage.prompt_tokens is None or request.prompt_len != len(ids):
            return
        self._on_compared(self._trust.compare(request.model, len(ids), usage.prompt_tokens))

    def _is_wanted(self, request: InferenceRequest) -> bool:
        if self._encoder is None or request.api is Api.OTHER or request.pinned_to:
            return _is_counted(request)
        return True

    def _obstacle(self, request: InferenceRequest) -> str:
        """Why *request* is not encoded now; empty where it is, or came encoded."""
        if _is_counted(request):
            return ""
        if not self._trust.believes(request.model):
            return "distrusted"
        return "busy" if len(self._running) >= MOST_AT_A_TIME else ""

    async def _tokenise(self, api: Api, model: str, body: bytes, *, is_counted: bool) -> array[int] | None:
        started = time.perf_counter()
        try:
            ids = await self._encode(api, model, body, is_counted)
            result = "ok"
        except NotTokenised as reason:
            ids, result = None, reason.result
        except (RecursionError, UnicodeEncodeError):
            # Nested too deeply, or with halves of surrogate pairs: the router looks no deeper than it must, engines do.
            ids, result = None, Refused.result
        except Exception:
            # A fault of ours: the hit lengths of this request stay unknown, and it is served all the same.
            if (kept_back := self._log_limit.passes(api)) is not None:
                log.exception("smetric.tokenize.failed", api=api.value, kept_back=kept_back)
            ids, result = None, "failed"
        self._on_result(result, time.perf_counter() - started)
        return ids

    async def _encode(self, api: Api, model: str, body: bytes, is_counted: bool) -> array[int]:
        if len(body) > MAX_BODY or (not is_counted and _commas(body) > MAX_COMMAS):
            raise NotTokenised
        try:
            found = await body_of_ids(body) if is_counted else json.loads(body)
        except ValueError:  # what the router's decoder takes and Python's does not: a number of thousands of digits
            raise Refused from None
        prompt = await self._read(api, model, found)
        if isinstance(prompt, array):
            return prompt
        assert self._encoder is not None
        ids = await self._encoder.encode(model, prompt, len(body))
        if not ids:  # of an empty text, say: no engine begins with nothing
            raise Refused
        return ids

    async def _read(self, api: Api, model: str, body: dict[str, Any]) -> Text | Chat | array[int]:
        if api is Api.COMPLETIONS:
            return prompt_of_completion(body)
        if api is Api.CHAT:
            return chat_of_chat(body)
        if api is Api.RESPONSES:
            return chat_of_responses(body)
        assert self._traits is not None
        return chat_of_messages(
            body,
            merge_inline_system=has_inline_system(body) and await self._traits.merges_inline_system(model),
            disabled_effort=await self._traits.disabled_effort(model) if disables_thinking(body) else "none",
        )


def _is_counted(request: InferenceRequest) -> bool:
    """Whether its prompt came as token ids."""
    return request.api is Api.COMPLETIONS and request.prompt is not None and request.prompt.counted


def _commas(body: bytes) -> int:
    """Commas between its values; more may be told while they are few."""
    commas = body.count(b",")
    if commas > MAX_COMMAS:
        # Without escapes, every second piece is inside a string.
        outside = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
        commas = sum(piece.count(b",") for piece in outside)
    return commas
