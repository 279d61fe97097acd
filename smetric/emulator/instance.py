"""One emulated instance: the engine model driven by a real clock, times a scale."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field

from smetric.emulator.call import Call, Limits
from smetric.emulator.error import busy
from smetric.emulator.generation import Generation
from smetric.emulator.metrics import InstanceMetrics
from smetric.sim.engine import Engine, EngineConfig, QueueFullError
from smetric.sim.sequence import SequenceRequest

#: Steps are taken in batches this far apart at least, real seconds: timers cost more than steps.
TICK_S = 0.002
#: Steps in one batch at most, so that an engine that lags does not hold up the others.
STEPS_PER_TICK = 1000
#: A stream is told of new tokens this often at most when time runs faster than real, real seconds.
STREAM_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class InstanceSettings:
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

    def __init__(self, settings: InstanceSettings | None = None) -> None:
        self.settings = settings or InstanceSettings()
        self.limits = Limits(
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
        self._active: dict[Generation, None] = {}
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

    def generate(self, call: Call) -> Generation:
        """Put the sequences of *call* in the queue.

        Raises:
            EngineError: the queue is full (503).
        """
        now = self._now()
        generation = Generation(call, self.limits, self.settings.engine.block_size)
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

    def abort(self, generation: Generation) -> None:
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

    def _count(self, generation: Generation) -> None:
        call = generation.call
        self.metrics.answered(call.n, call.limit, len(generation.choices))
        for choice in generation.choices:
            reason = choice.finish_reason
            if reason is None:
                raise AssertionError("a request was counted as ended while it runs")
            self.metrics.ended(choice.sequence, reason)
