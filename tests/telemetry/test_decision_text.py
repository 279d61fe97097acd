from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from smetric import names
from smetric.features import VOCABULARY
from smetric.fleet.record import Forecast, Migration, Shadowed
from smetric.policy import Decision, Snapshot, load
from smetric.policy.explain import foremost
from smetric.telemetry import decision_text
from smetric.telemetry.decision_text import note_of, notes_of, summary_of
from tests.telemetry.samples import fleet, record, request


def decision(count: int = 3, *, id: str = "gpu-{}", known: list[bool] | None = None, turn: int = 0) -> Decision:
    loads = [float(1 + (i * 7) % count) for i in range(count)]
    hits = [float(10 * i) for i in range(count)]
    made = record(hits=hits, loads=loads, instances=fleet(count, id=id), known=known, turn=turn)
    assert made.decision is not None
    return made.decision


def test_foremost_are_the_chosen_one_then_the_best_scores() -> None:
    made = decision(32)
    order = foremost(made, 8)
    assert order[0] == made.index
    assert made.score is not None
    scores = [made.score[i] for i in order]
    assert scores == sorted(made.score)[:8]
    assert len(foremost(made, 0)) == 0


def test_rows_have_the_features_and_unknown_cells() -> None:
    made = decision(3, known=[True, True, False])
    by_id = {row["id"]: row for row in decision_text.rows(made, 8)}
    assert by_id["gpu-2"]["unknown"] == ["hit_len"]
    assert "unknown" not in by_id["gpu-1"]
    assert by_id["gpu-1"]["hit_len"] == 10
    assert [row["id"] for row in by_id.values() if row.get("chosen")] == [made.snapshot.ids[made.index]]


def test_rows_name_the_source_and_tier_of_each_looked_up_cell() -> None:
    made = decision(3)
    made.snapshot.origins = {"hit_len": ["kv_events", "", "lmcache:host"]}
    sources = {row["id"]: row.get("hit_len_source") for row in decision_text.rows(made, 8)}
    assert sources == {"gpu-0": "kv_events", "gpu-1": None, "gpu-2": "lmcache:host"}
    assert "hit_len from kv_events (gpu-0), lmcache:host (gpu-2)" in decision_text.as_text(made, "Why.", 8)


@pytest.mark.parametrize("id", ["gpu-{}", "a-very-long-name-of-an-instance-" * 6 + "{}", "ünï-" * 40 + "{}"])
@pytest.mark.parametrize("top", [0, 1, 8, 32])
def test_json_and_text_are_below_two_kilobytes(id: str, top: int) -> None:
    made = decision(1024, id=id)
    text = decision_text.as_json(made, top)
    assert len(text.encode()) <= decision_text.LIMIT
    rows = orjson.loads(text)
    assert len(rows) <= top
    assert bool(rows) == bool(top)
    assert len(decision_text.as_text(made, decision_text.summary(made), top).encode()) <= decision_text.LIMIT


def test_text_folds_guards_that_do_not_fit_on_a_line() -> None:
    source = (Path(__file__).parents[2] / "policies" / "smetric.policy").read_text()
    acting = load(source, VOCABULARY, path="smetric.policy")
    snapshot = Snapshot(["a", "b"], {"hit_len": [1356.0, 0.0], "requests": [3.0, 3.0]})
    made = acting.decide(snapshot, request(turn=1, est_hit=1344), {}, 1)
    assert isinstance(made, Decision)
    shown = decision_text.as_text(made, "Why.", 8).splitlines()
    assert shown[2:4] == [
        "  → stick    ✓ req.turn != 0 (req.turn is 1)   ✓ not_overloaded (3 ≤ 2 × 3)",
        "             ✓ session_not_evicted (1356 > 0.5 × 1344)",
    ]


def test_text_keeps_both_sides_of_each_comparison() -> None:
    source = (Path(__file__).parents[2] / "policies" / "smetric.policy").read_text()
    acting = load(source, VOCABULARY, path="smetric.policy")
    snapshot = Snapshot(["a", "b", "c"], {"hit_len": [102998.0, 0.0, 0.0], "requests": [13.0, 8.0, 18.0]})
    made = acting.decide(snapshot, request(turn=41, est_hit=102992), {}, 1)
    assert isinstance(made, Decision)
    assert "✓ session_not_evicted (102998 > 0.5 × 102992)\n" in decision_text.as_text(made, "Why.", 8)


def test_text_shows_the_last_of_many_long_rules() -> None:
    guards = " and ".join(f"requests[argmin(requests)] > {1000 + i}" for i in range(4))
    rules = "\n".join(f"route argmin(requests) when {guards} as rule_{i}" for i in range(12))
    acting = load(f"policy long\n{rules}\nroute argmin(requests) as rest\n", VOCABULARY, path="long.policy")
    made = acting.decide(Snapshot(["a", "b"], {"requests": [3.0, 4.0]}), request(), {}, 1)
    assert isinstance(made, Decision)
    shown = decision_text.as_text(made, "Why.", 8)
    assert len(shown.encode()) <= decision_text.LIMIT
    assert " more before\n" in shown
    assert "→ rest" in shown
    assert "←" in shown


def test_json_has_six_digits_of_a_score_larger_than_it_holds() -> None:
    made = record(loads=(1e19, 2e19, 3e19), turn=0).decision
    assert made is not None
    assert orjson.loads(decision_text.as_json(made, 8))[0]["requests"] in (1e19, 2e19, 3e19)


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (names.ROUTED, "stick: gpu-1 has the highest hit_len (880)"),
        (names.REJECTED, "full: rejected with 429"),
        (names.PINNED, "pinned: gpu-0 holds the response this request continues"),
        (names.ERROR, "the policy failed to evaluate"),
        (names.NO_CANDIDATE, "no instance may serve this request"),
    ],
)
def test_summary_of_each_outcome_is_a_sentence(outcome: str, said: str) -> None:
    assert summary_of(record(outcome)).startswith(said)


def test_summary_without_a_policy_names_the_instance() -> None:
    made = record(names.NO_CANDIDATE)
    made.outcome, made.instance = names.ROUTED, fleet()[0]
    assert summary_of(made).startswith("gpu-0: no inference")


def test_notes_have_the_migration_and_the_forecast() -> None:
    made = record()
    assert notes_of(made) == []
    made.migration = Migration("gpu-2", "not_overloaded", 20)
    made.forecast = Forecast(1.0, "gpu-2", 2.0, 3)
    moved, expected = notes_of(made)
    assert moved == "moved    from gpu-2, which keeps 20 tokens more: not_overloaded"
    assert expected == "expected 1 s to the first token, 2 s on gpu-2"


MOST_LOADED = load("policy most\nroute argmax(requests) as most\n", VOCABULARY)


def test_note_marks_a_shadow_that_agrees() -> None:
    made = record(loads=(2, 1, 5))
    assert made.decision is not None
    decided = MOST_LOADED.decide(made.decision.snapshot, made.request, {}, 7)
    assert isinstance(decided, Decision)
    agreeing = Shadowed(MOST_LOADED, 3, names.AGREES, decision=decided)
    assert note_of(agreeing) == "most would choose gpu-2 too"
