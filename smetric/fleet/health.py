"""Judges instances by their probes, by how requests sent to them end, and by what operators say: who is a candidate.

Nothing here does I/O or awaits: probes are sent by `smetric.sources.probe`, requests by the proxy. What a request says
is gathered in `smetric.fleet.trial`, how long streams wait in `smetric.fleet.latency`; the phantom load of an instance
that has come back is `smetric.fleet.fleet`'s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import structlog

from smetric.fleet.instance import Instance, State
from smetric.fleet.latency import Latencies
from smetric.fleet.tolerance import Tolerance
from smetric.fleet.vitals import Vitals

#: Seconds of good health after which one earlier fall is forgiven.
FORGIVEN_AFTER_S = 60.0
#: Answers in a row that ended in `finish_reason: abort` and mean that the engine is ending. One may be anything.
ABORTS = 2
#: Seconds for which others are asked instead of one that refuses.
SPARED_S = 1.0

log = structlog.get_logger("smetric.fleet.health")


class Health:
    """Writes `healthy`, `draining`, `spared` and `state` of the instances.

    Args:
        instances: those judged.
        tolerance: what they may do.
        on_ejected: told each time one is left out, and why: probe, connect, closed, protocol, timeout, 5xx or slow.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        instances: Iterable[Instance],
        tolerance: Tolerance | None = None,
        *,
        on_ejected: Callable[[Instance, str], object] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tolerance = tolerance or Tolerance()
        self._vitals = {instance: Vitals() for instance in instances}
        self._latencies = Latencies(self._vitals, self.tolerance.slow_factor, clock)
        self._on_ejected = on_ejected
        self._clock = clock
        #: When the first ejection, shutdown or slow start ends by itself.
        self._due = math.inf
        self._warming: set[Instance] = set()

    # ── probes ───────────────────────────────────────────────────────────────

    def probed(self, instance: Instance, *, ok: bool, refused: bool = False) -> None:
        """A probe has ended: with an answer that is *ok*, or not, or because the connection was *refused*."""
        vitals = self._vitals[instance]
        if ok:
            vitals.misses = 0
            if not vitals.answers:
                vitals.successes += 1
                if vitals.successes >= self.tolerance.rise:
                    if vitals.refuses:
                        vitals.stopping_until = -math.inf  # it was gone: what answers now is another process
                    vitals.answers, vitals.refuses = True, False
        else:
            vitals.successes = 0
            vitals.misses += 1
            if not vitals.answers:
                vitals.refuses = refused
            elif vitals.misses >= self.tolerance.fall:
                vitals.answers, vitals.refuses = False, refused
                self._fell(instance, vitals, "probe")
        self._judge(instance, vitals)

    # ── requests ─────────────────────────────────────────────────────────────

    def succeeded(self, instance: Instance) -> None:
        """A request was answered well, to its end."""
        vitals = self._vitals[instance]
        vitals.failures = vitals.doubts = vitals.aborts = 0
        if vitals.refuses:
            vitals.refuses = False
            self._judge(instance, vitals)

    def refused(self, instance: Instance) -> None:
        """A request found no connection: it is left out until probes find it again."""
        vitals = self._vitals[instance]
        vitals.successes = 0
        vitals.refuses = True
        if vitals.answers:
            vitals.answers = False
            self._fell(instance, vitals, "connect")
        self._judge(instance, vitals)

    def failed(self, instance: Instance, reason: str) -> None:
        """A request failed there for *reason*: closed, protocol, timeout or 5xx."""
        vitals = self._vitals[instance]
        vitals.failures += 1
        if vitals.failures >= self.tolerance.failures:
            self._eject(instance, vitals, reason)

    def doubted(self, instance: Instance) -> None:
        """A request failed there, and whether by its fault is not known yet: another one may take minutes to answer it.

        Until then one that fails at once looks idle. After as many as would eject it, others are asked for a moment.
        """
        vitals = self._vitals[instance]
        vitals.doubts += 1
        if vitals.doubts >= self.tolerance.failures:
            self.spare(instance)

    def spare(self, instance: Instance) -> None:
        """Others are asked for a moment, where there are any: it is full, or fails, and looks idle for it."""
        vitals = self._vitals[instance]
        vitals.spared_until = self._clock() + SPARED_S
        self._judge(instance, vitals)

    def waited(self, instance: Instance, seconds: float, tokens: int) -> None:
        """A stream waited there *seconds* for its first token, behind *tokens* of prompts, its own included."""
        if self._latencies.add(instance, seconds, tokens):
            for slow in self._latencies.outliers():
                self._eject(slow, self._vitals[slow], "slow")

    def aborted(self, instance: Instance) -> None:
        """The engine ended a request with `finish_reason: abort`, as it does when it is told to stop.

        It may be the request that is odd, so no more are taken to be ending than may be ejected, and never the last.
        """
        vitals = self._vitals[instance]
        vitals.aborts += 1
        if vitals.aborts >= ABORTS and self._may_leave_out(State.STOPPING) and self._is_replaceable(instance):
            self.stopping(instance)

    def stopping(self, instance: Instance) -> None:
        """The engine says that it is shutting down: no candidate until it answers as a new process.

        Should it go on as it is, it is tried again after the longest ejection.
        """
        vitals = self._vitals[instance]
        vitals.aborts = 0
        vitals.stopping_until = self._clock() + self.tolerance.longest_ejection_s
        self._judge(instance, vitals)

    def restarted(self, instance: Instance) -> None:
        """A new process answers: what the old one did is past, unless it is that processes come and go."""
        vitals = self._vitals[instance]
        vitals.failures = vitals.doubts = vitals.aborts = 0
        vitals.stopping_until = vitals.spared_until = -math.inf
        self._latencies.forget(instance)
        if not vitals.flaps:
            vitals.held_until = -math.inf
        self._judge(instance, vitals)
        if instance.state is State.WELL:
            self._warm(instance, vitals)
            self._judge(instance, vitals)

    # ── operators ────────────────────────────────────────────────────────────

    def drain(self, instance: Instance) -> None:
        """Send nothing new there until `undrain`; what is under way ends in its own time."""
        self._vitals[instance].drained = True
        self._judge(instance, self._vitals[instance])

    def undrain(self, instance: Instance) -> None:
        """Let it be a candidate again."""
        self._vitals[instance].drained = False
        self._judge(instance, self._vitals[instance])

    def drained(self) -> list[str]:
        """The ids of the instances that operators drain."""
        return [instance.id for instance, vitals in self._vitals.items() if vitals.drained]

    # ── time ─────────────────────────────────────────────────────────────────

    def settle(self) -> None:
        """End what ends by itself: ejections, shutdowns that were none, slow starts, respites. Free if none is due."""
        if self._clock() < self._due:
            return
        self._due = math.inf
        for instance, vitals in self._vitals.items():
            self._judge(instance, vitals)

    def coldness(self, candidates: Sequence[Instance]) -> list[float] | None:
        """The share of its slow start that each candidate still has to go, 1..0; None while none has any."""
        if not self._warming:
            return None
        now, over_s = self._clock(), self.tolerance.slow_start_s
        cold = [
            0.0 if since is None else max(0.0, 1.0 - (now - since) / over_s)
            for since in (self._vitals[instance].warming_since for instance in candidates)
        ]
        return cold if any(cold) else None

    # ── the verdict ──────────────────────────────────────────────────────────

    def _fell(self, instance: Instance, vitals: Vitals, reason: str) -> None:
        """It is left out once more; one that comes and goes stays out for longer each time."""
        if vitals.falls and vitals.well_since is not None:
            vitals.falls = max(0, vitals.falls - int((self._clock() - vitals.well_since) / FORGIVEN_AFTER_S))
            if vitals.falls and not vitals.answers:
                self._hold(vitals, self.tolerance.ejection_s * vitals.falls, flaps=True)
        vitals.falls += 1
        self._on_ejected(instance, reason)

    def _eject(self, instance: Instance, vitals: Vitals, reason: str) -> None:
        """Leave it out for a while, if it is not yet and not too many are."""
        if not instance.healthy or not self._may_leave_out(State.EJECTED):
            return
        vitals.failures = 0
        self._fell(instance, vitals, reason)
        self._hold(vitals, self.tolerance.ejection_s * vitals.falls, flaps=False)
        self._judge(instance, vitals)

    def _hold(self, vitals: Vitals, seconds: float, *, flaps: bool) -> None:
        vitals.held_until = self._clock() + min(seconds, self.tolerance.longest_ejection_s)
        vitals.flaps = flaps

    def _may_leave_out(self, state: State) -> bool:
        """Whether one more may come into *state* for what requests say."""
        left_out = sum(instance.state is state for instance in self._vitals)
        return not left_out or (left_out + 1) / len(self._vitals) <= self.tolerance.max_ejected

    def _is_replaceable(self, instance: Instance) -> bool:
        """Whether others take requests that serve what it serves."""
        models = instance.base_models or frozenset()
        others = [other for other in self._vitals if other is not instance and other.healthy and not other.draining]
        return any(other.models is None or models <= other.models for other in others)

    def _judge(self, instance: Instance, vitals: Vitals) -> None:
        """Write down how the instance stands now, and when that changes by itself."""
        now = self._clock()
        held, stopping = vitals.held_until > now, vitals.stopping_until > now
        is_out = held or stopping or vitals.drained or not vitals.answers
        if is_out:
            vitals.warming_since = vitals.well_since = None
            self._warming.discard(instance)
        elif vitals.well_since is None:
            vitals.well_since = now
            self._latencies.forget(instance)
            self._warm(instance, vitals)
        if vitals.warming_since is not None and now >= vitals.warming_since + self.tolerance.slow_start_s:
            vitals.warming_since = None
            self._warming.discard(instance)
        instance.healthy = vitals.answers and not held
        instance.draining = vitals.drained or stopping
        if held:
            self._due = min(self._due, vitals.held_until)
        if stopping:
            self._due = min(self._due, vitals.stopping_until)
        if vitals.warming_since is not None:
            self._due = min(self._due, vitals.warming_since + self.tolerance.slow_start_s)
        was_spared, instance.spared = instance.spared, vitals.spared_until > now
        if instance.spared:
            self._due = min(self._due, vitals.spared_until)
        elif was_spared:
            instance.load_changed()
        state = vitals.state(held=held, stopping=stopping)
        if state is not instance.state:
            tell = log.info if state in (State.WELL, State.WARMING) else log.warning
            tell("smetric.instance.changed", instance=instance.id, state=state.value, before=instance.state.value)
            instance.state = state
            instance.load_changed()

    def _warm(self, instance: Instance, vitals: Vitals) -> None:
        if self.tolerance.slow_start_s > 0:
            vitals.warming_since = self._clock()
            self._warming.add(instance)
