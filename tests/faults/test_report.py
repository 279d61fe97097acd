from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults import report

CASES = """<testsuites><testsuite>
<testcase name="test_a1_one"><properties><property name="F7" value="5 ms"/></properties></testcase>
<testcase name="test_a1_two[x]"><failure message="no"/></testcase>
<testcase name="test_a1_three"><error message="in its fixture"/></testcase>
<testcase name="test_h11_alone"><skipped message="no process can be confined here"/></testcase>
<testcase name="test_b10_beside_b1"/>
<testcase name="test_of_no_row"/>
</testsuite></testsuites>"""


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path with the results of an earlier run."""
    kept = tmp_path / "reliability.json"
    rows = {"A1": {"passed": 3, "failed": 0}, "B1": {"passed": 1, "failed": 0}}
    kept.write_text(json.dumps({"normal": {"rows": rows, "figures": {}}}))
    monkeypatch.setattr(report, "RESULTS", kept)
    return kept


def run(monkeypatch: pytest.MonkeyPatch, code: int, *arguments: str) -> tuple[int, list[str]]:
    """Return the exit code of `report` and its call of pytest, which ends with *code*."""
    called: list[str] = []

    def instead(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        for word in command:
            if word.startswith("--junitxml="):
                called.extend(command)
                Path(word.partition("=")[2]).write_text(CASES)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", instead)
    monkeypatch.setattr(sys, "argv", ["report", *arguments])
    return report.main(), called


def test_report_counts_passed_failed_and_skipped_tests_of_a_row(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, 1)[0] == 1
    assert json.loads(results.read_text())["normal"] == {
        "rows": {
            "A1": {"passed": 1, "failed": 2},
            "B10": {"passed": 1, "failed": 0},
            "H11": {"passed": 0, "failed": 0, "skipped": 1},
        },
        "figures": {"F7": "5 ms"},
    }


def test_report_renews_whole_rows_and_keeps_others(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, called = run(monkeypatch, 0, "a1", "H11", "D15")
    assert code == 0
    # the time of D5 stands in the same figure as that of D15
    assert called[called.index("-k") + 1] == "test_a1_ or test_d15_ or test_d5_ or test_h11_"
    rows = json.loads(results.read_text())["normal"]["rows"]
    assert (rows["A1"], rows["B1"]) == ({"passed": 1, "failed": 2}, {"passed": 1, "failed": 0})


@pytest.mark.parametrize("code", [2, 3, 4, 5])
def test_report_ignores_an_incomplete_run(
    code: int, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = results.read_text()
    assert run(monkeypatch, code)[0] == code
    assert results.read_text() == before
    assert "nothing is written" in capsys.readouterr().err


def test_report_names_an_unknown_row(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, 0, "Z9")
    assert "Z9: no such row" in capsys.readouterr().err
