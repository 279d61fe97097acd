"""Built-in functions: the table, reductions, scales, draws, keys and picks."""

from __future__ import annotations

import math
import random
import re
import statistics
import types
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric.features import VOCABULARY
from smetric.policy import Decision, Snapshot, load
from smetric.policy.builtin import (
    BUILTINS,
    Builtin,
    Family,
    bucket,
    chance,
    draw,
    drawn,
    drawn_of,
    highest,
    hrw,
    lowest,
    marked,
    mix,
    quantile,
    rotated,
    sample,
    share,
    softmax,
    softmin,
    std,
    stream_of,
)
from smetric.policy.parser import parse
from smetric.policy.types import Interval
from smetric.policy.vocabulary import mean_of, pseudonym
from tests.policy.reference import Reference

NAMES = ["a", "b", "c", "d"]
SEEDS = st.integers(0, 1 << 62)
IDS = st.lists(st.text("abcxyz-019", min_size=1, max_size=4), min_size=1, max_size=8, unique=True)
CELLS = st.lists(st.floats(-1e15, 1e15), min_size=1, max_size=9)
#: The 99.99th percentile of chi-square by degrees of freedom.
CHI_SQUARE = {2: 18.4, 3: 21.1, 5: 25.7}


def chi_square(counts: list[int], weights: list[float]) -> float:
    """Chi-square of *counts* against *weights*; an outcome of weight 0 must not occur."""
    assert all(count == 0 for count, weight in zip(counts, weights, strict=True) if weight == 0)
    expected = [sum(counts) * weight / sum(weights) for weight in weights]
    return sum((count - each) ** 2 / each for count, each in zip(counts, expected, strict=True) if each)


# ── the table ────────────────────────────────────────────────────────────────

_WRITTEN_OUT = {Family.PICK, Family.ROTATION, Family.RATIO, Family.FIRST, Family.TOP, Family.FRESH}


@pytest.mark.parametrize("row", BUILTINS.values(), ids=BUILTINS.keys())
def test_row_agrees_with_its_signature_and_family(row: Builtin) -> None:
    assert re.fullmatch(r"[a-z_]+\(.*\)", row.signature)
    assert row.doc.endswith(".")
    assert set(row.required) <= set(row.named)
    assert (row.function is None) == (row.family in _WRITTEN_OUT or row.name in {"least", "greatest", "clamp"})
    assert bool(row.direction) == (row.family in {Family.PICK, Family.ROTATION, Family.LOTTERY})


def test_signature_bounds_the_positional_arguments() -> None:
    found = {
        name: BUILTINS[name].positional for name in ("mean", "quantile", "count", "least", "ratio", "argmin", "top")
    }
    assert found == {
        "mean": (1, 1),
        "quantile": (2, 2),
        "count": (0, 1),
        "least": (2, None),
        "ratio": (2, 2),
        "argmin": (1, 1),
        "top": (2, 2),
    }


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("greatest", [(1, 4), (-2, 3)], (1, 4)),
        ("least", [(1, 4), (-2, 3)], (-2, 3)),
        ("norm", [(1, 4)], (0, 1)),
        ("share", [(1, 4)], (0, 1)),
        ("mean", [(-2, 3)], (-2, 3)),
        ("quantile", [(-2, 3)], (-2, 3)),
        ("std", [(-2, 3)], (0, 2.5)),
    ],
)
def test_row_bounds_its_result(name: str, arguments: list[tuple[float, float]], result: tuple[float, float]) -> None:
    assert BUILTINS[name].bounds([Interval(*each) for each in arguments]) == Interval(*result)


