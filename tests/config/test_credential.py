from __future__ import annotations

import os
from pathlib import Path

import pytest

from smetric.config.credential import Credential, credential
from smetric.errors import ConfigError
from tests.clock import Clock


def test_nothing_set_is_no_credential() -> None:
    assert credential("admin.token_file", "", "") is None


def test_a_file_is_read_again_when_it_changes_and_the_last_good_secret_kept_while_it_is_bad(tmp_path: Path) -> None:
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
def test_what_can_be_no_secret_is_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"admin\.token_file: expected 16 to 4096 printable") as refused:
        Credential("admin.token_file", "", str(file), least=16)
    assert not text or text not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"admin\.token_file: cannot read .*/nowhere: No such file"):
        Credential("admin.token_file", "", str(tmp_path / "nowhere"))


def test_a_pipe_would_block_and_is_refused(tmp_path: Path) -> None:
    clock, file = Clock(0.0), tmp_path / "secret"
    file.write_text("first")
    secret = Credential("x", "", str(file), clock=clock)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match=r"admin\.token_file: cannot read .*/secret: not a regular file"):
        Credential("admin.token_file", "", str(file))
    clock.now = 1.0
    assert secret.text == "first"


def test_its_representation_does_not_show_it() -> None:
    assert "hunter2" not in repr(Credential("admin.token", "hunter2", ""))
