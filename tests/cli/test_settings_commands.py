"""config and serve: where settings come from, and what stops a start."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from smetric.cli import main
from smetric.config import load_settings


def run(*arguments: str, **env: str) -> Result:
    return CliRunner(env=env).invoke(main, arguments)


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
def test_a_wrong_setting_stops_serve_with_2(arguments: tuple[str, ...], env: dict[str, str], message: str) -> None:
    result = run("serve", *arguments, **env)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
