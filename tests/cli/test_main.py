import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import smetric
from smetric.cli import COMMANDS, main


def test_the_version_is_the_packages() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"smetric {smetric.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_in_the_help_exists_and_has_its_own(name: str) -> None:
    assert name in CliRunner().invoke(main, ["--help"]).output
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.name == name


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["chekc"])
    assert result.exit_code == 2
    assert "No such command" in result.output


def test_what_was_probably_meant_by_an_unknown_command_is_named() -> None:
    assert "Error: No such command 'chek'; did you mean check?\n" in CliRunner().invoke(main, ["chek"]).output
    assert CliRunner().invoke(main, ["nothing_like_it"]).output.endswith("No such command 'nothing_like_it'.\n")
    assert "No such option" in CliRunner().invoke(main, ["--chek"]).output


def test_checking_a_policy_does_not_load_the_server() -> None:
    program = """
import atexit, sys
atexit.register(lambda: print(sorted({"aiohttp", "hypercorn", "starlette"} & set(sys.modules))))
from smetric.cli import main
main(["check", "load_only"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_an_error_of_the_user_prints_one_line_and_no_traceback() -> None:
    command = [sys.executable, "-m", "smetric", "serve", "--config", "/nonexistent.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert (
        done.stderr
        == "Error: /nonexistent.yaml: cannot be read: No such file or directory; name another file with --config\n"
    )
