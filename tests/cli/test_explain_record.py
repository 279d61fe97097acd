"""`smetric explain` on a recorded decision: by the policy that made it, by it set differently, or by another one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from smetric.cli import main
from smetric.files import shipped_policies
from smetric.fleet.record import DecisionRecord
from smetric.policy import Policy
from smetric.policy.explain import explain
from smetric.request.request import InferenceRequest
from tests.records.drive import Fleet, policy, write


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


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


def test_a_recorded_decision_is_explained_as_it_was_made(made: list[DecisionRecord], record: str) -> None:
    for each in made:
        assert each.decision is not None
        result = run("--record", record, "--decision", each.id)
        assert result.exit_code == 0, result.output
        account = explain(each.decision)
        assert result.stdout.startswith(account)
        assert "  flips at " in result.stdout[len(account) :]


def test_what_if_it_had_been_set_differently_or_another_policy_had_decided(
    made: list[DecisionRecord], record: str
) -> None:
    first = made[0].id
    assert run("--record", record, "--decision", first, "--set", "OVERLOAD=1000", "--set", "HIT_RATIO=0").exit_code == 0
    other = run("bailian", "--record", record, "--decision", first)
    assert other.stdout.startswith("bailian: route to ")
    wrong = run("--record", record, "--decision", first, "--set", "OVERLOD=2")
    assert wrong.exit_code == 1
    assert "`--set` sets `OVERLOD`, which this policy does not declare" in wrong.output
    assert "did you mean `OVERLOAD`?" in wrong.output


def test_what_was_not_recorded_is_not_made_up(made: list[DecisionRecord], record: str) -> None:
    result = run("bailian", "--record", record, "--decision", made[1].id)
    assert result.exit_code == 1
    assert "not answerable: hit_len not read, so bailian cannot decide it" in result.output


def test_a_decision_or_a_file_that_is_not_there_is_named(record: str) -> None:
    missing = run("--record", record, "--decision", "01NONE")
    assert (missing.exit_code, missing.output) == (1, f"Error: decision 01NONE is not in {record}\n")
    assert run("--record", f"{record}.none", "--decision", "01NONE").exit_code == 2
    assert run("--record", record).exit_code == 2
