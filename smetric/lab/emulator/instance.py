"""Emulated instance: the engine model on a real clock, its replies, and the base of every API's answer."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from smetric.lab.emulator import prompt as tokenizer
from smetric.lab.emulator.call import EmulatedCall, EngineError, EngineLimits
from smetric.lab.emulator.metrics import InstanceMetrics
from smetric.lab.engine import Engine, EngineConfig, QueueFullError, SequenceRequest, SequenceState
from smetric.lab.store import block_keys, root_key

BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."

#: Words of three letters: with a space before it each is four bytes, and so one token wherever the reply occurs.
_LETTERS = (
    "theonetwosixtennewoldbignowandbutfornotcanmayhashadwasareallanyfew"
    "itsourherhissheyouwhohowwhyoutoffrunsetgetputletseesayasktryusefix"
    "addmapkeyrowlogbitendtoplowred"
)
_TOKENS = [f" {_LETTERS[at : at + 3]}" for at in range(0, len(_LETTERS), 3)]

#: Tokens of a reply without a limit: from the first to the sum of both, depending on the prompt.
SHORTEST, SPREAD = 64, 192
#: Minimum interval between batches of steps, real seconds: a timer costs more than a step.
TICK_S = 0.002
#: Maximum steps of a batch, so that an engine that lags does not delay the others.
STEPS_PER_TICK = 1000
#: Minimum interval between events of a stream when time is scaled up, real seconds.
STREAM_INTERVAL_S = 0.02


def digest(prompt: bytes, seed: int | None, index: int) -> int:
    """Return a number that identifies the prompt, the seed and the choice."""
    return xxh3_64_intdigest(b"%d:%d:" % (seed or 0, index) + prompt)


def text(key: int, tokens: int) -> str:
    """Return a reply of exactly *tokens* tokens, four ASCII bytes each; the same for the same *key*."""
    return "".join(Random(key).choices(_TOKENS, k=tokens))


class Choice:
    """Reply: the engine releases a text, known from the start, token by token.

    Args:
        index: its place in the answer.
        prompt: packed tokens.
        text: the reply, one token every four characters.
        sequence: the sequence of the engine.
        cut: a limit ends it, and not the reply itself.
    """

    __slots__ = ("cut", "index", "prompt", "sent", "sequence", "text")

    def __init__(self, index: int, prompt: bytes, text: str, sequence: SequenceRequest, cut: bool) -> None:
        self.index = index
        self.prompt = prompt
        self.text = text
        self.sequence = sequence
        self.cut = cut
        self.sent = 0

    @property
    def fresh(self) -> bool:
        """Whether there are new tokens, or the end."""
        return self.sequence.emitted > self.sent or self.sequence.state is SequenceState.ABORTED

    @property
    def finish_reason(self) -> str | None:
        """Reason of the end in vLLM's words; None before the end."""
        if self.sequence.state is SequenceState.ABORTED:
            return "abort"
        if self.sequence.state is SequenceState.FINISHED:
            return "length" if self.cut else "stop"
        return None

    @property
    def produced(self) -> str:
        """Text so far."""
        return self.text[: 4 * self.sequence.emitted]

    def take(self) -> str:
        """Return the text since the last call."""
        start, self.sent = self.sent, self.sequence.emitted
        return self.text[4 * start : 4 * self.sent]

    def token_ids(self, start: int = 0) -> list[int]:
        """Return the ids of the output tokens so far, from the *start*-th on."""
        return tokenizer.to_ids(tokenizer.encode(self.text[4 * start : 4 * self.sequence.emitted]))


