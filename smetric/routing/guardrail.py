"""Guardrail: restores the previous policy, once, when load or errors leave their band after a policy file has changed.

It judges the effects of the change, not the policy: the requests of its own arm and, where these are too few to tell,
all requests on the instances. What it has undone stays undone until the file changes again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from smetric import names
from smetric.config.settings import Settings
from smetric.fleet.exchange import Exchange, Listener
from smetric.fleet.instance import Instance
from smetric.fleet.record import DecisionRecord
from smetric.routing.policy_files import NoGeneration, Origin, PolicyFile
from smetric.routing.routes import Route, Routes

#: Likelihood above which an imbalance may be chance.
CHANCE = 1e-4
#: Looks in a window.
LOOKS = 10
#: Fewest requests for a share of errors, and lowest mean load of an instance that counts.
LEAST_REQUESTS = 20
LEAST_LOAD = 1.0
#: Factor by which a change may increase the imbalance.
WORSE = 1.25
#: Windows after which a change is the baseline of the next one; a bad change is undone by then.
SETTLED = 3
#: Upper limit of the band, as a share of the way from the mean to all requests on one instance.
MOST_OF_ALL = 0.9

log = structlog.get_logger("smetric.guardrail")

#: Models of a group of comparable instances.
Group = frozenset[str] | None


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of requests over instances.

    Args:
        count: instances, at least two.
        mean: requests per instance.
        busiest: requests on the busiest instance.
        choices: requests that were placed independently of each other.
        piles: how often the busiest instance may have changed; 1 if it is the same throughout.
    """

    count: int
    mean: float
    busiest: float
    choices: float = math.inf
    piles: int = 1

    @property
    def imbalance(self) -> float:
        """The busiest instance's requests over the mean; 1 without requests."""
        return self.busiest / self.mean if self.mean else 1.0

    def chance(self, imbalance: float) -> float:
        """Return the log-likelihood that random choices put *imbalance* times the mean on some instance.

        Chernoff's bound: of n choices, one of k instances gets the share s or more with a probability of at most
        k·exp(−n·D), where D = s·ln(s·k) + (1 − s)·ln((1 − s) / (1 − 1/k)). If the busiest instance changes m times, it
        is kᵐ·exp(−n·D).
        """
        if imbalance <= 1:
            return 0.0
        fair = 1 / self.count
        share = min(1.0, imbalance * fair)
        apart = share * math.log(share / fair)
        if share < 1:
            apart += (1 - share) * math.log((1 - share) / (1 - fair))
        return self.piles * math.log(self.count) - self.choices * apart

    def shows(self, imbalance: float) -> bool:
        """Return whether random choices would hardly put *imbalance* times the mean on any instance."""
        return self.chance(imbalance) < math.log(CHANCE)


def at_once(looks: Iterable[Mapping[Instance, float]], instances: Collection[Instance]) -> Spread:
    """Return the distribution over *instances* at a single look, averaged over *looks*."""
    loads = [[look.get(instance, 0) for instance in instances] for look in looks]
    count = max(1, len(loads))
    total = sum(map(sum, loads)) / count
    return Spread(len(instances), total / len(instances), sum(map(max, loads)) / count, total)


#: Distributions over a window: averaged over time, and at once.
Spreads = tuple[Spread, Spread]


class ArmLoad:
    """Running requests that the current policy of one arm has placed, sampled at looks.

    A pile of requests may stay on one instance, or move on as a whole: then each instance has its share on average, and
    yet one has all at any moment. Both are measured.

    Args:
        looks: looks that are kept.
    """

    def __init__(self, looks: int) -> None:
        #: By decision id: the instance, and whether it is a first turn, which is placed independently.
        self._under_way: dict[str, tuple[Instance, bool]] = {}
        self._looks: deque[dict[str, tuple[Instance, bool]]] = deque(maxlen=looks)

    def clear(self) -> None:
        """Drop all; another policy acts."""
        self._under_way.clear()
        self._looks.clear()

    def placed(self, record: DecisionRecord) -> None:
        """Count the request of *record* on its instance."""
        if record.instance is not None:
            self._under_way[record.id] = record.instance, not record.request.turn

    def left(self, record: DecisionRecord) -> None:
        """Count the request of *record* no longer."""
        self._under_way.pop(record.id, None)

    def look(self) -> None:
        """Take a sample."""
        self._looks.append(self._under_way.copy())

    def over(self, instances: Collection[Instance]) -> Spread:
        """Return the distribution over *instances*, averaged over the last looks.

        Later turns may follow the previous turn: of them only those that run at the same time are choices.
        """
        loads: Counter[Instance] = Counter()
        first: set[str] = set()
        later = 0
        for look in self._looks:
            for id, (instance, is_first) in look.items():
                if instance in instances:
                    loads[instance] += 1
                    if is_first:
                        first.add(id)
                    else:
                        later += 1
        looks = max(1, len(self._looks))
        busiest = max(loads.values(), default=0)
        return Spread(
            len(instances), loads.total() / looks / len(instances), busiest / looks, len(first) + later / looks
        )

    def at_once(self, instances: Collection[Instance]) -> Spread:
        """Return the distribution over *instances* at a single look.

        Choices are the requests that run at the same time; or all, where each look may have its own busiest instance.
        The less likely reading counts.
        """
        spread = at_once([Counter(instance for instance, _ in look.values()) for look in self._looks], instances)
        over = replace(spread, choices=self.over(instances).choices, piles=max(1, len(self._looks)))
        return min(spread, over, key=lambda one: one.chance(one.imbalance))


