"""Parameters and their configured values. Their diagnostics are in `diagnostics.golden`."""

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


def test_parameter_has_value_unit_and_domain() -> None:
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
def test_parameter_can_be_configured_with_or_without_its_unit(given: Value) -> None:
    found = checked(
        "param WAIT = 2s\nroute argmin(requests + 1) when req.priority * 1s > WAIT\nroute rr_argmin(0)", {"WAIT": given}
    )
    assert found.params["WAIT"].value == 18.0


@pytest.mark.parametrize(("load", "unit"), [("requests", "requests"), ("unprefilled", "tokens")])
def test_parameter_in_the_unit_of_a_feature_follows_the_chosen_feature(load: str, unit: str) -> None:
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
        ("N = 2", "3" + " " * 100 + "4", "but it must be a number"),
        ("N = 2", float("nan"), "configuration sets `N` to nan, but numbers are at most 1e15"),
        ("N = 2", 10**400, "but numbers are at most 1e15"),
    ],
)
def test_parameter_refuses_values_that_no_file_can_hold(declaration: str, given: Value, message: str) -> None:
    (found,) = errors(f"param {declaration}\nroute rr_argmin(0)", {"N": given})
    assert message in found
