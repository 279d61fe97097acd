"""smetric fmt on files, folders and standard input."""

import errno
import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from smetric.cli import main

UGLY = "policy mine\nroute argmin( requests )when req.turn==0 as first_turn # why\nroute rr_argmin(0)as spread"
FINE = """\
policy mine

route argmin(requests)  when req.turn == 0  as first_turn  # why
route rr_argmin(0)                          as spread
"""


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ("fmt", *arguments), input=stdin)


@pytest.fixture
def ugly(tmp_path: Path) -> Path:
    path = tmp_path / "mine.policy"
    path.write_text(UGLY)
    return path


def test_a_file_is_laid_out_and_then_left_alone(ugly: Path) -> None:
    ugly.chmod(0o640)
    first = run(str(ugly))
    assert (first.exit_code, first.output) == (0, f"{ugly}: laid out\n")
    assert ugly.read_text() == FINE
    assert stat.S_IMODE(ugly.stat().st_mode) == 0o640
    written = ugly.stat().st_ino
    second = run(str(ugly))
    assert (second.exit_code, second.output) == (0, "")
    assert ugly.stat().st_ino == written
    assert os.listdir(ugly.parent) == ["mine.policy"]


def test_check_names_what_would_change_and_writes_nothing(ugly: Path) -> None:
    result = run("--check", str(ugly))
    assert result.exit_code == 1
    assert f"run `smetric fmt {ugly}`" in result.stderr
    assert ugly.read_text() == UGLY
    spaced = ugly.rename(ugly.with_name("not mine.policy"))
    assert f"run `smetric fmt '{spaced}'`" in run("--check", str(spaced)).stderr
    assert run("--check", "-", stdin=UGLY).stderr == "<stdin>: not in its canonical layout\n"
    ugly.write_text(FINE)
    assert (run("--check", "--diff", str(ugly)).exit_code, run("--check", "--diff", str(ugly)).output) == (0, "")


def test_diff_prints_what_would_change_and_writes_nothing(ugly: Path) -> None:
    result = run("--diff", str(ugly))
    assert result.exit_code == 1
    assert "-route rr_argmin(0)as spread\n\\ No newline at end of file\n" in result.stdout
    assert "+route rr_argmin(0)                          as spread\n" in result.stdout
    assert ugly.read_text() == UGLY


def test_standard_input_goes_to_standard_output() -> None:
    assert run("-", stdin=UGLY).stdout == FINE
    assert run("-", stdin=FINE).stdout == FINE
    assert run("-", "--check", stdin=UGLY).exit_code == 1


def test_a_folder_is_searched_except_for_what_is_hidden(
    ugly: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("deep/other.policy", ".hidden/third.policy", "deep/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(UGLY)
    monkeypatch.chdir(tmp_path)
    result = run()
    assert result.exit_code == 0
    assert result.output.count("laid out") == 2
    assert (tmp_path / "deep/other.policy").read_text() == FINE
    assert (tmp_path / ".hidden/third.policy").read_text() == UGLY
    assert (tmp_path / "deep/notes.txt").read_text() == UGLY


def test_a_file_without_folder_in_its_name(ugly: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unusual = ugly.rename(ugly.with_name("mine"))
    monkeypatch.chdir(ugly.parent)
    assert run("mine").output == "mine: laid out\n"
    assert unusual.read_text() == FINE


def test_a_file_of_tests_beside_a_policy_is_laid_out_by_itself(ugly: Path) -> None:
    beside = ugly.with_name("mine.test.policy")
    beside.write_text('policy mine\ntest "t" instance|requests a|1 expect a')
    assert run(str(beside)).exit_code == 0
    assert beside.read_text() == ('policy mine\n\ntest "t"\n  instance | requests\n  a        |        1\n  expect a\n')
    assert ugly.read_text() == UGLY


def test_a_link_stays_one(ugly: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.policy"
    link.symlink_to(ugly)
    run(str(link))
    assert link.is_symlink()
    assert ugly.read_text() == FINE


def test_a_file_that_does_not_parse_is_left_alone_and_the_others_are_not(ugly: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.policy"
    broken.write_text("policy broken\nrout  x\n")
    result = run(str(broken), str(ugly))
    assert result.exit_code == 1
    assert "did you mean `route`?" in result.stderr
    assert broken.read_text() == "policy broken\nrout  x\n"
    assert ugly.read_text() == FINE


def test_what_is_not_there_ends_with_2(tmp_path: Path) -> None:
    missing = run(str(tmp_path / "none.policy"))
    assert missing.exit_code == 2
    assert "no such file or folder" in missing.stderr


def test_a_file_that_cannot_be_written_is_said_and_left_whole(ugly: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    result = run(str(ugly))
    assert result.exit_code == 2
    assert f"policy {ugly}: cannot be written: No space left on device" in result.stderr
    assert ugly.read_text() == UGLY
    assert os.listdir(ugly.parent) == ["mine.policy"]


def test_a_file_beside_which_none_can_be_written_is_said_and_left_whole(ugly: Path) -> None:
    """As on a file system that may only be read; here the longest name leaves no room for another."""
    longest = ugly.with_name("n" * 248 + ".policy")
    ugly.rename(longest)
    result = run(str(longest))
    assert result.exit_code == 2
    assert f"policy {longest}: cannot be written: File name too long" in result.stderr
    assert longest.read_text() == UGLY


@pytest.mark.parametrize("arguments", [["."], [], ["--check"], ["--diff", "."]])
def test_a_folder_without_policies_is_said(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert "policy .: no policy files in this folder" in result.stderr
