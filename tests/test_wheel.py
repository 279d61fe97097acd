"""A wheel carries the grammar and the shipped policies, and an installed one finds them without the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def run(*command: str, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder), folder=ROOT)
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_holds_the_package_its_data_and_its_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "smetric/_data/grammar/smetric.lark" in names
    page = {path.name for path in (ROOT / "smetric" / "admin" / "ui").iterdir()}
    assert {Path(name).name for name in names if name.startswith("smetric/admin/ui/")} == page
    assert {Path(name).name for name in names if name.startswith("smetric/_data/policies/")} == {
        path.name for path in (ROOT / "policies").iterdir()
    }
    assert "smetric/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_an_installed_wheel_checks_the_shipped_policies_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, "--no-deps", "--no-index", "--no-compile", "--target", str(site), str(wheel), folder=tmp_path)
    program = """
import sys
site, checkout = sys.argv[1:]
sys.path[:] = [site, *(path for path in sys.path if path != checkout)]
import smetric
assert smetric.__file__.startswith(site), smetric.__file__
from smetric.cli import main
main(["check", "--verbose"])
"""
    printed = run(sys.executable, "-I", "-c", program, str(site), str(ROOT), folder=tmp_path)
    for path in (ROOT / "policies").glob("*.policy"):
        assert path.stem in printed
