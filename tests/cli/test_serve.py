"""`smetric serve`: start, settings, signals, and what stops a start."""

from __future__ import annotations

import contextlib
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
from typing import Self, TextIO

import pytest
from click.testing import CliRunner

from smetric.cli import main
from smetric.cli.serve import Shutdown
from tests.ports import free_port

pytestmark = pytest.mark.slow


INSTANCE = ("--instance", "http://127.0.0.1:1")


def start(*arguments: str, before: Sequence[str] = (), terminal: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start `smetric serve` by the command *before*, on a *terminal* if given."""
    command = [*before, sys.executable, "-m", "smetric", "serve", *INSTANCE, *arguments]
    return subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, text=True)


class Router:
    """`smetric serve` with the policy load_only on free ports; it is killed at the end of the context."""

    def __init__(self, *arguments: str, before: Sequence[str] = (), terminal: int = subprocess.PIPE) -> None:
        self.port, self.admin_port = free_port(), free_port()
        ports = ("--port", str(self.port), "--admin-port", str(self.admin_port))
        self.process = start(*arguments, *ports, before=before, terminal=terminal)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def fetch(self, path: str, *, admin: bool = False) -> tuple[int | None, bytes]:
        """Return status and body of *path*; no status without an answer."""
        port = self.admin_port if admin else self.port
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read()
            except OSError:
                return None, b""

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for *condition* while the router runs."""
        deadline = time.monotonic() + 20
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def until_ready(self) -> None:
        self.until(lambda: self.fetch("/readyz")[0] == 200)

    def terminate(self) -> str:
        """End it by SIGTERM, and return its log."""
        self.process.send_signal(signal.SIGTERM)
        _, logged = self.process.communicate(timeout=20)
        assert self.process.returncode == 0, logged
        return logged


def test_serve_from_flags_until_sigterm() -> None:
    with Router("--policy", "load_only") as router:
        router.until_ready()
        assert router.fetch("/admin/decisions", admin=True)[0] == 200
        assert router.fetch("/admin/decisions")[0] == 404
        logged = router.terminate()
    assert '"smetric.serving"' in logged
    assert "Traceback" not in logged


def test_serve_logs_warnings_of_libraries(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import atexit, warnings\natexit.register(warnings.warn, 'odd\\nlines')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with Router("--policy", "load_only", before=("env", f"PYTHONPATH={path}")) as router:
        router.until_ready()
        logged = router.terminate()
    assert [json.loads(line)["event"] for line in logged.splitlines()][-2:] == ["smetric.stopped", "library"]


def test_serve_without_standard_streams_reserves_their_descriptors() -> None:
    with Router("--policy", "load_only", before=("bash", "-c", 'exec "$@" <&- >&- 2>&-', "closed")) as router:
        router.until_ready()
        opened = [os.readlink(f"/proc/{router.process.pid}/fd/{number}").partition(":")[0] for number in range(3)]
        router.terminate()
    assert opened == ["/dev/null"] * 3


def test_sighup_during_start_is_handled_once_serving(tmp_path: Path) -> None:
    pipe = tmp_path / "smetric.yaml"
    os.mkfifo(pipe)
    with Router("--config", str(pipe)) as router:
        writers: list[TextIO] = []

        def is_read() -> bool:
            try:
                writers.append(os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w"))
            except OSError as error:
                if error.errno != errno.ENXIO:  # no reader yet
                    raise
            return bool(writers)

        router.until(is_read)
        with writers[0] as writer:
            router.process.send_signal(signal.SIGHUP)
            writer.write("policy: load_only\n")
        router.until_ready()
        logged = router.terminate()
    assert logged.count('"smetric.files.looked_at"') == 1


def test_serve_outlives_its_terminal_and_counts_lost_lines() -> None:
    ours, theirs = pty.openpty()
    with Router("--policy", "load_only", before=("setsid", "--ctty"), terminal=theirs) as router:
        os.close(theirs)
        router.until_ready()
        os.close(ours)
        lost = rb"\nsmetric_log_lines_lost_total [1-9]"
        router.until(lambda: re.search(lost, router.fetch("/metrics", admin=True)[1]))
        assert router.fetch("/readyz")[0] == 200
        router.process.send_signal(signal.SIGTERM)
        assert router.process.wait(20) == 0


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
