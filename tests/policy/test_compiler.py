"""Compiled policies: order of look-ups, guards, tracebacks, and agreement with the plain reference."""

from __future__ import annotations

import ast
import math
import random
import traceback
import types
from collections.abc import Sequence
from typing import Any

import pytest

from smetric.features import VOCABULARY
from smetric.policy import Decision, Need, PolicyError, Snapshot, load
from smetric.policy.parser import parse
from tests.policy.author import VOCABULARY as WORDS
from tests.policy.author import WIDE, Author
from tests.policy.deciding import COLUMNS, asked, decide, policy, request, snapshot
from tests.policy.reference import Reference


def test_filter_applies_only_if_its_condition_holds() -> None:
    body = "keep healthy when req.turn > 3 as careful\nroute argmax(unprefilled)"
    assert decide(body, turn=1).instance == "c"
    assert decide(body, turn=4).instance == "a"
    assert [f.applied for f in decide(body, turn=1).filters] == [False]


def test_mean_of_equal_values_removes_no_candidate() -> None:
    for alike in (0.1, 0.173, 0.175, 0.7):
        for order in ("<=", ">="):
            body = f"keep kv_usage {order} mean(kv_usage)\nroute rr_argmin(0)"
            decision = decide(body, snapshot(kv_usage=[alike] * 3))
            assert decision.survivors == ([0, 1, 2],)


def test_hold_computes_its_patience_after_its_guards() -> None:
    body = "hold for max(hit_len) / 300 tokens * 1s when req.turn == 0 as wait\nroute argmin(requests)"
    assert decide(body, held=1.9).wait_s == 2.0
    assert decide(body, held=2.1).instance == "b"
    assert asked(body, turn=0) == {"hit_len"}
    assert asked(body, turn=1) == set()


@pytest.mark.parametrize(
    ("body", "fields", "expected"),
    [
        ("route argmin(requests)", {}, False),
        ("let unused = hit_len\nroute argmin(requests)", {}, False),
        ("route argmax(hit_len)", {}, True),
        ("route argmax(hit_len) when req.turn > 3\nroute argmin(requests)", {"turn": 1}, False),
        ("route argmax(hit_len) when req.turn > 3\nroute argmin(requests)", {"turn": 4}, True),
        ("route argmin(requests) when req.turn > 3 and max(hit_len) > 0\nroute argmin(running)", {"turn": 1}, False),
        ("route argmin(requests) when req.turn > 3 or max(hit_len) > 0\nroute argmin(running)", {"turn": 4}, False),
        ("route argmin(requests) when req.turn > 3 or max(hit_len) > 0\nroute argmin(running)", {"turn": 1}, True),
        ("route argmin(requests, then: hit_len)", {}, False),
        ("route argmin(0, then: hit_len)", {}, True),
        ("route rr_argmin(max(hit_len))", {}, False),
        ("route argmin(min(unprefilled where healthy, default: max(hit_len)) + unprefilled)", {}, False),
        ("route argmin(min(unprefilled where draining, default: max(hit_len)) + unprefilled)", {}, True),
        ("param DEEP = false\nroute argmin(unprefilled + (hit_len if DEEP else 0))", {}, False),
        ("route argmin(unprefilled + (hit_len if req.turn > 3 else 0 * hit_len + 1))", {"turn": 0}, True),
        ("route argmin(unprefilled if req.turn > 3 else hit_len)", {"turn": 4}, False),
        ("let m = req.turn > 3 and hit_len > 0\nroute first(argmin(requests where m), argmin(requests))", {}, False),
        ("keep draining or healthy\nkeep known(hit_len)\nroute argmin(requests)", {}, True),
    ],
)
def test_lookup_is_asked_for_only_when_evaluation_reaches_it(body: str, fields: dict[str, Any], expected: bool) -> None:
    assert asked(body, **fields) == ({"hit_len"} if expected else set())


def test_guard_fails_on_an_unknown_request_field() -> None:
    body = """
    let expected = req.est_hit * 2
    route argmin(requests) when not (expected > 5) and req.turn == 0 as quiet
    route argmax(requests)                                           as rest
    """
    assert decide(body, est_hit=None).rule == "rest"
    assert decide(body, est_hit=0).rule == "quiet"
    assert decide(body, est_hit=None).failed_guard == "not (expected > 5)"


def test_pick_reads_the_default_of_an_unknown_request_field() -> None:
    assert decide("route argmin(unprefilled + req.est_hit)", est_hit=None).score == COLUMNS["unprefilled"]


@pytest.mark.parametrize("name", ["__debug__", "None", "lambda", "len", "seed", "__builtins__"])
def test_name_may_be_reserved_in_python(name: str) -> None:
    rules = f"let {name} = argmax(requests)\nroute {name} when requests[{name}] > 9\nroute argmin(requests) as {name}"
    assert decide(rules).instance == "b"


def test_traceback_points_into_the_policy_file() -> None:
    source = "policy p\nlet l = requests\n\nroute argmin(l\n  * kv_usage)\n"
    loaded = load(source, VOCABULARY, path="some/where.policy")
    with pytest.raises(TypeError) as error:
        loaded.decide(snapshot(kv_usage=[None, None, None]), request(), {}, 1)
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.value.__traceback__)]
    assert ("some/where.policy", 4) in places


