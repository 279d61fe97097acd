"""Health of instances, from probes, from how requests end, and from operators.

Nothing here does I/O or awaits: `smetric.sources.vllm` sends probes, the proxy sends requests. The phantom load of an
instance in its slow start is computed by `smetric.fleet.fleet`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from smetric import names
from smetric.config.settings import HealthSettings
from smetric.fleet.instance import Instance, Lease, State

#: Seconds of good health after which one earlier fall is forgiven.
FORGIVEN_AFTER_S = 60.0
#: Answers in a row that ended in `finish_reason: abort` and mean that the engine is shutting down. One may be anything.
ABORTS = 2
#: Seconds for which an instance that refuses is deprioritized.
DEPRIORITIZED_S = 1.0
#: Seconds for which an engine counts as asleep after it said so. Each scrape says it again.
ASLEEP_S = 30.0
#: Status of an instance that has no room.
FULL = 503
#: Status of an instance that is asked too often, by this client or another.
TOO_MANY = 429
#: 5xx answers of a healthy instance: a full queue, or something the engine cannot do.
NEUTRAL = frozenset({501, FULL})
#: Number of the latest waits for a first token that show that an instance is slow, and their largest age in seconds.
#: More than half as many show what is usual for its peers.
COMPARED = 7
FRESH_S = 60.0
#: Cost of a first token beside prefill, in tokens of prefill. Without it, short prompts would look slow.
BASE_TOKENS = 512
#: An instance whose first token comes within this many seconds is never slow. The bound grows with the differences
#: between the waits of its peers, `LEAST_SPREAD_S` at least; twice as much in fleets of up to `SMALL_FLEET` instances.
NOTICED_S = 0.25
LEAST_SPREAD_S = 0.05
SMALL_FLEET = 3
#: Each of its waits is so many times as long as is usual: what stalls now and then is not slow.
LEAST_FACTOR = 2.5
#: An instance whose clients give up `health.failures` requests in a row, each after longer than its peers took, hangs
#: if they waited for so many seconds in all, and for so many times the longest of the latest waits for its peers.
SILENT_S = 3.0
SILENT_FACTOR = 4.0
#: Seconds between two comparisons.
EVERY_S = 1.0

if TYPE_CHECKING:
    from smetric.fleet.exchange import Attempt

log = structlog.get_logger("smetric.fleet.health")


class _Wait(NamedTuple):
    """A wait for a first token, which is over at *at*. If the client gave it up, it would have been longer.

    Its seconds are compared as they are and for each token ahead of it. So long prompts, a queue of the router's own
    making and prompts whose cached part is unknown do not count against an instance.
    """

    at: float
    seconds: float
    per_token: float
    is_given_up: bool


class _Usual(NamedTuple):
    """Waits of a group of peers: the medians of its faster half, and the longest of nine in ten of its waits."""

    seconds: float
    per_token: float
    longest: float
    is_small: bool


class Latencies:
    """Times to first token, compared among peers: instances of the same role, pool and models.

    Waits of one instance that overlap count once: one stall delays many. An instance is slow if all its latest waits
    are longer than usual, half of them by far, and the newest still is.

    Args:
        instances: the instances to compare.
        factor: a slow instance waits more than so many times as long as its peers; 0: none is slow.
        clock: monotonic seconds.
    """

    def __init__(self, instances: Iterable[Instance], factor: float, clock: Callable[[], float]) -> None:
        self._waits: dict[Instance, deque[_Wait]] = {instance: deque(maxlen=COMPARED) for instance in instances}
        self._factor = factor
        self._clock = clock
        self._usual: dict[Hashable, _Usual] = {}
        self._due = -math.inf

    def add(self, instance: Instance, seconds: float, tokens: int, *, is_given_up: bool = False) -> dict[str, Any]:
        """Add a wait of *seconds*, behind *tokens* to prefill; return why the instance is slow, empty if it is not."""
        now, waits = self._clock(), self._waits[instance]
        if not self._factor or (waits and now - seconds < waits[-1].at):
            return {}
        waits.append(_Wait(now, seconds, seconds / (BASE_TOKENS + tokens), is_given_up))
        return self._verdict(instance, now) if seconds > NOTICED_S and len(waits) == COMPARED else {}

    def forget(self, instance: Instance) -> None:
        """Drop the times of *instance*."""
        self._waits[instance].clear()

    def _verdict(self, instance: Instance, now: float) -> dict[str, Any]:
        if now >= self._due:
            self._due = now + EVERY_S
            self._usual = self._compare(now)
        usual = self._usual.get(_group(instance))
        waits = self._waits[instance]
        if usual is None or waits[0].at < now - FRESH_S:
            return {}
        # A small fleet, and one whose waits differ much, has chance outliers.
        spread = LEAST_SPREAD_S + usual.longest - usual.seconds
        bound = max(self._factor * usual.seconds, NOTICED_S + (2 if usual.is_small else 1) * spread)
        wait_s = median(wait.seconds for wait in waits)
        if (
            wait_s <= bound
            or median(wait.per_token for wait in waits) <= self._factor * usual.per_token
            or min(wait.seconds for wait in waits) <= LEAST_FACTOR * usual.seconds
        ):
            return {}
        return {"wait_s": round(wait_s, 3), "bound_s": round(bound, 3), "peers_s": round(usual.seconds, 3)}

    def _compare(self, now: float) -> dict[Hashable, _Usual]:
        """Return what is usual by group. The faster half counts: if most are slow, none is an outlier."""
        groups: dict[Hashable, list[tuple[float, float, list[float]]]] = {}
        for instance, waits in self._waits.items():
            known = [wait for wait in waits if wait.at >= now - FRESH_S and not wait.is_given_up]
            if len(known) > COMPARED // 2:
                seconds = [wait.seconds for wait in known]
                row = median(seconds), median(wait.per_token for wait in known), seconds
                groups.setdefault(_group(instance), []).append(row)
        usual = {}
        for group, rows in groups.items():
            half = sorted(rows)[: (len(rows) + 1) // 2]
            pooled = sorted(wait for _, _, seconds in half for wait in seconds)
            per_token = median_low(per_token for _, per_token, _ in rows)
            longest = pooled[int(0.9 * (len(pooled) - 1))]
            usual[group] = _Usual(half[-1][0], per_token, longest, len(rows) <= SMALL_FLEET)
        return usual


def _group(instance: Instance) -> Hashable:
    return instance.role, instance.pool, instance.base_models


@dataclass(slots=True, eq=False)
class _Vitals:
    """Observations of one instance."""

    #: Verdict of the probes, and whether the last connection was refused.
    answers: bool = True
    refuses: bool = False
    #: Probes in a row: failed while it answers, succeeded while it does not.
    misses: int = 0
    successes: int = 0
    #: Requests in a row: failed by its fault, failed by an unknown fault, aborted by the engine.
    failures: int = 0
    suspicions: int = 0
    aborts: int = 0
    #: Its latest waits for output by whether a stream was awaited, and when the last of all was over.
    waits: dict[bool, deque[_Wait]] = field(
        default_factory=lambda: {False: deque(maxlen=COMPARED), True: deque(maxlen=COMPARED)}
    )
    heard_at: float = -math.inf
    #: Requests in a row that clients gave up after longer than its peers took, for how many seconds at least one of
    #: them waited, and when the last client left.
    given_up: int = 0
    silent_s: float = 0.0
    left_at: float = -math.inf
    #: Why it was ejected last: fields of the log line.
    why: dict[str, Any] = field(default_factory=dict)
    #: Falls that are not forgiven, and since when it has been well; None while it is not.
    falls: int = 0
    well_since: float | None = -math.inf
    ejected_until: float = -math.inf
    #: Whether it is ejected because it comes and goes.
    flaps: bool = False
    stopping_until: float = -math.inf
    deprioritized_until: float = -math.inf
    asleep_until: float = -math.inf
    drained: bool = False
    #: Start of its slow start; None outside of one.
    warming_since: float | None = None

    def state(self, *, ejected: bool, stopping: bool, asleep: bool) -> State:
        """Return its state; if several apply, the one that usually lasts longest."""
        if self.drained:
            return State.DRAINING
        if self.refuses:
            return State.REFUSING
        if asleep:
            return State.ASLEEP
        if stopping:
            return State.STOPPING
        if not self.answers:
            return State.ILL
        if ejected:
            return State.EJECTED
        return State.WELL if self.warming_since is None else State.WARMING


class Health:
    """Judge of instances: writes their `healthy`, `draining`, `deprioritized` and `state`.

    Args:
        instances: the instances.
        settings: bounds.
        on_ejected: called when an instance is left out, with the reason, one of `names.EJECTION_REASONS`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        instances: Iterable[Instance],
        settings: HealthSettings | None = None,
        *,
        on_ejected: Callable[[Instance, str], object] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or HealthSettings()
        self._vitals = {instance: _Vitals() for instance in instances}
        self._latencies = Latencies(self._vitals, self.settings.slow_factor, clock)
        self._on_ejected = on_ejected
        self._clock = clock
        #: When the first ejection, shutdown or slow start ends; from then on, `settle` has something to do.
        self.due = math.inf
        #: Instances in their slow start.
        self.warming: set[Instance] = set()

    # ── probes ───────────────────────────────────────────────────────────────

    def probed(self, instance: Instance, *, ok: bool, refused: bool = False) -> None:
        """Record the end of a probe: *ok* or not, and whether the connection was refused."""
        vitals = self._vitals[instance]
        if ok:
            vitals.misses = 0
            if not vitals.answers:
                vitals.successes += 1
                if vitals.successes >= self.settings.rise:
                    if vitals.refuses:
                        vitals.stopping_until = -math.inf  # it was gone: another process answers now
                    vitals.answers, vitals.refuses = True, False
        else:
            vitals.successes = 0
            vitals.misses += 1
            if not vitals.answers:
                vitals.refuses = refused
            elif vitals.misses >= self.settings.fall:
                vitals.answers, vitals.refuses = False, refused
                self._fell(instance, vitals, "probe")
        self._judge(instance, vitals)

    # ── requests ─────────────────────────────────────────────────────────────

    def succeeded(self, instance: Instance) -> None:
        """Record a good and complete answer."""
        vitals = self._vitals[instance]
        vitals.failures = vitals.suspicions = vitals.aborts = 0
        if vitals.refuses:
            vitals.refuses = False
            self._judge(instance, vitals)

    def refused(self, instance: Instance) -> None:
        """Record a failed connection: the instance is left out until probes succeed again."""
        vitals = self._vitals[instance]
        vitals.successes = 0
        vitals.refuses = True
        if vitals.answers:
            vitals.answers = False
            self._fell(instance, vitals, "connect")
        self._judge(instance, vitals)

    def failed(self, instance: Instance, reason: str) -> None:
        """Record a request that failed by the instance's fault: closed, protocol, timeout, 5xx or engine_error."""
        vitals = self._vitals[instance]
        vitals.failures += 1
        if vitals.failures >= self.settings.failures:
            self._eject(instance, vitals, reason, failures=vitals.failures)

    def record_suspect_failure(self, instance: Instance) -> None:
        """Record a failed request whose fault is unknown until another instance has answered it, maybe minutes later.

        Until then, an instance that fails at once looks idle. After `health.failures` of these it is deprioritized.
        """
        vitals = self._vitals[instance]
        vitals.suspicions += 1
        if vitals.suspicions >= self.settings.failures:
            self.deprioritize(instance)

    def deprioritize(self, instance: Instance) -> None:
        """Prefer other candidates for a moment: a full or failing instance has low load and would attract traffic."""
        vitals = self._vitals[instance]
        vitals.deprioritized_until = self._clock() + DEPRIORITIZED_S
        self._judge(instance, vitals)

    def waited(self, instance: Instance, seconds: float, tokens: int, *, is_stream: bool | None = True) -> None:
        """Record the wait for the first output of an answer, behind *tokens* to prefill, its own included.

        If *is_stream* is None, the answer is a stream that cannot be read. It may have begun before its first output.
        """
        vitals, now = self._vitals[instance], self._clock()
        if is_stream is not None:
            vitals.waits[is_stream].append(_Wait(now, seconds, seconds / (BASE_TOKENS + tokens), False))
        vitals.heard_at = now
        vitals.given_up = 0
        if is_stream and (why := self._latencies.add(instance, seconds, tokens)):
            self._eject(instance, vitals, names.SLOW, **why)

    def gave_up(self, instance: Instance, seconds: float, tokens: int, *, is_stream: bool = True) -> None:
        """Record that a client left which had waited *seconds* for output in vain: it takes at least as long.

        Answers in one piece differ too much in length to call an instance slow, but one that gives none at all hangs.
        It is compared by waits of the same kind, for a prompt as long. Time in which no request waited says nothing.
        """
        vitals, now = self._vitals[instance], self._clock()
        if is_stream and (why := self._latencies.add(instance, seconds, tokens, is_given_up=True)):
            self._eject(instance, vitals, names.SLOW, **why)
            return
        group = _group(instance)
        peers = [peer for one, peer in self._vitals.items() if one is not instance and _group(one) == group]
        waits = [wait for peer in peers for wait in peer.waits[is_stream]]
        if not waits:
            return
        per_token = median(wait.per_token for wait in waits)
        longest = max(per_token * (BASE_TOKENS + tokens), *(wait.seconds for wait in waits))
        silent_s = min(seconds, now - vitals.heard_at)
        if silent_s <= longest:
            return
        before_s = vitals.silent_s if vitals.given_up else 0.0
        vitals.silent_s = before_s + min(silent_s, now - vitals.left_at)  # waits that overlap count once
        vitals.left_at = now
        vitals.given_up += 1
        do_peers_answer = max(wait.at for wait in waits) > now - vitals.silent_s
        if (
            vitals.given_up >= self.settings.failures
            and vitals.silent_s > max(SILENT_S, SILENT_FACTOR * longest)
            and do_peers_answer
        ):
            why = {"silent_s": round(vitals.silent_s, 3), "given_up": vitals.given_up}
            self._eject(instance, vitals, names.TIMEOUT, **why)

    def aborted(self, instance: Instance) -> None:
        """Record an answer that ended in `finish_reason: abort`, as all do when the engine shuts down.

        The request may be at fault, so no more instances are taken to be stopping than may be ejected, never the last.
        """
        vitals = self._vitals[instance]
        vitals.aborts += 1
        if vitals.aborts >= ABORTS and self._may_leave_out(State.STOPPING) and self._is_replaceable(instance):
            self.stopping(instance)

    def stopping(self, instance: Instance) -> None:
        """Record that the engine is shutting down: no candidate until a new process answers.

        If none does, the instance is tried again after the longest ejection.
        """
        vitals = self._vitals[instance]
        vitals.aborts = 0
        vitals.stopping_until = self._clock() + self.settings.longest_ejection
        self._judge(instance, vitals)

    def sleeps(self, instance: Instance, asleep: bool) -> None:
        """Record whether the engine says that it sleeps; without news it counts as awake after `ASLEEP_S`."""
        vitals = self._vitals[instance]
        if asleep or vitals.asleep_until > -math.inf:
            vitals.asleep_until = self._clock() + ASLEEP_S if asleep else -math.inf
            self._judge(instance, vitals)

    def restarted(self, instance: Instance) -> None:
        """Record that a new process answers. The old one's failures are past, unless processes come and go."""
        vitals = self._vitals[instance]
        vitals.failures = vitals.suspicions = vitals.aborts = vitals.given_up = 0
        vitals.stopping_until = vitals.deprioritized_until = -math.inf
        self._latencies.forget(instance)
        if not vitals.flaps:
            vitals.ejected_until = -math.inf
        self._judge(instance, vitals)
        if instance.state is State.WELL:
            self._warm(instance, vitals)
            self._judge(instance, vitals)

    # ── operators ────────────────────────────────────────────────────────────

    def drain(self, instance: Instance) -> None:
        """Send nothing new there until `undrain`; running requests end in their own time."""
        self._vitals[instance].drained = True
        self._judge(instance, self._vitals[instance])

    def undrain(self, instance: Instance) -> None:
        """Let it be a candidate again."""
        self._vitals[instance].drained = False
        self._judge(instance, self._vitals[instance])

    def drained(self) -> list[str]:
        """Return the ids of the instances that operators drain."""
        return [instance.id for instance, vitals in self._vitals.items() if vitals.drained]

    # ── time ─────────────────────────────────────────────────────────────────

    def settle(self) -> None:
        """End ejections, shutdowns and slow starts whose time is over."""
        if self._clock() < self.due:
            return
        self.due = math.inf
        for instance, vitals in self._vitals.items():
            self._judge(instance, vitals)

    def slow_start_remaining(self, candidates: Sequence[Instance]) -> list[float] | None:
        """Return the remaining share of each candidate's slow start, 1..0; None if none is in one."""
        if not self.warming:
            return None
        now, over_s = self._clock(), self.settings.slow_start
        remaining = [
            0.0 if since is None else max(0.0, 1.0 - (now - since) / over_s)
            for since in (self._vitals[instance].warming_since for instance in candidates)
        ]
        return remaining if any(remaining) else None

    # ── verdict ──────────────────────────────────────────────────────────────

    def _fell(self, instance: Instance, vitals: _Vitals, reason: str) -> None:
        """Count a fall; an instance that comes and goes stays out longer each time."""
        if vitals.falls and vitals.well_since is not None:
            vitals.falls = max(0, vitals.falls - int((self._clock() - vitals.well_since) / FORGIVEN_AFTER_S))
            if vitals.falls and not vitals.answers:
                self._hold(vitals, self.settings.ejection * vitals.falls, flaps=True)
        vitals.falls += 1
        self._on_ejected(instance, reason)

    def _eject(self, instance: Instance, vitals: _Vitals, reason: str, **why: Any) -> None:
        if not instance.healthy or not self._may_leave_out(State.EJECTED):
            return
        vitals.failures = vitals.given_up = 0
        vitals.why = {"reason": reason, **why}
        self._fell(instance, vitals, reason)
        self._hold(vitals, self.settings.ejection * vitals.falls, flaps=False)
        self._judge(instance, vitals)

    def _hold(self, vitals: _Vitals, seconds: float, *, flaps: bool) -> None:
        vitals.ejected_until = self._clock() + min(seconds, self.settings.longest_ejection)
        vitals.flaps = flaps

    def _may_leave_out(self, state: State) -> bool:
        """Return whether requests may bring one more instance into *state*."""
        left_out = sum(instance.state is state for instance in self._vitals)
        return not left_out or 100 * (left_out + 1) / len(self._vitals) <= self.settings.max_ejected_percent

    def _is_replaceable(self, instance: Instance) -> bool:
        """Return whether another candidate serves all that *instance* serves."""
        models = instance.base_models or frozenset()
        others = [other for other in self._vitals if other is not instance and other.healthy and not other.draining]
        return any(other.models is None or models <= other.models for other in others)

    def _judge(self, instance: Instance, vitals: _Vitals) -> None:
        """Write the instance's state, and note when it changes by itself."""
        now = self._clock()
        ejected, stopping, asleep = (
            until > now for until in (vitals.ejected_until, vitals.stopping_until, vitals.asleep_until)
        )
        instance.draining = vitals.drained or stopping or asleep
        if ejected or instance.draining or not vitals.answers:
            vitals.warming_since = vitals.well_since = None
            self.warming.discard(instance)
        elif vitals.well_since is None:
            vitals.well_since = now
            self._latencies.forget(instance)
            self._warm(instance, vitals)
        if vitals.warming_since is not None and now >= vitals.warming_since + self.settings.slow_start:
            vitals.warming_since = None
            self.warming.discard(instance)
        instance.healthy = vitals.answers and not ejected
        was_deprioritized, instance.deprioritized = instance.deprioritized, vitals.deprioritized_until > now
        ends = [vitals.ejected_until, vitals.stopping_until, vitals.deprioritized_until, vitals.asleep_until]
        if vitals.warming_since is not None:
            ends.append(vitals.warming_since + self.settings.slow_start)
        self.due = min([self.due, *(end for end in ends if end > now)])
        if was_deprioritized and not instance.deprioritized:
            instance.load_changed()
        state = vitals.state(ejected=ejected, stopping=stopping, asleep=asleep)
        if state is not instance.state:
            write = log.info if state in (State.WELL, State.WARMING) else log.warning
            why = vitals.why if state is State.EJECTED else {}
            write(
                "smetric.instance.changed", instance=instance.id, state=state.value, before=instance.state.value, **why
            )
            instance.state = state
            instance.load_changed()

    def _warm(self, instance: Instance, vitals: _Vitals) -> None:
        if self.settings.slow_start > 0:
            vitals.warming_since = self._clock()
            self.warming.add(instance)


