"""Page "Your first policy": its commands and their output."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from smetric.features import VOCABULARY
from smetric.policy import Decision, Policy, Snapshot, load
from smetric.request.request import InferenceRequest
from tests.integration.test_policies import figure_13
from tests.walkthrough import Command, steps

PAGE = Path(__file__).parents[2] / "docs" / "start" / "first-policy.md"


@pytest.fixture
def walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which the page was followed."""
    monkeypatch.chdir(tmp_path)
    for step in steps(PAGE.read_text(), tmp_path):
        if isinstance(step, Command):
            assert step.run() == step.expected, step.line
    return tmp_path


def test_first_policy_page_shows_the_output_of_its_commands(walked: Path) -> None:
    assert (walked / "mine.policy").exists()


def test_first_policy_page_has_a_mistake_and_its_fix_in_each_step() -> None:
    sections = re.split(r"\n## (?=\d )", PAGE.read_text())[1:]
    assert len(sections) == 7
    for section in sections:
        assert ("error: " in section and "= help: " in section) or "FAILED " in section, section


def test_first_policy_page_ends_with_figure_13_of_the_paper(walked: Path) -> None:
    policy = load((walked / "mine.policy").read_text(), VOCABULARY)
    assert _differences(policy, random.Random(13)) == []


def _differences(policy: Policy, rng: random.Random) -> list[tuple[Snapshot, InferenceRequest]]:
    """Random situations in which *policy* and the figure differ."""
    found = []
    for _ in range(1500):
        ids = [f"gpu-{i}" for i in rng.sample(range(40), k=rng.randint(1, 9))]
        hits = [rng.choice([0, rng.randint(0, 1000)]) for _ in ids]
        loads = [rng.randint(0, rng.choice([2, 30])) for _ in ids]
        snapshot = Snapshot(ids, {"hit_len": hits, "requests": loads})
        request = InferenceRequest(
            turn=rng.choice([None, 0, 1, 7]), est_hit=rng.choice([None, 0, 1, 500, 1500]), prompt_len=1000
        )
        cursors = rng.choice([{}, {"balance": rng.choice(ids)}])
        decision = policy.decide(snapshot, request, cursors, rng.getrandbits(63))
        assert isinstance(decision, Decision)
        last = cursors.get("balance", "")
        rule, allowed = figure_13(ids, [*hits], [*loads], request.turn, request.est_hit, last)
        if decision.rule != rule or decision.instance not in allowed:
            found.append((snapshot, request))
    return found
