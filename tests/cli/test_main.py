"""The command line as a whole: lazy commands, exit codes, standard streams."""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import smetric
from smetric.cli import COMMANDS, main
from smetric.files import shipped_policies
from tests.records.drive import Fleet, policy, write

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[2]


def test_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"smetric {smetric.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_commands_that_exist(name: str) -> None:
    assert name in CliRunner().invoke(main, ["--help"]).output
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.name == name


def test_command_unknown_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["chekc"])
    assert result.exit_code == 2
    assert "No such command" in result.output


def test_command_unknown_suggests_the_closest() -> None:
    assert "Error: No such command 'chek'; did you mean check?\n" in CliRunner().invoke(main, ["chek"]).output
    assert CliRunner().invoke(main, ["nothing_like_it"]).output.endswith("No such command 'nothing_like_it'.\n")
    assert "No such option" in CliRunner().invoke(main, ["--chek"]).output


def test_check_does_not_load_the_server() -> None:
    program = """
import atexit, sys
atexit.register(lambda: print(sorted({"aiohttp", "hypercorn", "starlette"} & set(sys.modules))))
from smetric.cli import main
main(["check", "load_only"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_config_error_prints_one_line() -> None:
    command = [sys.executable, "-m", "smetric", "serve", "--config", "/nonexistent.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert (
        done.stderr
        == "Error: /nonexistent.yaml: cannot be read: No such file or directory; name another file with --config\n"
    )


def started(*arguments: str, **streams: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "smetric", *arguments], stderr=subprocess.PIPE, text=True, **streams)


def test_ctrl_c_ends_a_command_with_130(tmp_path: Path) -> None:
    pipe = tmp_path / "smetric.yaml"
    os.mkfifo(pipe)
    with started("config", "show", "--config", str(pipe)) as process, pipe.open("w"):  # it reads from here on
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode in (130, -signal.SIGINT)  # to a shell both are 130
    assert said == "\nInterrupted.\n"


def test_ctrl_c_during_import_prints_nothing() -> None:
    program = """
import signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "smetric.cli":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
from smetric.__main__ import run
run()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a file that is always full")
@pytest.mark.parametrize("arguments", [("config", "schema"), ("fmt", "-"), ("emulate", "--port", "0"), ("--help",)])
def test_output_that_cannot_be_written_is_one_line(arguments: tuple[str, ...]) -> None:
    policy = (ROOT / "policies" / "load_only.policy").open()
    with policy, open("/dev/full", "w") as full, started(*arguments, stdin=policy, stdout=full) as process:
        _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (2, "Error: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("arguments", [("check", "-"), ("fmt", "-")])
def test_closed_standard_streams_are_empty(arguments: tuple[str, ...]) -> None:
    command = shlex.join([sys.executable, "-m", "smetric", *arguments])
    done = subprocess.run(
        ["bash", "-c", f"exec {command} <&- >&-"], stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: a file starts with `policy NAME`")


def test_files_are_utf_8_in_every_locale(tmp_path: Path) -> None:
    record, report, snapshot = (tmp_path / name for name in ("decisions.jsonl", "report.html", "snapshot.json"))
    fleet, acting = Fleet(random.Random(11), 4), policy(shipped_policies()["smetric"].read_text())
    write(record, [fleet.decide(acting) for _ in range(20)])
    snapshot.write_bytes('{"instances": [{"id": "grün"}]}'.encode())
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for arguments in (
        ["replay", str(record), "--policy", "round_robin", "--format", "html", "--output", str(report)],
        ["explain", "smetric", "--snapshot", str(snapshot)],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "smetric", *arguments], capture_output=True, timeout=60, check=False, env=ascii_only
        )
        assert (done.returncode, done.stderr) == (0, b"")
    assert not report.read_text("utf-8").isascii()


def test_output_escapes_what_the_encoding_lacks() -> None:
    snapshot = '{"instances": [{"id": "a", "requests": 1}]}'
    done = subprocess.run(
        [sys.executable, "-m", "smetric", "explain", "smetric", "--snapshot", "-"],
        input=snapshot.encode(),
        capture_output=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert "\\u2717 req.turn != 0 (req.turn is 0)   · not_overloaded" in done.stdout.decode("latin-1")


#: Program that runs a command, then writes the kinds of descriptors 0 to 2 into a file.
PROGRAM = """
import os, sys
from smetric.cli import main
main(["--version"], standalone_mode=False)
streams = [os.readlink(f"/proc/self/fd/{number}").partition(":")[0] for number in range(3)]
with open(sys.argv[1], "w") as file:
    file.write(" ".join(streams))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_are_reopened_on_the_null_device(closed: str, tmp_path: Path) -> None:
    file = tmp_path / "streams"
    command = ["bash", "-c", f'exec "$@" {closed}', "closed", sys.executable, "-c", PROGRAM, str(file)]
    done = subprocess.run(command, stdin=subprocess.PIPE, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert file.read_text().split().count("/dev/null") == closed.count("&-")
