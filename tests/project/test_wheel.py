"""Built wheel of `smetric-router`: name, content, and command without the checkout."""

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from smetric import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

pytestmark = pytest.mark.slow


def run(*command: str, folder: Path, environ: dict[str, str] | None = None) -> str:
    """Run *command* in *folder* and return its output."""
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **(environ or {})},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel, alone in a folder."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder), folder=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def site(wheel: Path, tmp_path: Path) -> Path:
    """Return the folder of the installed wheel, without its dependencies."""
    folder = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, "--no-deps", "--no-index", "--no-compile", "--target", str(folder), str(wheel), folder=tmp_path)
    return folder


def test_wheel_holds_package_data_and_licence(wheel: Path) -> None:
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


def test_wheel_is_called_smetric_router_and_keeps_package_and_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = f"smetric_router-{__version__}.dist-info"
    metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert (metadata["Name"], metadata["Version"]) == ("smetric-router", __version__)
    assert metadata.get_all("Provides-Extra") == sorted(PROJECT["optional-dependencies"])
    assert {name.partition("/")[0] for name in archive.namelist()} == {"smetric", info}
    assert "[console_scripts]\nsmetric = " in archive.read(f"{info}/entry_points.txt").decode()


def test_installed_wheel_checks_shipped_policies_without_checkout(site: Path, tmp_path: Path) -> None:
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


def test_installed_command_prints_its_version(site: Path, tmp_path: Path) -> None:
    printed = run(str(site / "bin" / "smetric"), "--version", folder=tmp_path, environ={"PYTHONPATH": str(site)})
    assert printed == f"smetric {__version__}\n"


def test_uvx_runs_the_command_from_the_distribution(wheel: Path, tmp_path: Path) -> None:
    uvx = Path(sys.executable).with_name("uvx")
    if not uvx.exists():
        pytest.skip("uv is not installed")
    # No network: uv leaves the dependencies out, and Python finds those of the tests.
    names = [Requirement(text).name for text in PROJECT["dependencies"]]
    overrides = tmp_path / "overrides.txt"
    overrides.write_text("".join(f"{name}; python_version < '0'\n" for name in names))
    uvx_smetric = [str(uvx), "--offline", "--no-cache", "--no-config", "--no-index", "--find-links", str(wheel.parent)]
    uvx_smetric += ["--overrides", str(overrides), "--python", sys.executable, "--from", "smetric-router", "smetric"]
    environ = {"PYTHONPATH": sysconfig.get_path("purelib")}
    assert run(*uvx_smetric, "--version", folder=tmp_path, environ=environ) == f"smetric {__version__}\n"
    assert "smetric" in run(*uvx_smetric, "check", "--verbose", folder=tmp_path, environ=environ)
