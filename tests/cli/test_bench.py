"""smetric bench on shipped policies, and what it cannot measure."""

import ast
import json
from pathlib import Path

from click.testing import CliRunner, Result

from smetric.cli import main


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ("bench", *arguments), input=stdin)


def test_a_table_has_one_line_per_request_and_one_column_per_size() -> None:
    result = run("smetric", "--calls", "20")
    assert result.exit_code == 0
    head, sizes, *lines = result.output.rstrip().splitlines()
    assert head.startswith("smetric ")
    assert "µs per decision" in head
    assert sizes.split() == ["8", "32", "128", "1024"]
    assert [(line.split("  ")[0], line.split()[-1]) for line in lines] == [
        ("first turn", "balance"),
        ("later turn, cached", "stick"),
        ("later turn, cache lost", "balance"),
    ]
    assert all(line.count(" / ") == 4 for line in lines)


def test_json_has_every_figure() -> None:
    result = run("load_only", "round_robin", "--calls", "20", "--format", "json")
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert [each["policy"] for each in found] == ["load_only", "round_robin"]
    for each in found:
        assert len(each["hash"]) == 12
        assert len(each["figures"]) == 12
        assert set(each["figures"][0]) == {"instances", "request", "rule", "p50_us", "p99_us"}
        assert all(figure["p99_us"] >= figure["p50_us"] >= 0 for figure in each["figures"])


def test_the_generated_python_is_python() -> None:
    result = run("smetric", "--python")
    assert result.exit_code == 0
    (function,) = ast.parse(result.output).body
    assert isinstance(function, ast.FunctionDef)
    assert [argument.arg for argument in function.args.args] == ["policy", "snapshot", "req", "used", "seed"]
    assert "snapshot.columns" in result.output


def test_libraries_are_passed_over(tmp_path: Path) -> None:
    library, policy = tmp_path / "common.policy", tmp_path / "p.policy"
    library.write_text("library common\ndef busy(x) = max(requests) > x")
    policy.write_text("policy p\nuse common (busy)\nroute argmin(requests) when busy(3)\nroute rr_argmin(0)")
    result = run(str(library), str(policy), "--python")
    assert result.exit_code == 0
    assert result.stdout.count("def decide(") == 1
    assert f"{library}: a library" in result.stderr


def test_what_does_not_check_is_not_measured() -> None:
    result = run("-", stdin="policy p\nroute argmin(reqests)")
    assert result.exit_code == 1
    assert "did you mean `requests`?" in result.stderr
    assert run("none.policy").exit_code == 2
    assert run("smetric", "--python", "--format", "json").exit_code == 2
    assert run("smetric", "--calls", "1").exit_code == 2
