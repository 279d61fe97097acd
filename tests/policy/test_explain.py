"""Explanations of decisions: account, sentence, table, lead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smetric.features import VOCABULARY
from smetric.policy import Snapshot, load
from smetric.policy.explain import explain, lead, summary, table
from smetric.policy.snapshot import Origins
from tests.policy.deciding import decide

SMETRIC = load((Path(__file__).parents[2] / "policies" / "smetric.policy").read_text(), VOCABULARY)
IDS = ["gpu-0", "gpu-1", "gpu-2"]
HOT = Snapshot(IDS, {"hit_len": [9000, 512, 512], "requests": [20, 4, 3]})


def test_account_of_a_hot_instance_that_sheds_a_session() -> None:
    assert explain(decide(SMETRIC, HOT, turn=3, est_hit=9500)) == "\n".join(
        [
            "smetric: route to gpu-2",
            "    stick      ✓ req.turn != 0 (req.turn is 3)   ✗ not_overloaded (20 > 2 × 9)   · session_not_evicted",
            "  → balance    always",
            "                hit_len    requests",
            "    gpu-0          9000          20",
            "    gpu-1           512           4",
            "    gpu-2           512           3  ←",
        ]
    )


def test_account_of_a_rule_that_fires() -> None:
    account = explain(
        decide(SMETRIC, Snapshot(IDS, {"hit_len": [9000, 0, 0], "requests": [4, 4, 4]}), turn=1, est_hit=9000)
    )
    assert account.splitlines()[1] == (
        "  → stick    ✓ req.turn != 0 (req.turn is 1)   ✓ not_overloaded (4 ≤ 2 × 4)   "
        "✓ session_not_evicted (9000 > 0.5 × 9000)"
    )


def test_account_marks_an_unknown_cell() -> None:
    snapshot = Snapshot(IDS, HOT.columns, known={"hit_len": [True, False, True]})
    lines = explain(decide(SMETRIC, snapshot, turn=3, est_hit=9500)).splitlines()
    assert lines[5] == "    gpu-1         ? 512           4"


@pytest.mark.parametrize(
    ("origins", "last"),
    [
        (["lmcache:host", "", "lmcache:host"], "hit_len from lmcache:host"),
        (["kv_events", "lmcache:host", "kv_events"], "hit_len from kv_events (gpu-0, gpu-2), lmcache:host (gpu-1)"),
    ],
)
def test_account_names_the_sources_of_a_lookup(origins: list[str], last: str) -> None:
    known: dict[str, list[bool] | None] = {"hit_len": [bool(origin) for origin in origins]}
    snapshot = Snapshot(IDS, HOT.columns, known, {}, {"hit_len": origins})
    assert explain(decide(SMETRIC, snapshot, turn=3, est_hit=9500)).splitlines()[-1] == f"    {last}"


def test_account_has_the_ages_of_measured_values() -> None:
    for stamps, said in (
        ({"requests": [99.6, 97.5, None]}, "requests 0.4 to 2.5 s old"),
        ({"requests": [99.6, 97.5, 98.5]}, "requests 1.5 s old on gpu-2, 0.4 to 2.5 s on all"),
    ):
        lines = explain(decide(SMETRIC, Snapshot(IDS, HOT.columns, stamps=stamps, now=100.0), turn=3)).splitlines()
        assert lines[-1] == f"    {said}"
    stamps = {"requests": [99.6] * 3, "kv_usage": [99.6] * 3, "hit_len": [0.0] * 3}
    body = "route argmin(norm(requests) + norm(kv_usage))"
    snapshot = Snapshot(IDS, {"requests": [1, 2, 3], "kv_usage": [0.5] * 3}, stamps=stamps, now=100.0)
    assert explain(decide(body, snapshot)).splitlines()[-1] == "    requests, kv_usage 0.4 s old"


def test_account_has_no_column_of_a_feature_that_was_not_looked_up() -> None:
    lines = explain(decide(SMETRIC, Snapshot(IDS, {"requests": [3, 2, 1]}), turn=0)).splitlines()
    assert lines[3:] == [
        "                requests",
        "    gpu-0              3",
        "    gpu-1              2",
        "    gpu-2              1  ←",
    ]


def test_account_has_a_column_of_a_computed_score() -> None:
    body = "let f = requests * 1.5\nroute argmin({})"
    assert explain(decide(body.format("f"), HOT)).splitlines()[2:] == [
        "                requests      f",
        "    gpu-0             20     30",
        "    gpu-1              4      6",
        "    gpu-2              3    4.5  ←",
    ]
    assert "f + 1" in table(decide(body.format("f  +  1"), HOT))


def test_account_of_filters_marks_the_candidates_removed() -> None:
    body = """
    keep   requests < 9            as calm
    prefer requests > 99           as busy
    prefer hit_len > 600 when req.turn > 5 as warm
    route argmax(requests)
    """
    assert explain(decide(body, HOT, turn=1)).splitlines() == [
        "p: route to gpu-1",
        "    calm       left 2 of 3",
        "    busy       ignored: it would leave no candidate",
        "    warm       does not apply",
        "  → route_1    always",
        "                requests    hit_len",
        "    gpu-0             20       9000  ✗ calm",
        "    gpu-1              4        512  ←",
        "    gpu-2              3        512",
    ]


def test_account_and_sentence_of_a_request_that_is_not_routed() -> None:
    decision = decide('reject 429 "full" when min(requests) > 2 as shed\nroute argmin(requests)', HOT)
    assert summary(decision) == "shed: rejected with 429"
    assert explain(decision).startswith("p: reject 429, full\n  → shed    ✓ min(requests) > 2 (3 > 2)\n")
    held = decide("hold for 500ms when min(requests) > 2 as wait\nroute argmin(requests)", HOT)
    assert summary(held) == "wait: held, for 0.5 s in all at most"
    assert explain(held).startswith(
        "p: hold for 0.5 s in all\n  → wait    ✓ min(requests) > 2 (3 > 2)   ✓ held (0 < 0.5)\n"
    )
    over = decide("hold for 500ms when min(requests) > 2 as wait\nroute argmin(requests)", HOT, held=0.6)
    assert summary(over).endswith("; wait failed held (0.6 ≥ 0.5)")
    nobody = decide("keep requests > 99 as busy\nroute argmin(requests)", HOT)
    assert summary(nobody) == "busy: none of 3 instances is left"
    assert explain(nobody).splitlines()[0] == "p: reject 503, no instance is left after `busy`"


# ── one sentence ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("fields", "hits", "sentence"),
    [
        (
            {"turn": 3, "est_hit": 9500},
            [9000, 512, 512],
            "balance: gpu-2 has the fewest requests (3); "
            "gpu-0, with the highest hit_len (9000), failed not_overloaded (20 > 2 × 9)",
        ),
        (
            {"turn": 0},
            [0, 0, 0],
            "balance: gpu-2 has the fewest requests (3); stick failed req.turn != 0 (req.turn is 0)",
        ),
        (
            {"turn": None},
            [0, 0, 0],
            "balance: gpu-2 has the fewest requests (3); stick failed req.turn != 0 (req.turn is unknown)",
        ),
        (
            {"turn": 3, "est_hit": 9500},
            [0, 0, 4000],
            "balance: gpu-2 has the fewest requests (3); "
            "gpu-2, with the highest hit_len (4000), failed session_not_evicted (4000 ≤ 0.5 × 9500)",
        ),
        (
            {"turn": 3, "est_hit": None},
            [0, 0, 4000],
            "balance: gpu-2 has the fewest requests (3); "
            "gpu-2, with the highest hit_len (4000), failed session_not_evicted (req.est_hit is unknown)",
        ),
        ({"turn": 3, "est_hit": 9000}, [0, 9000, 0], "stick: gpu-1 has the highest hit_len (9000)"),
    ],
)
def test_sentence_has_the_decisive_numbers(fields: dict[str, Any], hits: list[float], sentence: str) -> None:
    snapshot = Snapshot(IDS, {"hit_len": hits, "requests": [20, 4, 3]})
    assert summary(decide(SMETRIC, snapshot, **fields)) == sentence


@pytest.mark.parametrize("pick", ["sample(hit_len)", "rr_argmax(hit_len, within: 9000 tokens)"])
def test_sentence_does_not_call_a_drawn_or_rotated_candidate_the_best(pick: str) -> None:
    body = f"let s = {pick}\nroute s when hit_len[s] > 9999 as full\nroute argmin(requests)"
    assert summary(decide(body, Snapshot(IDS, {"hit_len": [8, 0, 0], "requests": [20, 4, 3]}))) == (
        "route_2: gpu-2 has the fewest requests (3); gpu-0, with hit_len 8, failed hit_len[s] > 9999 (8 ≤ 9999)"
    )


def test_sentence_names_the_tie_break() -> None:
    even = Snapshot(IDS, {"hit_len": [0, 0, 0], "requests": [2, 2, 2]})
    assert summary(decide("route rr_argmin(requests)", even)) == (
        "route_1: gpu-0 has the fewest requests (2), as have 2 more: it is next in the rotation"
    )
    uneven = Snapshot(IDS, {"requests": [3, 2, 9]})
    assert summary(decide("route rr_argmin(requests, within: 2 requests)", uneven)) == (
        "route_1: gpu-0 has nearly the fewest requests (3), as have 1 more: it is next in the rotation"
    )
    best = Snapshot(IDS, {"requests": [2, 3, 9]})
    assert summary(decide("route rr_argmin(requests, within: 2 requests)", best)) == (
        "route_1: gpu-0 has the fewest requests (2), as nearly have 1 more: it is next in the rotation"
    )
    assert summary(decide("route rr_argmin(0)", even)) == "route_1: gpu-0 is next in the rotation among 3"
    assert summary(decide("route rr_argmin(0, then: requests)", uneven)) == (
        "route_1: gpu-1 is taken by lowest requests, then next in the rotation among 3"
    )
    assert summary(decide("route softmin(requests, temperature: 0 requests)", even)).endswith(
        "has the fewest requests (2), as have 2 more: it is drawn"
    )
    assert summary(decide("route argmax(hit_len, then: requests)", even)).endswith(
        "has the highest hit_len (0), as have 2 more: taken by lowest requests, then drawn"
    )


@pytest.mark.parametrize(
    ("loads", "said"),
    [
        ((9424.6, 9424.8, 9424.9), "9424.6 < 9424.77"),
        ((0.12344, 0.12341, 0.12341), "0.12344 > 0.12342"),
        ((2.0, 2.0 + 4e-16, 2.0 + 4e-16), "2 < 2.0000000000000004"),
        ((2.0, 3.0, 4.0), "2 < 3"),
    ],
)
def test_comparison_has_as_many_digits_as_make_it_true(loads: tuple[float, ...], said: str) -> None:
    failing = {"<": ">=", ">": "<="}
    for sign in (said.split()[1], failing[said.split()[1]]):
        body = f"route argmin(requests) when requests[argmax(hit_len)] {sign} mean(requests)\nroute argmax(requests)"
        decision = decide(body, Snapshot(IDS, {"requests": list(loads), "hit_len": [9, 0, 0]}))
        assert f"({said})" in explain(decision).splitlines()[1]


def test_sentence_names_a_rule_that_found_no_candidate() -> None:
    sentence = summary(decide("route argmin(requests where hit_len > 9999) as roomy\nroute argmin(requests)", HOT))
    assert sentence == "route_2: gpu-2 has the fewest requests (3); roomy found no candidate"


def test_sentence_of_an_unknown_history_that_a_filter_reads() -> None:
    body = "prefer hit_len >= 0.5 * req.est_hit\nroute argmin(requests where healthy)\nroute argmin(requests)"
    snapshot = Snapshot(IDS, {**HOT.columns, "healthy": [True, True, True]})
    decision = decide(body, snapshot, est_hit=None)
    assert summary(decision) == "route_1: gpu-2 has the fewest requests (3)"
    assert (decision.runner_up, decision.tied) == ("gpu-1", 1)
    assert "prefer_1    left 3 of 3" in explain(decision)


def test_explanations_never_print_strings_of_a_request() -> None:
    body = 'route argmin(requests) when req.session == "other" as mine\nroute argmax(requests) as rest'
    decision = decide(body, HOT, session="secret-session", tenant="secret-tenant")
    for text in (summary(decision), explain(decision), table(decision), repr(decision)):
        assert "secret" not in text


# ── the table ────────────────────────────────────────────────────────────────


def test_table_has_the_chosen_first_then_the_best_and_counts_the_rest() -> None:
    ids = [f"gpu-{i}" for i in range(40)]
    snapshot = Snapshot(ids, {"requests": [39 - i for i in range(40)]})
    lines = table(decide("route argmin(requests)", snapshot), top=3).splitlines()
    assert [line.split()[0] for line in lines] == ["requests", "gpu-39", "gpu-38", "gpu-37", "…"]
    assert lines[1].endswith("←")
    assert lines[-1] == "    … and 37 more"


@pytest.mark.parametrize("limit", [0, 50, 300, 1900])
def test_table_never_exceeds_its_bytes(limit: int) -> None:
    ids = [f"an-instance-with-a-name-as-long-as-a-sentence-which-is-cut-{i}" for i in range(64)]
    origins: dict[str, Origins] = {"hit_len": [f"source-{i % 3}" for i in range(64)]}
    snapshot = Snapshot(ids, {"requests": [5] * 64, "hit_len": [7] * 64}, origins=origins)
    text = table(decide("route argmax(hit_len, then: requests)", snapshot), top=64, limit_bytes=limit)
    assert len(text.encode()) <= limit
    assert "\n" in text or limit < 300


def test_account_of_a_large_fleet_lists_the_best() -> None:
    ids = [f"gpu-{i}" for i in range(200)]
    lines = explain(decide("route argmin(requests)", Snapshot(ids, {"requests": list(range(200))}))).splitlines()
    assert lines[-1] == "    … and 168 more"
    assert lines[3].split()[0] == "gpu-0"


# ── the pick ─────────────────────────────────────────────────────────────────


def test_runner_up_margin_and_ties_are_of_candidates_only() -> None:
    snapshot = Snapshot(["a", "b", "c", "d"], {"requests": [1, 2, 5, 2], "hit_len": [0, 9, 9, 9]})
    decision = decide("keep hit_len > 0\nroute argmin(requests where requests < 5)\nroute argmin(requests)", snapshot)
    assert (decision.tied, decision.margin, list(decision.candidates)) == (2, 0, [1, 3])
    assert {decision.instance, decision.runner_up} == {"b", "d"}
    best = decide("route argmax(requests)", snapshot)
    assert (best.instance, best.runner_up, best.margin, best.direction, best.tied) == ("c", "b", 3, "max", 1)


@pytest.mark.parametrize(
    ("rules", "cells", "said"),
    [
        ("route argmin(requests)", {"requests": [5.0, 3.0, 9.0]}, "2 of requests ahead of gpu-0"),
        ("let f = requests * 2\nroute argmax(f)", {"requests": [5.0, 3.0, 9.0]}, "8 of f ahead of gpu-0"),
        ("route rr_argmin(requests)", {"requests": [3.0, 3.0]}, "gpu-1 ties by requests"),
        ("route rr_argmin(requests, within: 2 requests)", {"requests": [5.0, 3.0]}, "2 of requests behind gpu-1"),
        ("route rr_argmax(requests, within: 2 requests)", {"requests": [3.0, 5.0]}, "2 of requests behind gpu-1"),
        ("route rr_argmin(requests, within: 2 requests)", {"requests": [3.0, 5.0]}, "2 of requests ahead of gpu-1"),
        ("route argmin(requests)", {"requests": [5.0]}, ""),
        ("route rr_argmin(0)", {"requests": [5.0, 1.0]}, ""),
        ("keep requests > 9\nroute argmin(requests)", {"requests": [5.0, 1.0]}, ""),
    ],
)  # fmt: skip
def test_lead_is_the_margin_over_the_runner_up(rules: str, cells: dict[str, list[Any]], said: str) -> None:
    ids = IDS[: len(cells["requests"])]
    assert lead(decide(rules, Snapshot(ids, cells))) == said