@pytest.mark.parametrize(
    "chain",
    [
        "let x{n} = x{p} if req.turn > {n} else x{p} + 1",
        "let x{n} = (x{p} if req.turn > {n} else 1) if req.turn < {n} else (x{p} if req.turn > 2 else 2)",
        "let x{n} = max(x{p} + kv_usage)",
    ],
)
def test_chain_that_would_grow_without_bound_is_refused_or_small(chain: str) -> None:
    # Each step of a chain may double the code, or nest it.
    outcomes = []
    for length in (8, 60, 80):
        body = "let x0 = req.turn\n" + "\n".join(chain.format(n=n, p=n - 1) for n in range(1, length))
        try:
            loaded = policy(f"{body}\nroute argmin(requests) when x{length - 1} > 3\nroute argmin(requests)")
        except PolicyError as error:
            outcomes.append(error.diagnostics[0].code)
        else:
            outcomes.append(type(loaded.decide(snapshot(), request(), {}, 1)).__name__)
    assert outcomes[0] == "Decision"
    assert set(outcomes[1:]) <= {"Decision", "too-large", "too-deep"}


@pytest.mark.filterwarnings("ignore:Field 'of_a_later_python':DeprecationWarning")
def test_code_of_a_policy_survives_node_fields_of_a_later_python(monkeypatch: pytest.MonkeyPatch) -> None:
    # A function has `type_params` from 3.12 on; there a node that was made without it has no such attribute.
    name = "of_a_later_python"
    monkeypatch.setattr(ast.FunctionDef, "_fields", (*ast.FunctionDef._fields, name))
    types = {**getattr(ast.FunctionDef, "_field_types", {}), name: list[ast.expr]}  # from 3.13 on
    monkeypatch.setattr(ast.FunctionDef, "_field_types", types, raising=False)
    assert load("policy p\nroute argmin(requests)\n", VOCABULARY).name == "p"


# ── against the reference ────────────────────────────────────────────────────

#: Numbers at the ends of the language's range, and some that are sensitive to rounding and overflow.
EXTREMES = [0.0, 5e-324, 1e-15, 1e-9, 1 / 3, 1.0, 7.0, 1e9, 1e15]


def random_snapshot(rng: random.Random, numbers: Sequence[float] = (0, 1, 2, 3, 4, 1e-12)) -> Snapshot:
    ids = [f"gpu-{i}" for i in range(rng.randint(1, 5))]
    rng.shuffle(ids)
    columns: dict[str, list[Any]] = {}
    known: dict[str, list[bool] | None] = {}
    for name in ("near", "far", "hits", "deep"):
        cells = [None if rng.random() < 0.2 else rng.choice(numbers) for _ in ids]
        columns[name], known[name] = WORDS.features[name].fill(cells)
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


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(4))
def test_decision_agrees_with_the_reference_if_eager_lazy_or_restarted(batch: int) -> None:
    rng = random.Random(batch)
    for _ in range(24):
        source = Author(rng).policy()
        policy = load(source, WORDS)
        file = parse(source)
        for _ in range(8):
            snapshot = random_snapshot(rng)
            request = random_request(rng, [None, 0, 1, 3])
            cursors = {key: rng.choice(snapshot.ids) for key in policy.plan.keys}
            seed = rng.getrandbits(63)
            eager = told(policy.decide(snapshot, request, cursors, seed))
            expected = Reference(policy, file, WORDS, snapshot, request, cursors, seed).decide()
            assert eager[:2] == expected, source

            absent = {"hits", "deep"}
            always = set(policy.lookups_always)
            while isinstance(lazy := policy.decide(without(snapshot, absent), request, cursors, seed), Need):
                assert lazy.features & absent, source
                assert lazy.features <= policy.reads
                absent -= lazy.features
            assert told(lazy) == eager, source
            assert not always & absent, source


@pytest.mark.slow
def test_decision_agrees_with_the_reference_if_parameters_settle_conditions() -> None:
    rng = random.Random(17)
    for _ in range(30):
        source = Author(rng, settled=True).policy()
        policy, file = load(source, WORDS), parse(source)
        for _ in range(4):
            # Never unknown: a guard that a parameter settles reads no field, so it does not fail.
            snapshot, request, seed = random_snapshot(rng), random_request(rng, [0, 1, 3]), rng.getrandbits(63)
            cursors = {key: rng.choice(snapshot.ids) for key in policy.plan.keys}
            decision = policy.decide(snapshot, request, cursors, seed)
            assert told(decision)[:2] == Reference(policy, file, WORDS, snapshot, request, cursors, seed).decide()


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(4))
def test_decision_agrees_with_the_reference_on_extreme_numbers(batch: int) -> None:
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


@pytest.mark.slow
def test_decision_does_not_depend_on_the_order_of_candidates() -> None:
    rng = random.Random(99)
    for _ in range(30):
        policy = load(Author(rng).policy(), WORDS)
        for _ in range(6):
            snapshot = random_snapshot(rng)
            request = random_request(rng, [0, 1, 3])
            cursors = {key: rng.choice(snapshot.ids) for key in policy.plan.keys}
            seed = rng.getrandbits(63)
            order = rng.sample(range(len(snapshot.ids)), k=len(snapshot.ids))
            first = policy.decide(snapshot, request, cursors, seed)
            second = policy.decide(permuted(snapshot, order), request, cursors, seed)
            assert told(first)[:2] == told(second)[:2]
