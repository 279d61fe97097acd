"""Cost of one decision on synthetic fleets."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from smetric.policy import Decision, Feature, Kind, Policy, Snapshot, Vocabulary
from smetric.request.request import InferenceRequest

#: The sizes of the fleets, in instances.
SIZES = (8, 32, 128, 1024)
#: The requests of one size are measured in this many turns, so that a busy moment of the machine affects all.
ROUNDS = 20
PROMPT = 8000
#: The tokens that one instance of a fleet holds; the others hold none.
HELD = 3500
#: The requests, by name.
REQUESTS: Mapping[str, InferenceRequest] = {
    "first turn": InferenceRequest(turn=0, prompt_len=PROMPT, session="a", id="1"),
    "later turn, cached": InferenceRequest(turn=3, prompt_len=PROMPT, est_hit=6000, session="a", id="2"),
    "later turn, cache lost": InferenceRequest(turn=3, prompt_len=PROMPT, est_hit=7900, session="a", id="3"),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Median and 99th percentile of single calls in microseconds, without the cost of reading the clock."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figure:
    """Cost of a decision for one request on one fleet, and the label of its rule."""

    instances: int
    request: str
    rule: str
    cost: Cost


def figures(policy: Policy, vocabulary: Vocabulary, calls: int) -> Iterator[Figure]:
    """The figures of a policy by size and request, each from *calls* calls, at least `ROUNDS`."""
    cursors = dict.fromkeys(policy.plan.keys, id_of(3))
    for size in SIZES:
        snapshot = fleet(size, (vocabulary.features[name] for name in policy.reads))

        def deciding(request: InferenceRequest, snapshot: Snapshot = snapshot) -> Callable[[], Any]:
            return lambda: policy.decide(snapshot, request, cursors, 12345)

        cells = {name: deciding(request) for name, request in REQUESTS.items()}
        for name, cost in costs(cells, calls).items():
            decision = cells[name]()
            assert isinstance(decision, Decision), "the fleet holds every look-up"
            yield Figure(size, name, decision.rule, cost)


def id_of(ordinal: int) -> str:
    """The id of an instance of a fleet."""
    return f"gpu-{ordinal:04}"


def fleet(size: int, features: Iterable[Feature], *, equal: bool = False) -> Snapshot:
    """A reproducible fleet of *size* instances, one of which holds `HELD` tokens; loads are random, or all *equal*."""
    rng = random.Random(size)
    ids = [id_of(ordinal) for ordinal in range(size)]
    loads = [4 if equal else rng.randint(3, 6) for _ in ids]
    return Snapshot(ids, {feature.name: _column(feature, ids, loads) for feature in features})


def _column(feature: Feature, ids: list[str], loads: list[int]) -> list[Any]:
    """Cells of a feature: hits on one instance, loads on the feature's own scale, all healthy."""
    if feature.name == "id":
        return list(ids)
    if feature.kind is not Kind.NUMBER:
        return [True if feature.name == "healthy" else feature.default] * len(ids)
    if feature.at_most:
        return [HELD if at == len(ids) // 2 else 0 for at in range(len(ids))]
    scale = min(900 if "tokens" in feature.unit else 1, feature.high / 10)
    return [max(feature.low, load * scale) for load in loads]


def costs(cells: Mapping[str, Callable[[], Any]], calls: int) -> dict[str, Cost]:
    """The cost of each call, measured *calls* times."""
    overhead = _percentile(_times({"": lambda: None}, 4000)[""], 0.5)
    found = {}
    for name, times in _times(cells, calls).items():
        p50, p99 = (max(0.0, _percentile(times, share) - overhead) / 1000 for share in (0.5, 0.99))
        found[name] = Cost(p50, p99)
    return found


def _times(cells: Mapping[str, Callable[[], Any]], calls: int) -> dict[str, list[int]]:
    """Nanoseconds of each single call."""
    clock = time.perf_counter_ns
    times: dict[str, list[int]] = {name: [] for name in cells}
    for _ in range(ROUNDS):
        for name, call in cells.items():
            taken = times[name]
            for _ in range(calls // ROUNDS):
                started = clock()
                call()
                taken.append(clock() - started)
    return times


def _percentile(times: list[int], share: float) -> int:
    return sorted(times)[int(len(times) * share)]
