from __future__ import annotations

from smetric import names
from smetric.admin.live import MOST_ROWS, account
from smetric.fleet.record import Migration
from tests.telemetry import samples


def test_the_table_tells_value_age_and_source_of_each_cell_and_what_was_unknown() -> None:
    record = samples.record(hits=(0, 880, 0), loads=(2, 3, 1), known=[False, True, True])
    table = account(record)["table"]
    assert [column["name"] for column in table["columns"]] == ["requests", "hit_len"] or [
        column["name"] for column in table["columns"]
    ] == ["hit_len", "requests"]
    hit = next(i for i, column in enumerate(table["columns"]) if column["name"] == "hit_len")
    assert table["columns"][hit]["unit"] == "tokens"
    rows = {row["id"]: row for row in table["rows"]}
    assert rows["gpu-1"]["chosen"]
    assert rows["gpu-1"]["cells"][hit]["value"] == "880"
    assert rows["gpu-0"]["cells"][hit] == {"value": "0", "unknown": True}


def test_the_rules_tell_both_sides_of_each_comparison_and_the_lines_they_stand_on() -> None:
    record = samples.record(hits=(0, 880, 0), loads=(0, 30, 1))
    told = account(record)
    full, stick, balance = told["rules"]
    assert (full["kind"], full["result"]) == ("reject", "passed over")
    assert stick["guards"] == [
        {"guard": "req.turn != 0", "held": True, "numbers": "req.turn is 3"},
        {"guard": "not_overloaded", "held": False, "numbers": "30 > 2 × 10.33"},
    ]
    assert (balance["fired"], balance["result"]) == (True, "fired")
    first, last = balance["lines"]
    assert told["text"].splitlines()[first - 1 : last] == ["route rr_argmin(requests) as balance"]


def test_a_rule_that_was_not_reached_says_so() -> None:
    told = account(samples.record(names.REJECTED))
    assert [rule["result"] for rule in told["rules"]] == ["fired", "not reached", "not reached"]
    assert [rule["fired"] for rule in told["rules"]] == [True, False, False]


def test_the_instance_a_request_was_taken_away_from_is_marked_and_shown_however_many_there_are() -> None:
    count = MOST_ROWS + 40
    hits = [0.0] * (count - 1) + [880.0]
    record = samples.record(hits=hits, loads=[1.0] * (count - 1) + [2000.0])
    record.migration = Migration(f"gpu-{count - 1}", "not_overloaded", 880)
    table = account(record)["table"]
    assert len(table["rows"]) == MOST_ROWS
    assert table["more"] == count - MOST_ROWS
    assert [row["id"] for row in table["rows"] if row.get("left")] == [table["rows"][1]["id"]] == [f"gpu-{count - 1}"]


def test_where_no_policy_ran_there_is_a_sentence_and_no_table() -> None:
    told = account(samples.record(names.PINNED))
    assert "table" not in told
    assert told["sentence"].startswith("pinned: ")
