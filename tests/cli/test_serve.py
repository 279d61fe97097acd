"""`smetric serve` as a process: it starts from flags alone, ends on SIGTERM, and says in one go why it cannot start."""

import errno
import http.client
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

import pytest

from smetric.cli.serve import Shutdown
from tests.ports import free_port

pytestmark = pytest.mark.slow

INSTANCE = ("--instance", "http://127.0.0.1:1")


def start(*arguments: str, before: Sequence[str] = (), terminal: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    """`smetric serve`, run by the command *before*, on a *terminal* if given."""
    command = [*before, sys.executable, "-m", "smetric", "serve", *INSTANCE, *arguments]
    return subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, text=True)


def fetch(port: int, path: str) -> tuple[int | None, bytes]:
    """Status and body of what is at *path*; no status where nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except OSError:
        return None, b""
    finally:
        connection.close()


def status(port: int, path: str) -> int | None:
    return fetch(port, path)[0]


def until(condition: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    """Wait for *condition*, as long as *process* runs."""
    deadline = time.monotonic() + 20
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_it_serves_from_flags_alone_until_sigterm() -> None:
    port, admin_port = free_port(), free_port()
    with start("--policy", "load_only", "--port", str(port), "--admin-port", str(admin_port)) as process:
        try:
            until(lambda: status(port, "/healthz") == 200, process)
            assert status(admin_port, "/admin/decisions") == 200
            assert status(port, "/admin/decisions") == 404
            process.send_signal(signal.SIGTERM)
            _, logged = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0, logged
    assert '"smetric.serving"' in logged
    assert "Traceback" not in logged


def test_a_librarys_warning_is_a_line_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import atexit, warnings\natexit.register(warnings.warn, 'odd\\nlines')")
    port, admin_port = free_port(), free_port()
    arguments = ("--policy", "load_only", "--port", str(port), "--admin-port", str(admin_port))
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with start(*arguments, before=("env", f"PYTHONPATH={path}")) as process:
        try:
            until(lambda: status(port, "/healthz") == 200, process)
            process.send_signal(signal.SIGTERM)
            _, logged = process.communicate(timeout=20)
        finally:
            process.kill()
    assert [json.loads(line)["event"] for line in logged.splitlines()][-2:] == ["smetric.stopped", "library"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_it_serves_without_standard_streams_and_gives_their_numbers_to_no_connection(closed: str) -> None:
    port, admin_port = free_port(), free_port()
    arguments = ("--policy", "load_only", "--port", str(port), "--admin-port", str(admin_port))
    with start(*arguments, before=("bash", "-c", f'exec "$@" {closed}', "closed")) as process:
        try:
            until(lambda: status(port, "/readyz") == 200, process)
            opened = [os.readlink(f"/proc/{process.pid}/fd/{number}").partition(":")[0] for number in range(3)]
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0
    assert opened.count("/dev/null") == closed.count("&-")
    assert "socket" not in opened


def writer_of(pipe: Path, process: "subprocess.Popen[str]") -> TextIO:
    """Writes into *pipe*, once *process* reads it."""
    found: list[TextIO] = []

    def is_read() -> bool:
        try:
            found.append(os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w"))
        except OSError as error:
            if error.errno != errno.ENXIO:  # nobody reads it yet
                raise
        return bool(found)

    until(is_read, process)
    return found[0]


def test_a_hangup_while_it_starts_is_answered_when_it_serves(tmp_path: Path) -> None:
    port, pipe = free_port(), tmp_path / "smetric.yaml"
    os.mkfifo(pipe)
    with start("--config", str(pipe), "--port", str(port), "--admin-port", "0") as process:
        try:
            with writer_of(pipe, process) as writer:
                process.send_signal(signal.SIGHUP)
                writer.write("policy: load_only\n")
            until(lambda: status(port, "/healthz") == 200, process)
            process.send_signal(signal.SIGTERM)
            _, logged = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0, logged
    assert logged.count('"smetric.files.looked_at"') == 1


def test_it_outlives_its_terminal_and_counts_the_lines_that_went_with_it() -> None:
    port, admin_port = free_port(), free_port()
    ours, theirs = pty.openpty()
    arguments = ("--policy", "load_only", "--port", str(port), "--admin-port", str(admin_port))
    with start(*arguments, before=("setsid", "--ctty"), terminal=theirs) as process:
        try:
            os.close(theirs)
            until(lambda: status(port, "/readyz") == 200, process)
            os.close(ours)
            until(
                lambda: re.search(rb"\nsmetric_log_lines_lost_total [1-9]", fetch(admin_port, "/metrics")[1]), process
            )
            assert status(port, "/readyz") == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def refused(*arguments: str) -> tuple[int, str]:
    with start(*arguments) as process:
        _, logged = process.communicate(timeout=30)
    assert "Traceback" not in logged
    return process.returncode, logged


def test_a_policy_that_does_not_check_stops_it_with_1(tmp_path: Path) -> None:
    path = tmp_path / "bad.policy"
    path.write_text("policy bad\nrout argmin(requests)\n")
    code, logged = refused("--policy", str(path), "--port", "0", "--admin-port", "0")
    assert code == 1
    assert f"--> {path}:2:1" in logged
    assert "did you mean `route`?" in logged


@pytest.mark.parametrize("option", ["--port", "--admin-port"])
def test_a_port_in_use_stops_it_with_2(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports = {"--port": "0", "--admin-port": "0", option: str(listener.getsockname()[1])}
        code, logged = refused(*[word for pair in ports.items() for word in pair])
    assert code == 2
    assert "Address already in use" in logged


def test_shutdown_is_forced_by_a_second_signal() -> None:
    shutdown = Shutdown()
    shutdown.signalled()
    assert shutdown.draining.is_set()
    assert not shutdown.forced.is_set()
    shutdown.signalled()
    assert shutdown.forced.is_set()
