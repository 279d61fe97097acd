from __future__ import annotations

import pytest

from smetric.policy.parameter import Value
from tests.policy.verdict import checked, errors

_DECLARED = """
param OVERLOAD = 2.0 in 1.0..
param HIT_RATIO = 0.5 in 0.0..1.0
## What load means.
param LOAD = requests in {requests, unprefilled}
param FLOOR = 0 LOAD in 0..
route argmin(LOAD)
"""


def test_parameters_have_value_unit_and_domain() -> None:
    params = checked(_DECLARED, {"LOAD": "unprefilled", "OVERLOAD": 1.5}).params
    assert [(p.name, p.value, p.unit, p.domain, p.configured) for p in params.values()] == [
        ("OVERLOAD", 1.5, "", "1..", True),
        ("HIT_RATIO", 0.5, "", "0..1", False),
        ("LOAD", "unprefilled", "", "{requests, unprefilled}", True),
        ("FLOOR", 0.0, "tokens", "0..", False),
    ]
    assert params["LOAD"].is_feature
    assert params["LOAD"].doc == "What load means."


@pytest.mark.parametrize("given", [18, 18.0, "18", "18s", "18 seconds"])
def test_a_configured_number_may_carry_its_unit_or_none(given: Value) -> None:
    found = checked(
        "param WAIT = 2s\nroute argmin(requests + 1) when req.priority * 1s > WAIT\nroute rr_argmin(0)", {"WAIT": given}
    )
    assert found.params["WAIT"].value == 18.0


@pytest.mark.parametrize(("load", "unit"), [("requests", "requests"), ("unprefilled", "tokens")])
def test_a_number_set_in_the_unit_of_a_feature_has_that_of_the_one_chosen_with_it(load: str, unit: str) -> None:
    code = (
        "param LOAD = requests in {requests, unprefilled}\nparam FLOOR = 0 LOAD in 0..\n"
        "route argmin(LOAD) when max(LOAD) > FLOOR\nroute rr_argmin(0)\n"
    )
    case = 'test "{0} {1}"\nwith {2}FLOOR = 3 {1}\ninstance | requests\na | 1\nexpect a\n'
    chosen = "" if load == "requests" else f"LOAD = {load}, "
    params = checked(code + case.format(load, unit, chosen), {"LOAD": load, "FLOOR": f"3 {unit}"}).params
    assert params["FLOOR"].value == 3.0
    (found,) = errors(code, {"LOAD": load, "FLOOR": "3 blocks"})
    assert found == f'configuration sets `FLOOR` to "3 blocks", but its unit is {unit}, if LOAD = {load}'
    (found,) = errors(code + case.format(load, "blocks", chosen), {})
    assert found == f"this test sets `FLOOR` to 3 blocks, but its unit is {unit}, if LOAD = {load}"


@pytest.mark.parametrize(
    ("declaration", "given", "message"),
    [
        ("N = 2 in 1..8", 9, "configuration sets `N` to 9, outside 1..8"),
        ("N = 2 in 1..1048576", 1_048_577, "configuration sets `N` to 1048577, outside 1..1048576"),
        ("N = 2 in {1, 2}", 3, "configuration sets `N` to 3, outside {1, 2}"),
        ("N = 2", True, "configuration sets `N` to true, but it is a number"),
        ("N = 2", "3" + " " * 100 + "4", "but it is a number"),
        ("N = 2", "two", 'configuration sets `N` to "two", but it is a number'),
        ("N = 2", float("nan"), "configuration sets `N` to nan, but numbers are at most 1e15"),
        ("N = 2", 10**400, "but numbers are at most 1e15"),
        ("N = 2 requests", "3 tokens", 'configuration sets `N` to "3 tokens", but its unit is requests'),
        ("N = true", 1, "configuration sets `N` to 1, but it is true or false"),
        ("N = requests in {requests, waiting}", "kv_usage", "outside {requests, waiting}"),
    ],
)
def test_a_configured_value_is_held_against_its_declaration(declaration: str, given: Value, message: str) -> None:
    (found,) = errors(f"param {declaration}\nroute rr_argmin(0)", {"N": given})
    assert message in found


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ("N = 2 in 8..1", "this range is empty"),
        ("N = true in 0..1", "only a number has a range"),
        ("N = 2 requests in 1 token..", "this has the unit tokens, but `N` is requests"),
        ("N = 2 in {true, 2}", "the choices of `N` are of the kind of its default"),
        ("N = 2 in {3, 4}", "the default of `N` is outside its own choices {3, 4}"),
        ("N = role in {role, requests}", "`role` is no number"),
        ("N = nothing in {nothing}", "`nothing` is no feature"),
    ],
)
def test_a_parameter_is_held_against_itself(declaration: str, message: str) -> None:
    assert errors(f"param {declaration}\nroute rr_argmin(0)") == [message]


@pytest.mark.parametrize("declaration", ["N = 2 in 3..", "N = = 2"])
def test_a_parameter_at_fault_is_not_said_to_be_missing(declaration: str) -> None:
    code = f'param {declaration}\nroute rr_argmin(0)\ntest "t" with N = 1 instance | requests a | 1 expect a'
    assert len(errors(code, {"N": 1})) == 1
