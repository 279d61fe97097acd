"""Fleet: all instances, the candidates of a request, and the snapshot a policy decides on.

Nothing here awaits: between taking a snapshot and charging the chosen instance nothing else may run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import add, attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from smetric.config import Settings
from smetric.config.credential import credential
from smetric.errors import NoCandidate, unknown_model
from smetric.features import VOCABULARY
from smetric.fleet.health import Health
from smetric.fleet.instance import Instance, Scrape, State
from smetric.policy.snapshot import Origins, Snapshot
from smetric.policy.vocabulary import Vocabulary

if TYPE_CHECKING:
    from smetric.request.request import InferenceRequest

#: Age in seconds above which a scraped value is unknown.
UNKNOWN_AFTER_S = 30.0
#: Feature that depends on the request to place.
DECODE_BLOCKS = "decode_blocks"
#: Features on which an instance in its slow start bears a phantom load, and the origins of their cells in the trace.
#: `waiting` and `kv_usage` have none: rules ask by them whether an instance is full.
PHANTOM = ("requests", "running", "unprefilled", "unprefilled_cost", "inflight_tokens", DECODE_BLOCKS)
LEDGER = "ledger"
SLOW_START = "slow_start"
#: Most models, as requests name them, whose candidates are cached.
MOST_MODELS = 256

#: A value per instance, None where unknown; and when each was true, seconds on the fleet's clock, None for now.
Measured = tuple[list[float | None], list[float | None] | None]


class Measure(Protocol):
    """Source of features measured on passing requests; it fills them at once, without a look-up."""

    #: The features it fills.
    measures: frozenset[str]

    def measure(self, feature: str, instances: Sequence[Instance]) -> Measured:
        """Return a feature of *instances* as of now."""


class Candidates(list[Instance]):
    """Instances that may serve a request, in the order of their ids. Requests share them: never change one.

    Attributes:
        ids: their ids.
        measured_at: when each scrape was true, None without one.
        earliest: the earliest of these, -inf if one is None.
        others: the requests that others had sent to each as of its scrape.
    """

    __slots__ = ("earliest", "ids", "measured_at", "others")

    def __init__(self, instances: Iterable[Instance]) -> None:
        super().__init__(instances)
        self.ids = [one.id for one in self]
        scrapes = [one.scrape for one in self]
        self.measured_at = [None if scrape is None else scrape.measured_at for scrape in scrapes]
        self.earliest = min([-math.inf if at is None else at for at in self.measured_at], default=-math.inf)
        self.others = [0.0 if scrape is None else scrape.others for scrape in scrapes]


#: What makes an instance a candidate, with the values that candidates keep; and its own requests.
_STANDING = attrgetter("healthy", "draining", "deprioritized", "models", "scrape", "incarnation", "seen_empty")
_OWN = attrgetter("own")

#: Reads a feature of candidates: one cell for each, None where unknown.
ColumnOf = Callable[[Candidates], list[Any]]


class Fleet:
    """The configured instances, in the order of their ids.

    Args:
        instances: all of them; ids are unique.
        vocabulary: rule for unknown cells and range of each feature.
        unknown_after_s: age in seconds above which a scraped value is unknown.
        health: judge of the instances; by default one with the default settings.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        instances: Iterable[Instance],
        vocabulary: Vocabulary,
        *,
        unknown_after_s: float = UNKNOWN_AFTER_S,
        health: Health | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.instances: list[Instance] = sorted(instances, key=lambda instance: instance.id)
        self._by_id = {instance.id: instance for instance in self.instances}
        self._features = vocabulary.features
        self.unknown_after_s = unknown_after_s
        self.health = health or Health(self.instances, clock=clock)
        self.clock = clock
        self._measures: dict[str, Measure] = {}
        #: Decisions on candidates that include unhealthy ones, because too few were healthy (panic).
        self.panics = 0
        #: Candidates by model, valid while nothing that makes an instance a candidate changes.
        self._candidates: dict[str, Candidates] = {}
        self._standing: Sequence[tuple[object, ...]] = ()

    def __getitem__(self, id: str) -> Instance:
        return self._by_id[id]

    def get(self, id: str) -> Instance | None:
        """Return the instance with *id*, or None."""
        return self._by_id.get(id)

    def measured_by(self, measure: Measure) -> None:
        """Let *measure* fill its features, except features that another one fills already."""
        for name in measure.measures:
            self._measures.setdefault(name, measure)

    def watch_load(self, changed: Callable[[], object]) -> None:
        """Call *changed* whenever an instance may have more room than before."""
        for instance in self.instances:
            instance.load_changed = changed

    def why_unready(self) -> str:
        """Return why new requests should go to another router; empty if they need not.

        Only certain reasons count. If all instances are ill, refuse connections or are ejected, they are still tried
        (panic): our view may be wrong, they may be back in a moment, and other routers see the same. Instances that are
        drained, shutting down or asleep are never tried.
        """
        self.health.settle()
        if not self.instances:
            return "no instance is configured"
        return "all instances are drained, stopping or asleep" if all(one.draining for one in self.instances) else ""

    def serves_alike(self) -> bool:
        """Return whether all instances serve the same models and adapters, as far as is known."""
        return len({one.models for one in self.instances if one.models is not None and not one.draining}) < 2

    def has_common_model(self) -> bool:
        """Return whether there is a model besides adapters that all instances serve, as far as is known."""
        known = [one.base_models for one in self.instances if one.base_models is not None and not one.draining]
        return not known or bool(frozenset.intersection(*known))

    def candidates(self, model: str, *, exclude: Collection[Instance] = ()) -> Candidates:
        """Return the instances that may serve *model*: healthy, not draining, not for prefill alone, not excluded,
        preferably not deprioritized.

        If fewer than the tolerated share are healthy, a wrong view is more likely than a failure of that many engines.
        Then all are candidates (panic), except instances that refuse connections; if no other one is left, these too.

        Raises:
            NoCandidate: 404 if every instance's models are known and none serves *model*; 503 if all that serve it are
                out.
        """
        if self.clock() >= self.health.due:
            self.health.settle()
        standing = list(map(_STANDING, self.instances))
        if standing != self._standing:
            self._standing = standing
            self._candidates.clear()
        if exclude:
            return Candidates(self._found(model, exclude))
        found = self._candidates.get(model)
        if found is None:
            panics = self.panics
            found = Candidates(self._found(model))
            if panics == self.panics and len(self._candidates) < MOST_MODELS:
                self._candidates[model] = found
        return found

    def _found(self, model: str, exclude: Collection[Instance] = ()) -> list[Instance]:
        serving = [i for i in self.instances if i.serves(model)]
        if not serving:
            if not self.instances:
                raise NoCandidate("no instance is configured")
            raise unknown_model(model)
        eligible = [i for i in serving if not i.draining and i.role != "prefill"]
        chosen = [i for i in eligible if i.healthy]
        if eligible and (not chosen or 100 * len(chosen) / len(eligible) < self.health.settings.panic_below_percent):
            self.panics += 1
            chosen = [i for i in eligible if i.state is not State.REFUSING] or eligible
        if exclude:
            chosen = [i for i in chosen if i not in exclude] or [i for i in eligible if i not in exclude]
        if not chosen:
            why = "draining, asleep, excluded or for prefill alone"
            raise NoCandidate(f"all {len(serving)} instances that serve this model are {why}")
        return [i for i in chosen if not i.deprioritized] or chosen

    def snapshot(
        self, candidates: Candidates, reads: Iterable[str], request: InferenceRequest | None = None
    ) -> Snapshot:
        """Return what a policy sees of *candidates* now, before anything is looked up.

        Args:
            candidates: a result of `candidates`.
            reads: the features the policy reads.
            request: the request to place, whose own blocks count in `decode_blocks`.

        Returns:
            A snapshot with a column for every feature of *reads* except look-ups.
        """
        now = self.clock()
        oldest = now - self.unknown_after_s
        is_fresh = candidates.earliest >= oldest
        measured: Sequence[float | None] = candidates.measured_at
        if not is_fresh:
            measured = [None if at is None or at < oldest else at for at in measured]
        columns: dict[str, list[Any]] = {}
        known: dict[str, list[bool] | None] = {}
        stamps: dict[str, Sequence[float | None]] = {}
        origins: dict[str, Origins] = {}
        for name in reads:
            if name in SCRAPED:
                feature, cells = self._features[name], SCRAPED[name](candidates)
                stamps[name] = measured
                if not is_fresh:
                    cells = [None if at is None else cell for at, cell in zip(measured, cells, strict=True)]
                if None in cells:
                    counted = [one.own for one in candidates] if feature.counted else None
                    columns[name], known[name] = feature.fill(cells, counted)
                else:
                    columns[name] = cells
            elif name in CERTAIN:
                columns[name] = CERTAIN[name](candidates)
            elif name == DECODE_BLOCKS:
                own = () if request is None else (request.prompt_len, *request.prompt_blocks())
                columns[name] = [one.decode_blocks(*own) for one in candidates]
            elif not self._features[name].lookup:
                columns[name], known[name], at = self._measured_now(name, candidates)
                if at is not None:
                    stamps[name] = at
        if self.health.warming and (remaining := self.health.slow_start_remaining(candidates)) is not None:
            _add_phantoms(columns, origins, remaining)
        return Snapshot(candidates.ids, columns, known, stamps, origins, now)

    def fill(
        self, snapshot: Snapshot, name: str, cells: Sequence[float | None], origins: Origins, prompt_len: int
    ) -> None:
        """Add a looked-up feature to *snapshot*, which was taken in this tick and has not been decided on.

        Args:
            snapshot: of the candidates that were looked up.
            name: the feature.
            cells: one per candidate, None where unknown.
            origins: source of each cell, as in `Snapshot`.
            prompt_len: tokens of the request's prompt, the upper bound of a hit.
        """
        feature = self._features[name]
        values, known = feature.fill(cells)
        if values and not 0 <= min(values) <= max(values) <= prompt_len:
            values = [min(max(0.0, value), prompt_len) for value in values]
        snapshot.columns[name], snapshot.known[name], snapshot.origins[name] = values, known, origins

    def _measured_now(
        self, name: str, candidates: Sequence[Instance]
    ) -> tuple[list[Any], list[bool] | None, list[float | None] | None]:
        """Return a measured feature: its values, which of them are known, and when each was true."""
        measure = self._measures.get(name)
        if measure is None:
            return (*self._features[name].fill([None] * len(candidates)), None)
        cells, at = measure.measure(name, candidates)
        feature = self._features[name]
        if None not in cells:
            return cells, None, at
        instead = self._measured_now(feature.instead, candidates)[0] if feature.instead else None
        return (*feature.fill(cells, instead), at)


