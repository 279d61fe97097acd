"""Fit of policies and fleets."""

from __future__ import annotations

import pytest

from smetric.features import VOCABULARY
from smetric.policy import Severity, load
from smetric.policy.fit import misfits

LABELS = {
    "id": ["gpu-0", "gpu-1", "gpu-2"],
    "pool": ["h100", "h100", "a100"],
    "zone": ["x", "y", "y"],
    "role": ["both", "both", "both"],
}


def found(rules: str, labels: dict[str, list[str]] = LABELS) -> list[tuple[str, str, str]]:
    """Return severity, marked text and way out of each misfit."""
    policy = load(f"policy p\n{rules}\nroute rr_argmin(0)", VOCABULARY)
    each = misfits(policy.plan, labels)
    return [(one.severity.value, policy.source[one.span.start : one.span.end], one.way_out) for one in each]


@pytest.mark.parametrize(
    ("rules", "marked", "help_text"),
    [
        ('keep pool == "h10O"', 'pool == "h10O"', "did you mean `h100`?"),
        ('keep pool == "l4"', 'pool == "l4"', '`pool` is "a100" or "h100" in this fleet'),
        ('prefer zone in {"a", "b"}', 'zone in {"a", "b"}', '`zone` is "x" or "y" in this fleet'),
        ('keep role != "both" when req.turn > 0', 'role != "both"', '`role` is "both" in this fleet'),
        ('keep id not in {"gpu-0", "gpu-1", "gpu-2"}', 'id not in {"gpu-0", "gpu-1", "gpu-2"}', "`id` is"),
        ('let fast = pool == "H100"\nkeep fast and healthy', 'pool == "H100"', "did you mean `h100`?"),
        ('param POOL = "b200"\nkeep pool == POOL', "pool == POOL", '`pool` is "a100" or "h100" in this fleet'),
        ('keep pool == "a100" and zone == "x"', 'pool == "a100" and zone == "x"', "`zone` is"),
        ('route argmin(requests where pool == "t4")', 'pool == "t4"', "`pool` is"),
        ('route rr_argmin(requests) when any(zone == "z")', 'zone == "z"', "`zone` is"),
        ('keep "both" == role and not (pool == "a100" or pool == "h100")', "", "`pool` is"),
        ("route rr_argmin(requests) when count() > 3", "count() > 3", "compare with what the instances"),
        ('route rr_argmin(requests) when 2 <= count(pool == "a100")', '2 <= count(pool == "a100")', "`pool` is"),
    ],
)
def test_misfit_is_an_error_where_a_condition_never_holds(rules: str, marked: str, help_text: str) -> None:
    severity, text, way_out = found(rules)[0]
    assert severity == "error"
    assert marked in text
    assert way_out.startswith(help_text)


@pytest.mark.parametrize(
    "rules",
    [
        'keep pool in {"", "h100"}',
        'keep pool in {"", "shared"} or pool == req.tenant',
        'keep pool == "a100" and zone == "y"',
        "keep zone == req.prefill_zone",
        'keep model == "m"',
        'keep role != "decode"',
        'keep (pool if zone == "x" else role) == "h100"',
        "keep requests < 3 and known(requests)",
        'route rr_argmin(0) when count(pool == "h100" and healthy) == 2 and count() >= 3',
        'route rr_argmin(0) when all(pool == "a100")',
    ],
)
def test_misfit_is_absent_where_a_condition_may_hold(rules: str) -> None:
    assert [each for each in found(rules) if each[0] == "error"] == []


def test_misfit_is_a_warning_where_the_rest_may_hold() -> None:
    (one,) = found('keep pool == "h10O" or pool == "a100"')
    assert one == (Severity.WARNING.value, 'pool == "h10O"', "did you mean `h100`?")


def test_misfit_needs_a_fleet() -> None:
    assert found('keep pool == "l4"', {}) == []
