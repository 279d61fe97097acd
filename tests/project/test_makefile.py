"""Environment that `make` sets up."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_makefile_recreates_environment_after_move_or_copy(tmp_path: Path) -> None:
    here, there = tmp_path / "a checkout", tmp_path / "another"
    scripts = here / ".venv" / "bin"
    scripts.mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "requirements-build.lock"):
        shutil.copy(ROOT / name, here)
    for made in (scripts / "python", here / ".venv" / "installed"):
        made.touch()

    def set_up(folder: Path) -> bool:
        done = subprocess.run(
            ["make", "-n", "demo"], cwd=folder, capture_output=True, text=True, timeout=20, check=True
        )
        return "-m venv" in done.stdout

    assert not set_up(here)  # as an earlier release left it, without the location
    (here / ".venv" / "where").write_text(f"{here.resolve()}\n")
    assert not set_up(here)
    shutil.copytree(here, there)
    assert set_up(there)
    assert not set_up(here)
