"""Model of one engine: continuous batching with chunked prefill over a prefix cache, after vLLM's scheduler.

It has no clock and no input or output, and it knows lengths and names of blocks instead of tokens. The caller calls
`start` at the beginning of a step, waits for the returned time (by a heap of events, or by a real clock), and calls
`finish`. Priorities, sleeping and KV transfer are not modelled.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from smetric.lab.store import PrefixCache


class SequenceState(enum.Enum):
    """State of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(eq=False, slots=True)
class SequenceRequest:
    """Sequence to generate, and its progress.

    Args:
        prompt_len: tokens of the prompt, at least 1.
        output_len: tokens to generate, at least 1.
        keys: names of the full blocks of prompt and output together, as far as they are known; further blocks are
            computed but never shared.
    """

    prompt_len: int
    output_len: int
    keys: Sequence[int] = ()

    state: SequenceState = SequenceState.WAITING
    #: Output tokens generated so far.
    emitted: int = 0
    #: Cached prompt tokens at its first admission; None before.
    hit_len: int | None = None
    #: Model time of events, seconds; None until they happen.
    arrived_s: float = 0.0
    admitted_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    preemptions: int = 0

    # Tokens with computed KV, held blocks, and held blocks that are committed under a key.
    _computed: int = 0
    _blocks: int = 0
    _committed: int = 0

    @property
    def ended(self) -> bool:
        """Whether it is finished or aborted."""
        return self.state in (SequenceState.FINISHED, SequenceState.ABORTED)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Duration of one engine step in seconds: a linear model of its batch.

    The defaults are Qwen3-Coder-30B-A3B (bf16) on an H20, from the measured points of InferSim (Apache-2.0): 5.43 GFLOP
    of weights per token at 111 TFLOPS, 4 × 48 layers × 32 heads × 128 attention FLOP per token pair at 126 TFLOPS,
    96 KiB of KV per token read at 3.0 TB/s. `fixed_s` and `decode_s` are a straight line through its decode steps,
    where the expert weights read grow with the batch. They give 15.8k tokens/s of prefill at 4k prompts (measured:
    16.6k) and 39 ms for a batch of 100 at 5k context (measured: 38 ms).

    Args:
        fixed_s: per step.
        prefill_s: per computed prompt token.
        attention_s: per pair of a computed prompt token and a token of its context.
        decode_s: per decoding sequence.
        context_s: per token of context of a decoding sequence.
    """

    fixed_s: float = 8e-3
    prefill_s: float = 4.9e-5
    attention_s: float = 6.2e-9
    decode_s: float = 1.5e-4
    context_s: float = 3.3e-8

    def __call__(self, prefill: int, pairs: float, decodes: int, context: int) -> float:
        """Return the duration, seconds.

        Args:
            prefill: prompt tokens.
            pairs: pairs of a prompt token and a token of its context.
            decodes: decoding sequences.
            context: tokens of their contexts together.
        """
        return (
            self.fixed_s
            + self.prefill_s * prefill
            + self.attention_s * pairs
            + self.decode_s * decodes
            + self.context_s * context
        )


class QueueFullError(Exception):
    """The queue of waiting sequences is full."""


class TooLongError(ValueError):
    """The sequence can never fit this engine."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and speed of an engine; the defaults are vLLM's for API servers, with about the KV space of an H20.

    Args:
        block_size: tokens of a KV block.
        blocks: KV blocks.
        max_model_len: longest prompt and output together, tokens; must fit the KV blocks.
        max_batched_tokens: tokens computed in one step.
        max_running: sequences of the batch.
        max_waiting: sequences of the queue; further ones are rejected.
        step_time: duration of a step.
    """

    block_size: int = 16
    blocks: int = 16384
    max_model_len: int = 131072
    max_batched_tokens: int = 8192
    max_running: int = 1024
    max_waiting: int = 4096
    step_time: StepTime = field(default_factory=StepTime)

    def __post_init__(self) -> None:
        for name in ("block_size", "blocks", "max_model_len", "max_batched_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: an engine needs at least 1")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting is {self.max_waiting}: it cannot be negative")
        if self.max_model_len > self.blocks * self.block_size:
            raise ValueError(
                f"max_model_len is {self.max_model_len}, but {self.blocks} blocks of {self.block_size} tokens hold "
                f"only {self.blocks * self.block_size}: give more blocks or a smaller max_model_len"
            )


@dataclass(slots=True)
class StepResult:
    """Result of one step.

    Args:
        tokens: computed prompt and output tokens.
        decoded: generated tokens.
        first: sequences that got their first token.
        finished: sequences that got their last token.
    """

    tokens: int
    decoded: int
    first: list[SequenceRequest]
    finished: list[SequenceRequest]


@dataclass(slots=True)
class EngineTotals:
    """Counters since the start of the engine, in tokens unless named otherwise.

    `queries` and `hits` count a prompt at its admission. `prompt` and its `cached` part count at its first token, which
    an abort may prevent.
    """

    queries: int = 0
    hits: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    preemptions: int = 0
    refused: int = 0


class Engine:
    """Batch, queue and cache of one engine.

    Invariant: between two steps every held block belongs to a running sequence, and a lone sequence always fits, so
    that preemption always leaves a sequence that makes progress.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.cache = PrefixCache(self.config.blocks)
        self.running: list[SequenceRequest] = []
        self.waiting: deque[SequenceRequest] = deque()
        self.totals = EngineTotals()
        self._plan: list[tuple[SequenceRequest, int]] | None = None

    @property
    def busy(self) -> bool:
        """Whether a sequence runs or waits."""
        return bool(self.running or self.waiting)

    def hit_length(self, keys: Sequence[int]) -> int:
        """Return the tokens of the leading full blocks of *keys* that are cached now."""
        return self.cache.match(keys) * self.config.block_size

    def submit(self, sequence: SequenceRequest, now: float) -> None:
        """Append *sequence* to the queue.

        Raises:
            QueueFullError: the queue holds `max_waiting` sequences already.
            TooLongError: prompt and output together exceed `max_model_len`.
            ValueError: a length is below 1.
        """
        if sequence.prompt_len < 1 or sequence.output_len < 1:
            raise ValueError(
                f"prompt_len {sequence.prompt_len} and output_len {sequence.output_len} must be at least 1"
            )
        if sequence.prompt_len + sequence.output_len > self.config.max_model_len:
            raise TooLongError(
                f"{sequence.prompt_len} prompt and {sequence.output_len} output tokens exceed max_model_len "
                f"{self.config.max_model_len}"
            )
        if len(self.waiting) >= self.config.max_waiting and not self._admits_at_once():
            self.totals.refused += 1
            raise QueueFullError(f"{len(self.waiting)} sequences wait already")
        sequence.arrived_s = now
        self.waiting.append(sequence)

    def abort(self, sequence: SequenceRequest, now: float) -> None:
        """Stop *sequence* at once and free its blocks; no effect after its end."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._free(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        else:
            return
        sequence.state = SequenceState.ABORTED
        sequence.ended_s = now

    def start(self, now: float) -> float | None:
        """Start a step, and return its duration in seconds, or None without work.

        Raises:
            RuntimeError: the previous step is not finished.
        """
        if self._plan is not None:
            raise RuntimeError("a step is under way: finish it first")
        plan: list[tuple[SequenceRequest, int]] = []
        budget = self.config.max_batched_tokens
        preempted = False
        for sequence in tuple(self.running):
            if budget == 0:
                break
            if sequence.state is not SequenceState.RUNNING:
                continue
            count = min(sequence.prompt_len + sequence.emitted - sequence._computed, budget)
            while not self._grow(sequence, count):
                preempted = True
                if self._preempt_last() is sequence:
                    break
            else:
                plan.append((sequence, count))
                budget -= count
        if preempted:
            # A sequence may be preempted after it entered the plan.
            plan = [(sequence, count) for sequence, count in plan if sequence.state is SequenceState.RUNNING]
        else:
            self._admit(plan, budget, now)
        if not plan:
            return None
        self._plan = plan
        return self._duration(plan)

    def finish(self, now: float) -> StepResult:
        """Finish the step at *now*, and return its tokens.

        Raises:
            RuntimeError: no step was started.
        """
        plan = self._plan
        if plan is None:
            raise RuntimeError("no step is under way: start one first")
        self._plan = None
        block_size = self.config.block_size
        commit = self.cache.commit
        result = StepResult(0, 0, [], [])
        for sequence, count in plan:
            if sequence.state is not SequenceState.RUNNING:
                continue
            result.tokens += count
            computed = sequence._computed = sequence._computed + count
            committed = sequence._committed
            full = computed // block_size
            if full > committed:
                keys = sequence.keys
                full = min(full, len(keys))
                while committed < full:
                    commit(keys[committed])
                    committed += 1
                sequence._committed = committed
            if computed == sequence.prompt_len + sequence.emitted:
                if sequence.emitted == 0:
                    sequence.first_token_s = now
                    result.first.append(sequence)
                    self.totals.prompt += sequence.prompt_len
                    self.totals.cached += sequence.hit_len or 0
                sequence.emitted += 1
                result.decoded += 1
                if sequence.emitted == sequence.output_len:
                    sequence.state = SequenceState.FINISHED
                    sequence.ended_s = now
                    result.finished.append(sequence)
        if result.finished:
            self.running = [sequence for sequence in self.running if sequence.state is SequenceState.RUNNING]
            for sequence in result.finished:
                self._free(sequence)
        self.totals.generated += result.decoded
        return result

    def _admits_at_once(self) -> bool:
        return not self.waiting and len(self.running) < self.config.max_running

    def _admit(self, plan: list[tuple[SequenceRequest, int]], budget: int, now: float) -> None:
        config, cache = self.config, self.cache
        while self.waiting and budget and len(self.running) < config.max_running:
            sequence = self.waiting[0]
            length = sequence.prompt_len + sequence.emitted
            # The last token is always computed: its output is the next token.
            keys = sequence.keys[: (length - 1) // config.block_size]
            hits = cache.match(keys)
            held = keys[:hits]
            count = min(length - hits * config.block_size, budget)
            blocks = -(-(hits * config.block_size + count) // config.block_size) - hits
            if blocks > cache.available - cache.idle_among(held):
                return
            cache.pin(held)
            if not cache.reserve(blocks):
                raise AssertionError("counted blocks are not available")
            self.waiting.popleft()
            sequence.state = SequenceState.RUNNING
            sequence._computed = hits * config.block_size
            sequence._committed = hits
            sequence._blocks = hits + blocks
            if sequence.hit_len is None:
                sequence.hit_len = sequence._computed
                sequence.admitted_s = now
                self.totals.queries += sequence.prompt_len
                self.totals.hits += sequence._computed
            self.running.append(sequence)
            plan.append((sequence, count))
            budget -= count

    def _duration(self, plan: list[tuple[SequenceRequest, int]]) -> float:
        prefill = decodes = context = 0
        pairs = 0.0
        for sequence, count in plan:
            if count == 1 and sequence.emitted:
                decodes += 1
                context += sequence._computed
            else:
                prefill += count
                pairs += count * (sequence._computed + count / 2)
        return self.config.step_time(prefill, pairs, decodes, context)

    def _grow(self, sequence: SequenceRequest, count: int) -> bool:
        needed = -(-(sequence._computed + count) // self.config.block_size) - sequence._blocks
        if needed <= 0:
            return True
        if not self.cache.reserve(needed):
            return False
        sequence._blocks += needed
        return True

    def _preempt_last(self) -> SequenceRequest:
        sequence = self.running.pop()
        self._free(sequence)
        sequence.state = SequenceState.WAITING
        sequence.preemptions += 1
        self.totals.preemptions += 1
        self.waiting.appendleft(sequence)
        return sequence

    def _free(self, sequence: SequenceRequest) -> None:
        committed = sequence._committed
        self.cache.release(sequence.keys[:committed], sequence._blocks - committed)
        sequence._computed = sequence._blocks = sequence._committed = 0
