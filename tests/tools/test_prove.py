"""Counterexamples: search, reduction, their form as tests, and declared properties."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from smetric.features import VOCABULARY
from smetric.policy import Policy, load
from smetric.policy.testing import Situation, suite_of
from smetric.tools.prove import (
    PROPERTIES,
    Counterexample,
    SmallFleets,
    UnknownProperty,
    counterexample,
    declared,
    promised,
    test_of,
)
from tests.policy.words import WORDS


def policy(rules: str, doc: str = "") -> Policy:
    return load(f"{doc}policy p\n{rules}\n", VOCABULARY)


def search(rules: str, name: str) -> Counterexample | None:
    return counterexample(policy(rules), VOCABULARY, PROPERTIES[name], situations=1200)


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("balanced", "route argmin(requests)"),
        (
            "balanced",
            "keep healthy\nlet s = argmax(hit_len)\n"
            "route s when requests[s] <= 2 * mean(requests)\nroute argmin(requests)",
        ),
        ("monotone", "route argmin(requests, then: running)"),
        ("monotone", "route softmin(requests, temperature: 2)"),
        ("symmetric", "route sample(norm(requests) + kv_usage)"),
        ("symmetric", "route rr_argmin(abs(kv_usage - mean(kv_usage)), within: 0.2)"),
        ("kept", "keep healthy\nkeep role in {\"decode\", \"both\"}\nroute argmin(requests)"),
    ],
)  # fmt: skip
def test_property_that_holds_has_no_counterexample(name: str, rules: str) -> None:
    assert search(rules, name) is None


@pytest.mark.parametrize(
    ("name", "rules", "why", "size"),
    [
        ("balanced", "route argmax(hit_len)", "c has 1 requests, the mean is 0.333", 3),
        ("balanced", "route argmax(requests)", "has 1 requests, the mean is 0.333", 3),
        ("monotone", "route argmax(requests)", "with 1 more requests", 2),
        ("monotone", "route argmin(abs(requests - 3))", "with 1 more requests", 2),
    ],
)
def test_counterexample_is_small(name: str, rules: str, why: str, size: int) -> None:
    if "hit_len" in rules:
        rules += " when requests[argmax(hit_len)] >= 0\nroute argmin(requests)"
    found = search(rules, name)
    assert found is not None
    assert why[2 if why.startswith("c ") else 0 :] in found.why
    assert len(found.situation.ids) == size


def test_counterexample_is_a_test_that_fails_until_the_policy_is_fixed() -> None:
    wrong, right = "route argmax(requests)", "route argmin(requests)"
    found = search(wrong, "balanced")
    assert found is not None
    test = found.as_test()
    assert [result.passed for result in suite_of(f"policy p\n{wrong}\n\n{test}\n", VOCABULARY).run()] == [False]
    assert [result.passed for result in suite_of(f"policy p\n{right}\n\n{test}\n", VOCABULARY).run()] == [True]


def test_counterexample_needs_one_last_winner_at_most() -> None:
    rules = "let s = rr_argmin(0)\nroute rr_argmin(0) when requests[s] == 0 as x\nroute argmin(requests)"
    assert search(rules, "balanced") is None  # it takes two rotations of which each had a winner of its own


def test_search_is_the_same_each_time() -> None:
    first, second = (search("route argmax(hit_len, then: requests)", "balanced") for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.as_test() == second.as_test()


def test_search_tries_possible_situations_only() -> None:
    never = "route argmax(requests) when req.est_hit > req.prompt_len\nroute argmin(requests)"
    assert search(never, "balanced") is None


def test_kept_holds_for_a_filter_that_a_parameter_opens() -> None:
    assert search("param OPEN = true\nkeep OPEN or healthy\nroute argmin(requests)", "kept") is None


def test_kept_finds_a_filter_that_the_pick_ignored() -> None:
    # `kept` holds by construction, so the mask of the plan is replaced after compilation.
    loaded = policy("keep healthy\nroute argmin(requests)")
    lying = policy("keep not healthy or requests > 1\nroute argmin(requests)")
    situation = Situation(["a", "b"], {"healthy": [True, True], "requests": [2.0, 1.0]})
    decision = situation.decide(loaded, VOCABULARY)
    mask = lying.plan.steps[0].value
    assert mask is not None
    loaded.plan.steps[0].value = mask
    broken = PROPERTIES["kept"].broken(loaded, VOCABULARY, situation)
    assert decision.instance == "b"
    assert broken is not None
    assert (broken.why, broken.instead) == ("b is picked, which `keep_1` removes", ("a",))


@pytest.mark.parametrize(
    ("situation", "instead", "text"),
    [
        (
            Situation(["a", "b"], {"hit_len": [0.0, None], "waiting": [12.0, 0.5]}, {}, {"turn": None, "model": "m"}),
            ["a", "b"],
            'test "t"\n  given turn = ?, model = "m"\n  instance | hit_len | waiting\n'
            "  a        |       0 |      12\n  b        |       ? |     0.5\n  expect a or b",
        ),
        (
            Situation(["a"], {"loras": [frozenset({"y", "x"})], "healthy": [True]}, cursors={"route_1": "a"}),
            [],
            'test "t"\n  given last = a\n  instance |      loras | healthy\n'
            '  a        | {"x", "y"} |    true\n  expect reject 503',
        ),
        (Situation(["a"], {}), ["a"], 'test "t"\n  instance | healthy\n  a        |       ?\n  expect a'),
    ],
)  # fmt: skip
def test_situation_is_written_as_a_test(situation: Situation, instead: list[str], text: str) -> None:
    assert test_of("t", situation, instead) == text


def test_small_fleets_use_the_constants_of_the_policy() -> None:
    rules = (
        'keep role in {"decode", "both"} and pool != "spare"\nkeep req.lora in loras\n'
        "route argmin(requests) when max(requests) > 64 requests\nroute argmax(hit_len)"
    )
    drawn = list(SmallFleets(load(f"policy p\n{rules}\n", WORDS), WORDS).draw(2000))
    assert sorted({len(situation.ids) for situation in drawn}) == [1, 2, 3, 4]
    cells = {name: {cell for each in drawn for cell in each.cells[name]} for name in drawn[0].cells}
    assert {"decode", "both", "spare", "", None} <= cells["role"]
    assert {63.0, 64.0, 65.0} <= cells["requests"]
    assert {name for situation in drawn for name in situation.request} == {"lora", "prompt_len"}
    assert all(
        cell is None or cell <= each.request["prompt_len"] for each in drawn for cell in each.cells["hit_len"]
    )  # fmt: skip


# ── declared properties ──────────────────────────────────────────────────────


def names(found: Policy, wanted: Collection[str] = ()) -> list[str]:
    return [each.name for each in promised(found, VOCABULARY, wanted)]


def test_policy_declares_properties_in_its_documentation() -> None:
    doc = "## Fewest requests.\n## Holds: balanced, monotone.\n## Source: none.\n"
    assert declared(policy("route argmin(requests)", doc)) == ["balanced", "monotone"]
    assert names(policy("route argmin(requests)", doc)) == ["balanced", "monotone", "symmetric"]
    assert names(policy("keep healthy\nroute argmin(requests)")) == ["symmetric", "kept"]


@pytest.mark.parametrize(
    ("doc", "found"),
    [
        ("## Fewest. Holds: balanced.\n", ["balanced"]),
        ("## Holds: balanced. Not monotone, by design.\n", ["balanced"]),
        ("## Holds: balanced,\n## monotone.\n", ["balanced", "monotone"]),
        ("## Holds: balanced. Holds: monotone.\n", ["balanced", "monotone"]),
    ],
)
def test_declaration_is_a_sentence(doc: str, found: list[str]) -> None:
    assert declared(policy("route argmin(requests)", doc)) == found


def test_property_that_does_not_apply_is_left_out() -> None:
    assert names(policy("route rr_argmin(0)"), ["balanced", "kept", "symmetric"]) == ["symmetric"]


def test_unknown_property_is_named() -> None:
    with pytest.raises(UnknownProperty, match="ballanced"):
        promised(policy("route rr_argmin(0)", "## Holds: ballanced.\n"), VOCABULARY)
