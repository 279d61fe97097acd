"""Policies of peers against their formulas in plain Python."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import fmean, pstdev
from typing import Any

import pytest

from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.policy import Decision, Policy, Snapshot, load
from smetric.request.request import InferenceRequest
from smetric.routing.policy_files import libraries_beside

#: One column per feature, one cell per instance.
State = Mapping[str, list[Any]]
BLOCK = 16


def shipped(name: str, **settings: Any) -> Policy:
    path = shipped_policies()[name]
    return load(path.read_text(), VOCABULARY, path=str(path), settings=settings, libraries=libraries_beside(path))


def decide(policy: Policy, state: State, request: InferenceRequest, seed: int = 1) -> Decision:
    """Return the decision of *policy*; features missing in *state* are unknown."""
    ids = [f"i{n}" for n in range(len(next(iter(state.values()))))]
    columns = {name: state[name] for name in policy.reads if name in state}
    known: dict[str, list[bool] | None] = {}
    for name in policy.reads - columns.keys():
        columns[name], known[name] = VOCABULARY.features[name].fill([None] * len(ids))
    decision = policy.decide(Snapshot(ids, columns, known), request, {}, seed)
    assert isinstance(decision, Decision)
    return decision


# Formulas of the peers


def min_max(values: list[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def lmetric(state: State, length: int, *, own: float = 1, queued: bool = True) -> list[float]:
    """Prefill left after reuse, and queued, times requests. By default as released; as printed with *own* 0."""
    return [
        (max(length - hit, 1 if own else 0) + (waits if queued else 0)) * (load + own)
        for hit, load, waits in zip(state["hit_len"], state["requests"], state["unprefilled"], strict=True)
    ]


def vllm_default(state: State) -> list[float]:
    """4 × waiting + running."""
    return [4 * w + n for w, n in zip(state["waiting"], state["running"], strict=True)]


def dynamo(state: State, length: int) -> list[float]:
    """Prefill blocks left after credit for the instance's own cache, plus decode blocks; other tiers are empty."""
    return [
        max((waits + length) / BLOCK - hit / BLOCK, 0) + blocks
        for hit, waits, blocks in zip(state["hit_len"], state["unprefilled"], state["decode_blocks"], strict=True)
    ]


def least_load(state: State) -> list[float]:
    """Seconds of queued work at 2,000 tokens a second, and the KV cache's pressure."""
    return [w / 2000 + 0.15 * k / (1 - k) for w, k in zip(state["unprefilled"], state["kv_usage"], strict=True)]


def ramjet(state: State) -> list[float]:
    """Affinity in blocks of 512 tokens, at most 32, relative to the best, less 4 × (requests + prefill / 8192)."""
    return [
        -4 * (n + waits / 8192) + min(32, hit / 512)
        for hit, n, waits in zip(state["hit_len"], state["requests"], state["unprefilled"], strict=True)
    ]


def llmd(state: State, length: int) -> list[float]:
    """Queue 2, KV utilisation 2, prefix 3; no filter applies."""
    queues = min_max(state["waiting"])
    return [
        2 * (1 - queue) + 2 * (1 - k) + 3 * hit / length
        for queue, k, hit in zip(queues, state["kv_usage"], state["hit_len"], strict=True)
    ]


def bailian_sampled(state: State, alpha: float, beta: float, gamma: float) -> list[float]:
    """The weight of each instance."""
    hits, loads, tokens = (min_max(state[name]) for name in ("hit_len", "requests", "inflight_tokens"))
    return [alpha * h + beta * (1 - n) + gamma * (1 - t) for h, n, t in zip(hits, loads, tokens, strict=True)]


def bailian(state: State, length: int, weight: float = 0.7) -> list[float]:
    """(1 - λ) l / max(l) + λ (1 - c / L)."""
    most = max(state["requests"])
    return [
        (1 - weight) * (n / most if most else 0) + weight * (1 - hit / length)
        for n, hit in zip(state["requests"], state["hit_len"], strict=True)
    ]


