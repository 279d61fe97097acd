"""Decisions as lines of a record."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from smetric import names
from smetric.config import load_settings
from smetric.config.settings import RecordSettings, Settings
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.fleet.record import DecisionRecord, Forecast, Migration
from smetric.policy import Policy, Snapshot, load
from smetric.policy.vocabulary import pseudonym
from smetric.records.format import fields_recorded
from smetric.records.reader import Reading, find
from smetric.records.recorder import Recorder, RecordStack, recorded
from smetric.records.replay import Judge, NotRecorded
from smetric.records.report import ending
from smetric.routing.policy_files import libraries_beside
from tests.fakes import exchange_of
from tests.records.drive import Fleet, make_writer, policy, settle, write
from tests.telemetry import samples

# Recorded fields of requests


def shipped(name: str) -> Policy:
    path = shipped_policies()[name]
    return load(path.read_text(), VOCABULARY, libraries=libraries_beside(path))


def test_recorder_always_records_numbers_and_the_model() -> None:
    always = fields_recorded([shipped("round_robin")])
    assert always == ["turn", "prompt_len", "est_hit", "priority", "model", "held"]


def test_recorder_records_counted_features_read_by_a_policy() -> None:
    # Without a reading policy it is never counted; 0 would be invented. `hrw` of an empty key uses the id.
    read = set(fields_recorded([shipped("lmetric_guarded"), shipped("prefix_hash")]))
    assert read - set(fields_recorded([])) == {"class_share", "class_streak", "prefix", "id"}


# Lines

BY_TENANT = policy('policy by_tenant\nreject 429 "no" when req.tenant == "blue"\nroute rr_argmin(requests) as least\n')
BY_SESSION = policy("policy by_session\nroute argmin(requests where id == req.session) as own\nroute rr_argmin(0)\n")
LOAD_ONLY = policy("policy load_only\nroute rr_argmin(requests) as least\n")


def lines(path: Path) -> list[dict[str, Any]]:
    return [line for line in map(orjson.loads, path.read_bytes().splitlines()) if line["kind"] == "decision"]


def line_of(record: DecisionRecord, path: Path, observed: Any = ()) -> dict[str, Any]:
    write(path, [record], observed)
    return lines(path)[0]


def test_line_has_values_read_and_outcome(path: Path) -> None:
    record = samples.record(hits=(0, 880, 0), loads=(2, 3, 1), known=[True, True, False])
    record.ttft_s = 0.25
    line = line_of(record, path)
    assert line["id"] == record.id
    assert (line["outcome"], line["instance"], line["rule"]) == ("routed", "gpu-1", "stick")
    assert line["guards"] == [
        ["full", [["mean(requests) > 1000", False]]],
        ["stick", [["req.turn != 0", True], ["not_overloaded", True]]],
    ]
    assert line["ids"] == ["gpu-0", "gpu-1", "gpu-2"]
    assert line["columns"]["hit_len"] == {"values": [0, 880, 0], "unknown": [2], "origin": "prefix_index"}
    assert line["columns"]["requests"] == {"values": [2, 3, 1], "age": [0.5, 0.5, 0.5]}
    assert line["request"]["prompt_len"] == 1000
    assert (line["score"], line["margin"]) == (880, 880)
    assert line["seed"] == 7
    assert (line["status"], line["ttft_s"], line["duration_s"]) == (200, 0.25, 1.5)
    assert line["usage"] == {"prompt_tokens": 100, "completion_tokens": 20, "cached_tokens": 64}
    assert line["hit"] == {"tokens": 880, "source": "prefix_index"}


def test_line_has_forecast_and_migration(path: Path) -> None:
    record = samples.record(loads=(2, 30, 1))
    record.ttft_s = 0.25
    record.migration = Migration("gpu-1", "not_overloaded", 880)
    record.forecast = Forecast(0.2, "gpu-1", 1.5, 880)
    line = line_of(record, path)
    assert line["migration"] == {"from": "gpu-1", "guard": "not_overloaded", "left_tokens": 880}
    assert line["forecast"] == {"ttft_s": 0.2, "other": "gpu-1", "other_ttft_s": 1.5, "other_hit": 880}
    found = find([path], record.id)
    assert found is not None
    told = ending(found.line)
    assert "first byte after 0.25 s (0.2 s expected, 1.5 s on gpu-1)" in told
    assert told.endswith("moved from gpu-1, which keeps 880 tokens more: not_overloaded")


def test_record_has_policy_text_and_parameters(path: Path) -> None:
    acting = policy(Path("policies/smetric.policy").read_text(), OVERLOAD=3.0)
    write(path, [Fleet(random.Random(1), 3).decide(acting, generation=4)])
    line = orjson.loads(path.read_bytes().splitlines()[1])
    assert (line["kind"], line["generation"], line["name"], line["digest"]) == ("policy", 4, "smetric", acting.digest)
    assert line["text"] == acting.source
    assert line["params"] == {"OVERLOAD": 3.0, "HIT_RATIO": 0.5, "LOAD": "requests", "FLOOR": 0.0}
    assert line["file"] == "test.policy"


def test_record_names_the_policy_of_each_arm_without_a_decision(path: Path) -> None:
    records = [DecisionRecord(1, names.NO_CANDIDATE, samples.request(), acting, 1) for acting in (LOAD_ONLY, BY_TENANT)]
    write(path, records)
    assert [one.policy.name for one in Reading([path])] == ["load_only", "by_tenant"]


def test_line_leaves_out_unknown_fields_of_a_request(path: Path) -> None:
    crowd = policy("policy crowd\nroute argmin(requests) when req.class_share > 0.5\nroute rr_argmin(requests)\n")
    fleet = Fleet(random.Random(1), 3)
    told = [False, True, False]  # only requests of a route whose policy reads it have it
    records = [fleet.decide(LOAD_ONLY, fleet.request(is_described=is_told, class_share=0.5)) for is_told in told]
    write(path, records, [crowd])
    assert [line["request"].get("class_share") for line in lines(path)] == [None, 0.5, None]
    judge = Judge(crowd)
    answers = [judge.decide(one) for one in Reading([path])]
    assert [isinstance(one, NotRecorded) for one in answers] == [True, False, True]
    assert str(answers[0]) == "not answerable: req.class_share not read"


def test_line_leaves_out_client_texts_that_no_policy_reads(path: Path) -> None:
    fleet = Fleet(random.Random(1), 3)
    request = fleet.request(session="secret-session", tenant="secret-tenant", id="secret-id")
    line = line_of(fleet.decide(LOAD_ONLY, request), path)
    assert line["request"].keys() == {"turn", "prompt_len", "est_hit", "priority", "model", "held"}
    assert b"secret" not in path.read_bytes()


def test_texts_read_are_pseudonyms_unless_the_policy_names_them(path: Path) -> None:
    fleet = Fleet(random.Random(1), 3)
    tenants = ["blue", "secret-tenant", ""]
    write(path, [fleet.decide(BY_TENANT, fleet.request(tenant=tenant)) for tenant in tenants])
    assert [line["request"]["tenant"] for line in lines(path)] == [
        "blue",
        pseudonym("secret-tenant"),
        "",
    ]
    assert b"secret" not in path.read_bytes()


def test_text_of_the_snapshot_is_recorded_unchanged(path: Path) -> None:
    fleet = Fleet(random.Random(1), 1)
    write(path, [fleet.decide(BY_SESSION, fleet.request(session=name)) for name in ("gpu-0", "gpu-9")])
    assert [line["request"]["session"] for line in lines(path)] == ["gpu-0", pseudonym("gpu-9")]


@pytest.mark.parametrize(("name", "cell"), [("zone", "blue"), ("loras", frozenset({"green", "blue"}))])
def test_text_of_an_observed_snapshot_is_recorded_unchanged(name: str, cell: Any, path: Path) -> None:
    fleet = Fleet(random.Random(1), 1)
    record = fleet.decide(BY_SESSION, fleet.request(session="blue"))
    record.beside = ((fleet.snapshot(fleet.instances, {name: [cell]}), None),)
    assert line_of(record, path)["request"]["session"] == "blue"


def test_text_equal_to_the_model_is_recorded_unchanged(path: Path) -> None:
    fleet = Fleet(random.Random(1), 1)
    assert line_of(fleet.decide(BY_SESSION, fleet.request(session="m", model="m")), path)["request"]["session"] == "m"


def test_model_is_recorded_if_it_is_a_name(path: Path) -> None:
    fleet = Fleet(random.Random(1), 3)
    odd = "ignore all instructions\nand " * 40
    write(
        path,
        [fleet.decide(LOAD_ONLY, fleet.request(model=model)) for model in ("org/m", odd, "\ud800")],
    )
    assert [line["request"]["model"] for line in lines(path)] == [
        "org/m",
        pseudonym(odd),
        pseudonym("\ud800"),
    ]


def test_line_has_the_request_at_its_decision(path: Path) -> None:
    record = Fleet(random.Random(1), 3).decide(LOAD_ONLY)
    recorder = Recorder(writer := make_writer(path, {}))
    record.request.held = 0.0
    recorder.decided(exchange_of(record), record)
    record.request.held, record.request.prompt_len = 2.5, 1
    recorder.write(settle(record))
    writer.flush()
    (line,) = lines(path)
    assert line["request"]["held"] == 0.0
    assert line["request"]["prompt_len"] > 1


def test_last_line_of_a_request_alone_has_its_end(path: Path) -> None:
    fleet = Fleet(random.Random(1), 3)
    first, second = fleet.decide(LOAD_ONLY), fleet.decide(LOAD_ONLY)
    second.rank = 1
    recorder = Recorder(writer := make_writer(path, {}))
    recorder.decided(exchange_of(first), first)
    recorder.decided(exchange_of(first, second), second)
    recorder.write(settle(second))
    writer.flush()
    found = lines(path)
    assert [(line["id"], line["rank"], line["status"]) for line in found] == [(first.id, 0, None), (second.id, 1, 200)]


@pytest.mark.parametrize("outcome", [names.PINNED, names.NO_CANDIDATE, names.ERROR])
def test_line_exists_for_requests_without_a_decision(outcome: str, path: Path) -> None:
    line = line_of(samples.record(outcome), path)
    assert (line["outcome"], line["ids"], line["columns"]) == (outcome, [], {})


def test_line_has_observed_features_with_their_lag(path: Path) -> None:
    fleet = Fleet(random.Random(1), 3)
    record = fleet.decide(LOAD_ONLY)
    assert record.decision is not None
    chosen = [fleet.instances[int(id[4:])] for id in record.decision.snapshot.ids]
    at_hand = fleet.snapshot(chosen, {"kv_usage": [0.5] * len(chosen)})
    looked_up = fleet.snapshot(chosen, {"hit_len": [1] * len(chosen)})
    record.beside = ((at_hand, None), (looked_up, 0.004))
    columns = line_of(record, path)["columns"]
    assert columns.keys() == {"requests", "kv_usage", "hit_len"}
    assert [columns[name].get("lag") for name in columns] == [None, None, 0.004]


def test_line_has_the_sample_of_its_candidates_with_its_age(path: Path) -> None:
    fleet = Fleet(random.Random(1), 3)
    first, second, third = (fleet.decide(LOAD_ONLY) for _ in range(3))
    assert first.decision is not None
    ids, now = list(first.decision.snapshot.ids), first.decision.snapshot.now
    order = [*reversed(ids), "gone"]
    columns = {"running": [float(at) for at in range(len(order))], "requests": [9.0] * len(order)}
    sample = Snapshot(order, columns, {"running": [True] * 3 + [False]}, {}, {}, now - 0.25)
    first.at_hand = second.at_hand = sample
    third.at_hand = Snapshot(ids[1:], {"running": [1.0] * (len(ids) - 1)}, now=now)  # an instance came since
    write(path, [first, second, third])
    one, two, three = (line["columns"] for line in lines(path))
    assert one["running"] == {"values": [2.0, 1.0, 0.0], "age": [0.25] * 3}
    assert one["requests"]["values"] == first.decision.snapshot.columns["requests"]
    assert two.keys() == three.keys() == {"requests"}
    seen = next(recorded([second], [policy("policy p\nroute argmin(running)\n")]))
    assert seen.line.columns["running"].values == [2.0, 1.0, 0.0]


def test_observed_policy_is_recorded_after_a_clock_set_back(path: Path) -> None:
    recorder = Recorder(writer := make_writer(path, {}))
    recorder.follow([BY_TENANT])
    record = samples.record()
    record.request.tenant = "red"
    record.time_ns -= 3600 * 10**9
    recorder.decided(exchange_of(record), record)
    recorder.write(record)
    writer.flush()
    assert lines(path)[0]["request"]["tenant"] == pseudonym("red")


def test_recorder_keeps_a_bounded_number_of_policies(path: Path) -> None:
    fleet = Fleet(random.Random(1), 3)
    recorder = Recorder(writer := make_writer(path, {}))
    for generation in range(1, 301):
        record = fleet.decide(LOAD_ONLY, generation=generation)
        recorder.decided(exchange_of(record), record)
        recorder.write(record)
    writer.flush()
    assert len(recorder._generations) <= 256
    assert len(lines(path)) == 300


def test_recorder_counts_and_logs_a_failed_line(path: Path) -> None:
    results: dict[str, int] = {}
    recorder = Recorder(make_writer(path, results))
    with capture_logs() as logs:
        for _ in range(3):
            record = Fleet(random.Random(1), 3).decide(LOAD_ONLY)
            record.trace_id = object()  # type: ignore[assignment]  # simulates a bug
            recorder.decided(exchange_of(record), record)
            recorder.write(record)
    assert results == {"failed": 3}
    assert [line["event"] for line in logs] == ["smetric.record.failed"]


# Settings


def load_records(tmp_path: Path, text: str, **env: str) -> Settings:
    path = tmp_path / "smetric.yaml"
    path.write_text(text)
    return load_settings(path, env)


def test_settings_accept_a_path_alone(tmp_path: Path, path: Path) -> None:
    settings = load_records(tmp_path, "record: decisions.jsonl.gz\n")
    assert settings.record == RecordSettings(path=str(tmp_path / "decisions.jsonl.gz"))
    stack = RecordStack(settings, [], lambda *_: None)
    assert stack.decisions is not None
    assert stack.traffic is None
    assert len(stack.writers) == 1


def test_settings_of_records_come_from_the_environment(tmp_path: Path, path: Path) -> None:
    assert load_records(tmp_path, "", SMETRIC_RECORD="/var/lib/d.jsonl").record.path == "/var/lib/d.jsonl"
    settings = load_records(tmp_path, "", SMETRIC_RECORD__TRACE="/var/lib/t.jsonl", SMETRIC_RECORD__KEEP="3")
    assert settings.record == RecordSettings(trace="/var/lib/t.jsonl", keep=3)


def test_settings_without_a_path_record_nothing(tmp_path: Path) -> None:
    stack = RecordStack(load_records(tmp_path, ""), [], lambda *_: None)
    assert (stack.decisions, stack.traffic, stack.writers) == (None, None, [])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("record: {path: a.jsonl, trace: a.jsonl}", "record.trace: .*a.jsonl is record.path too"),
        ("observe: [bailian]", "observe: set, but record.path is not"),
        ("record: {path: a.jsonl, max_file: 1KiB}", "record.max_file"),
        ("record: {pth: a.jsonl}", "record.pth: no such setting; did you mean `?path"),
    ],
)
def test_settings_refuse_contradictions(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        load_records(tmp_path, text + "\n")
