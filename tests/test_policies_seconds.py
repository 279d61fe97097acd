"""Policies that reckon in seconds, and LMetric's guard, against their formulas in plain Python on random states."""

from __future__ import annotations

import random
from statistics import fmean
from typing import Any

from smetric.request.request import InferenceRequest
from tests.test_policies_peers import State, decide, lmetric, lowest, random_state, shipped


def random_costs(rng: random.Random) -> tuple[State, InferenceRequest]:
    """A state with rates, costs and what a shared store holds; some rates are unknown, as None."""
    state, request = random_state(rng)
    size, length = len(state["hit_len"]), request.prompt_len
    stored = rng.choice([0, length // 2, length])
    more: dict[str, list[Any]] = {
        **state,
        "unprefilled_cost": [rng.choice([0, rng.randint(0, 60_000)]) for _ in range(size)],
        "prefill_rate": [rng.choice([5_000.0, 10_000.0, 20_000.0]) for _ in range(size)],
        "fetch_rate": [rng.choice([20_000.0, 100_000.0])] * size,
        "store_hit_len": [stored] * size,
    }
    request.turn = rng.choice([0, 1, 3])
    request.est_hit = rng.choice([0, length // 2, length])
    return more, request


def prefill(new: float, length: int, equal: float) -> float:
    """Cost of computing the last *new* of *length* tokens, attention included."""
    return new + new * (length - new / 2) / equal


def smetric_slo(state: State, request: InferenceRequest) -> tuple[str, set[int]]:
    """The revised SMetric: the rule, and the instances it allows."""
    length, hits = request.prompt_len, state["hit_len"]
    loads = [c + prefill(length - h, length, 6923) for c, h in zip(state["unprefilled_cost"], hits, strict=True)]
    target = 1.0 + 62.5e-6 * length
    meets = [load / rate <= target for load, rate in zip(loads, state["prefill_rate"], strict=True)]
    warmest = [i for i, hit in enumerate(hits) if hit == max(hits)]
    home = min(warmest, key=lambda i: loads[i])
    assert request.est_hit is not None
    if request.turn and hits[home] > 0.5 * request.est_hit and (meets[home] or not any(meets)):
        return "stick", {i for i in warmest if loads[i] == loads[home]}
    return "balance", lowest([load * n for load, n in zip(loads, state["requests"], strict=True)])


def least_delay(state: State, request: InferenceRequest) -> set[int]:
    """Those within 0.6 s of the least delay that sending the request there adds."""
    delays, length = [], request.prompt_len
    for hit, store, cost, n, rate, fetch in zip(
        *(state[name] for name in ("hit_len", "store_hit_len", "unprefilled_cost", "requests")),
        *(state[name] for name in ("prefill_rate", "fetch_rate")),
        strict=True,
    ):
        have = max(hit, store)
        own = prefill(max(length - have, 1), length, 7800) / rate + (have - hit) / fetch
        delays.append(cost / rate + own * (1 + 0.5 * n) + 12 * (length - hit) / fetch)
    return {i for i, delay in enumerate(delays) if delay <= min(delays) + 0.6 + 1e-9}


def guarded(state: State, request: InferenceRequest) -> tuple[str, set[int]]:
    """LMetric's hot-spot guard: the rule, and the instances it allows."""
    scores, hits = lmetric(state, request.prompt_len), state["hit_len"]
    holders = [i for i, hit in enumerate(hits) if hit > 0]
    rest = [i for i, hit in enumerate(hits) if hit == 0]
    share = request.class_share
    floods = bool(rest) and (share == 1 or share / (1 - share) > len(holders) / len(rest))
    if holders and floods and request.class_streak >= 2 * len(holders):
        least = lowest([scores[i] for i in rest])
        return "spread", {rest[i] for i in least}
    return "product", lowest(scores)


def test_smetric_slo_is_its_formula() -> None:
    policy, rng = shipped("smetric_slo"), random.Random(21)
    seen = {"stick": 0, "balance": 0}
    for _ in range(1500):
        state, request = random_costs(rng)
        rule, allowed = smetric_slo(state, request)
        decision = decide(policy, state, request, rng.getrandbits(63))
        assert (decision.rule, decision.index in allowed) == (rule, True), state
        seen[rule] += 1
    assert min(seen.values()) > 100


def test_least_delay_is_its_formula() -> None:
    policy, rng = shipped("least_delay"), random.Random(22)
    several = 0
    for _ in range(1500):
        state, request = random_costs(rng)
        allowed = least_delay(state, request)
        several += 1 < len(allowed) < len(state["hit_len"])
        assert decide(policy, state, request, rng.getrandbits(63)).index in allowed, state
    assert several > 100


def test_lmetric_guarded_is_its_formula() -> None:
    policy, rng = shipped("lmetric_guarded"), random.Random(23)
    seen = {"spread": 0, "product": 0}
    for _ in range(1500):
        state, request = random_state(rng)
        request.class_share = rng.choice([0.0, 0.2, 0.5, 0.9, 1.0])
        request.class_streak = float(rng.randint(0, 8))
        rule, allowed = guarded(state, request)
        decision = decide(policy, state, request, rng.getrandbits(63))
        assert (decision.rule, decision.index in allowed) == (rule, True), state
        seen[rule] += 1
    assert min(seen.values()) > 100


def test_prefix_hash_and_bounded_hash_keep_their_bounds() -> None:
    rng = random.Random(24)
    for name in ("prefix_hash", "bounded_hash"):
        policy = shipped(name)
        for _ in range(500):
            state, request = random_state(rng)
            loads = state["requests"]
            decision = decide(policy, state, request, rng.getrandbits(63))
            bound = fmean(loads) if name == "prefix_hash" else (sum(loads) + 1) / len(loads)
            assert loads[decision.index] <= max(1.25 * bound, min(loads)) + 1e-9
