"""Random policies: compiled, lazy, restarted and permuted evaluation agree with the plain reference."""

from __future__ import annotations

import math
import random
import types
from collections.abc import Sequence
from typing import Any

import pytest

from smetric.policy import Decision, Need, PolicyError, Snapshot, load
from smetric.policy.parser import parse
from tests.policy.author import VOCABULARY, WIDE, Author
from tests.policy.reference import Reference

pytestmark = pytest.mark.slow

#: Numbers at the ends of what the language knows, and some that rounding and overflow are sensitive to.
EXTREMES = [0.0, 5e-324, 1e-15, 1e-9, 1 / 3, 1.0, 7.0, 1e9, 1e15]


def random_snapshot(rng: random.Random, numbers: Sequence[float] = (0, 1, 2, 3, 4, 1e-12)) -> Snapshot:
    ids = [f"gpu-{i}" for i in range(rng.randint(1, 5))]
    rng.shuffle(ids)
    columns: dict[str, list[Any]] = {}
    known: dict[str, list[bool] | None] = {}
    for name in ("near", "far", "hits", "deep"):
        cells = [None if rng.random() < 0.2 else rng.choice(numbers) for _ in ids]
        columns[name], known[name] = VOCABULARY.features[name].fill(cells)
    columns["well"] = [rng.random() < 0.5 for _ in ids]
    columns["side"] = [rng.choice(["x", "y", ""]) for _ in ids]
    stamps = {"near": [rng.choice([-1.0, -9.0]) for _ in ids]}
    return Snapshot(ids, columns, known, stamps)


def random_request(rng: random.Random, turns: Sequence[int | None]) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        turn=rng.choice(turns), size=rng.randint(1, 5), held=rng.randint(0, 3), key=rng.choice(["", "k"])
    )


def permuted(snapshot: Snapshot, order: list[int]) -> Snapshot:
    known = {name: None if cells is None else [cells[i] for i in order] for name, cells in snapshot.known.items()}
    return Snapshot(
        [snapshot.ids[i] for i in order],
        {name: [column[i] for i in order] for name, column in snapshot.columns.items()},
        known,
        {name: [stamps[i] for i in order] for name, stamps in snapshot.stamps.items()},
    )


def without(snapshot: Snapshot, features: set[str]) -> Snapshot:
    columns = {name: column for name, column in snapshot.columns.items() if name not in features}
    return Snapshot(snapshot.ids, columns, snapshot.known, snapshot.stamps)


def told(decision: Decision | Need) -> tuple[Any, ...]:
    assert isinstance(decision, Decision)
    return (str(decision.step_index), decision.instance, decision.stops, decision.cursors)


@pytest.mark.parametrize("batch", range(4))
def test_compiled_lazy_and_restarted_evaluation_agree_with_the_reference(batch: int) -> None:
    rng = random.Random(batch)
    for _ in range(24):
        source = Author(rng).policy()
        policy = load(source, VOCABULARY)
        file = parse(source)
        for _ in range(8):
            snapshot = random_snapshot(rng)
            request = random_request(rng, [None, 0, 1, 3])
            cursors = {key: rng.choice(snapshot.ids) for key in policy.plan.keys}
            seed = rng.getrandbits(63)
            eager = told(policy.decide(snapshot, request, cursors, seed))
            expected = Reference(policy, file, VOCABULARY, snapshot, request, cursors, seed).decide()
            assert eager[:2] == expected, source

            absent = {"hits", "deep"}
            always = set(policy.lookups_always)
            while isinstance(lazy := policy.decide(without(snapshot, absent), request, cursors, seed), Need):
                assert lazy.features & absent, source
                assert lazy.features <= policy.reads
                absent -= lazy.features
            assert told(lazy) == eager, source
            assert not always & absent, source


def test_what_parameters_settle_is_what_it_would_have_come_to() -> None:
    rng = random.Random(17)
    for _ in range(30):
        source = Author(rng, settled=True).policy()
        policy, file = load(source, VOCABULARY), parse(source)
        for _ in range(4):
            # Not unknown: a guard that a parameter settles does not fail for what it no longer reads.
            snapshot, request, seed = random_snapshot(rng), random_request(rng, [0, 1, 3]), rng.getrandbits(63)
            cursors = {key: rng.choice(snapshot.ids) for key in policy.plan.keys}
            decision = policy.decide(snapshot, request, cursors, seed)
            assert told(decision)[:2] == Reference(policy, file, VOCABULARY, snapshot, request, cursors, seed).decide()


@pytest.mark.parametrize("batch", range(4))
def test_what_is_accepted_decides_on_whatever_numbers_there_are(batch: int) -> None:
    rng, accepted = random.Random(1000 + batch), 0
    for _ in range(24):
        source = Author(rng, ("0", "1e15", "-1e15", "1e-15", "-1", "1e15 * 1e15", "1e-15 * 1e-15")).policy()
        try:
            policy = load(source, WIDE)
        except PolicyError:
            continue
        accepted += 1
        for _ in range(6):
            snapshot = random_snapshot(rng, EXTREMES)
            request = types.SimpleNamespace(
                turn=rng.choice([None, *EXTREMES]), size=rng.choice([1, 1e15]), held=rng.choice(EXTREMES), key="k"
            )
            cursors, seed = {key: rng.choice(snapshot.ids) for key in policy.plan.keys}, rng.getrandbits(63)
            decision = policy.decide(snapshot, request, cursors, seed)
            assert isinstance(decision, Decision)
            assert decision.score is None or all(map(math.isfinite, decision.score)), source
            expected = Reference(policy, parse(source), WIDE, snapshot, request, cursors, seed).decide()
            assert told(decision)[:2] == expected, source
    assert accepted > 12


def test_the_order_of_the_candidates_plays_no_part() -> None:
    rng = random.Random(99)
    for _ in range(30):
        policy = load(Author(rng).policy(), VOCABULARY)
        for _ in range(6):
            snapshot = random_snapshot(rng)
            request = random_request(rng, [0, 1, 3])
            cursors = {key: rng.choice(snapshot.ids) for key in policy.plan.keys}
            seed = rng.getrandbits(63)
            order = rng.sample(range(len(snapshot.ids)), k=len(snapshot.ids))
            first = policy.decide(snapshot, request, cursors, seed)
            second = policy.decide(permuted(snapshot, order), request, cursors, seed)
            assert told(first)[:2] == told(second)[:2]
