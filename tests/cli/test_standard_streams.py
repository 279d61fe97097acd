"""The three descriptors that a process may expect to have."""

import subprocess
import sys
from pathlib import Path

import pytest

#: Runs a command as the shell does, then writes what descriptors 0 to 2 are into a file.
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
def test_every_command_has_them_also_where_some_are_closed(closed: str, tmp_path: Path) -> None:
    file = tmp_path / "streams"
    command = ["bash", "-c", f'exec "$@" {closed}', "closed", sys.executable, "-c", PROGRAM, str(file)]
    done = subprocess.run(command, stdin=subprocess.PIPE, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert file.read_text().split().count("/dev/null") == closed.count("&-")