@dataclass(frozen=True, slots=True)
class Band:
    """Tolerated effects of a change.

    Args:
        imbalance: requests on the busiest instance over their mean.
        errors: increase of the share of failed requests.
        window_s: seconds over which both are measured.
        watch_s: seconds after a change in which they are watched.
    """

    imbalance: float = 3.0
    errors: float = 0.2
    window_s: float = 10.0
    watch_s: float = 600.0


@dataclass(slots=True)
class _Look:
    """Requests that ended since the previous look, and those that failed."""

    ended: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Watched:
    """An acting policy under watch.

    Args:
        route: its route.
        file: the policy.
    """

    route: Route
    file: PolicyFile
    looks: deque[_Look] = field(default_factory=lambda: deque([_Look()], maxlen=100 * LOOKS))
    load: ArmLoad = field(default_factory=lambda: ArmLoad(LOOKS))
    #: Time of the watched change, None without one; the generation that acted before, and its baseline: share of
    #: errors, and imbalances of the arm's own requests and of all, averaged and at once.
    since: float | None = None
    back_to: int = 0
    errors_before: float = 0.0
    before: dict[Group, Sequence[tuple[float, float]]] = field(default_factory=dict)

    def errors(self) -> float | None:
        """Return the share of failed requests over at least a window; None with too few requests."""
        ended = failed = 0
        for count, look in enumerate(reversed(self.looks), 1):
            ended += look.ended
            failed += look.failed
            if count >= LOOKS and ended >= LEAST_REQUESTS:
                break
        return failed / ended if ended >= LEAST_REQUESTS else None