class AttemptLog:
    """Reports the attempts of one request to health checking.

    A request that fails on two instances says more about itself than about them and counts against neither. Otherwise a
    client that repeats one poisonous request would have every instance ejected. The first failure is judged as soon as
    another instance begins to answer: streams are long, and until then a failing instance looks idle.

    Args:
        health: judge of the instances.
    """

    __slots__ = ("_blamed", "_health", "_is_excused", "failures")

    def __init__(self, health: Health) -> None:
        self._health = health
        #: Failed attempts.
        self.failures = 0
        self._is_excused = False
        self._blamed: tuple[Lease, str] | None = None

    def ended(self, lease: Lease, result: str, status: int | None) -> None:
        """Record the end of an attempt.

        A 4xx answer, and anything that the client ended, says nothing about the instance.

        Args:
            lease: of the attempt.
            result: one of `names.RESULTS`.
            status: the instance's answer, if any.
        """
        if lease.is_past or self._is_excused:
            return
        instance = lease.instance
        if result == names.OK and status is not None and status < 400:
            self._health.succeeded(instance)
            return
        if status == FULL:
            self._health.deprioritize(instance)
        elif status == TOO_MANY:
            self._health.record_suspect_failure(instance)
        if result in (names.CONNECT_ERROR, names.CONNECT_TIMEOUT):
            self._health.refused(instance)
        elif result in (names.CLOSED, names.PROTOCOL, names.TIMEOUT, names.ENGINE_ERROR) or (
            result == names.STATUS_5XX and status not in NEUTRAL
        ):
            self.failures += 1
            self._blamed = (lease, result)
            self._health.record_suspect_failure(instance)

    def answers(self, status: int) -> None:
        """Record that an instance begins to answer with *status*, which the client is given."""
        if status < 400:
            self.close()
            self._blamed = None

    def stopping(self, lease: Lease) -> None:
        """Record that the instance answered that it is shutting down."""
        if not lease.is_past:
            self._health.stopping(lease.instance)

    def aborted(self, lease: Lease) -> None:
        """Record that the instance ended its answer with `finish_reason: abort`."""
        if not lease.is_past:
            self.excuse()
            self._health.aborted(lease.instance)

    def excuse(self) -> None:
        """Note that the end of the present attempt says nothing about its instance, be it good or bad."""
        self._is_excused = True

    def waited(self, lease: Lease, seconds: float, *, is_stream: bool | None) -> None:
        """Record the wait for the first output of an answer, as `Health.waited` does."""
        self._health.waited(lease.instance, seconds, lease.ahead, is_stream=is_stream)

    def gave_up(self, lease: Lease, attempt: Attempt) -> None:
        """Record that the client left during *attempt*. If there was no output, its wait was in vain."""
        record = attempt.record
        if record.ttfc_s is None and record.is_inference and not lease.is_past:
            seconds = time.perf_counter() - attempt.started
            self._health.gave_up(lease.instance, seconds, lease.ahead, is_stream=record.request.stream)

    def untried(self) -> None:
        """Record that the request was not retried although it could have been; its fault stays unknown."""
        self._blamed = None

    def close(self) -> None:
        """Report a single failure; called when the request is over."""
        if self.failures == 1 and self._blamed is not None:
            lease, result = self._blamed
            if not lease.is_past:
                self._health.failed(lease.instance, result)
