"""Shipped policies: own tests, Figure 13 as an oracle, and look-ups; see also `test_peer_policies.py`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from smetric.app import Application
from smetric.config import Settings
from smetric.config.settings import InstanceSettings
from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.policy import Decision, Need, Policy, Snapshot, load
from smetric.policy.testing import suite_of
from smetric.request.prompt import Prompt
from smetric.request.request import InferenceRequest
from smetric.routing.policy_files import further_tests, libraries_beside
from smetric.routing.router import Router
from smetric.tools.prove import counterexample, promised
from tests.fakes import routes_by

FILES = sorted(shipped_policies().values())


def shipped(name: str, **settings: Any) -> Policy:
    path = FILES[0].with_name(f"{name}.policy")
    return load(path.read_text(), VOCABULARY, path=str(path), settings=settings, libraries=libraries_beside(path))


POLICIES = {path.stem: shipped(path.stem) for path in FILES}


def decided(decision: Decision | Need) -> Decision:
    assert isinstance(decision, Decision)
    return decision


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_policy_passes_its_own_tests_with_full_coverage(path: Path) -> None:
    beside = further_tests(path)
    suite = suite_of(path.read_text(), VOCABULARY, path=str(path), libraries=libraries_beside(path), beside=beside)
    results = suite.run()
    assert [(result.sentence, result.failure) for result in results if not result.passed] == []
    assert suite.coverage(results).missing == []


@pytest.mark.parametrize("name", POLICIES)
def test_policy_has_its_declared_properties(name: str) -> None:
    policy = POLICIES[name]
    broken = [counterexample(policy, VOCABULARY, each, situations=300) for each in promised(policy, VOCABULARY)]
    assert [found.as_test() for found in broken if found is not None] == []


@pytest.mark.parametrize("name", POLICIES)
def test_policy_is_named_like_its_file_documented_and_tested(name: str) -> None:
    policy = POLICIES[name]
    assert policy.name == name
    assert "Source:" in policy.doc
    assert policy.source.count('\ntest "') >= 3
    for line, before in zip(policy.source.splitlines()[1:], policy.source.splitlines(), strict=False):
        if line.startswith("param"):
            assert before.startswith("##"), f"{line} says neither what it is nor where its default comes from"


def test_policies_of_this_version_are_shipped() -> None:
    assert set(POLICIES) == {
        *("admission", "aibrix_prefix_sigma", "bailian", "bailian_sampled", "bounded_hash", "canary", "decode"),
        *("dualmap", "dynamo", "dynamo_new_tokens", "least_delay", "least_load", "llmd_weighted", "lmetric"),
        *("lmetric_guarded", "load_only", "prefix_hash", "production_stack_kvaware", "round_robin", "session"),
        *("sglang_cache_aware", "smetric", "smetric_basic", "smetric_slo", "tenants", "two_choices", "vllm_default"),
    }


# Figure 13


def figure_13(
    ids: list[str],
    c: list[float],
    l: list[float],  # noqa: E741 - the paper's letter
    turn: int | None,
    est_hit: float | None,
    last: str,
    *,
    overload: float = 2.0,
    hit_ratio: float = 0.5,
) -> tuple[str, set[str]]:
    """Figure 13 in plain Python: the rule, and the instances it allows where the paper leaves a tie open."""
    if turn is not None and turn != 0:
        # Line 5: the highest KV$ hit; ties to the least loaded, then open.
        hottest = [i for i in range(len(ids)) if c[i] == max(c)]
        lightest = [i for i in hottest if l[i] == min(l[j] for j in hottest)]
        # Lines 17-24; all of the tied have the same hit and the same load.
        s = lightest[0]
        if l[s] <= overload * (sum(l) / len(l)) and est_hit is not None and c[s] > hit_ratio * est_hit:
            return "stick", {ids[i] for i in lightest}
    least = sorted(ids[i] for i in range(len(ids)) if l[i] == min(l))
    return "balance", {next((id for id in least if id > last), least[0])}


def random_cells(rng: random.Random, size: int, highest: int) -> list[float | None]:
    unknown = rng.choice([0.0, 0.1, 0.5, 1.0])
    return [None if rng.random() < unknown else rng.randint(0, highest) for _ in range(size)]


def test_smetric_is_figure_13_on_random_snapshots() -> None:
    rng = random.Random(13)
    seen = {"stick": 0, "balance": 0}
    variants: list[tuple[dict[str, Any], str]] = [
        ({}, "requests"),
        ({"OVERLOAD": 1.2, "HIT_RATIO": 0.0}, "requests"),
        ({"LOAD": "unprefilled"}, "unprefilled"),
    ]
    loaded = [(shipped("smetric", **settings), settings, load_feature) for settings, load_feature in variants]
    for _ in range(6000):
        policy, settings, load_feature = rng.choice(loaded)
        ids = [f"gpu-{i}" for i in rng.sample(range(40), k=rng.randint(1, 9))]
        columns: dict[str, list[Any]] = {}
        known: dict[str, list[bool] | None] = {}
        for name, highest in (
            ("hit_len", rng.choice([1, 1000])),
            ("requests", rng.choice([2, 30])),
            ("unprefilled", 5),
        ):
            feature = VOCABULARY.features[name]
            columns[name], known[name] = feature.fill(random_cells(rng, len(ids), highest))
        request = InferenceRequest(
            turn=rng.choice([None, 0, 1, 7]), est_hit=rng.choice([None, 0, 1, 500, 1500]), prompt_len=1000
        )
        cursors: dict[str, str] = rng.choice([{}, {"balance": rng.choice(ids)}, {"balance": "gone"}])
        decision = decided(policy.decide(Snapshot(ids, columns, known), request, cursors, rng.getrandbits(63)))
        rule, allowed = figure_13(
            ids,
            columns["hit_len"],
            columns[load_feature],
            request.turn,
            request.est_hit,
            cursors.get("balance", ""),
            overload=float(settings.get("OVERLOAD", 2.0)),
            hit_ratio=float(settings.get("HIT_RATIO", 0.5)),
        )
        assert decision.rule == rule
        assert decision.instance in allowed
        seen[rule] += 1
    assert min(seen.values()) > 500


def test_smetric_draws_evenly_among_the_warmest() -> None:
    ids = ["a", "b", "c", "d"]
    snapshot = Snapshot(ids, {"hit_len": [500, 500, 500, 500], "requests": [1, 1, 1, 5]})
    request = InferenceRequest(turn=1, est_hit=600, prompt_len=1000)
    rng = random.Random(5)
    wins = dict.fromkeys(ids, 0)
    for _ in range(3000):
        decision = decided(POLICIES["smetric"].decide(snapshot, request, {}, rng.getrandbits(63)))
        wins[decision.instance or ""] += 1
    assert wins["d"] == 0
    assert all(850 < wins[id] < 1150 for id in "abc")


def test_smetric_rotates_first_turns_between_later_ones() -> None:
    policy = POLICIES["smetric"]
    snapshot = Snapshot(["a", "b", "c"], {"hit_len": [500, 0, 0], "requests": [1, 1, 1]})
    cursors: dict[str, str] = {}
    chosen = []
    for at in range(6):
        first = decided(policy.decide(snapshot, InferenceRequest(turn=0, prompt_len=900), cursors, at))
        cursors.update(first.cursors)
        chosen.append(first.instance)
        later = decided(policy.decide(snapshot, InferenceRequest(turn=1, est_hit=600, prompt_len=900), cursors, at))
        assert (later.rule, later.instance, later.cursors) == ("stick", "a", {})
    assert chosen == ["a", "b", "c", "a", "b", "c"]


# Look-ups


#: Look-ups of the policies that have any besides `hit_len`, and the policies that look up in every decision.
MORE_LOOKUPS = {"dynamo": {"host_hit_len", "disk_hit_len"}, "least_delay": {"store_hit_len"}}
ALWAYS = {
    *("bailian", "bailian_sampled", "dynamo", "dynamo_new_tokens", "least_delay", "lmetric", "lmetric_guarded"),
    *("production_stack_kvaware", "smetric_slo"),
}
WITHOUT_LOOKUPS = {
    *("admission", "bounded_hash", "canary", "decode", "least_load", "load_only", "prefix_hash", "round_robin"),
    *("session", "two_choices", "vllm_default"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_policy_has_these_lookups(name: str) -> None:
    lookups = {"hit_len", *MORE_LOOKUPS.get(name, ())} if name not in WITHOUT_LOOKUPS else set()
    assert POLICIES[name].lookups.keys() == lookups
    assert POLICIES[name].lookups_always == (lookups if name in ALWAYS else set())


@pytest.mark.parametrize("name", ["smetric", "smetric_basic"])
def test_policy_looks_nothing_up_for_a_first_turn(name: str) -> None:
    snapshot = Snapshot(["a", "b"], {"requests": [2, 1]})
    decision = decided(POLICIES[name].decide(snapshot, InferenceRequest(turn=0), {}, 1))
    assert (decision.rule, decision.instance) == ("balance", "b")
    needs = POLICIES[name].decide(snapshot, InferenceRequest(turn=1), {}, 1)
    assert isinstance(needs, Need)
    assert needs.features == {"hit_len"}


# In a router


@pytest.fixture(scope="module")
def plain() -> Application:
    instances = tuple(InstanceSettings(url=f"http://127.0.0.1:{port}", id=f"i{port}") for port in (1, 2, 3))
    return Application(Settings(instances=instances), {})


@pytest.mark.parametrize("name", POLICIES)
async def test_policy_decides_in_a_router_without_sources(name: str, plain: Application) -> None:
    routes = routes_by(shipped_policies()[name])
    router = Router(plain.fleet, routes, plain.sources.ranked)
    text = Prompt([b"x" * 4000], 4.0)
    for turn in (0, 1, 2):
        request = InferenceRequest(turn=turn, prompt_len=1000, est_hit=900 * turn, session="s", id="r", prompt=text)
        routing = await router.route(request)
        assert (routing.outcome, routing.error) == ("routed", None)
        assert routing.decision is not None
        assert set(routing.decision.snapshot.columns) <= POLICIES[name].reads