def sglang(state: State, length: int, absolute: float, relative: float, threshold: float) -> set[int]:
    """The choices of cache_aware: the shortest queues if loads diverge or nothing matches, else the best match."""
    loads, hits = state["requests"], state["hit_len"]
    shortest = {i for i, load in enumerate(loads) if load == min(loads)}
    if max(loads) - min(loads) > absolute and max(loads) > relative * min(loads):
        return shortest
    if max(hits) / length > threshold:
        warmest = [i for i, hit in enumerate(hits) if hit == max(hits)]
        return {i for i in warmest if loads[i] == min(loads[j] for j in warmest)}
    return shortest


def aibrix(state: State) -> set[int]:
    """The choices of prefix-cache: among calm instances the best match, then the least loaded."""
    running, hits = state["running"], state["hit_len"]
    left = list(range(len(running)))
    if max(running) - min(running) > 8:
        left = [i for i in left if running[i] == min(running)]
    loads = [running[i] for i in left]
    calm = fmean(loads) + pstdev(loads)
    matching = [i for i in left if hits[i] > 0 and running[i] <= calm + 1e-9]
    if not matching:
        return {i for i in left if running[i] == min(loads)}
    longest = [i for i in matching if hits[i] == max(hits[j] for j in matching)]
    return {i for i in longest if running[i] == min(running[j] for j in longest)}


def kvaware(state: State, length: int) -> set[int]:
    """The choices of kvaware's gate: at most 2,000 tokens are missing."""
    return {i for i, hit in enumerate(state["hit_len"]) if hit >= max(length - 2000, 0)}


def smetric_own_tokens(state: State, length: int, expected: float) -> tuple[list[float], bool]:
    """SMetric where load is queued prefill and the request's own new tokens: the loads, and whether home is kept."""
    loads = [w + length - hit for w, hit in zip(state["unprefilled"], state["hit_len"], strict=True)]
    home = max(range(len(loads)), key=lambda i: state["hit_len"][i])
    return loads, loads[home] <= 2 * fmean(loads) and state["hit_len"][home] > 0.5 * expected


# One state, fifteen policies

#: The second turn of a session with 3,500 tokens of history: i0 is warm and busy, i2 cold and idle.
STATE: State = {
    "hit_len": [3072, 1024, 0],
    "host_hit_len": [0, 0, 0],
    "disk_hit_len": [0, 0, 0],
    "store_hit_len": [0, 0, 0],
    "requests": [6, 2, 0],
    "running": [5, 2, 0],
    "waiting": [1, 0, 0],
    "unprefilled": [2000, 500, 0],
    "unprefilled_cost": [2000, 500, 0],
    "inflight_tokens": [16400, 5300, 0],
    "kv_usage": [0.62, 0.35, 0.05],
    "decode_blocks": [900, 300, 0],
    "role": ["both", "both", "both"],
    "pool": ["", "", ""],
    "prefill_rate": [10000, 10000, 10000],
    "fetch_rate": [10000, 10000, 10000],
}
LENGTH = 4096
REQUEST = InferenceRequest(turn=1, prompt_len=LENGTH, est_hit=3500)


def test_formulas_give_the_values_of_the_peers() -> None:
    assert lmetric(STATE, LENGTH) == [21168, 10716, 4096]
    assert vllm_default(STATE) == [9, 2, 0]
    assert dynamo(STATE, LENGTH) == [1089, 523.25, 256]
    assert least_load(STATE) == pytest.approx([1.2447, 0.3308, 0.0079], abs=5e-5)
    assert ramjet(STATE) == pytest.approx([-18.977, -6.244, 0], abs=5e-4)
    assert llmd(STATE, LENGTH) == pytest.approx([3.01, 4.05, 3.90])
    assert bailian_sampled(STATE, 0.7, 0.15, 0.15) == pytest.approx([0.700, 0.435, 0.300], abs=1e-3)
    assert bailian_sampled(STATE, 0.33, 0.33, 0.33) == pytest.approx([0.330, 0.553, 0.660], abs=1e-3)
    assert sglang(STATE, LENGTH, 64, 1.5, 0.3) == {0}
    assert sglang(STATE, LENGTH, 32, 1.1, 0.5) == {0}
    assert aibrix(STATE) == {1}
    assert kvaware(STATE, LENGTH) == {0}
    assert smetric_own_tokens(STATE, LENGTH, LENGTH) == ([3024, 3572, 4096], True)
    assert smetric_own_tokens(STATE, LENGTH, 3500)[1]


