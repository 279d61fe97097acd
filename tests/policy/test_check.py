"""Checker of policies. Its diagnostics are in `diagnostics.golden`."""

from __future__ import annotations

import pytest

from smetric.policy.policy import load
from tests.policy.verdict import checked, errors
from tests.policy.words import WORDS

_SMETRIC = """
param OVERLOAD = 2.0 in 1.0..
param HIT_RATIO = 0.5 in 0.0..1.0
## What load means.
param LOAD = requests in {requests, unprefilled}
param FLOOR = 0 LOAD in 0..
let c = hit_len
let l = LOAD
let s = argmax(c, then: l)
def not_overloaded(s, l) = l[s] <= greatest(OVERLOAD * mean(l), FLOOR)
def session_not_evicted(s, c) = c[s] > HIT_RATIO * req.est_hit
route s when req.turn != 0 and not_overloaded(s, l) and session_not_evicted(s, c) as stick
route rr_argmin(l) as balance
"""


# ── reads ──


def test_reads_spare_the_lookup_of_a_first_turn() -> None:
    assert checked(_SMETRIC).reads == {"hit_len": "req.turn != 0", "requests": "always"}


@pytest.mark.parametrize(
    ("code", "reads"),
    [
        ("route rr_argmin(0)", {}),
        ("route argmin(requests, then: waiting)", {"requests": "always", "waiting": "argmin(requests, then: waiting)"}),
        ("let unused = hit_len\nroute argmin(requests)", {"requests": "always"}),
        (
            "route argmax(hit_len) when req.turn != 0\nroute argmin(requests)",
            {"hit_len": "req.turn != 0", "requests": "req.turn != 0"},
        ),
        (
            "route argmax(hit_len) when max(requests) - min(requests) < 3\nroute argmin(requests)",
            {"hit_len": "max(requests) - min(requests) < 3", "requests": "always"},
        ),
        (
            "route argmax(hit_len) when max(requests) < 3\nroute argmax(hit_len, then: requests)",
            {"hit_len": "always", "requests": "always"},
        ),
        (
            "keep healthy when req.turn == 0\nroute argmin(running)",
            {"healthy": "req.turn == 0", "running": "req.turn == 0"},
        ),
        ("keep healthy\nroute argmin(kv_usage)", {"healthy": "always", "kv_usage": "healthy"}),
        ("prefer healthy\nroute argmin(kv_usage)", {"healthy": "always", "kv_usage": "always"}),
        (
            "route argmin(running where healthy)\nroute argmin(waiting)",
            {"healthy": "always", "running": "always", "waiting": "argmin(running where healthy)"},
        ),
        (
            "route softmin(requests where healthy, temperature: max(waiting))\nroute argmin(requests)",
            {
                "healthy": "always",
                "requests": "always",
                "waiting": "softmin(requests where healthy, temperature: max(waiting))",
            },
        ),
        (
            "route argmin(running) when quantile(running where healthy, max(kv_usage), default: 0) > 3\n"
            "route argmax(running)",
            {
                "healthy": "always",
                "kv_usage": "quantile(running where healthy, max(kv_usage), default: 0) > 3",
                "running": "always",
            },
        ),
        (
            "route rr_argmin(max(hit_len), within: 9 tokens, then: running)",
            {"running": "rr_argmin(max(hit_len), within: 9 tokens, then: running)"},
        ),
        (
            "let l = unprefilled if req.turn == 0 else hit_len\nroute argmin(l)",
            {"hit_len": "argmin(l)", "unprefilled": "argmin(l)"},
        ),
        ("param Q = false\nroute argmin(unprefilled if Q else hit_len)", {"hit_len": "always"}),
        # A guard that reads an unknown number of the request fails before it looks anything up.
        (
            "route argmin(requests) when max(hit_len) > req.est_hit\nroute argmin(requests)",
            {"hit_len": "max(hit_len) > req.est_hit", "requests": "always"},
        ),
        # Where one divisor for all is 0, the dividend is not looked at.
        (
            "route argmin(requests * ratio(max(hit_len), sum(hit_len) - 5, default: 1))",
            {"hit_len": "always", "requests": "always"},
        ),
        (
            "let f = requests * ratio(max(hit_len), max(requests), default: 1)\nroute argmin(f)",
            {"hit_len": "argmin(f)", "requests": "always"},
        ),
        (
            "param P = 1 in 1e-10..1\nlet f = requests * ratio(max(hit_len), P, default: 1)\nroute argmin(f)",
            {"hit_len": "argmin(f)", "requests": "always"},
        ),
        ("route argmin(ratio(hit_len, requests, default: 1))", {"hit_len": "always", "requests": "always"}),
    ],
)
def test_reads_name_the_guard_that_spares_a_feature(code: str, reads: dict[str, str]) -> None:
    assert checked(code).reads == reads


def test_reads_follow_the_configured_feature() -> None:
    assert "unprefilled" in checked(_SMETRIC, {"LOAD": "unprefilled"}).reads


def test_reads_agree_with_the_compiled_policy() -> None:
    for code in (
        _SMETRIC,
        "route argmax(hit_len) when max(requests) < 3\nroute argmax(hit_len, then: requests)",
        "route argmax(hit_len) when max(requests) < 3\nroute argmin(requests, then: hit_len)",
        "keep hit_len > 3 when req.turn == 0\nroute argmin(host_hit_len)",
        "let l = hit_len if req.turn == 0 else host_hit_len\nroute argmin(l)",
    ):
        policy = load(f"policy p\n{code}", WORDS)
        reads = checked(code).reads
        assert policy.reads == reads.keys()
        assert {name for name in policy.lookups if reads[name] == "always"} == set(policy.lookups_always)


# ── bounds ──


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("route argmin(" + " + ".join(["requests"] * 90) + ")", ""),
        ("route argmin(" + " + ".join(["requests"] * 200) + ")", "nests deeper than 100 operators"),
        ("\n".join(f"let a{i} = {i}" for i in range(600)) + "\nroute rr_argmin(0)", "more than 500 parts"),
        (
            "def f0(x) = x + x\n"
            + "\n".join(f"def f{i}(x) = f{i - 1}(x) + f{i - 1}(x)" for i in range(1, 30))
            + "\nroute argmin(f29(requests))",
            "more than 500 parts",
        ),
        (
            "\n".join(f"param P{i} = requests in {{requests, waiting}}" for i in range(12))
            + "\nroute argmin("
            + " + ".join(f"P{i}" for i in range(12))
            + ")",
            "choose among more than 16 combinations",
        ),
    ],
)
def test_check_bounds_the_size_of_a_policy(code: str, message: str) -> None:
    if message:
        assert any(message in found for found in errors(code))
    else:
        assert checked(code).warnings == ()
