"""Guardrail: restores the policy before a bad change."""

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

# Where the policy of one arm has put the requests that are under way, looked at now and then.
#
# A pile of requests may stay where it is, or move on as a whole whenever it has been worked off: then each instance has
# its share on average, and yet at any moment one has all. What is out of band is judged in `guardrail.py`.

#: What is more likely than this may have come about by chance.
CHANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Spread:
    """How requests lie on some instances.

    Args:
        count: the instances, two at least.
        mean: requests for each of them.
        busiest: requests on the busiest.
        choices: of all requests, how many were placed regardless of each other.
        piles: how often another instance may have been the busiest; 1 where it is the same throughout.
    """

    count: int
    mean: float
    busiest: float
    choices: float = math.inf
    piles: int = 1

    @property
    def imbalance(self) -> float:
        """The busiest instance's requests over the mean; 1 where there are none."""
        return self.busiest / self.mean if self.mean else 1.0

    def chance(self, imbalance: float) -> float:
        """Logarithm of how likely so many choices, made at random, put *imbalance* times the mean on some instance.

        Chernoff's bound: of n choices, one of k instances gets the share s or more with a probability of at most
        k·exp(−n·D), where D = s·ln(s·k) + (1 − s)·ln((1 − s) / (1 − 1/k)). Where it may be another one m times, that is
        kᵐ·exp(−n·D).
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
        """Whether so many choices, made at random, would hardly put *imbalance* times the mean on any instance."""
        return self.chance(imbalance) < math.log(CHANCE)


def at_once(looks: Iterable[Mapping[Instance, float]], instances: Collection[Instance]) -> Spread:
    """How requests lay on *instances* at each of *looks*: on the busiest of the moment, on average."""
    loads = [[look.get(instance, 0) for instance in instances] for look in looks]
    count = max(1, len(loads))
    total = sum(map(sum, loads)) / count
    return Spread(len(instances), total / len(instances), sum(map(max, loads)) / count, total)


class ArmLoad:
    """The requests of one arm that its policy in force has placed.

    Args:
        looks: how many looks back it tells of.
    """

    def __init__(self, looks: int) -> None:
        #: By id of the decision: where, and whether it is the first turn of a conversation, which is placed for itself.
        self._under_way: dict[str, tuple[Instance, bool]] = {}
        self._looks: deque[dict[str, tuple[Instance, bool]]] = deque(maxlen=looks)

    def clear(self) -> None:
        """Another policy is in force."""
        self._under_way.clear()
        self._looks.clear()

    def placed(self, record: DecisionRecord) -> None:
        """*record* sends its request to an instance."""
        if record.instance is not None:
            self._under_way[record.id] = record.instance, not record.request.turn

    def left(self, record: DecisionRecord) -> None:
        """The request of *record* is no longer where it was sent."""
        self._under_way.pop(record.id, None)

    def look(self) -> None:
        """Look at it."""
        self._looks.append(self._under_way.copy())

    def over(self, instances: Collection[Instance]) -> Spread:
        """How its requests lay on *instances*, averaged over the last looks.

        Later turns may be bound to the place of the turn before: of them only those under way at once are choices.
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
        """How they lay on *instances* at each of the last looks.

        Choices are those under way at the same time; or all, of which each look may have had a busiest one of its own.
        """
        spread = at_once([Counter(instance for instance, _ in look.values()) for look in self._looks], instances)
        over = replace(spread, choices=self.over(instances).choices, piles=max(1, len(self._looks)))
        return min(spread, over, key=lambda one: one.chance(one.imbalance))


# Watches a policy after its file has changed, and restores the one before, once, where load or errors go out of band.
#
# It looks at what came of the change, not at the policy: at the requests of its own arm, and where these are too few to
# tell, at all that the instances have. What it has undone it leaves alone until the file changes again.

#: Looks in a window.
LOOKS = 10
#: Fewer requests than this are no share of errors; fewer under way for each instance, or of an arm on its busiest, no
#: load.
LEAST_REQUESTS = 20
LEAST_LOAD = 1.0
#: A change may make the imbalance this many times what it was.
WORSE = 1.25
#: Windows after which a change counts as what was before the next one: a bad one is undone by then.
SETTLED = 3
#: However few instances there are, this much of the way from the mean to all requests on one of them is out of band.
MOST_OF_ALL = 0.9

log = structlog.get_logger("smetric.guardrail")

