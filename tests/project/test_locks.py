"""Lock files: content of pyproject.toml, hashes, no address of a registry."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = {
    "requirements.lock": ["project"],
    "requirements-build.lock": ["build"],
    "requirements-audit.lock": ["audit"],
    "requirements-docs.lock": ["docs"],
    "requirements-dev.lock": ["project", "build", "dev"],
}


def asked_for(name: str) -> list[Requirement]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    texts = project["project"]["dependencies"] if name == "project" else project["dependency-groups"][name]
    return [Requirement(text) for text in texts if isinstance(text, str)]


def pinned(lock: str) -> dict[str, str]:
    lines = re.findall(r"^(\S+)==([^\s;]+)", (ROOT / lock).read_text(), re.M)
    return {canonicalize_name(name): version for name, version in lines}


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_holds_requirements(lock: str) -> None:
    versions = pinned(lock)
    for group in LOCKS[lock]:
        for requirement in asked_for(group):
            version = versions.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement.name} is not in {lock}: run `make lock`"
            assert requirement.specifier.contains(version), f"{lock} pins {requirement.name} {version}: run `make lock`"


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_has_hashes_and_no_registry_address(lock: str) -> None:
    text = (ROOT / lock).read_text()
    entries = re.split(r"^(?=\S)", text, flags=re.M)
    assert [entry for entry in entries if entry.strip() and "--hash=sha256:" not in entry] == []
    assert "://" not in text
    assert "index" not in text


def test_lock_of_tests_contains_versions_for_users() -> None:
    assert pinned("requirements.lock").items() <= pinned("requirements-dev.lock").items()
    assert pinned("requirements-build.lock").items() <= pinned("requirements-dev.lock").items()


def test_lock_build_requirements_are_stated_once() -> None:
    system = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert [str(Requirement(text)) for text in system] == [str(requirement) for requirement in asked_for("build")]
