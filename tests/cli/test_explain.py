"""`smetric explain` on a snapshot, and on a recorded decision."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from smetric.files import shipped_policies
from smetric.fleet.record import DecisionRecord
from smetric.policy import Policy
from smetric.policy.explain import explain
from smetric.request.request import InferenceRequest
from tests.cli.commands import run
from tests.records.drive import Fleet, policy, write

THREE = {
    "instances": [
        {"id": "gpu-0", "requests": 20, "hit_len": 8000, "age(requests)": 0.4},
        {"id": "gpu-1", "requests": 4, "hit_len": 0},
        {"id": "gpu-2", "requests": 3, "hit_len": None},
    ],
    "request": {"turn": 3, "prompt_len": 9000, "est_hit": 8000},
}


@pytest.fixture
def three(tmp_path: Path) -> str:
    path = tmp_path / "three.json"
    path.write_text(json.dumps(THREE))
    return str(path)


def test_explain_snapshot_unreadable_is_a_usage_error(good: str, tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff")
    for name, reason in (
        ("none", "cannot be read: No such file or directory; give a JSON file, or - for standard input"),
        ("binary", "not a snapshot as JSON: JSON is malformed: invalid character (byte 0)"),
    ):
        path = tmp_path / f"{name}.json"
        result = run("explain", good, "--snapshot", str(path))
        assert (result.exit_code, result.output) == (2, f"Error: {path}: {reason}\n")


def test_explain_snapshot_shows_the_reason(three: str) -> None:
    result = run("explain", "smetric", "--snapshot", three)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("smetric: route to gpu-2")
    assert "✗ not_overloaded" in result.output
    assert run("explain", "smetric", "--snapshot", "-", stdin=json.dumps(THREE)).output == result.output


def test_explain_takes_parameters(three: str) -> None:
    result = run("explain", "smetric", "--snapshot", three, "--set", "OVERLOAD=5")
    assert result.output.startswith("smetric: route to gpu-0")
    result = run("explain", "smetric", "--snapshot", three, "--set", "OVERLOD=5")
    assert result.exit_code == 1
    assert "error: `--set` sets `OVERLOD`, which this policy does not declare" in result.output
    assert "did you mean `OVERLOAD`?" in result.output


def test_explain_snapshot_without_a_look_up_means_unknown() -> None:
    rows = [{"id": "a", "requests": 1}, {"id": "b", "requests": 2}]
    later = {"instances": rows, "request": {"turn": 2, "est_hit": 100, "prompt_len": 200}}
    result = run("explain", "smetric", "--snapshot", "-", stdin=json.dumps(later))
    assert result.exit_code == 0, result.output
    assert "hit_len" in result.output
    first = run("explain", "smetric", "--snapshot", "-", stdin=json.dumps({"instances": rows}))
    assert "not looked up" in first.output or "hit_len" not in first.output


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "<stdin>: not a snapshot as JSON: Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ({"instance": []}, "Object contains unknown field `instance`"),
        ({}, "Object missing required field `instances`"),
        ({"instances": []}, "Expected `array` of length >= 1 - at `$.instances`"),
        ({"instances": [{"id": "a"}, {"id": "a"}]}, 'instances[1]: id: expected a text of its own, got "a"'),
        ({"instances": [{"id": "a", "reqests": 1}]}, "instances[0]: reqests: no such name; did you mean requests?"),
        ({"instances": [{"id": "a", "requests": "1"}]}, 'instances[0]: requests: expected a number, got "1"'),
        ({"instances": [{"id": "a", "requests": -1}]}, "requests: expected a number from 0 to"),
        ({"instances": [{"id": "a", "age(requests)": "x"}]}, "age(requests): expected seconds"),
        (
            {"instances": [{"id": "a", "hit_len": 9}], "request": {"prompt_len": 8}},
            "hit_len: expected a number from 0 to 8",
        ),
        ({"instances": [{"id": "a"}], "request": {"turns": 1}}, "request: turns: no such name; did you mean turn?"),
        ({"instances": [{"id": "a"}], "request": {"prompt_len": None}}, "prompt_len: is never unknown"),
        ({"instances": [{"id": "a"}], "cursors": {"x": 1}}, "Expected `str`, got `int` - at `$.cursors[...]`"),
        ({"instances": [{"id": "a"}], "seed": -1}, "seed: expected a whole number"),
        ('{"instances": [{"id": "a", "requests": NaN}]}', "JSON is malformed: invalid character"),
        ("[" * 100_000, "<stdin>: "),
    ],
)
def test_explain_snapshot_mistake_is_one_line_with_its_place(document: Any, message: str) -> None:
    text = document if isinstance(document, str) else json.dumps(document)
    result = run("explain", "smetric", "--snapshot", "-", stdin=text)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def test_explain_snapshot_is_bounded() -> None:
    result = run("explain", "smetric", "--snapshot", "/dev/zero")
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "/dev/zero: larger than 67108864 bytes; is this the right file?" in result.output


@pytest.mark.parametrize(
    "arguments",
    [(), ("smetric",), ("--snapshot", "-"), ("smetric", "--snapshot", "-", "--decision", "A"), ("--decision", "a b"),
     ("--decision", "A", "--admin", "localhost"), ("smetric", "--snapshot", "-", "--set", "OVERLOAD")],
)  # fmt: skip
def test_explain_requires_a_snapshot_or_a_decision(arguments: tuple[str, ...]) -> None:
    result = run("explain", *arguments, stdin='{"instances": [{"id": "a"}]}')
    assert result.exit_code == 2
    assert "Error: " in result.output


@pytest.fixture
def smetric() -> Policy:
    return policy(shipped_policies()["smetric"].read_text())


@pytest.fixture
def made(smetric: Policy) -> list[DecisionRecord]:
    fleet = Fleet(random.Random(3), 4)
    requests = [InferenceRequest(turn=3, prompt_len=9000, est_hit=8000), InferenceRequest(turn=0, prompt_len=9000)]
    return [fleet.decide(smetric, request) for request in requests]


@pytest.fixture
def record(made: list[DecisionRecord], tmp_path: Path) -> str:
    path = tmp_path / "decisions.jsonl"
    write(path, made)
    return str(path)


def test_explain_record_as_it_was_decided(made: list[DecisionRecord], record: str) -> None:
    for each in made:
        assert each.decision is not None
        result = run("explain", "--record", record, "--decision", each.id)
        assert result.exit_code == 0, result.output
        account = explain(each.decision)
        assert result.stdout.startswith(account)
        assert "  flips at " in result.stdout[len(account) :]
        assert "\nanswered 200 after 1.5 s; 64 of 100 prompt tokens were cached" in result.stdout


def test_explain_record_with_other_parameters_or_policy(made: list[DecisionRecord], record: str) -> None:
    first = made[0].id
    assert (
        run(
            "explain", "--record", record, "--decision", first, "--set", "OVERLOAD=1000", "--set", "HIT_RATIO=0"
        ).exit_code
        == 0
    )
    other = run("explain", "bailian", "--record", record, "--decision", first)
    assert other.stdout.startswith("bailian: route to ")
    wrong = run("explain", "--record", record, "--decision", first, "--set", "OVERLOD=2")
    assert wrong.exit_code == 1
    assert "`--set` sets `OVERLOD`, which this policy does not declare" in wrong.output
    assert "did you mean `OVERLOAD`?" in wrong.output


def test_explain_record_without_a_look_up_is_not_answerable(made: list[DecisionRecord], record: str) -> None:
    result = run("explain", "bailian", "--record", record, "--decision", made[1].id)
    assert result.exit_code == 1
    assert "not answerable: hit_len not read, so bailian cannot decide it" in result.output


def test_explain_record_missing_is_named(record: str) -> None:
    missing = run("explain", "--record", record, "--decision", "01NONE")
    assert (missing.exit_code, missing.output) == (1, f"Error: decision 01NONE is not in {record}\n")
    assert run("explain", "--record", f"{record}.none", "--decision", "01NONE").exit_code == 2
    assert run("explain", "--record", record).exit_code == 2
