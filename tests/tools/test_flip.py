"""Smallest changes of one input that flip a decision."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smetric.features import VOCABULARY
from smetric.policy import Decision, Policy, load
from smetric.policy.explain import explain, lead, summary
from smetric.policy.testing import Situation
from smetric.tools.flip import Change, smallest_changes
from tests.policy.author import VOCABULARY as WORDS
from tests.policy.author import Author

SOURCE = (Path(__file__).parents[2] / "policies" / "smetric.policy").read_text()
SMETRIC = load(SOURCE, VOCABULARY)
HOT = {"hit_len": [9000.0, 512.0, 512.0], "requests": [20.0, 4.0, 3.0]}


def decide(policy: Policy | str, cells: dict[str, list[Any]], **request: Any) -> Decision:
    loaded = load(f"policy p\n{policy}\n", VOCABULARY) if isinstance(policy, str) else policy
    names = [f"gpu-{i}" for i in range(len(next(iter(cells.values()))))]
    return Situation(names, cells, request={"prompt_len": 10_000.0, **request}).decide(loaded, VOCABULARY)


def flips(decision: Decision) -> list[str]:
    return [str(change) for change in smallest_changes(decision, VOCABULARY)]


def test_load_flips_where_it_ties_or_passes() -> None:
    cells = {"requests": [6.0, 3.0], "waiting": [0.0, 1.0]}
    assert flips(decide("route argmin(requests, then: waiting)", cells)) == [
        "3 fewer requests on gpu-0 → gpu-0",
        "3 more requests on gpu-1 → gpu-0",
    ]
    assert flips(decide("route argmax(requests, then: waiting)", cells)) == [
        "4 fewer requests on gpu-0 → gpu-1",
        "4 more requests on gpu-1 → gpu-1",
    ]


def test_guard_flips_at_its_threshold() -> None:
    decision = decide(SMETRIC, HOT, turn=3.0, est_hit=9500.0)
    assert decision.instance == "gpu-2"
    assert flips(decision)[:2] == ["1 more request on gpu-2 → gpu-1", "1 fewer request on gpu-1 → gpu-1"]
    assert "6 fewer requests on gpu-0 → gpu-0" in [str(each) for each in smallest_changes(decision, VOCABULARY, 9)]


def test_flip_is_the_decision_of_the_policy_and_one_step_back_is_not() -> None:
    decision = decide(SMETRIC, HOT, turn=3.0, est_hit=9500.0)
    found = smallest_changes(decision, VOCABULARY, most=9)
    assert found
    for change in found:
        cells = {name: list(column) for name, column in HOT.items()}
        request: dict[str, Any] = {"turn": 3.0, "est_hit": 9500.0}
        for value, becomes in ((change.after, change.becomes), (_nearer(change.before, change.after), "gpu-2")):
            if change.instance:
                cells[change.name][int(change.instance[-1])] = value
            else:
                request[change.name.removeprefix("req.")] = value
            assert decide(SMETRIC, cells, **request).instance == becomes


def _nearer(before: float, after: float) -> float:
    """One step back from *after*."""
    return after - 1 if after > before else after + 1


def test_request_field_flips() -> None:
    decision = decide(
        "route argmin(requests) when req.turn > 4\nroute argmax(requests)", {"requests": [2.0, 7.0]}, turn=2.0
    )
    assert "req.turn 5 instead of 2 → gpu-0" in flips(decision)


def test_share_changes_in_hundredths_within_its_range() -> None:
    decision = decide("route argmin(kv_usage)", {"kv_usage": [0.5, 0.25]})
    assert {said.split()[-1] for said in flips(decision)} == {"gpu-0"}
    assert flips(decision)[0].split()[0] in ("0.25", "0.26")
    assert flips(decide("keep kv_usage <= 1\nroute argmax(kv_usage)", {"kv_usage": [1.0]})) == []


def test_flip_to_a_rejection_names_the_rule() -> None:
    rules = 'reject 429 "full" when min(requests) > 5 as shed\nroute argmin(requests)'
    assert flips(decide(rules, {"requests": [5.0]})) == ["1 more request on gpu-0 → reject by shed"]


def test_mean_in_place_of_an_unknown_load_follows_a_change() -> None:
    cells = {"requests": [3.0, 5.0, 7.0, None]}
    found = [str(each) for each in smallest_changes(decide("route argmin(requests)", cells), VOCABULARY, 9)]
    assert "2 more requests on gpu-0 → gpu-1" in found  # at 5 it ties with gpu-1, and the mean is 5.7
    assert [said for said in found if said.endswith("gpu-3")] == []


@pytest.mark.parametrize("seed", range(30))
def test_random_decisions_are_explained_and_their_flips_are_true(seed: int) -> None:
    rng = random.Random(seed)
    loaded = load(Author(rng, settled=seed % 2 == 1).policy(), WORDS)
    for _ in range(4):
        situation = _situation(rng)
        decision = situation.decide(loaded, WORDS)
        assert explain(decision).startswith(
            f"random: route to {decision.instance}" if decision.instance else "random: "
        )
        assert summary(decision).startswith(f"{decision.rule}: ")
        lead(decision)
        for change in smallest_changes(decision, WORDS, 9):
            then = _changed(situation, change).decide(loaded, WORDS)
            assert change.becomes == (then.instance or f"{then.outcome.value} by {then.rule}")


@pytest.mark.parametrize(
    "rules",
    [
        "route rr_argmin(near)",
        "route argmax(far, then: near)",
        "keep near <= 7\nroute argmax(far)",
        "prefer near < 3\nroute rr_argmin(far)",
        "route argmax(far where near < 5)\nroute rr_argmin(near)",
        "route argmax(far) when max(near) < 5\nroute argmin(near, then: far)",
        'reject 429 "full" when min(near) > 4\nroute rr_argmin(near)',
    ],
)
def test_flip_by_one_load_is_found_if_there_is_one(rules: str) -> None:
    loaded, rng = load(f"policy p\n{rules}\n", WORDS), random.Random(7)
    for _ in range(25):
        ids = [f"gpu-{i}" for i in range(rng.randint(1, 4))]
        cells: dict[str, list[Any]] = {name: [float(rng.randint(0, 9)) for _ in ids] for name in ("near", "far")}
        situation = Situation(ids, cells, seed=rng.getrandbits(63))
        decision = situation.decide(loaded, WORDS)
        nearest: dict[tuple[str, str], float] = {}
        for name, column in cells.items():
            for ident, cell in zip(ids, column, strict=True):
                for value in map(float, range(10)):
                    changed = [value if each == ident else old for each, old in zip(ids, column, strict=True)]
                    then = replace(situation, cells={**cells, name: changed}).decide(loaded, WORDS)
                    if (then.instance or then.rule) != (decision.instance or decision.rule):
                        away = abs(value - cell)
                        nearest[name, ident] = min(away, nearest.get((name, ident), away))
        found = smallest_changes(decision, WORDS, 99)
        assert {(each.name, each.instance): abs(each.after - each.before) for each in found} == nearest


def test_stand_in_of_an_unknown_value_follows_a_change() -> None:
    rules = "route argmin(hit_len / prefill_rate + unprefilled / fetch_rate)"
    cells: dict[str, list[Any]] = {
        "hit_len": [0.0, 900.0],
        "unprefilled": [1000.0, 0.0],
        "prefill_rate": [100.0, 100.0],
        "fetch_rate": [None, None],
    }
    decision = decide(rules, cells)
    assert decision.instance == "gpu-1"
    assert "12 more prefill_rate on gpu-0 → gpu-0" in [str(each) for each in smallest_changes(decision, VOCABULARY, 9)]


def test_change_stays_within_the_bounds_of_the_request() -> None:
    cells = {"hit_len": [880.0, 0.0], "requests": [3.0, 0.0]}
    decision = decide(
        load(SOURCE, VOCABULARY, settings={"FLOOR": 9.0}), cells, turn=3.0, est_hit=900.0, prompt_len=1000.0
    )
    assert flips(decision) == [
        "430 fewer tokens of hit_len on gpu-0 → gpu-1",
        "880 more tokens of hit_len on gpu-1 → gpu-1",
        "req.turn 0 instead of 3 → gpu-1",
    ]
    long = decide("route argmin(requests) when req.prompt_len < 500\nroute argmax(hit_len)", cells, prompt_len=1000.0)
    assert all("prompt_len" not in said for said in flips(long))


def _situation(rng: random.Random) -> Situation:
    ids = [f"gpu-{i}" for i in range(rng.randint(1, 5))]
    cells: dict[str, list[Any]] = {
        name: [None if rng.random() < 0.2 else float(rng.randint(0, 9)) for _ in ids]
        for name in ("near", "far", "hits", "deep")
    }
    cells["well"] = [rng.random() < 0.5 for _ in ids]
    request = {"turn": rng.choice([None, 0.0, 3.0]), "size": float(rng.randint(1, 9)), "held": 1.0, "key": "k"}
    return Situation(ids, cells, request=request, seed=rng.getrandbits(63))


def _changed(situation: Situation, change: Change) -> Situation:
    if not change.instance:
        return replace(situation, request={**situation.request, change.name.removeprefix("req."): change.after})
    column = list(situation.cells[change.name])
    column[situation.ids.index(change.instance)] = change.after
    return replace(situation, cells={**situation.cells, change.name: column})


def test_change_is_of_known_inputs_that_were_read() -> None:
    assert flips(decide("route argmin(requests)", {"requests": [None, None]})) == []
    first = decide(SMETRIC, {"requests": [4.0, 2.0]}, turn=0.0)
    assert all("hit_len" not in said for said in flips(first))


@pytest.mark.parametrize(
    ("rules", "cells", "said"),
    [
        ("route argmax(hit_len, then: requests)", {"hit_len": [512.0, 0.0]}, "513 more tokens of hit_len on gpu-1"),
        ("route argmin(hit_len, then: requests)", {"hit_len": [0.0, 0.0]}, "1 more token of hit_len on"),
        ("route argmin(waiting)", {"waiting": [0.0, 3.0]}, "3 more waiting on gpu-0"),
        ("route argmin(requests)", {"requests": [0.0, 0.0]}, "1 more request on"),
    ],
)
def test_change_has_the_unit_of_its_feature(rules: str, cells: dict[str, list[Any]], said: str) -> None:
    more = {"requests": [float(i) for i in range(2)]} if "requests" not in cells else {}
    found = [str(change) for change in smallest_changes(decide(rules, {**more, **cells}), VOCABULARY, 9)]
    assert any(change.startswith(said) for change in found), found
