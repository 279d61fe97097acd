"""Libraries of policies. Their diagnostics are in `diagnostics.golden`."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import pytest

from smetric.features import VOCABULARY
from smetric.policy import Decision, Policy, PolicyError, PolicyText, Reader, Snapshot, load
from smetric.policy.check import check_text
from smetric.policy.testing import suite_of

COMMON = """## Shared definitions. A library decides nothing.
library common

## Times the mean above which an instance counts as overloaded.
param OVERLOAD_AT = 2.0 in 1.0..

def overloaded(s, l) = l[s] > OVERLOAD_AT * mean(l)
def hit_ratio(c)     = c / req.prompt_len
"""


def reader(files: Mapping[str, str]) -> Reader:
    return lambda name: PolicyText(files[name], f"{name}.policy") if name in files else None


def policy(body: str, files: Mapping[str, str] | None = None, **settings: Any) -> Policy:
    return load(f"policy p\n{body}\n", VOCABULARY, settings=settings, libraries=reader(files or {"common": COMMON}))


def errors(body: str, files: Mapping[str, str] | None = None, **settings: Any) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        policy(body, files, **settings)
    return [
        found.headline(caught.value.text) + (f"; {found.help}" if found.help else "")
        for found in caught.value.diagnostics
    ]


def decide(loaded: Policy, **columns: list[Any]) -> Decision:
    fields = {name: field.default for name, field in VOCABULARY.request.items()}
    snapshot = Snapshot(["a", "b"], {"requests": [4, 1], "hit_len": [800, 100], **columns})
    decision = loaded.decide(snapshot, types.SimpleNamespace(**{**fields, "prompt_len": 1000}), {}, 1)
    assert isinstance(decision, Decision)
    return decision


USES = """
use common (overloaded)
let s = argmax(hit_len)
route s when not overloaded(s, requests) as stick
route argmin(requests)                   as balance
"""


def test_library_definition_keeps_its_own_scope() -> None:
    assert decide(policy(USES)).rule == "stick"
    assert decide(policy(USES), requests=[9, 0]).rule == "stick"
    low = {"common": COMMON.replace("= 2.0 in", "= 1.2 in")}
    assert decide(policy(USES, low)).rule == "balance"
    assert decide(policy(USES, low)).failed_guard == "not overloaded"


def test_library_name_is_free_unless_taken() -> None:
    body = "use common (hit_ratio)\nlet OVERLOAD_AT = 3\nroute argmax(hit_ratio(hit_len) * OVERLOAD_AT)"
    assert decide(policy(body)).score == pytest.approx([2.4, 0.3])


def test_library_parameter_can_be_configured_when_taken() -> None:
    body = USES.replace("(overloaded)", "(overloaded, OVERLOAD_AT)")
    assert policy(body).params["OVERLOAD_AT"].value == 2.0
    assert policy(body).warnings == ()
    set_ = policy(body, OVERLOAD_AT=1.2)
    assert set_.params["OVERLOAD_AT"].configured
    assert decide(set_).rule == "balance"


def test_library_parameter_can_be_set_by_a_test() -> None:
    test = "  given prompt_len = 1000\n  instance | hit_len | requests\n  a | 800 | 4\n  b | 100 | 1\n"
    body = USES.replace("(overloaded)", "(overloaded, OVERLOAD_AT)")
    text = (
        f'policy p\n{body}\ntest "t"\n  with OVERLOAD_AT = 1.2\n{test}  expect b as balance failing "not overloaded"\n'
    )
    (result,) = suite_of(text, VOCABULARY, libraries=reader({"common": COMMON})).run()
    assert result.failure == ""


def test_library_feature_parameter_reads_the_chosen_feature() -> None:
    library = (
        "library load\nparam LOAD = requests in {requests, unprefilled}\n"
        "param FLOOR = 0 LOAD\ndef above(l) = l > FLOOR\ndef load(k) = LOAD * k\n"
    )
    body = "use load (load, LOAD)\nroute argmin(load(2))"
    assert policy(body, {"load": library}).reads == {"requests"}
    assert policy(body, {"load": library}, LOAD="unprefilled").reads == {"unprefilled"}


def test_library_feature_parameter_keeps_its_default_unless_taken() -> None:
    library = {"load": "library load\nparam LOAD = requests in {requests, running}\ndef load(k) = LOAD * k\n"}
    body = "use load (load)\nparam LOAD = waiting in {waiting, running}\nroute argmin(LOAD + load(2))"
    assert policy(body, library).reads == {"requests", "waiting"}
    assert policy(body, library, LOAD="running").reads == {"requests", "running"}


def test_library_feature_parameter_is_a_unit() -> None:
    library = {"load": "library load\nparam LOAD = requests in {requests, unprefilled}\n"}
    body = (
        "use load (LOAD)\nparam FEW = 2 {unit} in 0..\nroute argmin(LOAD) when max(LOAD) > FEW\nroute rr_argmin(LOAD)"
    )
    assert policy(body.format(unit="LOAD"), library).params["FEW"].unit == "requests"
    assert policy(body.format(unit="LOAD"), library, LOAD="unprefilled", FEW="3 tokens").params["FEW"].value == 3


def test_library_reports_why_it_cannot_be_read() -> None:
    def unreadable(name: str) -> PolicyText | None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(PolicyError, match=r"common\.policy cannot be read: Permission denied"):
        load("policy p\nuse common (x)\nroute argmin(0)", VOCABULARY, libraries=unreadable)


def test_library_is_read_once_for_all_its_users() -> None:
    files = {
        "a": "library a\nuse c (twice)\ndef one(x) = twice(x) + 1",
        "b": "library b\nuse c (twice, STEP)\ndef two(x) = twice(x) + 2 * STEP",
        "c": "library c\nparam STEP = 1 request\ndef twice(x) = 2 * x",
    }
    asked: list[str] = []

    def counting(name: str) -> PolicyText | None:
        asked.append(name)
        return reader(files)(name)

    text = "policy p\nuse a (one)\nuse b (two)\nroute argmin(one(requests) + two(requests) * 0)\n"
    loaded = load(text, VOCABULARY, libraries=counting)
    assert sorted(asked) == ["a", "b", "c"]
    assert decide(loaded).score == [9, 3]


def test_library_count_is_bounded() -> None:
    files = {f"l{i}": f"library l{i}\nuse l{i + 1} (x)\ndef x(y) = y" for i in range(40)}
    assert any("at most 16 libraries" in found for found in errors("use l0 (x)\nroute argmin(x(0))", files))


def test_library_counts_only_used_definitions_towards_the_size() -> None:
    many = "library many\n" + "\n".join(f"def f{i}(x) = x * {i}" for i in range(120)) + "\n"
    assert policy("use many (f3)\nroute argmin(f3(requests))", {"many": many}).reads == {"requests"}
    nested = "library many\ndef g0(x) = x + x\n" + "\n".join(
        f"def g{i}(x) = g{i - 1}(x) + g{i - 1}(x)" for i in range(1, 30)
    )
    assert any(
        "more than 500 parts" in found
        for found in errors("use many (g29)\nroute argmin(g29(requests))", {"many": nested})
    )


def test_library_text_is_part_of_the_digest() -> None:
    plain = policy("route argmin(requests)")
    one, same = policy(USES), policy(USES)
    other = policy(USES, {"common": COMMON + "# edited\n"})
    assert one.digest == same.digest != other.digest
    assert plain.libraries == {}
    assert one.libraries == {"common": PolicyText(COMMON, "common.policy")}


def test_library_can_be_checked_but_not_loaded() -> None:
    file, checked = check_text(COMMON, VOCABULARY)
    assert (file.kind, file.name, checked.warnings) == ("library", "common", ())
    with pytest.raises(PolicyError, match="`common` is a library, which decides nothing"):
        load(COMMON, VOCABULARY)


def test_library_guard_has_the_place_of_its_call() -> None:
    decision = decide(policy(USES), requests=[50, 0])
    assert decision.rule == "stick"
    assert decision.policy.plan.steps[0].guards[0].label == "not overloaded"
    for step in decision.policy.plan.steps:
        for guard in step.guards:
            assert 0 <= guard.value.span.start < guard.value.span.end <= len(decision.policy.source)