@pytest.mark.parametrize(
    ("name", "settings", "pick", "rule"),
    [
        ("smetric", {}, 2, "balance"),
        ("smetric", {"LOAD": "unprefilled"}, 2, "balance"),
        ("smetric_basic", {}, 0, "stick"),
        ("bailian", {}, 0, "route_1"),
        ("lmetric", {}, 2, "route_1"),
        ("lmetric", {"QUEUED": True}, 2, "route_1"),
        ("lmetric", {"OWN": 0}, 2, "route_1"),
        ("lmetric_guarded", {}, 2, "product"),
        ("dynamo", {}, 2, "route_1"),
        ("dynamo_new_tokens", {}, 0, "route_1"),
        ("llmd_weighted", {}, 1, "route_1"),
        ("load_only", {}, 2, "route_1"),
        ("vllm_default", {}, 2, "route_1"),
        ("least_load", {}, 2, "route_1"),
        ("sglang_cache_aware", {}, 0, "best_prefix"),
        ("sglang_cache_aware", {"CACHE_THRESHOLD": 0.5, "ABS_THRESHOLD": 32, "REL_THRESHOLD": 1.1}, 0, "best_prefix"),
        ("aibrix_prefix_sigma", {}, 1, "best_match"),
        ("production_stack_kvaware", {}, 0, "covered_enough"),
        ("smetric_slo", {}, 0, "stick"),
        ("least_delay", {}, 0, "route_1"),
        ("tenants", {}, 2, "balance"),
    ],
)
def test_policy_picks_its_instance_on_that_state(name: str, settings: dict[str, Any], pick: int, rule: str) -> None:
    policy = shipped(name, **settings)
    for seed in range(20):
        decision = decide(policy, STATE, REQUEST, seed)
        assert (decision.index, decision.rule) == (pick, rule)


def test_smetric_finds_the_warm_instance_overloaded_by_requests_and_by_tokens() -> None:
    for settings in ({}, {"LOAD": "unprefilled"}):
        assert decide(shipped("smetric", **settings), STATE, REQUEST).failed_guard == "not_overloaded"


def test_bailian_has_score_runner_up_and_margin() -> None:
    decision = decide(shipped("bailian"), STATE, REQUEST)
    assert decision.score == pytest.approx([0.475, 0.625, 0.70])
    assert decision.runner_up == "i1"
    assert decision.margin == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, (0.700, 0.435, 0.300)), ({"ALPHA": 0.33, "BETA": 0.33, "GAMMA": 0.33}, (0.330, 0.553, 0.660))],
)
def test_bailian_sampled_draws_in_proportion_to_the_peers_values(
    settings: dict[str, float], expected: tuple[float, ...]
) -> None:
    policy = shipped("bailian_sampled", **settings)
    rng = random.Random(11)
    wins = [0, 0, 0]
    for _ in range(4000):
        wins[decide(policy, STATE, REQUEST, rng.getrandbits(63)).index] += 1
    for won, chance in zip(wins, expected, strict=True):
        share = chance / sum(expected)
        assert abs(won - 4000 * share) < 4 * math.sqrt(4000 * share * (1 - share))


# Random states


def random_state(rng: random.Random) -> tuple[State, InferenceRequest]:
    """Loads close together or far apart; hits on no, some or all instances."""
    size = rng.randint(1, 7)
    length = rng.choice([1, 100, 4096])
    most = rng.choice([1, 4, 12, 200])
    state: dict[str, list[Any]] = {
        "hit_len": [rng.choice([0, length, rng.randint(0, length)]) for _ in range(size)],
        "requests": [rng.randint(0, most) for _ in range(size)],
        "running": [rng.randint(0, most) for _ in range(size)],
        "waiting": [rng.randint(0, most) for _ in range(size)],
        "unprefilled": [rng.choice([0, rng.randint(0, 20_000)]) for _ in range(size)],
        "inflight_tokens": [rng.randint(0, 50_000) for _ in range(size)],
        "decode_blocks": [rng.randint(0, 900) for _ in range(size)],
        "kv_usage": [rng.choice([0.0, 0.5, 0.9]) for _ in range(size)],
        "role": ["both"] * size,
    }
    for tier in ("host_hit_len", "disk_hit_len", "store_hit_len"):
        state[tier] = [0] * size
    return state, InferenceRequest(turn=1, prompt_len=length, est_hit=length)


