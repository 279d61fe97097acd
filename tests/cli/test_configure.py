"""`smetric init`, and colours of reports."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from smetric.cli import main
from smetric.cli.options import painted
from tests.cli.commands import BAD, run


def test_init_writes_what_check_and_test_accept(tmp_path: Path) -> None:
    result = run("init", str(tmp_path / "new"), "--instance", "http://10.0.0.7:8000")
    assert result.exit_code == 0, result.output
    settings, policy = (str(tmp_path / "new" / name) for name in ("smetric.yaml", "mine.policy"))
    assert f"smetric serve --config {settings}" in result.stdout
    assert "  - http://10.0.0.7:8000\n" in Path(settings).read_text()
    assert run("test", "--min-coverage", "100", policy).stdout == "12 passed, 0 failed\n"
    for command in (("check", policy), ("fmt", "--check", policy), ("config", "check", settings)):
        checked = run(*command)
        assert (checked.exit_code, checked.output) == (0, ""), command
    examples = re.sub(r"^# (?=[a-z]+: )", "", Path(settings).read_text(), flags=re.M)
    Path(settings).write_text(examples)
    assert run("config", "show", "--config", settings).exit_code == 0


def test_init_keeps_existing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.policy").write_text("mine")
    result = run("init")
    assert result.exit_code == 2
    assert "mine.policy: exists already" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.policy"]
    assert run("init", "other", "--instance", "x").exit_code == 2
    assert not Path("other").exists()


def test_reports_have_colours_on_a_terminal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    path = tmp_path / "bad.policy"
    path.write_text(BAD)
    assert "\x1b" not in run("check", str(path)).output
    assert (
        click.style("error", fg="red", bold=True) in CliRunner().invoke(main, ("check", str(path)), color=True).output
    )
    text = "FAILED a\npassed b\n    → stick ✓ a ✗ b\n  | x\n  |  ^^\n  = help: do\nwarning: w"
    assert click.unstyle(painted(text)) == text
    assert painted(text).count("\x1b[0m") == 8
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted(text) == text