def _add_phantoms(columns: dict[str, list[Any]], origins: dict[str, Origins], remaining: list[float]) -> None:
    """Add a share of the mean load of the other candidates to the load of each candidate in its slow start.

    With c of the slow start remaining, beside w warm instances, the share is c (w + 1) / (w + c): a policy that
    equalises loads then gives the instance 1 - c of its fair share. The trace shows the sum and its origin. If all
    candidates are in their slow start, nothing is added.
    """
    for name in PHANTOM:
        column = columns.get(name)
        if column is None:
            continue
        warm = [value for value, c in zip(column, remaining, strict=True) if not c]
        if warm:
            mean, w = sum(warm) / len(warm), len(warm)
            columns[name] = [
                value + mean * c * (w + 1) / (w + c) if c else value for value, c in zip(column, remaining, strict=True)
            ]
            origins[name] = [SLOW_START if c else LEDGER for c in remaining]


def _each(of_one: Callable[[Instance], Any]) -> ColumnOf:
    return lambda candidates: list(map(of_one, candidates))


def _scraped(of_one: Callable[[Scrape], Any]) -> ColumnOf:
    return lambda candidates: [None if one.scrape is None else of_one(one.scrape) for one in candidates]


def _requests(candidates: Candidates) -> list[Any]:
    """Return `Instance.requests` of each; nearly every decision reads it."""
    return list(map(add, map(_OWN, candidates), candidates.others))


