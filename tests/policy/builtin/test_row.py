"""The table of built-ins agrees with itself, and each one, compiled, with the plain reference."""

from __future__ import annotations

import types
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric.features import VOCABULARY
from smetric.policy import Decision, Snapshot, load
from smetric.policy.builtin import BUILTINS, Builtin, Family
from smetric.policy.parser import parse
from smetric.policy.types import Interval
from tests.policy.reference import Reference

_WRITTEN_OUT = {Family.PICK, Family.ROTATION, Family.RATIO, Family.FIRST, Family.TOP, Family.FRESH}


@pytest.mark.parametrize("row", BUILTINS.values(), ids=BUILTINS.keys())
def test_a_row_agrees_with_itself(row: Builtin) -> None:
    assert row.signature.startswith(f"{row.name}(")
    assert row.doc.endswith(".")
    assert ("where" in row.signature) == row.where
    assert all(f"{name}:" in row.signature for name in row.named)
    assert set(row.required) <= set(row.named)
    assert row.most is None or row.least <= row.most
    assert row.of_nobody or "default" in row.named
    assert (row.function is None) == (row.family in _WRITTEN_OUT or row.name in {"least", "greatest", "clamp"})
    assert bool(row.direction) == (row.family in {Family.PICK, Family.ROTATION, Family.LOTTERY})


def test_bounds_follow_the_arguments() -> None:
    one, two = Interval(1.0, 4.0), Interval(-2.0, 3.0)
    assert BUILTINS["greatest"].bounds([one, two]) == Interval(1.0, 4.0)
    assert BUILTINS["least"].bounds([one, two]) == Interval(-2.0, 3.0)
    assert BUILTINS["norm"].bounds([one]) == Interval(0.0, 1.0)
    assert BUILTINS["mean"].bounds([two]) == two
    assert BUILTINS["std"].bounds([two]) == Interval(0.0, 2.5)
    assert BUILTINS["quantile"].bounds([two]) == two
    assert BUILTINS["share"].bounds([one]) == Interval(0.0, 1.0)


#: One policy for each built-in, whose decision depends on what it gives.
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


def test_every_built_in_is_held_against_the_reference() -> None:
    assert _BODIES.keys() == BUILTINS.keys()


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
    known = {name: known for name, (_, known) in filled.items()}
    fields = {name: field.default for name, field in VOCABULARY.request.items()}
    request = types.SimpleNamespace(**{**fields, "session": draw(st.sampled_from(["", "one", "two"]))})
    return Snapshot(ids, columns, known, stamps), request, draw(st.integers(0, 1 << 62))


@pytest.mark.parametrize(("name", "body"), _BODIES.items(), ids=_BODIES.keys())
def test_a_built_in_decides_as_the_reference_says(name: str, body: str) -> None:
    source = f"policy p\n{body}\n"
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
