"""Libraries: taken by name, in a scope of their own, checked in their own text, and part of the policy's digest."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import pytest

from smetric.features import VOCABULARY
from smetric.policy import Decision, Policy, PolicyError, Reader, Snapshot, Source, load
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
    return lambda name: Source(files[name], f"{name}.policy") if name in files else None


def policy(body: str, files: Mapping[str, str] | None = None, **settings: Any) -> Policy:
    return load(f"policy p\n{body}\n", VOCABULARY, settings=settings, libraries=reader(files or {"common": COMMON}))


def errors(body: str, files: Mapping[str, str] | None = None, **settings: Any) -> list[str]:
    with pytest.raises(PolicyError) as caught:
        policy(body, files, **settings)
    return [
        found.headline(caught.value.text) + (f"; {found.help}" if found.help else "")
        for found in caught.value.diagnostics
    ]


def warnings(body: str, files: Mapping[str, str] | None = None) -> list[str]:
    return [found.message for found in policy(body, files).warnings]


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


def test_a_definition_keeps_the_scope_of_its_own_file() -> None:
    assert decide(policy(USES)).rule == "stick"
    assert decide(policy(USES), requests=[9, 0]).rule == "stick"
    low = {"common": COMMON.replace("= 2.0 in", "= 1.2 in")}
    assert decide(policy(USES, low)).rule == "balance"
    assert decide(policy(USES, low)).failed_guard == "not overloaded"


def test_a_name_of_the_library_that_is_not_taken_is_free_and_unseen() -> None:
    body = "use common (hit_ratio)\nlet OVERLOAD_AT = 3\nroute argmax(hit_ratio(hit_len) * OVERLOAD_AT)"
    assert decide(policy(body)).score == pytest.approx([2.4, 0.3])
    assert errors("use common (hit_ratio)\nroute argmax(hit_ratio(hit_len) * OVERLOAD_AT)") == [
        '3:35: unknown name `OVERLOAD_AT`; define it above, or quote it if it is a string: "OVERLOAD_AT"'
    ]


def test_a_parameter_that_is_taken_is_one_of_the_policy_and_may_be_configured() -> None:
    body = USES.replace("(overloaded)", "(overloaded, OVERLOAD_AT)")
    assert policy(body).params["OVERLOAD_AT"].value == 2.0
    assert policy(body).warnings == ()
    set_ = policy(body, OVERLOAD_AT=1.2)
    assert set_.params["OVERLOAD_AT"].configured
    assert decide(set_).rule == "balance"
    assert errors(body, OVERLOAD_AT=0.5) == ["common.policy:5:7: configuration sets `OVERLOAD_AT` to 0.5, outside 1.."]
    for name in ("OVERLOAD_AT", "overloaded"):
        assert errors(USES, None, **{name: 1.2}) == [
            f"1:8: configuration sets `{name}`, which this policy does not declare; it declares none"
        ]


def test_a_test_may_set_a_parameter_that_is_taken() -> None:
    test = "  given prompt_len = 1000\n  instance | hit_len | requests\n  a | 800 | 4\n  b | 100 | 1\n"
    body = USES.replace("(overloaded)", "(overloaded, OVERLOAD_AT)")
    text = (
        f'policy p\n{body}\ntest "t"\n  with OVERLOAD_AT = 1.2\n{test}  expect b as balance failing "not overloaded"\n'
    )
    (result,) = suite_of(text, VOCABULARY, libraries=reader({"common": COMMON})).run()
    assert result.failure == ""


def test_a_feature_parameter_of_a_library_is_typed_for_each_choice() -> None:
    library = (
        "library load\nparam LOAD = requests in {requests, unprefilled}\n"
        "param FLOOR = 0 LOAD\ndef above(l) = l > FLOOR\ndef load(k) = LOAD * k\n"
    )
    body = "use load (load, LOAD)\nroute argmin(load(2))"
    assert policy(body, {"load": library}).reads == {"requests"}
    assert policy(body, {"load": library}, LOAD="unprefilled").reads == {"unprefilled"}
    wrong = "use load (above, load)\nroute argmin(load(2)) when any(above(requests))\nroute argmin(load(1))"
    assert errors(wrong, {"load": library}) == [
        "3:32: cannot compare requests with tokens, if load.LOAD = unprefilled; a unit may be the parameter itself: "
        "`0 LOAD`, once it is taken: use load (LOAD)"
    ]


def test_a_feature_parameter_that_is_not_taken_keeps_its_default_beside_one_of_its_name() -> None:
    library = {"load": "library load\nparam LOAD = requests in {requests, running}\ndef load(k) = LOAD * k\n"}
    body = "use load (load)\nparam LOAD = waiting in {waiting, running}\nroute argmin(LOAD + load(2))"
    assert policy(body, library).reads == {"requests", "waiting"}
    assert policy(body, library, LOAD="running").reads == {"requests", "running"}


def test_a_feature_parameter_that_is_taken_is_a_unit_too() -> None:
    library = {"load": "library load\nparam LOAD = requests in {requests, unprefilled}\n"}
    body = (
        "use load (LOAD)\nparam FEW = 2 {unit} in 0..\nroute argmin(LOAD) when max(LOAD) > FEW\nroute rr_argmin(LOAD)"
    )
    assert policy(body.format(unit="LOAD"), library).params["FEW"].unit == "requests"
    assert policy(body.format(unit="LOAD"), library, LOAD="unprefilled", FEW="3 tokens").params["FEW"].value == 3
    assert errors(body.format(unit="requests"), library) == [
        "4:25: cannot compare tokens with requests, if load.LOAD = unprefilled; a unit may be the parameter itself: "
        "`0 LOAD`"
    ]


# ── what is wrong with files ─────────────────────────────────────────────────


def test_an_error_inside_a_library_is_shown_in_its_own_text() -> None:
    broken = COMMON.replace("mean(l)", "meen(l)")
    with pytest.raises(PolicyError) as caught:
        policy(USES, {"common": broken})
    assert str(caught.value) == (
        "error: unknown function `meen`\n"
        " --> common.policy:7:45\n"
        "  |\n"
        "7 | def overloaded(s, l) = l[s] > OVERLOAD_AT * meen(l)\n"
        "  |                                             ^^^^\n"
        "  = help: did you mean `mean`?"
    )


def test_an_error_that_an_argument_brings_is_shown_at_the_call_with_the_line_of_the_library() -> None:
    assert errors("use common (hit_ratio)\nroute argmin(hit_ratio(hit_len) + hit_ratio(role))") == [
        "3:35: `/` takes numbers, found string per instance; in `hit_ratio`, line 8 of common.policy"
    ]


def test_a_name_that_two_uses_fail_to_take_is_not_said_to_be_there_twice() -> None:
    assert errors("use nope (x)\nuse nada (x)\nlet s = x\nroute argmin(requests)") == [
        "2:5: there is no nope.policy beside this file; it would start with `library nope`",
        "3:5: there is no nada.policy beside this file; it would start with `library nada`",
    ]
    assert errors("use nope (x\nuse nada (x)\nroute argmin(requests)") == [
        "2:10: `(` is not closed",
        "3:5: there is no nada.policy beside this file; it would start with `library nada`",
    ]


def test_syntax_errors_of_policy_and_library_come_in_one_run_without_echoes() -> None:
    found = errors(
        "use common (overloaded)\nlet s = argmax(hit_len\nroute s when not overloaded(s, requests)\nroute argmin(0)",
        {"common": COMMON + "def half(x = x / 2\n"},
    )
    assert found == [
        "3:15: `(` is not closed",
        "common.policy:9:9: `(` is not closed",
    ]
    assert errors("use common overloaded\nroute argmin(requests) when overloaded(3, requests)\nroute argmin(0)") == [
        "2:12: did not expect `overloaded` here; expected `(`"
    ]


@pytest.mark.parametrize(
    ("body", "files", "found"),
    [
        ("use p (x)", {}, ["2:5: these files use each other: p → p; move what they share into a library of its own"]),
        (
            "use a (x)",
            {"a": "library a\nuse b (x)", "b": "library b\nuse a (x)"},
            ["b.policy:2:5: these files use each other: a → b → a; move what they share into a library of its own"],
        ),
        (
            "use a (x)",
            {"a": "library a\nuse p (x)"},
            ["a.policy:2:5: these files use each other: p → a → p; move what they share into a library of its own"],
        ),
        ("use other (x)", {}, ["2:5: there is no other.policy beside this file; it would start with `library other`"]),
        (
            "use common (overloded)",
            None,
            ["2:13: library `common` defines no `overloded`; did you mean `overloaded`?"],
        ),
        (
            "use a (x)",
            {"a": "policy a\nroute argmin(0)"},
            ["2:5: `a` is a policy, and only a library can be used; move what they share into a library"],
        ),
        (
            "use a (x)",
            {"a": "library b"},
            ["2:5: a.policy says that it is `library b`; file and library have one name"],
        ),
        (
            "use a (x)",
            {"a": "library a\nparam x = 1\nlet y = 2"},
            ["a.policy:3:1: a library holds only `param`, `def` and `use`; what decides stands in a policy"],
        ),
        (
            "use a (x)",
            {"a": "library a\nuse b (x)\ndef y(z) = x(z)", "b": "library b\ndef x(z) = z"},
            ["2:8: library `a` defines no `x`; take it from where it is defined: use b (x)"],
        ),
        (
            "use common (hit_ratio, hit_ratio)",
            None,
            ["2:24: `hit_ratio` is already defined on line 2; names are never redefined"],
        ),
        (
            "def hit_ratio(x) = x\nuse common (hit_ratio)",
            None,
            ["3:13: `hit_ratio` is already defined on line 2; names are never redefined"],
        ),
        ("use common (hit_ratio as h)", None, ["2:23: did not expect `as` here; expected `)` or `,`"]),
    ],
)
def test_a_wrong_use_is_named_once(body: str, files: dict[str, str] | None, found: list[str]) -> None:
    assert errors(f"{body}\nroute rr_argmin(0)", files) == found


def test_a_library_that_cannot_be_read_says_why() -> None:
    def unreadable(name: str) -> Source | None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(PolicyError, match=r"common\.policy cannot be read: Permission denied"):
        load("policy p\nuse common (x)\nroute argmin(0)", VOCABULARY, libraries=unreadable)


def test_libraries_may_use_libraries_and_are_read_once() -> None:
    files = {
        "a": "library a\nuse c (twice)\ndef one(x) = twice(x) + 1",
        "b": "library b\nuse c (twice, STEP)\ndef two(x) = twice(x) + 2 * STEP",
        "c": "library c\nparam STEP = 1 request\ndef twice(x) = 2 * x",
    }
    asked: list[str] = []

    def counting(name: str) -> Source | None:
        asked.append(name)
        return reader(files)(name)

    text = "policy p\nuse a (one)\nuse b (two)\nroute argmin(one(requests) + two(requests) * 0)\n"
    loaded = load(text, VOCABULARY, libraries=counting)
    assert sorted(asked) == ["a", "b", "c"]
    assert decide(loaded).score == [9, 3]


def test_the_number_of_libraries_is_bounded() -> None:
    files = {f"l{i}": f"library l{i}\nuse l{i + 1} (x)\ndef x(y) = y" for i in range(40)}
    assert any("at most 16 libraries" in found for found in errors("use l0 (x)\nroute argmin(x(0))", files))


def test_a_large_library_costs_only_what_is_used_of_it() -> None:
    many = "library many\n" + "\n".join(f"def f{i}(x) = x * {i}" for i in range(120)) + "\n"
    assert policy("use many (f3)\nroute argmin(f3(requests))", {"many": many}).reads == {"requests"}
    nested = "library many\ndef g0(x) = x + x\n" + "\n".join(
        f"def g{i}(x) = g{i - 1}(x) + g{i - 1}(x)" for i in range(1, 30)
    )
    assert any(
        "more than 500 parts" in found
        for found in errors("use many (g29)\nroute argmin(g29(requests))", {"many": nested})
    )


def test_what_is_taken_and_not_used_is_warned_of() -> None:
    assert warnings("use common (overloaded, hit_ratio)\nroute argmin(hit_ratio(hit_len))") == [
        "import `overloaded` is never used"
    ]


# ── the whole ────────────────────────────────────────────────────────────────


def test_the_digest_covers_the_libraries() -> None:
    plain = policy("route argmin(requests)")
    one, same = policy(USES), policy(USES)
    other = policy(USES, {"common": COMMON + "# edited\n"})
    assert one.digest == same.digest != other.digest
    assert plain.libraries == {}
    assert one.libraries == {"common": Source(COMMON, "common.policy")}


def test_a_library_can_be_checked_but_not_loaded() -> None:
    file, checked = check_text(COMMON, VOCABULARY)
    assert (file.kind, file.name, checked.warnings) == ("library", "common", ())
    with pytest.raises(PolicyError, match="`common` is a library, which decides nothing"):
        load(COMMON, VOCABULARY)


def test_guards_and_tracebacks_of_library_code_stand_at_the_call() -> None:
    decision = decide(policy(USES), requests=[50, 0])
    assert decision.rule == "stick"
    assert decision.policy.plan.steps[0].guards[0].label == "not overloaded"
    for step in decision.policy.plan.steps:
        for guard in step.guards:
            assert 0 <= guard.value.span.start < guard.value.span.end <= len(decision.policy.source)