#: A policy for each built-in, whose decision depends on its value.
_BODIES = {
    "mean": "route argmin(abs(requests - mean(requests where healthy, default: 2)))",
    "min": "route argmin(abs(requests - min(running where healthy, default: 2)))",
    "max": "route argmin(abs(requests - max(running where healthy, default: 2)))",
    "quantile": "route argmin(abs(requests - quantile(running where healthy, 0.75, default: 2)))",
    "sum": "route argmin(abs(requests - sum(running where healthy)))",
    "std": "route argmin(abs(requests - std(running where healthy)))",
    "any": "route argmin(requests) when any(running > 3 where healthy)\nroute argmax(requests)",
    "all": "route argmin(requests) when all(running > 3 where healthy)\nroute argmax(requests)",
    "count": "route argmin(abs(requests - count(healthy) * 1 request))",
    "norm": "keep running > 1\nroute argmin(norm(requests) - norm(running))",
    "share": "keep running > 1\nroute argmin(share(requests) - 2 * share(running))",
    "rank": "keep running > 1\nroute argmin(rank(requests) - 2 * rank(running))",
    "least": "route argmax(least(requests, running, 3))",
    "greatest": "route argmin(greatest(requests, running, 2))",
    "clamp": "route argmax(clamp(requests, 2, running))",
    "abs": "route argmin(abs(requests - 3))",
    "ratio": "route argmin(ratio(requests, running, default: 9))",
    "argmin": "route argmin(requests, then: running)",
    "argmax": "route argmax(requests where healthy, then: running)\nroute argmin(0)",
    "rr_argmin": "route rr_argmin(requests, then: running, within: 2)",
    "rr_argmax": "route rr_argmax(requests where healthy, within: 1 request)\nroute rr_argmin(0)",
    "softmin": "route softmin(requests, temperature: 2)",
    "softmax": "keep running > 1\nroute softmax(requests where healthy, temperature: 1)\nroute sample(1)",
    "sample": "route sample(requests where running < 4)\nroute sample(healthy)",
    "first": "route first(argmin(requests where healthy), argmax(requests))",
    "draw": "keep running > 1\nkeep draw(2)\nroute argmin(requests)",
    "top": "keep running > 1\nkeep top(requests, 2, then: running)\nroute argmin(kv_usage)",
    "chance": "route argmin(requests) when chance(0.5)\nroute argmax(requests)",
    "hrw": "route argmax(hrw(req.session))",
    "bucket": "route argmin(requests) when bucket(req.session) < 0.5\nroute argmax(requests)",
    "known": "route argmin(requests where known(requests))\nroute argmin(0)",
    "age": "route argmin(age(requests))",
    "fresh": "route argmax(requests where fresh(requests, 4s))\nroute argmax(0)",
}


@st.composite
def _situations(draw: st.DrawFn) -> tuple[Snapshot, Any, int]:
    ids = draw(st.lists(st.sampled_from(["a", "b", "c", "d", "e"]), min_size=1, max_size=5, unique=True))
    size = len(ids)

    def column(cell: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(cell, min_size=size, max_size=size))

    cells = {"requests": column(st.none() | st.integers(0, 5)), "running": column(st.integers(0, 5))}
    filled = {name: VOCABULARY.features[name].fill(values) for name, values in cells.items()}
    columns = {name: values for name, (values, _) in filled.items()}
    columns |= {"healthy": column(st.booleans()), "kv_usage": column(st.sampled_from([0.0, 0.5, 1.0]))}
    stamps = {"requests": column(st.sampled_from([-1.0, -3.0, -9.0]))}
    fields = {name: field.default for name, field in VOCABULARY.request.items()}
    request = types.SimpleNamespace(**{**fields, "session": draw(st.sampled_from(["", "one", "two"]))})
    return Snapshot(ids, columns, {name: known for name, (_, known) in filled.items()}, stamps), request, draw(SEEDS)


@pytest.mark.parametrize("name", BUILTINS)
def test_builtin_decides_like_the_reference(name: str) -> None:
    source = f"policy p\n{_BODIES[name]}\n"
    policy, file = load(source, VOCABULARY), parse(source)

    @settings(max_examples=15)
    @given(_situations())
    def agrees(situation: tuple[Snapshot, Any, int]) -> None:
        snapshot, request, seed = situation
        cursors = dict.fromkeys(policy.plan.keys, snapshot.ids[0])
        decision = policy.decide(snapshot, request, cursors, seed)
        assert isinstance(decision, Decision)
        expected = Reference(policy, file, VOCABULARY, snapshot, request, cursors, seed).decide()
        assert (str(decision.step_index), decision.instance) == expected

    agrees()


# ── reductions, scales, provenance ───────────────────────────────────────────


@pytest.mark.parametrize(("part", "expected"), [(0, 1), (0.25, 2), (0.5, 3), (0.9, 7), (1, 9)])
def test_quantile_is_linear_between_two_values(part: float, expected: float) -> None:
    assert quantile([4, 1, 9, 2, 3], part) == pytest.approx(expected)
    assert quantile([7], part) == 7


