"""Reports of check and test: text, JSON, GitHub annotations, JUnit XML."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from tests.cli.commands import BAD, GOOD, run


def test_check_verbose_lists_parameters_and_reads(good: str) -> None:
    printed = run("check", "-v", good, "smetric", "load_only").output
    assert "parameters  OVERLOAD = 2" in printed
    assert "reads       requests" in printed
    assert "looks up    hit_len, when reached by warmest" in printed
    assert "looks up    hit_len, when reached by not_overloaded\n  never       host_hit_len, disk_hit_len, " in printed
    assert printed.endswith("\n  never       hit_len, host_hit_len, disk_hit_len, store_hit_len\n")


def test_check_json_has_code_place_and_help(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text(BAD)
    result = run("check", "--format", "json", str(path))
    assert result.exit_code == 1
    (file,) = json.loads(result.stdout)["files"]
    assert (file["file"], file["ok"]) == (str(path), False)
    first = file["findings"][0]
    assert first == {
        "severity": "error",
        "code": "unknown-name",
        "message": "unknown name `reqests`",
        "help": "did you mean `requests`?",
        "file": str(path),
        "line": 2,
        "column": 14,
        "end_line": 2,
        "end_column": 21,
        "start": 25,
        "end": 32,
    }
    assert [found["code"] for found in file["findings"]] == ["unknown-name", "statement"]


def test_check_json_lists_reads_and_look_ups() -> None:
    (file,) = json.loads(run("check", "--format", "json", "smetric").stdout)["files"]
    assert (file["ok"], file["policy"], file["findings"]) == (True, "smetric", [])
    assert file["reads"] == ["requests"]
    assert file["lookups"]["hit_len"]["when"] == "when reached"
    assert file["lookups"]["hit_len"]["asked_by"] == ["not_overloaded"]
    assert "store_hit_len" in file["never"]


def test_check_github_prints_one_command_per_finding(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text("policy p\nlet f = requests + hit_len\nroute argmin(requests) when 1 < 2\nroute argmin(0)\n")
    lines = run("check", "--format", "github", str(path)).stdout.splitlines()
    assert lines == [
        f"::error file={path},line=2,endLine=2,col=9,endColumn=27,title=units::cannot add requests and tokens"
        "%0Aput both on one scale first, e.g. norm(…) of each, or divide by a rate"
    ]
    path.write_text("policy p\nroute argmin(requests) when 1 < 2\nroute argmin(0)\n")
    result = run("check", "--format", "github", str(path))
    assert result.exit_code == 0
    assert result.stdout.startswith("::warning ")


def test_test_junit_has_every_result(tmp_path: Path) -> None:
    path, junit = tmp_path / "p.policy", tmp_path / "junit.xml"
    path.write_text(GOOD.replace("expect b", "expect a"))
    assert run("test", "--junit", str(junit), str(path), "load_only").exit_code == 1
    root = ElementTree.parse(junit).getroot()
    assert [(suite.get("tests"), suite.get("failures")) for suite in root] == [("1", "1"), ("3", "0")]
    (failure,) = root.iter("failure")
    assert failure.get("message") == "expected a, got b (seed 0)"
    assert "→ first_turn" in (failure.text or "")
    (case,) = root[0]
    assert (case.get("file"), case.get("line")) == (str(path), "9")
    assert run("test", "--junit", str(tmp_path / "no" / "x.xml"), "load_only").exit_code == 2
