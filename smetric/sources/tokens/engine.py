"""Tokenisation by the engine's own /tokenize."""

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
from smetric.sources.tokens.chat import Chat, NotTokenised, Refused, Text, Unavailable

#: Longest answer that is read, in bytes: two million tokens.
MAX_ANSWER = 16 << 20
#: Answers above this many bytes are decoded in a thread.
INLINE_BYTES = 256 << 10
#: Failures in a row after which an instance is not asked about a model, and for how many seconds.
FAILURES, OPEN_S = 3, 5.0
#: Connections to one instance.
MOST_CONNECTIONS = 16
#: Statuses by which an engine says that it is the prompt that it does not take.
_REFUSING = frozenset({400, 413, 422})

log = structlog.get_logger("smetric.tokenize")


class _Answer(msgspec.Struct):
    count: int
    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]


_ANSWER = msgspec.json.Decoder(_Answer)


class EngineEncoder:
    """An `Encoder` that asks instances in turn; a second one where the first could not answer.

    Args:
        fleet: the instances.
        timeout_s: seconds one of them may take.
        resolve: how names are looked up.
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
        """Open the connections' pool."""
        self._session = PlainSession(self._resolve, timeout_s=self._timeout_s, most_to_one=MOST_CONNECTIONS)

    async def stop(self) -> None:
        """Close it."""
        if self._session is not None:
            await self._session.close()

    async def encode(self, model: str, prompt: Text | Chat, size: int) -> array[int]:
        """The ids of *prompt*, as an instance that serves *model* gives them."""
        body = json.dumps(_question(model, prompt), ensure_ascii=False, separators=(",", ":")).encode()
        try:
            candidates = self._fleet.candidates(model)
        except NoCandidate:
            raise Unavailable from None
        self._turns += 1
        first = self._turns % len(candidates)
        asked = 0
        for instance in candidates[first:] + candidates[:first]:
            breaker = self._breaker(instance, model)
            if not breaker.allows():
                continue
            asked += 1
            try:
                return await self._ask(instance, model, body, breaker)
            except Unavailable:
                if asked == 2:
                    raise
        raise Unavailable

    def _breaker(self, instance: Instance, model: str) -> Breaker:
        """Of each model its own: where one cannot be tokenised, the others can."""
        key = instance.id, model
        breaker = self._breakers.get(key)
        if breaker is None:
            breaker = self._breakers[key] = Breaker(FAILURES, OPEN_S, clock=self._clock)
        return breaker

    async def _ask(self, instance: Instance, model: str, body: bytes, breaker: Breaker) -> array[int]:
        """One question to one instance, whose end *breaker* is told exactly once."""
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
                data=io.BytesIO(body),  # from a file it goes out piece by piece, and others are served in between
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


def _question(model: str, prompt: Text | Chat) -> dict[str, Any]:
    """The body of `/tokenize`."""
    if isinstance(prompt, Text):
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
