from __future__ import annotations

import os
from pathlib import Path

import pytest

from smetric.config.credential import Credential, credential
from smetric.errors import ConfigError
from tests.clock import Clock


def test_credential_is_none_if_nothing_is_set() -> None:
    assert credential("admin.token_file", "", "") is None


def test_credential_follows_its_file_and_keeps_the_last_good_secret(tmp_path: Path) -> None:
    clock, file = Clock(0.0), tmp_path / "secret"
    file.write_text("first\n")
    secret = Credential("x", "", str(file), clock=clock)
    assert secret.text == "first"
    file.write_text("second one")
    assert secret.text == "first"  # not looked at yet
    clock.now = 1.0
    assert secret.text == "first"  # no secret has a space
    file.unlink()
    clock.now = 2.0
    assert secret.text == "first"
    replacement = tmp_path / "new"
    replacement.write_text("third\n")
    replacement.rename(file)
    clock.now = 3.0
    assert secret.text == "third"


@pytest.mark.parametrize("text", ["", "two words", "short", "no-ascii-é-in-a-secret", "x" * 5000])
def test_credential_refuses_invalid_secret_without_showing_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"admin\.token_file: expected 16 to 4096 printable") as refused:
        Credential("admin.token_file", "", str(file), least=16)
    assert not text or text not in str(refused.value)


def test_credential_names_its_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"admin\.token_file: cannot read .*/nowhere: No such file"):
        Credential("admin.token_file", "", str(tmp_path / "nowhere"))


def test_credential_refuses_a_pipe(tmp_path: Path) -> None:
    clock, file = Clock(0.0), tmp_path / "secret"
    file.write_text("first")
    secret = Credential("x", "", str(file), clock=clock)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match=r"admin\.token_file: cannot read .*/secret: not a regular file"):
        Credential("admin.token_file", "", str(file))
    clock.now = 1.0
    assert secret.text == "first"


def test_credential_repr_hides_the_secret() -> None:
    assert "hunter2" not in repr(Credential("admin.token", "hunter2", ""))