def _waiting(instance: Instance) -> float:
    return 0.0 if instance.scrape is None else min(instance.scrape.waiting, instance.requests())


def _running(instance: Instance) -> float:
    return instance.requests() - _waiting(instance)


#: Features that depend on a scrape.
SCRAPED: dict[str, ColumnOf] = {
    "requests": _requests,
    "running": _each(_running),
    "waiting": _each(_waiting),
    **{name: _scraped(attrgetter(name)) for name in ("kv_usage", "loras", "lora_room")},
}

#: Features that the router always knows.
CERTAIN: dict[str, ColumnOf] = {
    "unprefilled_cost": _each(Instance.unprefilled_cost),
    "inflight_tokens": _each(Instance.inflight_tokens),
    "model": _each(lambda instance: min(instance.models) if instance.models else ""),
    **{name: _each(attrgetter(name)) for name in ("unprefilled", "healthy", "draining", "id", "role", "pool", "zone")},
}


def fleet_of(settings: Settings, on_ejected: Callable[[Instance, str], None]) -> Fleet:
    """Return the fleet of *settings*.

    Args:
        settings: all settings.
        on_ejected: called with an instance that is left out and the reason, one of `names.EJECTION_REASONS`.

    Raises:
        ConfigError: an instance's key cannot be read.
    """
    instances = [
        Instance(
            one.id,
            one.url,
            models=one.models,
            role=one.role,
            pool=one.pool,
            zone=one.zone,
            key=credential(f"instances: {one.id}: api_key_file", one.api_key, one.api_key_file),
            attention_tokens=settings.prefill.attention_tokens,
        )
        for one in settings.instances
    ]
    return Fleet(
        instances,
        VOCABULARY,
        unknown_after_s=settings.scrape.unknown_after,
        health=Health(instances, settings.health, on_ejected=on_ejected),
    )