@given(CELLS, st.floats(0, 1), st.floats(0, 1))
def test_quantile_lies_within_the_values_and_grows_with_its_share(cells: list[float], one: float, two: float) -> None:
    low, high = sorted([one, two])
    assert min(cells) <= quantile(cells, low) <= max(cells)
    assert quantile(cells, low) <= quantile(cells, high) + abs(quantile(cells, high)) * 1e-12
    assert (quantile(cells, 0), quantile(cells, 1)) == (min(cells), max(cells))


@given(CELLS)
def test_std_is_that_of_the_population(cells: list[float]) -> None:
    assert std(cells) == pytest.approx(statistics.pstdev(cells), rel=1e-6, abs=1)
    assert std(cells) <= (max(cells) - min(cells)) / 2


def test_std_does_not_overflow_and_is_0_without_candidates() -> None:
    assert std([-1e300, 1e300]) == pytest.approx(1e300)
    assert std([]) == 0


@given(st.floats(-1e15, 1e15), st.integers(1, 9), st.sampled_from([0, 1, -1]))
def test_mean_lies_within_the_values(cell: float, size: int, step: int) -> None:
    cells = [cell] * size + [math.nextafter(cell, math.inf * step)] * bool(step)
    assert min(cells) <= mean_of(cells) <= max(cells)


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=9))
def test_shares_sum_to_1(values: list[float]) -> None:
    shares = share(values, values)
    assert all(0 <= each <= 1 for each in shares)
    assert abs(sum(shares) - 1) < 1e-9


# ── draws ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [2, 3, 7, 32])
def test_mix_is_even_over_consecutive_and_random_seeds(size: int) -> None:
    rng, stream = random.Random(size), stream_of("balance")
    for seeds in (range(20_000), [rng.getrandbits(63) for _ in range(20_000)]):
        counts = Counter(mix(seed, stream) % size for seed in seeds)
        # The 99.99th percentile of chi-square with n degrees of freedom is below n + 6 √n + 14.
        assert chi_square([counts[i] for i in range(size)], [1] * size) < size + 6 * size**0.5 + 14


def test_mix_depends_on_seed_and_stream_and_fits_64_bits() -> None:
    assert mix(7, 9) == mix(7, 9)
    assert 0 <= mix((1 << 80) + 5, stream_of("x")) < 1 << 64


def test_streams_of_one_decision_are_independent() -> None:
    one, two = stream_of("home"), stream_of("home.2")
    assert 850 < sum(mix(seed, one) % 4 == mix(seed, two) % 4 for seed in range(4000)) < 1150


@given(st.integers(1, 12), st.floats(-2, 15), SEEDS)
def test_draw_takes_its_count_in_any_order(size: int, number: float, seed: int) -> None:
    names = [f"gpu-{i}" for i in range(size)]
    taken = drawn_of(range(size), number, names, seed, 9)
    assert len(set(taken)) == len(taken) == min(max(1, int(number)), size)
    turned = names[::-1]
    assert {turned[i] for i in drawn_of(range(size), number, turned, seed, 9)} == {names[i] for i in taken}
    assert draw(range(size), number, names, seed, 9) == marked(taken, size)


def test_draw_takes_every_pair_alike() -> None:
    pairs = Counter(frozenset(drawn_of(range(4), 2, NAMES, seed, 9)) for seed in range(6000))
    assert len(pairs) == 6
    assert chi_square(list(pairs.values()), [1] * 6) < CHI_SQUARE[5]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=9), st.floats(-1, 12))
def test_highest_are_certain_or_tied_for_the_last_places(values: list[int], number: float) -> None:
    those = range(len(values))
    certain, tied, places = highest(values, those, number)
    wanted = min(max(1, int(number)), len(values))
    best = sorted(values, reverse=True)[:wanted]
    assert len(certain) + places == wanted
    assert 1 <= places <= len(tied)
    assert sorted([values[i] for i in [*certain, *tied[:places]]], reverse=True) == best
    assert {values[i] for i in tied} == {best[-1]}
    negated = [-value for value in values]
    assert [sorted(part) for part in lowest(negated, those, number)[:2]] == [sorted(certain), sorted(tied)]


@pytest.mark.parametrize("part", [0.0, 0.05, 0.5, 1.0])
def test_chance_is_true_for_that_share_of_seeds(part: float) -> None:
    hits = sum(chance(part, seed, 4) for seed in range(10_000))
    assert abs(hits - 10_000 * part) <= 4 * (10_000 * part * (1 - part)) ** 0.5