#: What tells the instances of one model from those of others.
Group = frozenset[str] | None
#: How requests lay over a window: on average, and at once.
Spreads = tuple[Spread, Spread]


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
    load: ArmLoad = field(default_factory=lambda: ArmLoad(LOOKS))
    #: When the change came that is watched, None where none is; which generation acted before, and how it was then:
    #: imbalances of the arm's own requests and of all, on average and at once.
    since: float | None = None
    back_to: int = 0
    errors_before: float = 0.0
    before: dict[Group, Sequence[tuple[float, float]]] = field(default_factory=dict)

    def errors(self) -> float | None:
        """Share of requests that failed, over a window at least and so many requests; None where there are too few."""
        ended = failed = 0
        for count, look in enumerate(reversed(self.looks), 1):
            ended += look.ended
            failed += look.failed
            if count >= LOOKS and ended >= LEAST_REQUESTS:
                break
        return failed / ended if ended >= LEAST_REQUESTS else None


class Guardrail(Listener):
    """Watches all policies that act.

    Args:
        routes: them.
        instances: all instances.
        band: what is tolerated.
        on_restored: told of the route, and of what was out of band: one of `names.OUT_OF_BAND`.
        aliases: names by which clients, and so routes, call models that instances serve under another.
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
        """*file* has another policy: watch it if it was read from disk; what was restored is left alone.

        A change soon after another is one with it: what the first has done is no measure of the second, and no way out.
        """
        now = self._clock()
        for watched in self._watched.values():
            if watched.file is file:
                since, watched.since = watched.since, None
                if file.current.origin is Origin.FILE:
                    watched.since = now
                    if since is None or now - since >= SETTLED * self._band.window_s:
                        self._note_before(watched)
                # What is decided and what ends from now on is the new policy's.
                watched.load.clear()
                watched.looks.clear()
                watched.looks.append(_Look())

    def _note_before(self, watched: _Watched) -> None:
        """Remember how it was before the change."""
        previous = watched.file.previous()
        watched.back_to = previous.number if previous is not None else 0
        watched.errors_before = watched.errors() or 0.0
        watched.before = {
            group: [(_shown(one), _shown(other)) for one, other in zip(own, all, strict=True)]
            for group, own, all in self._spreads(watched)
        }

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Count a request where it was placed, and no longer where its attempt has failed."""
        previous = exchange.previous
        # It need not be on an arm now: where nobody else may serve it, no policy has run.
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
            return  # no policy has decided it
        if record.generation != watched.file.current.number or record.status is None:
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
            watched.load.look()
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
        for group, own, all in self._spreads(watched):
            most = 1 + MOST_OF_ALL * (own[0].count - 1)
            band, tells = min(self._band.imbalance, most), False
            before = watched.before.get(group, ((1.0, 1.0), (1.0, 1.0)))
            for one, (own_before, _) in zip(own, before, strict=True):
                # All of an arm's own may lie on one instance by design, such as a tenant's; all of everybody's may not.
                limit = max(band, WORSE * own_before)
                if one.imbalance > limit and one.busiest >= LEAST_LOAD and one.shows(one.imbalance):
                    return names.IMBALANCED, _figures("of its own requests ", one, own_before)
                tells = tells or one.shows(limit)
            if tells:
                continue  # had it piled up its own, that would show: what else is on the instances is not its fault
            for other, (_, all_before) in zip(all, before, strict=True):
                limit = min(max(self._band.imbalance, WORSE * all_before), most)
                if other.imbalance > limit and other.shows(other.imbalance):
                    return names.IMBALANCED, _figures("", other, all_before)
        return None

    def _spreads(self, watched: _Watched) -> Iterator[tuple[Group, Spreads, Spreads]]:
        """For each group of instances under load that it may choose from: its own requests, and all, of a window."""
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
    """Its imbalance; 1 where that may have come about by chance."""
    return spread.imbalance if spread.shows(spread.imbalance) else 1.0


def _figures(what: str, spread: Spread, before: float) -> str:
    return f"{what}the busiest instance had {spread.imbalance:.1f} times the mean, {before:.1f} before"


def band_of(settings: Settings) -> Band:
    """What *settings* tolerate."""
    return Band(
        imbalance=settings.guardrail.imbalance_percent / 100,
        errors=settings.guardrail.errors_percent / 100,
        window_s=settings.guardrail.window,
        watch_s=settings.guardrail.watch,
    )
