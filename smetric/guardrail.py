"""Watches a policy after its file has changed, and restores the one before, once, where load or errors go out of band.

It looks at what came of the change, not at the policy. What it has undone it leaves alone until the file changes again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from smetric.config.settings import Settings
from smetric.fleet.instance import Instance
from smetric.policy_file import NoGeneration, Origin, PolicyFile
from smetric.routes import Route, Routes
from smetric.telemetry import names
from smetric.telemetry.record import DecisionRecord

#: Looks in a window.
LOOKS = 10
#: Fewer requests than this are no share of errors, and fewer under way for each instance no load.
LEAST_REQUESTS = 20
LEAST_LOAD = 1.0
#: A change may make the imbalance this many times what it was.
WORSE = 1.25
#: However few instances there are, this much of the way to all requests on one of them is out of band.
MOST_OF_ALL = 0.9

log = structlog.get_logger("smetric.guardrail")

#: What tells the instances of one model from those of others.
Group = frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Band:
    """What is tolerated.

    Args:
        imbalance: requests on the busiest instance over their mean.
        errors: share of requests that may fail more than before.
        window_s: seconds over which both are taken.
        watch_s: seconds after a change in which they are.
    """

    imbalance: float = 3.0
    errors: float = 0.2
    window_s: float = 10.0
    watch_s: float = 600.0


@dataclass(slots=True)
class _Look:
    """What ended since the look before: requests, and those that failed."""

    ended: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Watched:
    """A policy that acts.

    Args:
        route: where.
        file: the policy.
    """

    route: Route
    file: PolicyFile
    looks: deque[_Look] = field(default_factory=lambda: deque([_Look()], maxlen=100 * LOOKS))
    #: When the change came that is watched, and how it was before; None where none is.
    since: float | None = None
    errors_before: float = 0.0
    imbalance_before: Mapping[Group, float] = field(default_factory=dict)

    def errors(self) -> float | None:
        """Share of requests that failed, over a window at least and so many requests; None where there are too few."""
        ended = failed = 0
        for count, look in enumerate(reversed(self.looks), 1):
            ended += look.ended
            failed += look.failed
            if count >= LOOKS and ended >= LEAST_REQUESTS:
                break
        return failed / ended if ended >= LEAST_REQUESTS else None


class Guardrail:
    """Watches all policies that act.

    Args:
        routes: them.
        instances: all instances.
        band: what is tolerated.
        on_restored: told of the route, and of what was out of band: one of `names.OUT_OF_BAND`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        routes: Routes,
        instances: Callable[[], Sequence[Instance]],
        band: Band,
        on_restored: Callable[[str, str], None] = lambda route, reason: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instances = instances
        self._band = band
        self._on_restored = on_restored
        self._clock = clock
        self._watched = {(route.name, arm.name): _Watched(route, arm.file) for route, arm in routes.acting()}
        #: Requests on each instance, at the last looks.
        self._loads: deque[dict[Instance, float]] = deque(maxlen=LOOKS)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run(), name="guardrail")

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._band.window_s / LOOKS)
            try:
                self.look()
            except Exception:
                log.exception("smetric.guardrail.failed")

    def swapped(self, file: PolicyFile) -> None:
        """*file* has another policy: watch it if it was read from disk; what was restored is left alone."""
        for watched in self._watched.values():
            if watched.file is file:
                watched.since = None
                if file.current.origin is Origin.FILE:
                    watched.since = self._clock()
                    watched.errors_before = watched.errors() or 0.0
                    watched.imbalance_before = dict(self._imbalances(watched.route))
                # What ends from now on is the new policy's.
                watched.looks.clear()
                watched.looks.append(_Look())

    def ended(self, record: DecisionRecord) -> None:
        """A request that a policy decided has ended."""
        watched = self._watched.get((record.route, record.arm))
        if watched is None or record.generation != watched.file.current.number or record.status is None:
            return
        look = watched.looks[-1]
        look.ended += 1
        if record.status >= 500 or record.status == 429:
            look.failed += 1

    def look(self) -> None:
        """Look at all of them, and restore what must be."""
        now = self._clock()
        self._loads.append({one: one.requests() for one in self._instances() if one.healthy and not one.draining})
        for watched in self._watched.values():
            since = watched.since
            if since is not None and now - since > self._band.watch_s:
                watched.since = since = None  # it has proved itself
            if since is not None and now - since >= self._band.window_s:
                found = self._out_of_band(watched)
                if found is not None:
                    self._restore(watched, *found)
            watched.looks.append(_Look())

    def _out_of_band(self, watched: _Watched) -> tuple[str, str] | None:
        """Which of `names.OUT_OF_BAND`, and its figures in words; None while all is well."""
        errors = watched.errors()
        if errors is not None and errors > watched.errors_before + self._band.errors:
            return names.ERRORS, f"{errors:.0%} of the requests failed, {watched.errors_before:.0%} before"
        for group, imbalance in self._imbalances(watched.route):
            before = watched.imbalance_before.get(group, 1.0)
            if imbalance > self._limit(group, before):
                return (
                    names.IMBALANCED,
                    f"the busiest instance had {imbalance:.1f} times the mean, {before:.1f} before",
                )
        return None

    def _limit(self, group: Group, before: float) -> float:
        """The imbalance that is tolerated in a group of instances."""
        count = sum(1 for one in self._loads[-1] if one.models == group)
        return min(max(self._band.imbalance, WORSE * before), 1 + MOST_OF_ALL * (count - 1))

    def _imbalances(self, route: Route) -> Iterator[tuple[Group, float]]:
        """For each group of instances that *route* may choose from: largest over mean load, over the last window."""
        if not self._loads:
            return
        groups: dict[Group, list[float]] = {}
        for instance in self._loads[-1]:
            models = route.match.models
            if not models or any(instance.serves(model) for model in models):
                seen = [loads[instance] for loads in self._loads if instance in loads]
                groups.setdefault(instance.models, []).append(sum(seen) / len(seen))
        for group, loads in groups.items():
            mean = sum(loads) / len(loads)
            if len(loads) > 1 and mean >= LEAST_LOAD:
                yield group, max(loads) / mean

    def _restore(self, watched: _Watched, reason: str, figures: str) -> None:
        watched.since = None
        try:
            watched.file.restore(Origin.GUARDRAIL, reason=figures)
        except NoGeneration as error:
            log.error("smetric.guardrail.failed", route=watched.route.name, reason=figures, error=str(error))
            return
        self._on_restored(watched.route.name, reason)


def band_of(settings: Settings) -> Band:
    """What *settings* tolerate."""
    return Band(
        imbalance=settings.guardrail.imbalance_percent / 100,
        errors=settings.guardrail.errors_percent / 100,
        window_s=settings.guardrail.window,
        watch_s=settings.guardrail.watch,
    )
