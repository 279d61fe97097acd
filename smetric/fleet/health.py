"""Health of instances."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_low

import structlog

from smetric import names
from smetric.config import Settings
from smetric.fleet.instance import Instance, Lease, State

# What an instance may do before it is left out, and for how long it then is.
#
# Judging by it is `smetric.fleet.health`'s.


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The bounds.

    Args:
        fall: probes in a row that fail and make an instance ill.
        rise: probes in a row that succeed and make it well again.
        failures: requests in a row that fail and eject it.
        slow_factor: times its peers' wait for a first token, from which it is ejected; 0 for never.
        ejection_s: seconds it is ejected for, times the falls it has not been forgiven.
        longest_ejection_s: most seconds in one go.
        max_ejected: most of all instances that may be ejected for what requests say, 0..1; one always may.
        panic_below: share of healthy instances, 0..1, below which health no longer decides who is a candidate.
        slow_start_s: seconds over which an instance that has come back gets its share again; 0 for at once.
    """

    fall: int = 2
    rise: int = 2
    failures: int = 5
    slow_factor: float = 5.0
    ejection_s: float = 30.0
    longest_ejection_s: float = 300.0
    max_ejected: float = 0.3
    panic_below: float = 0.5
    slow_start_s: float = 30.0


def tolerance_of(settings: Settings) -> Tolerance:
    """What the settings say."""
    return Tolerance(
        fall=settings.health.fall,
        rise=settings.health.rise,
        failures=settings.health.failures,
        slow_factor=settings.health.slow_factor,
        ejection_s=settings.health.ejection,
        longest_ejection_s=settings.health.longest_ejection,
        max_ejected=settings.health.max_ejected_percent / 100,
        panic_below=settings.health.panic_below_percent / 100,
        slow_start_s=settings.health.slow_start,
    )


# How long instances make streams wait for their first token, compared among peers: finds those that are far slower.
#
# A wait is compared as it was and per token that stood before it; an outlier is one by both. So neither long prompts
# nor a queue of the router's own making count against an instance, nor prompts whose cached part the router does not
# know. Leaving one out is `smetric.fleet.health`'s.

#: The last waits of an instance that are kept, how few of them say nothing, and seconds after which one is no news.
KEPT = 8
FEWEST = 5
FRESH_S = 60.0
#: What every first token costs beside prefill, in tokens of prefill; without it short prompts would look slow.
BASE_TOKENS = 512
#: An instance that answers within so many seconds is slow to nobody.
NOTICED_S = 0.25
#: Seconds between two comparisons.
EVERY_S = 1.0


class Latencies:
    """The last waits of each instance.

    Args:
        instances: those compared.
        factor: an instance is an outlier if its median is more than so many times its peers'; 0 for never.
        clock: monotonic seconds.
    """

    def __init__(self, instances: Iterable[Instance], factor: float, clock: Callable[[], float]) -> None:
        #: Of each: when, seconds waited, seconds per token.
        self._waits: dict[Instance, deque[tuple[float, float, float]]] = {
            instance: deque(maxlen=KEPT) for instance in instances
        }
        self._factor = factor
        self._clock = clock
        self._due = -float("inf")

    def add(self, instance: Instance, seconds: float, tokens: int) -> bool:
        """A first token came after *seconds*, behind *tokens* to prefill; returns whether it is time to compare."""
        if not self._factor:
            return False
        now = self._clock()
        self._waits[instance].append((now, seconds, seconds / (BASE_TOKENS + tokens)))
        if now < self._due:
            return False
        self._due = now + EVERY_S
        return True

    def forget(self, instance: Instance) -> None:
        """What *instance* did so far says nothing of what it will do."""
        self._waits[instance].clear()

    def outliers(self) -> list[Instance]:
        """Those that are far slower than their peers: instances of the same role, pool and models.

        Their lower median is the measure: of two the slower one may be an outlier, and where most are slow nobody is.
        """
        since = self._clock() - FRESH_S
        groups: dict[Hashable, list[tuple[float, float, Instance]]] = {}
        for instance, waits in self._waits.items():
            fresh = [(seconds, per_token) for at, seconds, per_token in waits if at >= since]
            if len(fresh) >= FEWEST:
                seconds, per_token = (median(column) for column in zip(*fresh, strict=True))
                peers = groups.setdefault((instance.role, instance.pool, instance.base_models), [])
                peers.append((seconds, per_token, instance))
        found = []
        for peers in groups.values():
            longest = max(NOTICED_S, self._factor * median_low(seconds for seconds, _, _ in peers))
            slowest = self._factor * median_low(per_token for _, per_token, _ in peers)
            found += [one for seconds, per_token, one in peers if seconds > longest and per_token > slowest]
        return found


# What is remembered of one instance to judge it by; who judges is `health.py`.


