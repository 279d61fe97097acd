"""Fault matrix: its tests, its page and its results."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ROWS = tomllib.loads((HERE / "matrix.toml").read_text())
FIGURES = tomllib.loads((HERE / "figures.toml").read_text())
WANTED = [row for row, about in ROWS.items() if about["priority"] in ("P0", "P1") and "instead" not in about]


def rows_tested() -> set[str]:
    found = (re.findall(r"def test_([a-i]\d+)_", path.read_text()) for path in (ROOT / "tests").rglob("test_*.py"))
    return {row.upper() for rows in found for row in rows}


def test_matrix_rows_of_a_release_have_tests() -> None:
    assert set(WANTED) - rows_tested() == set()


def test_matrix_has_each_row_that_tests_name() -> None:
    assert rows_tested() - set(ROWS) == set()


@pytest.mark.parametrize("name", [*ROWS, *FIGURES])
def test_manual_has_a_line_for_each_row_and_figure(name: str) -> None:
    assert f"\n| {name} | " in (ROOT / "docs" / "internals" / "reliability.md").read_text()


def test_matrix_rows_passed_in_the_last_run() -> None:
    runs = json.loads((ROOT / "docs" / "figures" / "reliability.json").read_text())
    assert {kind: [row for row, counts in run["rows"].items() if counts["failed"]] for kind, run in runs.items()} == {
        kind: [] for kind in runs
    }
    ran = {row for run in runs.values() for row, counts in run["rows"].items() if counts["passed"]}
    assert set(WANTED) - ran == set()
