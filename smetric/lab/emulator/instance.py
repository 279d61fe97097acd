"""Emulated instance."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import orjson
from xxhash import xxh3_64_intdigest

from smetric.lab.emulator import call as tokenizer
from smetric.lab.emulator.call import EmulatedCall, EngineLimits, busy
from smetric.lab.emulator.metrics import InstanceMetrics
from smetric.lab.engine import Engine, EngineConfig, QueueFullError, SequenceRequest, SequenceState
from smetric.lab.store import block_keys, root_key

# What an emulated engine answers: filler words, the same ones for the same prompt, seed and choice.

#: Words of three letters: with a space before it each is four bytes, hence one token wherever the reply is read again.
_LETTERS = (
    "theonetwosixtennewoldbignowandbutfornotcanmayhashadwasareallanyfew"
    "itsourherhissheyouwhohowwhyoutoffrunsetgetputletseesayasktryusefix"
    "addmapkeyrowlogbitendtoplowred"
)
_TOKENS = [f" {_LETTERS[at : at + 3]}" for at in range(0, len(_LETTERS), 3)]

#: Tokens of a reply that nobody limits: from the first to the sum of both, by the prompt.
SHORTEST, SPREAD = 64, 192


def digest(prompt: bytes, seed: int | None, index: int) -> int:
    """A number that stands for this prompt, seed and choice."""
    return xxh3_64_intdigest(b"%d:%d:" % (seed or 0, index) + prompt)


def natural_length(key: int) -> int:
    """Tokens after which the reply ends by itself."""
    return SHORTEST + key % (SPREAD + 1)


def text(key: int, tokens: int) -> str:
    """A reply of exactly *tokens* tokens, four ASCII bytes each."""
    return "".join(Random(key).choices(_TOKENS, k=tokens))


# The sequences one request runs, and the news of them that its response waits for.


class Choice:
    """One reply: its whole text from the start, of which the engine hands out a token at a time.

    Args:
        index: its place in the answer.
        prompt: packed tokens.
        text: the reply, one token every four characters.
        sequence: what the engine runs for it.
        cut: whether a limit ends it, not the reply itself.
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
        """Whether there is something to tell: new tokens, or the end."""
        return self.sequence.emitted > self.sent or self.sequence.state is SequenceState.ABORTED

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, in vLLM's words; None while it has not."""
        if self.sequence.state is SequenceState.ABORTED:
            return "abort"
        if self.sequence.state is SequenceState.FINISHED:
            return "length" if self.cut else "stop"
        return None

    @property
    def produced(self) -> str:
        """The text so far."""
        return self.text[: 4 * self.sequence.emitted]

    def take(self) -> str:
        """The text that has not been told yet."""
        start, self.sent = self.sent, self.sequence.emitted
        return self.text[4 * start : 4 * self.sent]

    def token_ids(self, start: int = 0) -> list[int]:
        """Ids of the output tokens from the *start*-th on, as far as they are generated."""
        return tokenizer.to_ids(tokenizer.encode(self.text[4 * start : 4 * self.sequence.emitted]))