# ── keys ─────────────────────────────────────────────────────────────────────


def test_hrw_spreads_keys_evenly_and_moves_only_those_of_a_removed_instance() -> None:
    def home(key: str, names: list[str]) -> str:
        weights = hrw(key, names, 0)
        return names[weights.index(max(weights))]

    homes = {key: home(key, NAMES) for key in (f"session-{i}" for i in range(4000))}
    counts = Counter(homes.values())
    assert chi_square([counts[name] for name in NAMES], [1] * 4) < CHI_SQUARE[3]
    assert all(home(key, ["a", "b", "d"]) == homes[key] for key in homes if homes[key] != "c")
    assert home("session-1", NAMES[::-1]) == homes["session-1"]


def test_bucket_is_fixed_and_even() -> None:
    places = [bucket(f"session-{i}", 0) for i in range(4000)]
    assert all(0 <= place < 1 for place in places)
    assert abs(sum(place < 0.25 for place in places) - 1000) < 4 * (4000 * 0.25 * 0.75) ** 0.5
    assert bucket("session-1", 1) == places[1] == 0.5604531134723802  # the same in every version


def test_empty_key_stands_for_the_seed() -> None:
    assert len({bucket("", seed) for seed in range(50)}) == 50
    assert hrw("", NAMES, 1) != hrw("", NAMES, 2)


@given(st.text(min_size=1), SEEDS)
def test_pseudonym_has_the_place_of_its_text(key: str, seed: int) -> None:
    assert bucket(pseudonym(key), seed) == bucket(key, seed)
    assert hrw(pseudonym(key), NAMES, seed) == hrw(key, NAMES, seed)


# ── rotations and lotteries ──────────────────────────────────────────────────


@given(IDS, SEEDS)
def test_drawn_candidate_is_tied_in_any_order(names: list[str], seed: int) -> None:
    assert drawn(names, seed, 5) in names
    assert drawn(names[::-1], seed, 5) == drawn(names, seed, 5)


@given(IDS, st.text("abcxyz-019", max_size=4))
def test_rotation_visits_each_instance_once_before_any_twice(names: list[str], last: str) -> None:
    visited = [last := rotated(names, last) for _ in names]
    assert sorted(visited) == sorted(names)


SOFT = [3.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("lottery", "values", "more", "weights"),
    [
        (sample, [1, 2, 5], (), [1, 2, 5]),
        (sample, [0, -3, 4], (), [0, 0, 1]),
        (sample, [-1, 0, 0], (), [1, 1, 1]),
        (sample, [True, False, True], (), [1, 0, 1]),
        *((softmin, SOFT, (t,), [math.exp(-(v - 1) / t) for v in SOFT]) for t in (0.5, 1.0, 4.0)),
        *((softmax, SOFT, (t,), [math.exp((v - 3) / t) for v in SOFT]) for t in (0.5, 1.0, 4.0)),
        (softmin, [1.0, 2.0, 1.0], (0,), [1, 0, 1]),  # temperature 0: one of the best
        (softmax, [1.0, 2.0, 1.0], (0,), [0, 1, 0]),
    ],
)
def test_lottery_follows_its_weights(lottery: Any, values: list[float], more: Any, weights: list[float]) -> None:
    counts = Counter(lottery(values, range(3), NAMES[:3], seed, 77, *more) for seed in range(6000))
    assert chi_square([counts[i] for i in range(3)], weights) < CHI_SQUARE[2]


@given(IDS, st.data(), SEEDS, st.just(0.0) | st.floats(0, 1e15, allow_subnormal=True))
def test_lottery_chooses_a_candidate_for_any_values_and_order(
    names: list[str], data: st.DataObject, seed: int, temperature: float
) -> None:
    size = len(names)
    values = data.draw(st.lists(st.floats(-1e300, 1e300), min_size=size, max_size=size))
    turned = names[::-1], values[::-1]
    for lottery, more in ((softmin, (temperature,)), (softmax, (temperature,)), (sample, ())):
        chosen = lottery(values, range(size), names, seed, 3, *more)
        assert 0 <= chosen < size
        assert turned[0][lottery(turned[1], range(size), turned[0], seed, 3, *more)] == names[chosen]