class Vitals:
    """What is remembered of one instance."""

    __slots__ = (
        "aborts",
        "answers",
        "doubts",
        "drained",
        "failures",
        "falls",
        "flaps",
        "held_until",
        "misses",
        "refuses",
        "spared_until",
        "stopping_until",
        "successes",
        "warming_since",
        "well_since",
    )

    def __init__(self) -> None:
        #: The probes' verdict; and whether the last that was heard is that it takes no connections.
        self.answers = True
        self.refuses = False
        #: Probes in a row: failed while it answers, succeeded while it does not.
        self.misses = 0
        self.successes = 0
        #: Requests in a row: failed by its fault, failed by whose fault ever, and aborted by the engine.
        self.failures = 0
        self.doubts = 0
        self.aborts = 0
        #: Times it was left out and not forgiven yet; and since when it has not been, None while it is.
        self.falls = 0
        self.well_since: float | None = -math.inf
        #: Ejected until then; because it comes and goes, not because of failed requests.
        self.held_until = -math.inf
        self.flaps = False
        self.stopping_until = -math.inf
        self.spared_until = -math.inf
        self.drained = False
        #: When it came back; None once it has its share.
        self.warming_since: float | None = None

    def state(self, *, held: bool, stopping: bool) -> State:
        """The word for how it stands; what lasts longest comes first.

        Args:
            held: it is ejected.
            stopping: it is taken to be shutting down.
        """
        if self.drained:
            return State.DRAINING
        if self.refuses:
            return State.REFUSING
        if stopping:
            return State.STOPPING
        if not self.answers:
            return State.ILL
        if held:
            return State.EJECTED
        return State.WELL if self.warming_since is None else State.WARMING


# Judges instances by their probes, by how requests sent to them end, and by what operators say: who is a candidate.
#
# Nothing here does I/O or awaits: probes are sent by `smetric.sources.probe`, requests by the proxy. What a request
# says is gathered in `smetric.fleet.trial`, how long streams wait in `smetric.fleet.latency`; the phantom load of an
# instance that has come back is `smetric.fleet.fleet`'s.

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


# What one request says of the instances it was tried on, told to their health once the request is over.
#
# A request that two instances fail at says more of itself than of them, and is held against neither: otherwise a client
# that sends one poisonous request again and again would have one instance after the other ejected.

#: An instance that has no room answers so.
FULL = 503
#: Who is asked too often answers so, whether that is the client's doing or not.
TOO_MANY = 429
#: A queue that is full, or something the engine cannot do: answers of one that is well.
NEUTRAL = frozenset({501, FULL})


class AttemptLog:
    """One request; `close` is called when it is over, whatever happened.

    Who failed first is judged when another one begins to answer: streams are long, and until it is judged an instance
    that fails at once looks idle, and draws the crowd.

    Args:
        health: judges the instances.
    """

    __slots__ = ("_aborted", "_blamed", "_failures", "_health")

    def __init__(self, health: Health) -> None:
        self._health = health
        self._failures = 0
        self._aborted = False
        self._blamed: tuple[Lease, str] | None = None

    def ended(self, lease: Lease, result: str, status: int | None) -> None:
        """An attempt has ended with *result*, one of `names.RESULTS`; *status* is what the instance answered.

        No answer of 4xx, and nothing that the client ended, says anything of an instance.
        """
        if lease.is_past:
            return
        instance = lease.instance
        if status == FULL:
            self._health.spare(instance)
        elif status == TOO_MANY:
            self._health.doubted(instance)
        if result in (names.CONNECT_ERROR, names.CONNECT_TIMEOUT):
            self._health.refused(instance)
        elif result == names.OK:
            if status is not None and status < 400 and not self._aborted:
                self._health.succeeded(instance)
        elif result in (names.CLOSED, names.PROTOCOL, names.TIMEOUT) or (
            result == names.STATUS_5XX and status not in NEUTRAL
        ):
            self._failures += 1
            self._blamed = (lease, result)
            self._health.doubted(instance)

    def answers(self, status: int) -> None:
        """An instance begins to answer with *status*, which the client is given."""
        if status < 400:
            self.close()
            self._blamed = None

    def stopping(self, lease: Lease) -> None:
        """The instance answered that it is shutting down."""
        if not lease.is_past:
            self._health.stopping(lease.instance)

    def aborted(self, lease: Lease) -> None:
        """The instance ended its answer with `finish_reason: abort`."""
        if not lease.is_past:
            self._aborted = True
            self._health.aborted(lease.instance)

    def waited(self, lease: Lease, seconds: float) -> None:
        """The first byte of a stream came after *seconds*."""
        self._health.waited(lease.instance, seconds, lease.ahead)

    def untried(self) -> None:
        """It was not tried elsewhere though others are there: whether it or the instance is to blame nobody knows."""
        self._blamed = None

    def close(self) -> None:
        """The request is over."""
        if self._failures == 1 and self._blamed is not None:
            lease, result = self._blamed
            if not lease.is_past:
                self._health.failed(lease.instance, result)