class EmulatedGeneration:
    """All sequences of one request; `wake` and `changed` connect the engine with the response.

    Args:
        call: the request.
        limits: of the engine.
        block_size: of the engine, tokens.
    """

    __slots__ = ("_block_size", "_news", "call", "choices", "told_at")

    def __init__(self, call: EmulatedCall, limits: EngineLimits, block_size: int) -> None:
        self.call = call
        self.choices: list[Choice] = []
        #: When news was last given, seconds of the loop's clock.
        self.told_at = 0.0
        self._block_size = block_size
        self._news = asyncio.Event()
        root = root_key(call.salt)
        for prompt in call.prompts:
            length = tokenizer.count(prompt)
            for which in range(call.n):
                key = digest(prompt, call.seed, which)
                room = limits.max_model_len - length
                limit = room if call.limit is None else min(room, call.limit)
                natural = limit if call.exact else max(natural_length(key), call.shortest)
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
        """Prompt tokens of the first prompt that were in the cache."""
        return self.choices[0].sequence.hit_len or 0

    @property
    def created_tokens(self) -> int:
        """Prompt tokens of the first prompt that entered the cache, in full blocks."""
        prompt_len = self.choices[0].sequence.prompt_len
        return max(0, prompt_len // self._block_size * self._block_size - self.cached_tokens)

    def wake(self) -> None:
        """There is news."""
        self._news.set()

    async def changed(self) -> None:
        """Wait for news."""
        await self._news.wait()
        self._news.clear()


# One emulated instance: the engine model driven by a real clock, times a scale.

#: Steps are taken in batches this far apart at least, real seconds: timers cost more than steps.
TICK_S = 0.002
#: Steps in one batch at most, so that an engine that lags does not hold up the others.
STEPS_PER_TICK = 1000
#: A stream is told of new tokens this often at most when time runs faster than real, real seconds.
STREAM_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class EmulatedSettings:
    """What one emulated instance is.

    Args:
        model: the name it answers with.
        aliases: further names it serves.
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
    """Takes calls, runs the engine while there is work, tells the responses of it. Lives in one event loop."""

    def __init__(self, settings: EmulatedSettings | None = None) -> None:
        self.settings = settings or EmulatedSettings()
        self.limits = EngineLimits(
            (self.settings.model, *self.settings.aliases),
            self.settings.engine.max_model_len,
        )
        #: Requests that generate and are open on the wire.
        self.open_requests = 0
        self._start_anew()

    def _start_anew(self) -> None:
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
        """Restart: what runs is aborted, the cache is empty, the counters and the start time are new."""
        self.abort_all()
        if self._timer is not None:
            self._timer.cancel()
        self._start_anew()

    def generate(self, call: EmulatedCall) -> EmulatedGeneration:
        """Put the sequences of *call* in the queue.

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
            raise busy() from None
        self._active[generation] = None
        if self._step_ends is None:
            self._begin_step(now)
            self._arm()
        return generation

    def abort(self, generation: EmulatedGeneration) -> None:
        """Stop what still runs of *generation*, at once, and wake its response; nothing happens if it has ended."""
        if generation not in self._active:
            return
        del self._active[generation]
        now = self._now()
        for choice in generation.choices:
            self.engine.abort(choice.sequence, now)
        self._count(generation)
        generation.wake()

    def abort_all(self) -> None:
        """Stop everything, as an engine does that is told to end; streams finish with the reason `abort`."""
        for generation in tuple(self._active):
            self.abort(generation)

    def _now(self) -> float:
        return (time.monotonic() - self._origin) * self.settings.time_scale

    def _begin_step(self, at: float) -> None:
        duration = self.engine.start(at)
        self._step_ends = None if duration is None else at + duration
        self._step_took = duration or 0.0

    def _arm(self) -> None:
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
        self._tell()
        self._arm()

    def _tell(self) -> None:
        now = time.monotonic()
        interval = STREAM_INTERVAL_S if self.settings.time_scale > 1 else 0.0
        for generation in tuple(self._active):
            if generation.ended:
                del self._active[generation]
                self._count(generation)
                generation.wake()
            elif (
                generation.call.stream
                and now - generation.told_at >= interval
                and any(choice.fresh for choice in generation.choices)
            ):
                generation.told_at = now
                generation.wake()

    def _count(self, generation: EmulatedGeneration) -> None:
        call = generation.call
        self.metrics.answered(call.n, call.limit, len(generation.choices))
        for choice in generation.choices:
            reason = choice.finish_reason
            if reason is None:
                raise AssertionError("a request was counted as ended while it runs")
            self.metrics.ended(choice.sequence, reason)


# What every API's answer is made of: one body, or the events of a stream.

#: As vLLM 0.32.0 signs its answers.
FINGERPRINT = "vllm-0.32.0-emulated"

#: The end of a stream in the OpenAI APIs.
DONE = b"data: [DONE]\n\n"


class EmulatedAnswer(Protocol):
    """Writes the answer to one call in one API's form; events are whole, one chunk each on the wire."""

    #: Whether the opening is sent at once; otherwise it waits for the first token.
    eager: bool

    def body(self) -> dict[str, Any]:
        """The answer that is not streamed, once everything has ended."""

    def opening(self) -> Iterable[bytes]:
        """The events before the first token."""

    def news(self, choice: Choice) -> Iterable[bytes]:
        """The events for what *choice* has to tell."""

    def closing(self) -> Iterable[bytes]:
        """The events after everything has ended."""


def counts(generation: EmulatedGeneration) -> dict[str, int]:
    """What `usage` begins with in the OpenAI APIs."""
    prompt_tokens, output_tokens = generation.prompt_tokens, generation.output_tokens
    total = prompt_tokens + output_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": output_tokens}


def data_event(value: dict[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """An event named by its own `type`."""
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"
