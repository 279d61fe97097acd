"""`smetric serve`: start, settings, signals, and what stops a start."""

from __future__ import annotations

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
from click.testing import CliRunner

from smetric.cli import main
from smetric.cli.serve import Shutdown
from tests.ports import free_port

pytestmark = pytest.mark.slow


INSTANCE = ("--instance", "http://127.0.0.1:1")


def start(*arguments: str, before: Sequence[str] = (), terminal: int = subprocess.PIPE) -> subprocess.Popen[str]:
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


def until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait for *condition*, as long as *process* runs."""
    deadline = time.monotonic() + 20
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_serve_from_flags_until_sigterm() -> None:
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


def test_serve_logs_warnings_of_libraries(tmp_path: Path) -> None:
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
def test_serve_without_standard_streams_reserves_their_descriptors(closed: str) -> None:
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


def writer_of(pipe: Path, process: subprocess.Popen[str]) -> TextIO:
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


def test_sighup_during_start_is_handled_once_serving(tmp_path: Path) -> None:
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


def test_serve_outlives_its_terminal_and_counts_lost_lines() -> None:
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


def test_serve_with_bad_policy_ends_with_1(tmp_path: Path) -> None:
    path = tmp_path / "bad.policy"
    path.write_text("policy bad\nrout argmin(requests)\n")
    code, logged = refused("--policy", str(path), "--port", "0", "--admin-port", "0")
    assert code == 1
    assert f"--> {path}:2:1" in logged
    assert "did you mean `route`?" in logged


@pytest.mark.parametrize("option", ["--port", "--admin-port"])
def test_serve_with_port_in_use_ends_with_2(option: str) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        ((), {}, "no instances to route to: add --instance http://HOST:PORT"),
        (("--instance", "foo"), {}, "--instance: instances[0].url: expected an http or https URL without a path"),
        (("--port", "http"), {}, '--port: listen.port: expected a whole number from 0 to 65535, got "http"'),
        (("--policy", ""), {}, "--policy: policy: expected the name of a shipped policy, or the path"),
        (("--port", ""), {}, "--port: listen.port: expected a whole number from 0 to 65535, got nothing"),
        (("--set", "OVERLOAD"), {}, 'expected PARAM=VALUE, such as OVERLOAD=3, got "OVERLOAD"'),
        ((), {"SMETRIC_LISTEN__PROT": "1"}, "did you mean SMETRIC_LISTEN__PORT?"),
    ],
)
def test_serve_with_wrong_setting_ends_with_2(arguments: tuple[str, ...], env: dict[str, str], message: str) -> None:
    result = CliRunner(env=env).invoke(main, ("serve", *arguments))
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
