"""Figures of the live page: rates, percentiles and loads of the last seconds, and their history of ten minutes."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from smetric import names
from smetric.fleet.instance import Instance

if TYPE_CHECKING:
    from smetric.fleet.record import DecisionRecord


#: Seconds over which rates and percentiles, and hit rates, are computed.
WINDOW_S, HIT_WINDOW_S = 10, 60
#: Seconds of history, and most cells (instances × seconds): a minute with 1,024 instances.
KEPT_S, MOST_CELLS = 600, 65_536
#: Times of one second that enter percentiles.
_MOST_TIMES = 256


@dataclass(slots=True)
class _Second:
    """Events within one second; times in seconds, hits in tokens."""

    decisions: int = 0
    instances: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    evaluations: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    predicted: int = 0
    actual: int = 0
    prompts: int = 0
    #: By policy in shadow: its answers, and how many of them agreed.
    answered: Counter[str] = field(default_factory=Counter)
    agreed: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Sample:
    """One second of the history: requests of each instance, and the figures of `SERIES`."""

    time_ms: int
    ids: tuple[str, ...]
    loads: array[float]
    values: tuple[float | None, ...]


#: Figures of the router with a history.
SERIES = ("rate", "ttft_p50_s", "ttft_p99_s", "imbalance", "predicted", "actual", "age_s")


class Figures:
    """Figures of the last seconds and their history.

    Args:
        instances: returns all instances.
        clock: monotonic seconds, as of scrapes.
        now_ms: Unix milliseconds.
    """

    def __init__(
        self, instances: Callable[[], Sequence[Instance]], clock: Callable[[], float], now_ms: Callable[[], int]
    ) -> None:
        self._instances = instances
        self._clock = clock
        self._now_ms = now_ms
        self._second = _Second()
        self._window: deque[_Second] = deque(maxlen=WINDOW_S)
        #: By instance, per second: prompt tokens found in its caches, and looked up there, since its start.
        self._caches: dict[str, deque[tuple[int, int]]] = {}
        self._history: deque[_Sample] = deque()
        self._state: dict[str, Any] = {}

    def add(self, decided: Sequence[DecisionRecord], ended: Sequence[DecisionRecord]) -> None:
        """Count decisions and endings."""
        second = self._second
        second.decisions += len(decided)
        second.outcomes.update([record.outcome for record in decided])
        second.instances.update([record.instance.id for record in decided if record.instance is not None])
        evaluations = (record.evaluate_s for record in decided if record.decision is not None)
        second.evaluations.extend(islice(evaluations, _MOST_TIMES - len(second.evaluations)))
        ttfts = (record.ttft_s for record in ended if record.ttft_s is not None)
        second.ttfts.extend(islice(ttfts, _MOST_TIMES - len(second.ttfts)))
        predicted = actual = prompts = 0
        for record in ended:
            for one in record.shadowed:
                if one.decision is not None:
                    second.answered[one.policy.name] += 1
                    second.agreed[one.policy.name] += one.answer == names.AGREES
            usage, hit = record.usage, record.hit
            if hit is not None and usage is not None and usage.cached_tokens is not None and usage.prompt_tokens:
                predicted += record.as_counted(hit[0], usage.prompt_tokens)
                actual += usage.cached_tokens
                prompts += usage.prompt_tokens
        second.predicted += predicted
        second.actual += actual
        second.prompts += prompts

    def close_second(self) -> None:
        """Compute the figures of the second that has passed."""
        self._window.append(self._second)
        self._second = _Second()
        instances = list(self._instances())
        self._state = state = self._compute(instances)
        rows = state["instances"]
        ids = tuple(row["id"] for row in rows)
        last = self._history[-1] if self._history else None
        if last is not None and last.ids == ids:
            ids = last.ids  # all samples share one tuple
        loads = array("f", (row["requests"] for row in rows))
        self._history.append(_Sample(state["time_ms"], ids, loads, tuple(state[name] for name in SERIES)))
        most = min(KEPT_S, max(1, MOST_CELLS // max(1, len(ids))))
        while len(self._history) > most:
            self._history.popleft()

    def state(self) -> dict[str, Any]:
        """Return the figures of the last complete second."""
        if not self._state:
            self._state = self._compute(list(self._instances()))
        return self._state

    def history(self) -> dict[str, Any]:
        """Return the history, oldest first: times, requests of each current instance, and the router's series.

        None stands for an instance that was absent, or an unknown figure.
        """
        samples = list(self._history)
        ids = samples[-1].ids if samples else ()
        loads: dict[str, list[float | None]] = {id: [] for id in ids}
        for sample in samples:
            if sample.ids is ids:
                for id, load in zip(ids, sample.loads, strict=True):
                    loads[id].append(round(load, 1))
                continue
            then = dict(zip(sample.ids, sample.loads, strict=True))
            for id in ids:
                loads[id].append(round(then[id], 1) if id in then else None)
        return {
            "times_ms": [sample.time_ms for sample in samples],
            "loads": loads,
            "series": {name: [sample.values[i] for sample in samples] for i, name in enumerate(SERIES)},
        }

    def _compute(self, instances: Sequence[Instance]) -> dict[str, Any]:
        now, window = self._clock(), self._window
        seconds = max(1, len(window))
        sent, outcomes, answered, agreed = (Counter[str]() for _ in range(4))
        for second in window:
            sent.update(second.instances)
            outcomes.update(second.outcomes)
            answered.update(second.answered)
            agreed.update(second.agreed)
        decisions = sum(second.decisions for second in window)
        ttfts = sorted(time for second in window for time in second.ttfts)
        evaluations = sorted(time for second in window for time in second.evaluations)
        prompts = sum(second.prompts for second in window)
        rows = [self._row(instance, now, sent[instance.id] / seconds) for instance in instances]
        ages = [row["age_s"] for row in rows if row["age_s"] is not None]
        present = {instance.id for instance in instances}
        for gone in self._caches.keys() - present:
            del self._caches[gone]
        return {
            "time_ms": self._now_ms(),
            "up": sum(1 for one in instances if one.healthy and not one.draining),
            "rate": round(decisions / seconds, 1),
            "outcomes": {outcome: round(count / decisions, 4) for outcome, count in sorted(outcomes.items())},
            "evaluate_p99_s": percentile(evaluations, 0.99),
            "ttft_p50_s": percentile(ttfts, 0.5),
            "ttft_p99_s": percentile(ttfts, 0.99),
            "imbalance": imbalance(instances),
            "predicted": _share(sum(second.predicted for second in window), prompts),
            "actual": _share(sum(second.actual for second in window), prompts),
            "age_s": max(ages, default=None),
            "shadows": {name: _share(agreed[name], count) for name, count in sorted(answered.items())},
            "instances": rows,
        }

    def _row(self, instance: Instance, now: float, rate: float) -> dict[str, Any]:
        scrape = instance.scrape
        kv_usage = scrape.kv_usage if scrape is not None else None
        return {
            "id": instance.id,
            "state": instance.state.value,
            "requests": round(instance.requests(), 1),
            "running": scrape.running if scrape is not None else None,
            "waiting": scrape.waiting if scrape is not None else None,
            "kv_usage": round(kv_usage, 4) if kv_usage is not None else None,
            "hit_rate": self._hit_rate(instance),
            "age_s": round(max(0.0, now - scrape.measured_at), 3) if scrape is not None else None,
            "rate": round(rate, 1),
        }

    def _hit_rate(self, instance: Instance) -> float | None:
        """Return the share of the prompt tokens of the last minute that the engine found in a cache."""
        tokens = instance.prefix_tokens
        if tokens is None:
            self._caches.pop(instance.id, None)
            return None
        found = tokens.local + tokens.external
        seen = self._caches.setdefault(instance.id, deque(maxlen=HIT_WINDOW_S))
        if seen and seen[-1][1] > found + tokens.missed:
            seen.clear()  # a new process
        seen.append((found, found + tokens.missed))
        return _share(found - seen[0][0], found + tokens.missed - seen[0][1])


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Return the value that *share* of the sorted values do not exceed; None without values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def imbalance(instances: Iterable[Instance]) -> float | None:
    """Return the largest ratio of an instance's requests to the mean of its models' instances; None if all are idle."""
    groups: dict[frozenset[str] | None, list[float]] = {}
    for instance in instances:
        if instance.healthy and not instance.draining:
            groups.setdefault(instance.base_models, []).append(instance.requests())
    ratios = [max(loads) * len(loads) / sum(loads) for loads in groups.values() if sum(loads)]
    return round(max(ratios), 3) if ratios else None


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole > 0 else None
