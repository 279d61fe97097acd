"""Tokenisation by the engines' own `/tokenize`."""

from __future__ import annotations

import asyncio
import io
import json
import time
from array import array
from collections.abc import Callable
from typing import Annotated, Any

import aiohttp
import msgspec
import structlog
from cachetools import LRUCache

from smetric.errors import UNREADABLE, NoCandidate
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.http.addresses import Resolve, resolve
from smetric.sources.client import Breaker, PlainSession, is_plain, read_within
from smetric.sources.tokens.chat import ChatPrompt, NotTokenised, Refused, TextPrompt, Unavailable

#: Largest answer that is read, in bytes: two million tokens.
MAX_ANSWER = 16 << 20
#: Answers above this many bytes are decoded in a thread.
INLINE_BYTES = 256 << 10
#: Failures in a row after which an instance is not asked about a model, and seconds until it is tried again.
FAILURES, OPEN_S = 3, 5.0
#: Most connections to one instance.
MOST_CONNECTIONS = 16
#: Statuses by which an engine refuses the prompt.
_REFUSING = frozenset({400, 413, 422})

log = structlog.get_logger("smetric.tokenize")


class _Answer(msgspec.Struct):
    count: int
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]


_ANSWER = msgspec.json.Decoder(_Answer)


class EngineEncoder:
    """`Encoder` that asks the instances in turn, and a second one if the first cannot answer.

    Args:
        fleet: the instances.
        timeout_s: timeout of one request, in seconds.
        resolve: resolves host names.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        timeout_s: float,
        resolve: Resolve = resolve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._clock = clock
        self._breakers: LRUCache[tuple[str, str], Breaker] = LRUCache(1024)
        self._turns = 0
        self._session: PlainSession | None = None

    async def start(self) -> None:
        """Open the connection pool."""
        self._session = PlainSession(self._resolve, timeout_s=self._timeout_s, most_to_one=MOST_CONNECTIONS)

    async def stop(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def encode(self, model: str, prompt: TextPrompt | ChatPrompt, size: int) -> array[int]:
        """Return the ids of *prompt* from an instance that serves *model*."""
        body = json.dumps(_question(model, prompt), ensure_ascii=False, separators=(",", ":")).encode()
        try:
            candidates = self._fleet.candidates(model)
        except NoCandidate:
            raise Unavailable from None
        self._turns += 1
        first = self._turns % len(candidates)
        asked = 0
        for instance in candidates[first:] + candidates[:first]:
            # Each model has its own breaker: if one model cannot be tokenised, others may.
            breaker = self._breakers.setdefault((instance.id, model), Breaker(FAILURES, OPEN_S, clock=self._clock))
            if not breaker.allows():
                continue
            asked += 1
            try:
                return await self._ask(instance, model, body, breaker)
            except Unavailable:
                if asked == 2:
                    raise
        raise Unavailable

    async def _ask(self, instance: Instance, model: str, body: bytes, breaker: Breaker) -> array[int]:
        """Ask one instance, and report the outcome to *breaker* exactly once."""
        was_open = breaker.is_open
        try:
            ids = await self._post(instance, body)
        except Unavailable:
            breaker.failed()
            if breaker.is_open and not was_open:
                log.warning("smetric.tokenize.unavailable", instance=instance.id, model=model)
            raise
        except NotTokenised:
            breaker.succeeded()
            raise
        except BaseException:
            breaker.abandoned()
            raise
        breaker.succeeded()
        return ids

    async def _post(self, instance: Instance, body: bytes) -> array[int]:
        assert self._session is not None, "start() comes first"
        headers = {"Content-Type": "application/json"}
        if instance.key is not None:
            headers["Authorization"] = f"Bearer {instance.key.text}"
        try:
            async with self._session.http.post(
                instance.url + "/tokenize",
                data=io.BytesIO(body),  # aiohttp sends a file piece by piece, and other tasks run in between
                headers=headers,
                allow_redirects=False,
            ) as response:
                if response.status in _REFUSING:
                    raise Refused
                if response.status != 200 or not is_plain(response):
                    raise Unavailable
                if (answer := await read_within(response, MAX_ANSWER)) is None:
                    raise Unavailable
        except (TimeoutError, aiohttp.ClientError, OSError):
            raise Unavailable from None
        if len(answer) > INLINE_BYTES:
            return await asyncio.to_thread(_ids, answer)
        return _ids(answer)


def _ids(answer: bytearray) -> array[int]:
    try:
        read = _ANSWER.decode(answer)
    except UNREADABLE:
        raise Unavailable from None
    if read.count != len(read.tokens):
        raise Unavailable
    return array("I", read.tokens)


def _question(model: str, prompt: TextPrompt | ChatPrompt) -> dict[str, Any]:
    """Return the request body of `/tokenize`."""
    if isinstance(prompt, TextPrompt):
        return {"model": model, "prompt": prompt.text, "add_special_tokens": prompt.add_special_tokens}
    question: dict[str, Any] = {
        "model": model,
        "messages": prompt.messages,
        "add_generation_prompt": prompt.add_generation_prompt,
        "continue_final_message": prompt.continue_final_message,
        "add_special_tokens": prompt.add_special_tokens,
    }
    if prompt.tools is not None:
        question["tools"] = prompt.tools
    if prompt.template_kwargs:
        question["chat_template_kwargs"] = prompt.template_kwargs
    if prompt.chat_template is not None:
        question["chat_template"] = prompt.chat_template
    return question
