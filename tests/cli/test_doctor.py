"""doctor on emulated engines: what it prints, and how it ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from smetric.cli import main
from smetric.lab.emulator.fleet import EmulatedFleet
from tests.doctor.lab import ENGINES
from tests.ports import free_port


async def run(*arguments: str) -> Result:
    """The command, in a thread with a loop of its own."""
    return await asyncio.to_thread(CliRunner().invoke, main, ("doctor", *arguments))


async def test_it_is_content_with_emulated_engines(tmp_path: Path) -> None:
    async with EmulatedFleet(2, ENGINES, lmcache=True) as fleet:
        file = tmp_path / "smetric.yaml"
        file.write_text(
            f"instances: {json.dumps(fleet.urls)}\n"
            f"listen: {{port: {free_port()}}}\nadmin: {{port: {free_port()}}}\n"
            f"lmcache: {{url: '{fleet.lmcache_url}'}}\ntokenizer: {{source: engine}}\n"
            "lookup: {deadline_base: 5s, deadline_cap: 5s}\n"
        )
        result = await run("--config", str(file))
        assert result.exit_code == 0, result.output
        assert "2 of 2 instances answer; 0 errors, 0 warnings, 0 info" in result.output
        assert "tokens, lmcache, hits" in result.output


async def test_findings_end_it_with_1_and_json_has_them_all() -> None:
    async with EmulatedFleet(2, ENGINES) as fleet:
        instances = [part for url in fleet.urls for part in ("--instance", url)]
        ports = ("--port", str(free_port()), "--admin-port", str(free_port()))
        result = await run(*instances, *ports, "--instance", "http://127.0.0.1:9", "--format", "json", "--no-probe")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["instances"] == {"configured": 3, "reachable": 2}
    found = [(check["name"], finding["where"]) for check in told["checks"] for finding in check["findings"]]
    assert found == [("instances", "instance 127.0.0.1:9")]


async def test_it_ends_with_3_when_nobody_answers_and_2_when_the_settings_are_wrong(tmp_path: Path) -> None:
    assert (await run("--instance", "http://127.0.0.1:9", "--port", str(free_port()))).exit_code == 3
    for arguments, message in (
        ((), "no instances to examine: add `instances:`"),
        (("--instance", "x"), "expected an http or https URL"),
        (("--instance", "http://127.0.0.1:9", "--policy", "nosuch"), "no such shipped policy"),
    ):
        result = await run(*arguments)
        assert result.exit_code == 2
        assert message in result.output


@pytest.mark.parametrize("option", ["--no-probe", "--slow", "--format", "--config"])
async def test_its_options_are_explained(option: str) -> None:
    assert option in (await run("--help")).output
