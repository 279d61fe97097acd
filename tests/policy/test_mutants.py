"""Mutants of the shipped policies are caught by their tests or promises: some in each run, all on demand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from smetric.files import shipped_policies
from tests.policy.mutants import Trial, mutants

pytestmark = pytest.mark.slow

SHIPPED = list(shipped_policies().values())
#: Mutants of each policy tried in a normal run.
SAMPLE = 3


def _survivors(path: Path, sample: int | None, situations: int) -> list[str]:
    trial = Trial(path, situations)
    found = mutants(trial.source)
    if sample is not None:
        found = random.Random(path.stem).sample(found, min(sample, len(found)))
    return [mutant.change for mutant in found if trial.survives(mutant)]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_some_mutants_of_a_policy_are_caught(path: Path) -> None:
    assert _survivors(path, SAMPLE, 200) == []


@pytest.mark.soak
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_all_mutants_of_a_policy_are_caught(path: Path) -> None:
    assert _survivors(path, None, 1000) == []


def test_a_policy_without_tests_catches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text("policy p\nroute argmin(requests) when req.turn < 3\nroute argmax(requests)\n")
    changes = _survivors(path, None, 200)
    assert "line 2: `argmin` → `argmax`" in changes
    assert "line 2: `3` → `6`" in changes