def lowest(values: list[float]) -> set[int]:
    """Those as low as the lowest, to the last digits."""
    least = min(values)
    return {i for i, value in enumerate(values) if value <= least + 1e-9 * max(1.0, abs(least))}


#: The instances that a peer's formula allows, for each policy that follows it to the letter.
ORACLES: dict[str, tuple[dict[str, Any], Callable[[State, int], set[int]]]] = {
    "bailian": ({}, lambda state, length: lowest(bailian(state, length))),
    "lmetric": ({"QUEUED": True}, lambda state, length: lowest(lmetric(state, length))),
    "lmetric, as printed": (
        {"OWN": 0},
        lambda state, length: lowest(lmetric(state, length, own=0, queued=False)),
    ),
    "lmetric_guarded": ({}, lambda state, length: lowest(lmetric(state, length))),
    "vllm_default": ({}, lambda state, _: lowest(vllm_default(state))),
    "dynamo": ({}, lambda state, length: lowest(dynamo(state, length))),
    "dynamo_new_tokens": ({}, lambda state, length: lowest([length - hit for hit in state["hit_len"]])),
    "least_load": ({}, lambda state, _: lowest(least_load(state))),
    "load_only": ({}, lambda state, _: lowest(state["requests"])),
    "llmd_weighted": ({"STICKY": 2}, lambda state, length: lowest([-score for score in llmd(state, length)])),
    "sglang_cache_aware": ({}, lambda state, length: sglang(state, length, 64, 1.5, 0.3)),
    "aibrix_prefix_sigma": ({}, lambda state, _: aibrix(state)),
}


@pytest.mark.parametrize("name", ORACLES)
def test_policy_is_its_formula_on_random_states(name: str) -> None:
    settings, oracle = ORACLES[name]
    policy = shipped(name.partition(",")[0], **settings)
    rng = random.Random(name)
    for _ in range(800):
        state, request = random_state(rng)
        decision = decide(policy, state, request, rng.getrandbits(63))
        assert decision.index in oracle(state, request.prompt_len), state


def test_kvaware_takes_an_instance_past_its_gate_on_random_states() -> None:
    policy = shipped("production_stack_kvaware")
    rng = random.Random(3)
    gated = 0
    for _ in range(800):
        state, request = random_state(rng)
        covered = kvaware(state, request.prompt_len)
        decision = decide(policy, state, request, rng.getrandbits(63))
        assert (decision.rule == "covered_enough") == bool(covered)
        gated += bool(covered)
        assert not covered or decision.index in covered
    assert 100 < gated < 800


# Policies in seconds, and LMetric's guard


def random_costs(rng: random.Random) -> tuple[State, InferenceRequest]:
    """A state with rates, costs and the hits of a shared store."""
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
    """The instances within 0.6 s of the least added delay."""
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


def random_crowd(rng: random.Random) -> tuple[State, InferenceRequest]:
    """A random state, and a request of a class of any size."""
    state, request = random_state(rng)
    request.class_share = rng.choice([0.0, 0.2, 0.5, 0.9, 1.0])
    request.class_streak = float(rng.randint(0, 8))
    return state, request


@pytest.mark.parametrize(
    ("name", "make", "oracle"),
    [("smetric_slo", random_costs, smetric_slo), ("lmetric_guarded", random_crowd, guarded)],
)
def test_policy_of_two_rules_is_its_formula(
    name: str,
    make: Callable[[random.Random], tuple[State, InferenceRequest]],
    oracle: Callable[[State, InferenceRequest], tuple[str, set[int]]],
) -> None:
    policy, rng = shipped(name), random.Random(21)
    seen: Counter[str] = Counter()
    for _ in range(1500):
        state, request = make(rng)
        rule, allowed = oracle(state, request)
        decision = decide(policy, state, request, rng.getrandbits(63))
        assert (decision.rule, decision.index in allowed) == (rule, True), state
        seen[rule] += 1
    assert len(seen) == 2
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
