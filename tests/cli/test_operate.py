"""Commands that operate a router: the admin client, config and doctor."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result

from smetric.cli import main
from smetric.config import load_settings
from smetric.lab.emulator.fleet import EmulatedFleet
from tests.cli.commands import run
from tests.doctor.lab import ENGINES
from tests.ports import free_port


class Admin(http.server.BaseHTTPRequestHandler):
    """HTTP server that is not an admin port, with a few replies for decisions."""

    answers: ClassVar = {
        "/admin/decisions/01GONE/record": (404, b'{"error": "no such decision"}'),
        "/admin/decisions/01ODD/record": (200, b"<html>"),
        "/admin/decisions/01OTHER/record": (200, b'{"decision": {"id": "01OTHER"}}'),
        "/admin/decisions/01ILL/record": (500, b"[]"),
    }

    otherwise = 404, b"{}"

    def do_GET(self) -> None:
        status, body = self.answers.get(self.path, self.otherwise)
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def admin() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Admin) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("decision", "code", "message"),
    [
        ("01GONE", 1, "decision 01GONE is not among the last ones of"),
        ("01ODD", 3, "not as SMetric does"),
        ("01NOWHERE", 3, "answers 404, but not as SMetric does"),
        ("01OTHER", 3, "not as SMetric does"),
        ("01ILL", 3, "answers 500"),
    ],
)
def test_explain_decision_unknown_to_the_router_is_an_error(admin: str, decision: str, code: int, message: str) -> None:
    result = run("explain", "--decision", decision, "--admin", admin + "/")
    assert (result.exit_code, message in result.output) == (code, True), result.output


@pytest.mark.parametrize(
    "url",
    [
        "localhost",
        "http://",
        "http://[::1",
        "http://a:b",
        "http://a:99999",
        "http://a b",
        "http://b\u00fc",
        "http://a?x",
        "ftp://a",
    ],
)
def test_admin_url_malformed_is_a_usage_error(url: str) -> None:
    result = run("explain", "--decision", "01GOOD", "--admin", url)
    assert result.exit_code == 2
    assert f'--admin: expected a URL such as http://127.0.0.1:9464, got "{url}"' in result.stderr


def test_admin_url_with_password_is_refused_without_showing_it() -> None:
    result = run("explain", "--decision", "01GOOD", "--admin", "http://me:secret@127.0.0.1:9464")
    assert result.exit_code == 2
    assert "no user or password" in result.stderr
    assert "secret" not in result.stderr


def test_admin_url_with_invalid_host_is_unreachable() -> None:
    result = run("explain", "--decision", "01GOOD", "--admin", "http://a..b")
    assert (result.exit_code, "http://a..b does not answer" in result.stderr) == (3, True)


@pytest.mark.parametrize("command", ["drain", "undrain", "rollback", "try"])
def test_admin_answer_of_another_server_is_recognised(
    command: str, admin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for body in (b"{}", b"[]", b"404", b"[" * 9000, b'{"error": {"message": "this path is not served here"}}'):
        monkeypatch.setattr(Admin, "otherwise", (404, body))
        result = run(command, "smetric", "--admin", admin)
        assert (result.exit_code, "answers 404, but not as SMetric does" in result.stderr) == (3, True), result.output


@pytest.mark.parametrize("command", ["drain", "undrain", "rollback"])
def test_admin_path_carries_undecodable_names(command: str, admin: str) -> None:
    result = run(command, "gpu-\udcff", "--admin", admin)
    assert "404" in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_admin_token_invalid_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch, admin: str) -> None:
    monkeypatch.setenv("SMETRIC_ADMIN__TOKEN", "two lines,\nso to speak")
    result = run("explain", "--decision", "01GOOD", "--admin", admin)
    assert result.exit_code == 2
    assert "SMETRIC_ADMIN__TOKEN: admin.token: expected 16 to 256 printable ASCII characters" in result.stderr
    assert "so to speak" not in result.stderr


def test_admin_unreachable_ends_with_3() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Admin) as server:
        port = server.server_port
    result = run("explain", "--decision", "01GOOD", "--admin", f"http://127.0.0.1:{port}")
    assert result.exit_code == 3
    assert "is the router running" in result.output


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "smetric.yaml"
    path.write_text("listen:\n  port: 8001\ninstances: [http://127.0.0.1:9101]\nparams: {OVERLOAD: 3, 'odd $': x}\n")
    return path


def test_config_show_prints_settings_that_load_again(file: Path, tmp_path: Path) -> None:
    env = {"SMETRIC_LOG__LEVEL": "debug", "SMETRIC_PARAMS__SIGNS": "$$ ${HOME} $"}
    result = run("config", "show", "--config", str(file), "--admin-port", "9999", **env)
    assert result.exit_code == 0, result.output
    again = tmp_path / "again.yaml"
    again.write_text(result.output)
    loaded = load_settings(again, {})
    assert (loaded.listen.port, loaded.admin.port, loaded.log.level) == (8001, 9999, "debug")
    assert loaded.params == {"OVERLOAD": 3.0, "odd $": "x", "SIGNS": env["SMETRIC_PARAMS__SIGNS"]}


def test_config_show_says_where_each_value_comes_from(file: Path) -> None:
    arguments = ("--config", str(file), "--admin-port", "9999", "--set", "OVERLOAD=2")
    result = run("config", "show", "--origin", *arguments, SMETRIC_LOG__LEVEL="debug")
    origins = {}
    for line in result.output.splitlines():
        value, found, origin = line.partition("  # ")
        if found:
            origins[value.strip()] = origin
    assert origins["port: 8001"] == f"{file}:2"
    assert origins["port: 9999"] == "--admin-port"
    assert origins['level: "debug"'] == "SMETRIC_LOG__LEVEL"
    assert origins["OVERLOAD: 2.0"] == "--set"
    assert origins['"odd $": "x"'] == f"{file}:4"
    assert origins["block_size: 16"] == "default"
    assert [origin for value, origin in origins.items() if value.startswith("- {")] == [f"{file}:3"]


def test_config_schema_is_json_schema() -> None:
    schema = json.loads(run("config", "schema").output)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["$defs"]["Listen"]["properties"]["port"]["default"] == 8080


async def examined(*arguments: str) -> Result:
    """Run `smetric doctor` in a thread with a loop of its own."""
    return await asyncio.to_thread(CliRunner().invoke, main, ("doctor", *arguments))


async def test_doctor_finds_nothing_on_emulated_engines(tmp_path: Path) -> None:
    async with EmulatedFleet(2, ENGINES, lmcache=True) as fleet:
        file = tmp_path / "smetric.yaml"
        file.write_text(
            f"instances: {json.dumps(fleet.urls)}\n"
            f"listen: {{port: {free_port()}}}\nadmin: {{port: {free_port()}}}\n"
            f"lmcache: {{url: '{fleet.lmcache_url}'}}\ntokenizer: {{source: engine}}\n"
            "lookup: {deadline_base: 5s, deadline_cap: 5s}\n"
        )
        result = await examined("--config", str(file))
        assert result.exit_code == 0, result.output
        assert "2 of 2 instances answer; 0 errors, 0 warnings, 0 info" in result.output
        assert "tokens, lmcache, hits" in result.output


async def test_doctor_findings_end_with_1_and_are_in_json() -> None:
    async with EmulatedFleet(2, ENGINES) as fleet:
        instances = [part for url in fleet.urls for part in ("--instance", url)]
        ports = ("--port", str(free_port()), "--admin-port", str(free_port()))
        result = await examined(
            *instances, *ports, "--instance", "http://127.0.0.1:9", "--format", "json", "--no-probe"
        )
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["instances"] == {"configured": 3, "reachable": 2}
    found = [(check["name"], finding["where"]) for check in report["checks"] for finding in check["findings"]]
    assert found == [("start", "params.FLOOR"), ("instances", "instance 127.0.0.1:9")]


async def test_doctor_exit_codes_2_and_3(tmp_path: Path) -> None:
    assert (await examined("--instance", "http://127.0.0.1:9", "--port", str(free_port()))).exit_code == 3
    for arguments, message in (
        ((), "no instances to examine: add `instances:`"),
        (("--instance", "x"), "expected an http or https URL"),
    ):
        result = await examined(*arguments)
        assert result.exit_code == 2
        assert message in result.output
