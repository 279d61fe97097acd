"""`smetric serve` as a process: it starts from flags alone, ends on SIGTERM, and says in one go why it cannot start."""

import http.client
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

INSTANCE = ("--instance", "http://127.0.0.1:1")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "smetric", "serve", *INSTANCE, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def status(port: int, path: str) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def test_it_serves_from_flags_alone_until_sigterm() -> None:
    port, admin_port = free_port(), free_port()
    with start("--policy", "load_only", "--port", str(port), "--admin-port", str(admin_port)) as process:
        try:
            deadline = time.monotonic() + 20
            while status(port, "/healthz") != 200:
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert status(admin_port, "/admin/decisions") == 200
            assert status(port, "/admin/decisions") == 404
            process.send_signal(signal.SIGTERM)
            _, logged = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0, logged
    assert '"smetric.serving"' in logged
    assert "Traceback" not in logged


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