class Guardrail(Listener):
    """Watch over all acting policies.

    Args:
        routes: the routes.
        instances: returns all instances.
        band: tolerated effects.
        on_restored: called with the route and the reason, one of `names.OUT_OF_BAND`.
        aliases: model aliases, by which routes may name models.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        routes: Routes,
        instances: Callable[[], Sequence[Instance]],
        band: Band,
        on_restored: Callable[[str, str], None] = lambda route, reason: None,
        *,
        aliases: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._instances = instances
        self._aliases = aliases or {}
        self._band = band
        self._on_restored = on_restored
        self._clock = clock
        self._watched = {(route.name, arm.name): _Watched(route, arm.file) for route, arm in routes.acting()}
        #: Requests on each instance, at the last looks.
        self._loads: deque[dict[Instance, float]] = deque(maxlen=LOOKS)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to look."""
        self._task = asyncio.create_task(self._run(), name="guardrail")

    async def stop(self) -> None:
        """Stop looking."""
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
        """Watch *file* after a change on disk; a restored policy is not watched.

        Changes less than `SETTLED` windows apart are rolled back together: the first one is no baseline for the second.
        """
        now = self._clock()
        for watched in self._watched.values():
            if watched.file is file:
                since, watched.since = watched.since, None
                if file.current.origin is Origin.FILE:
                    watched.since = now
                    if since is None or now - since >= SETTLED * self._band.window_s:
                        self._note_before(watched)
                # Decisions and ends from now on belong to the new policy.
                watched.load.clear()
                watched.looks.clear()
                watched.looks.append(_Look())

    def _note_before(self, watched: _Watched) -> None:
        """Note the baseline before the change."""
        previous = watched.file.previous()
        watched.back_to = previous.number if previous is not None else 0
        watched.errors_before = watched.errors() or 0.0
        watched.before = {
            group: [(_shown(one), _shown(other)) for one, other in zip(own, all, strict=True)]
            for group, own, all in self._spreads(watched)
        }

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Count a request on its instance, and no longer on one where its attempt has failed."""
        previous = exchange.previous
        # Now it may be on no arm: if no other instance serves it, no policy has run.
        if previous is not None and (before := self._watched.get((previous.route, previous.arm))) is not None:
            before.load.left(previous)
        watched = self._watched.get((record.route, record.arm))
        if watched is not None and record.decision is not None and record.generation == watched.file.current.number:
            watched.load.placed(record)

    def ended(self, exchange: Exchange) -> None:
        """Count the end of a decided request."""
        record = exchange.record
        watched = self._watched.get((record.route, record.arm)) if record is not None else None
        if record is None or watched is None:
            return
        watched.load.left(record)
        if record.decision is None and record.outcome != names.ERROR:
            return  # no policy decided it
        if record.generation != watched.file.current.number or record.status is None:
            return
        look = watched.looks[-1]
        look.ended += 1
        if record.status >= 500 or record.status == 429:
            look.failed += 1

    def look(self) -> None:
        """Take a sample of every policy, and restore those out of band."""
        now = self._clock()
        self._loads.append({one: one.requests() for one in self._instances() if one.healthy and not one.draining})
        for watched in self._watched.values():
            watched.load.look()
            since = watched.since
            if since is not None and now - since > self._band.watch_s:
                watched.since = since = None  # it has settled
            if since is not None and now - since >= self._band.window_s:
                found = self._out_of_band(watched)
                if found is not None:
                    self._restore(watched, *found)
            watched.looks.append(_Look())

    def _out_of_band(self, watched: _Watched) -> tuple[str, str] | None:
        """Return one of `names.OUT_OF_BAND` with its figures in words; None within the band."""
        errors = watched.errors()
        if errors is not None and errors > watched.errors_before + self._band.errors:
            return names.ERRORS, f"{errors:.0%} of the requests failed, {watched.errors_before:.0%} before"
        for group, own, all in self._spreads(watched):
            most = 1 + MOST_OF_ALL * (own[0].count - 1)
            band, tells = min(self._band.imbalance, most), False
            before = watched.before.get(group, ((1.0, 1.0), (1.0, 1.0)))
            for one, (own_before, _) in zip(own, before, strict=True):
                # One arm may put all its requests on one instance by design (a tenant, say); all together may not.
                limit = max(band, WORSE * own_before)
                if one.imbalance > limit and one.busiest >= LEAST_LOAD and one.shows(one.imbalance):
                    return names.IMBALANCED, _figures("of its own requests ", one, own_before)
                tells = tells or one.shows(limit)
            if tells:
                continue  # an imbalance of its own would show, so other load on the instances is not its fault
            for other, (_, all_before) in zip(all, before, strict=True):
                limit = min(max(self._band.imbalance, WORSE * all_before), most)
                if other.imbalance > limit and other.shows(other.imbalance):
                    return names.IMBALANCED, _figures("", other, all_before)
        return None

    def _spreads(self, watched: _Watched) -> Iterator[tuple[Group, Spreads, Spreads]]:
        """Yield the distributions of its own and of all requests for each loaded group of candidates."""
        if not self._loads:
            return
        models = [self._aliases.get(name, name) for name in watched.route.match.models]
        groups: dict[Group, dict[Instance, float]] = {}
        for instance in self._loads[-1]:
            if not models or any(instance.serves(model) for model in models):
                seen = [loads[instance] for loads in self._loads if instance in loads]
                groups.setdefault(instance.base_models, {})[instance] = sum(seen) / len(seen)
        for group, loads in groups.items():
            mean = sum(loads.values()) / len(loads)
            if len(loads) > 1 and mean >= LEAST_LOAD:
                own = watched.load.over(loads), watched.load.at_once(loads)
                yield group, own, (Spread(len(loads), mean, max(loads.values())), at_once(self._loads, loads))

    def _restore(self, watched: _Watched, reason: str, figures: str) -> None:
        watched.since = None
        file = watched.file
        kept = any(one.number == watched.back_to for one in file.generations)
        try:
            file.restore(Origin.GUARDRAIL, watched.back_to if kept else None, reason=figures)
        except NoGeneration as error:
            log.error("smetric.guardrail.failed", route=watched.route.name, reason=figures, error=str(error))
            return
        self._on_restored(watched.route.name, reason)


def _shown(spread: Spread) -> float:
    """Return the imbalance; 1 if it may be chance."""
    return spread.imbalance if spread.shows(spread.imbalance) else 1.0


def _figures(what: str, spread: Spread, before: float) -> str:
    return f"{what}the busiest instance had {spread.imbalance:.1f} times the mean, {before:.1f} before"


def band_of(settings: Settings) -> Band:
    """Return the band of *settings*."""
    return Band(
        imbalance=settings.guardrail.imbalance_percent / 100,
        errors=settings.guardrail.errors_percent / 100,
        window_s=settings.guardrail.window,
        watch_s=settings.guardrail.watch,
    )
