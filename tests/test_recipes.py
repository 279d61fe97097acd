"""Every recipe of the manual checks without a warning, passes its tests, and is laid out canonically."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from smetric.cli import main
from tests.walkthrough import steps

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guide" / "recipes.md"


def run(*words: str) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result.output


def test_every_recipe_checks_passes_and_is_laid_out_canonically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = list(steps(PAGE.read_text(), tmp_path))
    assert len(written) >= 12
    names = [str(path) for path in written]
    assert run("check", *names) == ""
    assert run("fmt", "--check", *names) == ""
    told = run("test", "--min-coverage", "100", *names)
    assert ", 0 failed" in told


def test_the_page_of_policies_names_every_shipped_one_and_no_other() -> None:
    folder = ROOT / "policies"
    shipped = {path.name for path in folder.glob("*.policy")}
    linked = {part.split(")")[0] for part in (folder / "README.md").read_text().split("](")[1:]}
    assert [name for name in linked if not (folder / name).exists()] == []
    assert {name for name in linked if name.endswith(".policy")} == shipped