class EmulatedGeneration:
    """Sequences of one request; `wake` and `changed` connect the engine with the response.

    Args:
        call: the request.
        limits: of the engine.
        block_size: of the engine, tokens.
    """

    __slots__ = ("_block_size", "_news", "call", "choices", "woken_at")

    def __init__(self, call: EmulatedCall, limits: EngineLimits, block_size: int) -> None:
        self.call = call
        self.choices: list[Choice] = []
        #: Time of the last event of a stream, seconds of the monotonic clock.
        self.woken_at = 0.0
        self._block_size = block_size
        self._news = asyncio.Event()
        root = root_key(call.salt)
        for prompt in call.prompts:
            length = tokenizer.count(prompt)
            for index in range(call.n):
                key = digest(prompt, call.seed, index)
                room = limits.max_model_len - length
                limit = room if call.limit is None else min(room, call.limit)
                natural = limit if call.exact else max(SHORTEST + key % (SPREAD + 1), call.shortest)
                output = min(limit, natural)
                words = text(key, output)
                keys = block_keys(prompt + words.encode(), block_size, root)
                sequence = SequenceRequest(length, output, keys)
                self.choices.append(Choice(len(self.choices), prompt, words, sequence, limit <= natural))

    @property
    def ended(self) -> bool:
        """Whether every sequence has ended."""
        return all(choice.sequence.ended for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(tokenizer.count(prompt) for prompt in self.call.prompts)

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(choice.sequence.emitted for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the first prompt that were in the cache."""
        return self.choices[0].sequence.hit_len or 0

    @property
    def created_tokens(self) -> int:
        """Tokens of the first prompt that entered the cache, in full blocks."""
        prompt_len = self.choices[0].sequence.prompt_len
        return max(0, prompt_len // self._block_size * self._block_size - self.cached_tokens)

    def wake(self) -> None:
        """Wake the response."""
        self._news.set()

    async def changed(self) -> None:
        """Wait for new tokens or the end."""
        await self._news.wait()
        self._news.clear()


@dataclass(frozen=True, slots=True)
class EmulatedSettings:
    """Settings of an emulated instance.

    Args:
        model: the name in answers.
        aliases: further names.
        engine: sizes and speed.
        time_scale: model seconds in one real second.
    """

    model: str = "emulated"
    aliases: tuple[str, ...] = ()
    engine: EngineConfig = field(default_factory=EngineConfig)
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.time_scale < math.inf:
            raise ValueError(
                f"time_scale is {self.time_scale}: it must be a number above 0 (1 is real time, 20 is 20 times it)"
            )


class EmulatedInstance:
    """Engine that runs while there is work, and wakes the responses; it belongs to one event loop."""

    def __init__(self, settings: EmulatedSettings | None = None) -> None:
        self.settings = settings or EmulatedSettings()
        names = (self.settings.model, *self.settings.aliases)
        self.limits = EngineLimits(names, self.settings.engine.max_model_len)
        #: Open requests that generate.
        self.open_requests = 0
        self._start()

    def _start(self) -> None:
        self.engine = Engine(self.settings.engine)
        self.started_at = time.time()
        self.metrics = InstanceMetrics(
            self.engine,
            model=self.settings.model,
            time_scale=self.settings.time_scale,
            started_at=self.started_at,
        )
        self._active: dict[EmulatedGeneration, None] = {}
        self._origin = time.monotonic()
        self._step_ends: float | None = None
        self._step_took = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def reset(self) -> None:
        """Restart: abort all requests, empty the cache, and reset counters and start time."""
        self.abort_all()
        if self._timer is not None:
            self._timer.cancel()
        self._start()

    def generate(self, call: EmulatedCall) -> EmulatedGeneration:
        """Queue the sequences of *call*.

        Raises:
            EngineError: the queue is full (503).
        """
        now = self._now()
        generation = EmulatedGeneration(call, self.limits, self.settings.engine.block_size)
        queued: list[SequenceRequest] = []
        try:
            for choice in generation.choices:
                self.engine.submit(choice.sequence, now)
                queued.append(choice.sequence)
        except QueueFullError:
            for sequence in queued:
                self.engine.abort(sequence, now)
            self.metrics.rejected += 1
            raise EngineError(503, BUSY, "Service Unavailable") from None
        self._active[generation] = None
        if self._step_ends is None:
            self._begin_step(now)
            self._set_timer()
        return generation

    def abort(self, generation: EmulatedGeneration) -> None:
        """Abort the sequences that still run, and wake the response; no effect after the end."""
        if generation not in self._active:
            return
        del self._active[generation]
        now = self._now()
        for choice in generation.choices:
            self.engine.abort(choice.sequence, now)
        self._count(generation)
        generation.wake()

    def abort_all(self) -> None:
        """Abort all requests, as vLLM does on SIGTERM; streams finish with the reason `abort`."""
        for generation in tuple(self._active):
            self.abort(generation)

    def _now(self) -> float:
        return (time.monotonic() - self._origin) * self.settings.time_scale

    def _begin_step(self, at: float) -> None:
        duration = self.engine.start(at)
        self._step_ends = None if duration is None else at + duration
        self._step_took = duration or 0.0

    def _set_timer(self) -> None:
        if self._step_ends is not None:
            wait = (self._step_ends - self._now()) / self.settings.time_scale
            self._timer = asyncio.get_running_loop().call_later(max(TICK_S, wait), self._tick)

    def _tick(self) -> None:
        now = self._now()
        for _ in range(STEPS_PER_TICK):
            ends = self._step_ends
            if ends is None or ends > now:
                break
            result = self.engine.finish(ends)
            self.metrics.stepped(result, self._step_took)
            self._begin_step(ends)
        self._wake_responses()
        self._set_timer()

    def _wake_responses(self) -> None:
        now = time.monotonic()
        interval = STREAM_INTERVAL_S if self.settings.time_scale > 1 else 0.0
        for generation in tuple(self._active):
            if generation.ended:
                del self._active[generation]
                self._count(generation)
                generation.wake()
            elif (
                generation.call.stream
                and now - generation.woken_at >= interval
                and any(choice.fresh for choice in generation.choices)
            ):
                generation.woken_at = now
                generation.wake()

    def _count(self, generation: EmulatedGeneration) -> None:
        call = generation.call
        self.metrics.answered(call.n, call.limit, len(generation.choices))
        for choice in generation.choices:
            reason = choice.finish_reason
            if reason is None:
                raise AssertionError("a request was counted as ended while it runs")
            self.metrics.ended(choice.sequence, reason)


class EmulatedAnswer(ABC):
    """Answer to one request in the form of one API; each event is one chunk on the wire."""

    #: Send the opening events at once, and not with the first token.
    eager = False

    def __init__(self, generation: EmulatedGeneration) -> None:
        self._generation = generation
        self._call = generation.call

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the body of an answer without a stream, after the end."""

    def opening(self) -> Iterable[bytes]:
        """Return the events before the first token; none in an API without streams."""
        return ()

    def news(self, choice: Choice) -> Iterable[bytes]:
        """Return the events for the new tokens, or the end, of *choice*."""
        return ()

    def closing(self) -> Iterable[bytes]:
        """Return the events after the end."""
        return ()


def named_event(value: dict[str, Any]) -> bytes:
    """Return an event that is named by its `type`."""
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"
